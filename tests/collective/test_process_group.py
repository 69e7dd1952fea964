import threading
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairwise import pairwise

from elephant.collective import data_plane
from elephant.collective.operation import AlgorithmThresholds
from elephant.errors import ConfigurationError, DeadlineExceededError, NetworkError, PeerLostError, ProtocolError

OPERATIONS = ["sum", "mean", "max", "min"]

WAYS = [{}, {"transport": "tcp"}, {"hosts": "ababa"}, {"hosts": "aabbc"}]
ENCRYPTED = {"hosts": "aabbc", "encryption": True}
several = settings(
    max_examples=min(25, settings.default.max_examples),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def values(rank, shape, dtype, seed):
    generator = np.random.default_rng((seed, rank))
    return np.asarray(generator.normal(size=shape) * 100).astype(dtype)


@several
@given(
    rows=st.lists(st.integers(0, 40), min_size=2, max_size=5),
    trailing=st.sampled_from([(), (1,), (3,), (2, 5), (0,)]),
    dtype=st.sampled_from(["f4", "f2", "i8", "u1", "?", "S3"]),
    seed=st.integers(0, 1000),
    way=st.sampled_from([*WAYS, ENCRYPTED]),
    small=st.booleans(),
)
def test_allgather_gives_every_ranks_rows(run_world, small_sizes, rows, trailing, dtype, seed, way, small):
    def gather(collective):
        return collective.allgather(values(collective.rank, (rows[collective.rank], *trailing), dtype, seed))

    for result in run_world(len(rows), gather, sizes=small_sizes if small else None, **way):
        for rank, part in enumerate(result):
            expected = values(rank, (rows[rank], *trailing), dtype, seed)
            assert part.dtype == expected.dtype and part.shape == expected.shape
            assert part.tobytes() == expected.tobytes() and part.flags.writeable


@several
@given(
    world_size=st.integers(2, 5),
    root=st.integers(0, 4),
    shape=st.sampled_from([(), (0,), (3,), (100,), (9, 7)]),
    dtype=st.sampled_from(["f4", "f2", "i8", "u1"]),
    way=st.sampled_from([*WAYS, ENCRYPTED]),
    small=st.booleans(),
)
def test_broadcast_gives_the_roots_values(run_world, small_sizes, world_size, root, shape, dtype, way, small):
    root %= world_size

    def spread(collective):
        array = values(collective.rank, shape, dtype, 0)
        collective.broadcast_(array, root)
        return array.tobytes()

    expected = values(root, shape, dtype, 0).tobytes()
    sizes = small_sizes if small else None
    assert run_world(world_size, spread, sizes=sizes, **way) == [expected] * world_size


@pytest.mark.parametrize("way", [*WAYS, ENCRYPTED], ids=str)
def test_large_arrays_give_the_same_bits_everywhere_and_every_time(run_world, way):
    def reduce(collective):
        array = values(collective.rank, (1_500_001,), "f4", 0)
        collective.allreduce_(array)
        return array

    results = run_world(5, reduce, **way)
    expected = sum(values(rank, (1_500_001,), "f4", 0).astype("f8") for rank in range(5))
    np.testing.assert_allclose(results[0], expected, rtol=1e-4, atol=1e-3)
    assert len({result.tobytes() for result in results + run_world(5, reduce, **way)}) == 1


@pytest.mark.parametrize("way", [*WAYS, ENCRYPTED], ids=str)
def test_messages_longer_than_the_buffers_of_a_connection_are_exchanged(run_world, way):
    count = 1_000_000

    def reduce(collective):
        return [float(collective.allreduce(np.full(count, collective.rank + step, "f4")).mean()) for step in range(5)]

    for result in run_world(3, reduce, sizes=AlgorithmThresholds(small_bytes=1 << 24), **way):
        assert result == [3.0 + 3 * step for step in range(5)]


def test_not_a_number_wins_on_every_rank(run_world):
    def reduce(collective):
        results = []
        for op in OPERATIONS:
            array = np.array([np.nan if collective.rank == 1 else 1.0, np.inf, 2.0], "f4")
            collective.allreduce_(array, op)
            results.append([bool(np.isnan(array[0])), float(array[1])])
        return results

    assert run_world(3, reduce) == [[[True, np.inf]] * 4] * 3


def test_barrier_lets_nobody_through_before_all_are_there(run_world):
    entered = []

    def wait(collective):
        time.sleep(0.05 * collective.rank)
        entered.append(collective.rank)
        collective.barrier()
        return len(entered)

    assert run_world(4, wait) == [4] * 4


def test_many_operations_in_a_row_keep_their_order(run_world):
    def work(collective):
        total = 0.0
        for step in range(200):
            array = np.full(step * 10, float(step), "f8")
            collective.allreduce_(array)
            total += float(array.sum())
            if step % 50 == 0:
                collective.barrier()
                total += float(np.concatenate(collective.allgather(np.full(collective.rank + 1, step))).sum())
        return total

    assert len(set(run_world(3, work))) == 1


@pytest.mark.parametrize("way", [*WAYS[:2], {"hosts": "aab"}], ids=str)
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_steady_state_takes_no_new_buffers(run_world, way, dtype):
    def work(collective):
        array = np.ones(1_000_000, dtype)
        collective.allreduce_(array)
        collective.barrier()
        if collective.rank == 0:
            tracemalloc.start()
        collective.barrier()
        for _ in range(3):
            collective.allreduce_(array)
        collective.barrier()
        peak = tracemalloc.get_traced_memory()[1] if collective.rank == 0 else 0
        collective.barrier()
        return peak

    try:
        assert max(run_world(3, work, **way)) < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "array, op, text",
    [
        (np.zeros(3, "u1"), "sum", "expected dtype float16, bfloat16, float32, float64, int32, int64. Received: uint8"),
        (np.zeros(3, "i4"), "mean", "expected sum, min, max or product for integers. Received: 'mean' for int32"),
        (np.zeros(3, ">f4"), "sum", "Received: >f4"),
        (np.zeros(3, "f4"), "prod", "expected one of sum, mean, min, max, product. Received: 'prod'"),
        (np.zeros((3, 4), "f4").T, "sum", "Received: one that is not contiguous"),
        (np.broadcast_to(np.float32(1), (1,)), "sum", "Received: one that is read-only"),
    ],
)
def test_allreduce_of_what_cannot_be_reduced_raises_and_breaks_nothing(run_world, array, op, text):
    def work(collective):
        with pytest.raises(ConfigurationError, match=text):
            collective.allreduce_(array, op)
        collective.barrier()
        return "usable"

    assert run_world(2, work) == ["usable"] * 2


