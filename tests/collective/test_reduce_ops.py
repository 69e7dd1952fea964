"""The reductions of all ranks' arrays, against numpy: every operation, dtype and size of world."""

import collections
import math
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elephant.collective import ring
from elephant.collective.operation import AlgorithmThresholds
from elephant.collective.ring import Ring

NUMPY = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}
DTYPES = [np.dtype(name) for name in ("float16", ml_dtypes.bfloat16, "float32", "float64", "int32", "int64")]
# Shared memory, TCP alone, and several hosts whose ranks stand together or take turns.
WAYS = [{}, {"transport": "tcp"}, {"hosts": "ababa"}, {"hosts": "aabbc"}]
several = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def values(rank, shape, dtype, seed):
    return np.asarray(np.random.default_rng((seed, rank)).normal(size=shape) * 100).astype(dtype)


def reduced(world_size, shape, dtype, seed, op):
    """What numpy makes of all ranks' values, in a wider dtype, rounded once."""
    inputs = np.stack([values(rank, shape, dtype, seed) for rank in range(world_size)])
    total = NUMPY[op].reduce(inputs.astype("f8" if dtype.kind != "i" else "i8"), axis=0)
    return total / world_size if op == "mean" else total


def check_close(result, expected, dtype):
    if dtype.kind == "i":
        np.testing.assert_array_equal(result, expected)
    else:
        bits = {2: 0.01, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
        np.testing.assert_allclose(result.astype("f8"), expected, rtol=bits, atol=bits * 100)


@several
@given(
    world_size=st.integers(1, 5),
    shape=st.sampled_from([(), (0,), (1,), (4, 5), (7, 0, 2), (1000,), (20_001,)]),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(list(NUMPY)),
    seed=st.integers(0, 1000),
    way=st.sampled_from(WAYS),
    small=st.booleans(),
)
def test_allreduce_when_run_then_gives_a_new_array_with_the_values_of_numpy(
    run_world, small_sizes, world_size, shape, dtype, op, seed, way, small
):
    if op == "mean" and dtype.kind == "i":
        op = "sum"

    def reduce(collective):
        array = values(collective.rank, shape, dtype, seed)
        array.flags.writeable = False
        return collective.allreduce(array, op)

    results = run_world(world_size, reduce, sizes=small_sizes if small else None, **way)
    for result in results:
        assert result.shape == shape and result.dtype == dtype and result.tobytes() == results[0].tobytes()
    check_close(results[0], reduced(world_size, shape, dtype, seed, op), dtype)


@several
@given(
    world_size=st.integers(1, 5),
    shape=st.sampled_from([(0,), (1,), (3, 2), (7, 0), (11, 3), (6, 4000)]),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["sum", "min", "max"]),
    seed=st.integers(0, 1000),
    way=st.sampled_from(WAYS),
    small=st.booleans(),
)
def test_reduce_scatter_when_run_then_gives_the_part_that_array_split_cuts(
    run_world, small_sizes, world_size, shape, dtype, op, seed, way, small
):
    def reduce(collective):
        return collective.reduce_scatter(np.asfortranarray(values(collective.rank, shape, dtype, seed)), op)

    expected = np.array_split(reduced(world_size, shape, dtype, seed, op), world_size)
    results = run_world(world_size, reduce, sizes=small_sizes if small else None, **way)
    for result, part in zip(results, expected, strict=True):
        assert result.shape == part.shape and result.dtype == dtype
        check_close(result, part, dtype)


@pytest.mark.parametrize("hosts", [None, "abcabcabc"], ids=["every rank apart", "ranks of a host apart in the ring"])
@pytest.mark.parametrize("world_size", [3, 6, 7, 9])
def test_arrays_when_reduced_in_rounds_then_give_what_the_ring_and_numpy_give(
    run_world, world_size, hosts, monkeypatch
):
    swaps = collections.Counter()
    swap = Ring._swap

    def counting(self, *given):
        swaps[threading.current_thread().name] += 1
        swap(self, *given)

    monkeypatch.setattr(Ring, "_swap", counting)

    def reduce(collective):
        array = values(collective.rank, (2 * world_size + 1, 30), np.dtype("float32"), 5)
        gathered = collective.allgather(np.full((collective.rank, 40), collective.rank, np.int32))
        return collective.allreduce(array), collective.reduce_scatter(array, "max"), np.concatenate(gathered)

    options = {"transport": "tcp"} if hosts is None else {"hosts": hosts}
    in_rounds, in_ring = (
        run_world(world_size, reduce, sizes=AlgorithmThresholds(small_bytes=64, rounds_bytes=length), **options)
        for length in (1 << 20, 0)
    )
    shape, kind = (2 * world_size + 1, 30), np.dtype("float32")
    total = reduced(world_size, shape, kind, 5, "sum")
    parts = np.array_split(reduced(world_size, shape, kind, 5, "max"), world_size)
    for rank, ((summed, part, gathered), (_, _, of_ring)) in enumerate(zip(in_rounds, in_ring, strict=True)):
        check_close(summed, total, kind)
        assert summed.tobytes() == in_rounds[0][0].tobytes()
        np.testing.assert_array_equal(part, parts[rank].astype(kind))
        np.testing.assert_array_equal(
            gathered, np.repeat(np.arange(world_size), np.arange(world_size) * 40).reshape(-1, 40)
        )
        np.testing.assert_array_equal(of_ring, gathered)
    # Of the allgather, the sum, twice as many, and the maximum; where hosts are shared, the three leaders sum.
    of_one = math.ceil(math.log2(world_size))
    assert max(swaps.values()) == (4 * of_one if hosts is None or world_size == 3 else of_one + 2 * 4)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_halves_when_summed_then_are_rounded_once(run_world, dtype):
    # In steps of the 16-bit format, 1 + eps/2 + eps/2 would stay at 1.
    epsilon = float(ml_dtypes.finfo(dtype).eps)

    def reduce(collective):
        return float(collective.allreduce(np.array([1.0 if collective.rank == 0 else epsilon / 2], dtype))[0])

    assert run_world(3, reduce) == [1 + epsilon] * 3


def test_broadcast_when_the_array_is_read_only_and_strided_then_gives_a_new_one(run_world):
    def spread(collective):
        array = np.arange(12.0).reshape(3, 4).T + collective.rank
        array.flags.writeable = False
        return collective.broadcast(array, root=1)

    for result in run_world(3, spread):
        np.testing.assert_array_equal(result, np.arange(12.0).reshape(3, 4).T + 1)


def test_links_when_every_rank_of_nine_measures_something_else_then_all_take_the_slowest_one_s_limit(
    run_world, monkeypatch
):
    chosen, choose = {}, Ring.choose_rounds

    def noting(self, operation):
        choose(self, operation)
        chosen[self._position] = self._rounds_bytes

    def measured(action):
        action()
        return 1e-3 * (1 + int(threading.current_thread().name.split("-")[-1]))

    monkeypatch.setattr(Ring, "choose_rounds", noting)
    monkeypatch.setattr(ring, "_seconds", measured)
    sums = run_world(9, lambda collective: collective.allreduce(np.ones(1_500_000, np.float32)), transport="tcp")
    slowest_byte_s = 9e-3 / (1 << 20)
    assert set(chosen.values()) == {int(2 * (8 - 4) * 9e-3 / (8 / 9 * 1.2 * slowest_byte_s))}
    assert sorted(chosen) == list(range(9))
    assert all((total == 9).all() for total in sums)
