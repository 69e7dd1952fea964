import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.compression.top_k import TopK, pack_sparse, unpack_sparse


def reduced_by(reduction, ring, values):
    flat = np.array(values, np.float32)
    reduction.reduce_(flat, ring)
    return flat


def test_topk_when_two_ranks_have_different_largest_values_then_both_arrive_and_the_rest_waits(run_ranks):
    given_values = {0: [5.0, 0.5, -0.25, 0.0], 1: [0.5, -6.0, 0.25, 0.0]}

    def work(ring):
        reduction = TopK([(0, (4,))], ratio=0.25)
        return [
            reduced_by(reduction, ring, values).tolist() for values in (given_values[ring.rank], [0.0] * 4, [0.0] * 4)
        ]

    # What was not sent at first comes in the order of its magnitude: halves, then quarters, which cancel.
    assert run_ranks(2, work)[0] == [[5.0, -6.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0] * 4]


@given(count=st.integers(1, 300_000), kept=st.integers(0, 500), seed=st.integers(0, 1000))
def test_sparse_values_when_packed_then_unpack_to_themselves(count, kept, seed):
    generator = np.random.default_rng(seed)
    indices = np.sort(generator.choice(count, min(kept, count), replace=False))
    values = generator.normal(size=len(indices)).astype(np.float32)
    data = pack_sparse(indices, values, count)
    assert len(data) == 6 * len(indices) + 4 * -(-count // 65_536)
    others, theirs = unpack_sparse(data, count)
    np.testing.assert_array_equal(others, indices)
    np.testing.assert_array_equal(theirs, values)


@pytest.mark.parametrize("count", [1000, 70_000, 1_000_000])
@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse", "equal", "periodic"])
def test_topk_when_values_are_selected_then_none_that_stays_is_larger(run_ranks, count, kind):
    generator = np.random.default_rng(3)
    values = {
        "normal": lambda: generator.normal(size=count),
        "heavy": lambda: generator.standard_t(1, size=count),
        "sparse": lambda: generator.normal(size=count) * (generator.random(count) < 0.001),
        "equal": lambda: np.ones(count),
        "periodic": lambda: generator.normal(size=count) * (np.arange(count) % 16 == 5),
    }[kind]().astype(np.float32)

    def work(ring):
        return reduced_by(TopK([(0, (count,))], ratio=0.01), ring, values)

    (result,) = run_ranks(1, work)
    sent = result != 0
    assert np.count_nonzero(sent) <= count // 100
    np.testing.assert_array_equal(result[sent], values[sent])
    # The sample that gives the threshold may let fewer through, never smaller ones.
    assert np.count_nonzero(sent) >= min(0.8 * count / 100, 0.8 * np.count_nonzero(values))
    assert np.abs(values[~sent]).max(initial=0) <= np.abs(values[sent]).min()


def test_topk_when_gradients_are_constant_then_the_running_sum_lags_by_a_bounded_number_of_steps(run_ranks):
    gradient = np.linspace(0.5, 1.5, 1000).astype(np.float32)
    steps = 200

    def work(ring):
        reduction, total = TopK([(0, (1000,))], ratio=0.05), np.zeros(1000)
        for _ in range(steps):
            total += reduced_by(reduction, ring, gradient)
        return total

    behind = (2 * steps * gradient.astype(np.float64) - run_ranks(2, work)[0]) / (2 * gradient)
    # One in twenty is sent at a time, so that a value of average magnitude waits for twenty steps or so.
    assert behind.min() > -0.01 and behind.max() < 60


def test_topk_when_most_values_are_not_finite_then_the_memory_is_clean_after_it(run_ranks):
    def work(ring):
        reduction = TopK([(0, (100,))], ratio=0.01)
        broken = reduced_by(reduction, ring, np.full(100, np.nan))
        return np.isnan(broken).any(), reduced_by(reduction, ring, np.eye(1, 100)[0]).tolist()

    assert run_ranks(2, work) == [(True, [2.0] + [0.0] * 99)] * 2


def test_topk_when_it_runs_then_sends_six_bytes_for_each_value(run_ranks):
    def work(ring):
        reduced_by(TopK([(0, (1_000_000,))]), ring, np.random.default_rng(ring.rank).normal(size=1_000_000))
        return ring.calls

    ((operation, length, _),) = run_ranks(2, work)[0]
    assert operation == "allgather" and 0.85 * 60_000 < length <= 60_000 + 4 * 16