def test_broadcast_from_a_rank_that_is_not_there_raises(run_world):
    def work(collective):
        with pytest.raises(ConfigurationError, match="a rank from 0 to 1. Received: 2"):
            collective.broadcast_(np.zeros(1), 2)
        with pytest.raises(ConfigurationError, match="at least one dimension"):
            collective.allgather(np.zeros(()))
        with pytest.raises(ConfigurationError, match="without Python objects"):
            collective.allgather(np.array([None]))

    assert run_world(2, work) == [None] * 2


ODD = {
    "barrier": lambda collective: collective.barrier(),
    "broadcast": lambda collective: collective.broadcast_(np.zeros(10, "f4")),
    "root": lambda collective: collective.broadcast_(np.zeros(500_000, "f4"), root=1),
    "op": lambda collective: collective.allreduce_(np.zeros(10, "f4"), "max"),
    "dtype": lambda collective: collective.allreduce_(np.zeros(10, "f8")),
    "empty": lambda collective: collective.allreduce_(np.zeros(0, "f4")),
    "large": lambda collective: collective.allreduce_(np.zeros(500_000, "f4")),
    "large half": lambda collective: collective.allreduce_(np.zeros(500_000, "f2")),
    "allgather": lambda collective: collective.allgather(np.zeros(10, "f4")),
    "reduce_scatter": lambda collective: collective.reduce_scatter(np.zeros(500_000, "f4")),
}


