"""States within an epoch that another number of ranks goes on from, against sums and means by numpy."""

import numpy as np
import pytest

from elephant.checkpoint.other_ranks import for_ranks, rows_of_all
from elephant.checkpoint.state import FitState

ROWS = (30, 10, 20)


def state_of(ranks, step=4, seed=0):
    rng, arrays = np.random.default_rng(seed), {"model/dense/kernel": np.ones((2, 2), np.float32)}
    for rank in range(ranks):
        arrays |= {
            f"metric/{rank}/0": rng.normal(size=()).astype(np.float32),
            f"metric/{rank}/1": rng.normal(size=3).astype(np.float32),
            f"moving/{rank}/model/norm/moving_mean": rng.normal(size=4).astype(np.float32),
            f"rows/{rank}/0": np.array([ROWS[rank], rng.integers(-(2**62), 2**62)]),
            f"random/{rank}/model/dropout": np.full(2, rank, np.uint32),
        }
    return FitState(epochs=1, step=step, arrays=arrays)


@pytest.mark.parametrize(("before", "after"), [(3, 1), (3, 2), (2, 3), (1, 3)])
def test_state_when_other_ranks_go_on_then_sums_are_whole_and_averages_are_those_of_all_rows(before, after):
    state = state_of(before)
    found = for_ranks(state, after)
    for name in ("metric/{}/0", "metric/{}/1", "rows/{}/0"):
        expected = sum(state.arrays[name.format(rank)] for rank in range(before))
        np.testing.assert_allclose(found.arrays[name.format(0)], expected, rtol=1e-6)
        assert all(not np.any(found.arrays[name.format(rank)]) for rank in range(1, after))
        assert name.format(after) not in found.arrays
        assert found.arrays[name.format(0)].dtype == state.arrays[name.format(0)].dtype
    weights = np.array(ROWS[:before]) / sum(ROWS[:before])
    means = [state.arrays[f"moving/{rank}/model/norm/moving_mean"] for rank in range(before)]
    for rank in range(after):
        mean = found.arrays[f"moving/{rank}/model/norm/moving_mean"]
        np.testing.assert_allclose(mean, weights @ np.stack(means), rtol=1e-6)
        assert mean.dtype == np.float32
    # What is nobody's, and generators, stay as they are.
    kept = ("model/dense/kernel", *(f"random/{rank}/model/dropout" for rank in range(before)))
    assert all(found.arrays[name] is state.arrays[name] for name in kept)
    np.testing.assert_array_equal(rows_of_all(found), rows_of_all(state))


def test_state_when_as_many_ranks_go_on_or_an_epoch_has_ended_then_is_the_same():
    within, at_end = state_of(2), state_of(2, step=0)
    assert for_ranks(within, 2) is within and for_ranks(at_end, 3) is at_end
    assert rows_of_all(FitState(epochs=1)) is None


def test_rows_when_sums_of_hashes_pass_the_largest_integer_then_begin_anew_as_ranks_add_them_up():
    largest = np.array([1, 2**63 - 1])
    state = FitState(epochs=0, step=1, arrays={"rows/0/0": largest, "rows/1/0": np.array([2, 5])})
    assert rows_of_all(state).tolist() == [3, -(2**63) + 4]
