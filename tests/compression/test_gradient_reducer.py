from functools import partial

import numpy as np
import pytest

from elephant.compression import reduction_for
from elephant.compression.codec import known_names, num_values
from elephant.errors import ConfigurationError

SLICES = [(0, (60, 50)), (3000, (50,)), (3050, (50, 40)), (5050, ())]
COUNT = 5051


def gradients(rank, step, count=COUNT):
    generator = np.random.default_rng((rank, step))
    return (generator.normal(size=count) * (1 + rank)).astype(np.float32)


@pytest.mark.parametrize("name", [None, *known_names()])
@pytest.mark.parametrize("world_size", [2, 3])
def test_reduction_when_ranks_differ_then_all_get_the_same_bits(run_ranks, name, world_size):
    def work(ring):
        reduction, results = reduction_for(name, SLICES), []
        for step in range(4):
            flat = gradients(ring.rank, step)
            reduction.reduce_(flat, ring)
            results.append(flat.tobytes())
        return results

    first, *others = run_ranks(world_size, work)
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("name", "error"),
    [(None, 1e-6), ("bfloat16", 0.01), ("float16", 0.002), ("int8", 0.03), ("int8:feedback", 0.03), ("topk:1", 1e-6)],
)
def test_reduction_when_it_keeps_all_values_then_gives_the_sum(run_ranks, name, error):
    def work(ring):
        flat = gradients(ring.rank, 0)
        reduction_for(name, SLICES).reduce_(flat, ring)
        return flat

    expected = sum(gradients(rank, 0).astype(np.float64) for rank in range(3))
    for result in run_ranks(3, work):
        np.testing.assert_allclose(result, expected, atol=error * np.abs(expected).max())


@pytest.mark.parametrize("name", [None, *known_names()])
def test_reduction_when_all_ranks_are_on_one_host_then_nothing_is_compressed(run_ranks, name):
    def work(ring):
        flat = gradients(ring.rank, 0)
        reduction_for(name, SLICES).reduce_(flat, ring)
        assert ring.calls == [("allreduce", COUNT, "NoneType")]
        return flat

    expected = gradients(0, 0) + gradients(1, 0)
    for result in run_ranks(2, work, crosses_hosts=False):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("name", [None, *known_names()])
def test_reduction_when_values_lie_behind_the_arrays_then_they_arrive_exactly(run_ranks, name):
    tail = np.array([1.0, 1 / 3, 1e-20], np.float32)

    def work(ring):
        flat = np.concatenate([1e6 * gradients(ring.rank, 0), tail])
        reduction_for(name, SLICES).reduce_(flat, ring)
        return flat[COUNT:]

    for result in run_ranks(2, work):
        np.testing.assert_array_equal(result, 2 * tail)


@pytest.mark.parametrize("name", [None, *known_names()])
def test_reduction_when_one_rank_overflows_then_all_see_it_and_the_next_steps_are_finite(run_ranks, name):
    def work(ring, bad):
        reduction, finite = reduction_for(name, SLICES), []
        for step in range(5):
            flat = gradients(ring.rank, step)
            if step == 2 and ring.rank == 1:
                flat[1234] = bad
            reduction.reduce_(flat, ring)
            finite.append(bool(np.isfinite(flat).all()))
        return finite

    seen = {str(bad): run_ranks(3, partial(work, bad=bad)) for bad in (np.nan, np.inf)}
    assert seen == dict.fromkeys(["nan", "inf"], [[True, True, False, True, True]] * 3)


@pytest.mark.parametrize("slices", [[], [(0, (0, 3))], [(0, (1,))], [(0, ())], [(0, (7, 1))]])
def test_reduction_when_arrays_are_tiny_then_sums_them(run_ranks, slices):
    count, names = num_values(slices), [None, *known_names()]

    def work(ring, name):
        flat = np.full(count, 2.0, np.float32)
        flat[1:] = 0
        reduction_for(name, slices).reduce_(flat, ring)
        return flat.tolist()

    summed = {name: run_ranks(2, partial(work, name=name)) for name in names}
    assert summed == dict.fromkeys(names, [[4.0, *[0.0] * (count - 1)][:count]] * 2)


def test_reduction_when_a_codec_is_named_then_the_allreduce_gets_it(run_ranks):
    def work(ring):
        flat = gradients(ring.rank, 0, COUNT + 2)
        for name in ("bfloat16", "float16", "int8", "int8:feedback"):
            reduction_for(name, SLICES).reduce_(flat, ring)
        return ring.calls

    expected = [("allreduce", COUNT, codec) for codec in ("BFloat16", "Float16", "Int8", "ErrorFeedback")]
    assert [call for call in run_ranks(2, work)[0] if call[1] != 2] == expected


@pytest.mark.parametrize("flat", [np.zeros(COUNT), np.zeros(COUNT - 1, "f4"), np.zeros((1, COUNT), "f4")])
def test_reduction_when_the_array_is_another_one_then_raises(run_ranks, flat):
    def work(ring):
        with pytest.raises(ConfigurationError, match="expected float32 of one dimension and at least 5051 values"):
            reduction_for("bfloat16", SLICES).reduce_(flat, ring)

    run_ranks(2, work)


@pytest.mark.parametrize("slices", [[(0, (2, 2)), (3, (1,))], [(4, (2,)), (0, (2,))]])
def test_reduction_when_arrays_overlap_then_raises(slices):
    with pytest.raises(ConfigurationError, match=r"slices\[1\]: expected a start from [46] on, .* Received: [03]"):
        reduction_for("bfloat16", slices)