@pytest.mark.parametrize(
    ("odd", "usual", "way"),
    pairwise(ODD, ["small", "empty", "large", "broadcast"], [{}, {"transport": "tcp"}, {"hosts": "abab"}]),
    ids=str,
)
def test_ranks_that_call_something_else_all_learn_it_in_that_operation(run_world, odd, usual, way):
    calls = {
        "small": lambda collective: collective.allreduce_(np.zeros(12, "f4")),
        "empty": lambda collective: collective.allreduce_(np.zeros((0, 3), "i4")),
        "large": lambda collective: collective.allreduce_(np.zeros(400_000, "f4")),
        "broadcast": lambda collective: collective.broadcast_(np.zeros(0, "f4"), root=3),
    }
    finished = []

    def work(collective):
        collective.barrier()
        (ODD[odd] if collective.rank == 2 else calls[usual])(collective)
        finished.append(collective.rank)

    errors = run_world(4, work, **way)
    assert finished == []
    for error in errors:
        assert type(error) is ProtocolError and "Expected all ranks to call the same operations" in str(error)
        assert "rank 2 asked for" in str(error) or "rank 2 for" in str(error)


def test_rows_of_different_shapes_are_refused(run_world):
    errors = run_world(3, lambda collective: collective.allgather(np.zeros((2, 3 + (collective.rank == 0)), "f4")))
    assert {type(error) for error in errors} == {ProtocolError}
    assert "allgather of float32 rows of shape (4,)" in str(errors[0])


def test_absurd_counts_of_rows_are_refused_before_memory_is_taken(run_world, monkeypatch):
    monkeypatch.setattr(data_plane, "_MAX_GATHERED_BYTES", 1000)
    for error in run_world(3, lambda collective: collective.allgather(np.zeros((100, 3), "f4"))):
        assert type(error) is ProtocolError
        assert str(error) == "Expected counts of rows that fit into memory, by rank. Received: [100, 100, 100]."


def test_after_an_error_every_call_raises_at_once(run_world):
    def work(collective):
        # A rank whose group is still forming hears of an error there, before it is in here.
        collective.barrier()
        with pytest.raises(NetworkError):
            collective.allreduce_(np.zeros(10 + collective.rank, "f4"))
        for call in (collective.barrier, lambda: collective.allgather(np.zeros(1))):
            with pytest.raises(ProtocolError, match="broken since an earlier failure: Expected all ranks"):
                call()

    assert run_world(3, work) == [None] * 3


def test_a_rank_that_has_closed_is_named_to_those_that_go_on(run_world):
    def work(collective):
        collective.barrier()
        if collective.rank != 1:
            collective.barrier()

    errors = run_world(3, work)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert type(error) is PeerLostError and "ank 1" in str(error)


def test_a_rank_that_fails_outside_of_an_operation_is_seen_by_all(run_world):
    def work(collective):
        if collective.rank == 1:
            raise KeyError("a bug of the caller's")
        collective.allreduce_(np.zeros(1_000_000, "f4"))

    errors = run_world(4, work)
    assert type(errors[1]) is KeyError
    for rank in (0, 2, 3):
        assert type(errors[rank]) is PeerLostError and "Rank 1 aborted its collective" in str(errors[rank])


def test_abort_from_another_thread_ends_an_operation_under_way(run_world):
    aborted = threading.Event()

    def abort(collective):
        collective.abort()
        aborted.set()

    def work(collective):
        if collective.rank == 0:
            threading.Timer(0.1, abort, [collective]).start()
        elif collective.rank == 1:
            aborted.wait(30)
        collective.barrier()

    errors = run_world(3, work)
    assert [type(error) for error in errors] == [PeerLostError] * 3
    assert "aborted" in str(errors[0]) and "Rank 0 aborted its collective" in str(errors[2])


def test_abort_in_a_long_operation_ends_it_on_all_ranks(run_world):
    def work(collective):
        if collective.rank == 0:
            threading.Timer(0.1, collective.abort).start()
        array = np.ones(2_000_000, "f4")
        if collective.rank == 2:
            time.sleep(0.3)
        while True:
            collective.allreduce_(array, "max")

    assert [type(error) for error in run_world(3, work)] == [PeerLostError] * 3


def test_a_long_operation_to_one_who_does_not_read_ends_at_the_deadline(run_world):
    released = threading.Event()

    def work(collective):
        if collective.rank == 1:
            released.wait(20)
            return
        try:
            collective.broadcast_(np.ones(30_000_000, "f4"))
        finally:
            released.set()

    error = run_world(2, work, operation_timeout_s=0.5)[0]
    assert type(error) is DeadlineExceededError
    assert str(error).endswith("Ranks that did not arrive: 1.")


def test_a_rank_that_does_not_come_is_named_at_the_deadline(run_world):
    released = threading.Event()

    def work(collective):
        if collective.rank == 1:
            released.wait(20)
            return
        try:
            collective.barrier()
        finally:
            released.set()

    errors = run_world(2, work, operation_timeout_s=0.3)
    assert type(errors[0]) is DeadlineExceededError
    assert str(errors[0]) == "The barrier on rank 0 did not end within 0.3 s. Ranks that did not arrive: 1."


def look_until_it_raises(collective):
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        collective.look("exchange", 0.0)
        time.sleep(0.01)


def test_who_waits_outside_of_operations_sees_what_happens_to_others(run_world):
    def work(collective):
        collective.barrier()
        if collective.rank == 1:
            raise ValueError("mine")
        with pytest.raises(PeerLostError, match="Rank 1 aborted its collective"):
            look_until_it_raises(collective)
        with pytest.raises(PeerLostError, match="is broken since an earlier failure: Rank 1 aborted"):
            collective.look("exchange", 0.0)

    first, second, third = run_world(3, work)
    assert (first, type(second), third) == (None, ValueError, None)


def test_who_waits_outside_of_operations_too_long_names_those_who_do_not_come(run_world):
    away, released = threading.Event(), threading.Event()

    def work(collective):
        if collective.rank == 1:
            away.set()
            released.wait(20)
            return
        assert away.wait(20)
        collective.look("exchange", 0.2)
        try:
            collective.look("exchange", 0.3)
        finally:
            released.set()

    error = run_world(2, work, operation_timeout_s=0.3)[0]
    assert type(error) is DeadlineExceededError
    assert str(error) == "The exchange on rank 0 did not end within 0.3 s. Ranks that did not arrive: 1."


def test_close_twice_and_calls_after_it(run_world):
    def work(collective):
        collective.barrier()
        collective.close()
        collective.close()
        with pytest.raises(PeerLostError, match="was closed on this rank"):
            collective.barrier()

    assert run_world(2, work) == [None] * 2


def test_what_all_have_begun_is_finished_though_one_fails_right_after_it(run_world):
    def work(collective):
        result = float(collective.allreduce(np.ones(3, "f4"))[0])
        if collective.rank == 1:
            collective.abort()
        return result

    for _ in range(5):
        assert run_world(5, work, hosts="aabbc") == [5.0] * 5


def test_who_shares_a_host_is_known(run_world):
    def where(collective):
        return collective.local_rank, collective.local_world_size, collective.crosses_hosts

    assert run_world(5, where, hosts="abaca") == [(0, 3, True), (0, 1, True), (1, 3, True), (0, 1, True), (2, 3, True)]
    assert run_world(2, where) == [(0, 2, False), (1, 2, False)]
    assert run_world(2, where, transport="tcp") == [(0, 1, True)] * 2


def test_counts_when_an_array_is_reduced_then_are_what_has_gone_to_other_ranks_and_not_through_memory(run_world):
    def sent(collective):
        before = collective.bytes_sent
        collective.allreduce_(np.ones(1_000_000, np.float32))
        assert collective.waited_s > 0
        return collective.bytes_sent - before

    # Each of N ranks sends 2 (N - 1) / N of an array on, and a little to agree on it.
    for count in run_world(4, sent, transport="tcp"):
        assert 6_000_000 <= count < 6_010_000
    assert all(count < 10_000 for count in run_world(2, sent, hosts="aa"))


SHAPES = {"broadcast": "broadcast of 2x3 float32 from rank 0", "allreduce": "allreduce sum of 2x3 float32"}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [2, 2000])
def test_array_when_another_rank_has_as_many_values_in_another_shape_then_all_say_so(run_world, name, rows):
    def call(collective):
        shape = (rows, 3) if collective.rank else (3, rows)
        getattr(collective, name)(np.ones(shape, np.float32))

    for result in run_world(2, call, transport="tcp"):
        assert isinstance(result, ProtocolError)
        for shape in (f"{rows}x3", f"3x{rows}"):
            assert SHAPES[name].replace("2x3", shape) in str(result)
