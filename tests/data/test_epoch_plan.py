"""The epoch plan against the properties that make it right, for any sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.data.epoch_plan import EpochPlan, random_rows, row_order, runs_of_pass, split_validation

sizes = st.lists(st.integers(0, 200), min_size=1, max_size=6).filter(lambda rows: sum(rows) > 0)


@given(rows=sizes, batch_size=st.integers(1, 64))
def test_plan_when_summed_over_steps_then_uses_every_row_once(rows, batch_size):
    plan = EpochPlan(tuple(rows), (0,) * len(rows), batch_size)
    for rank, count in enumerate(rows):
        assert sum(plan.rows_at(rank, step) for step in range(plan.steps)) == count


@given(rows=sizes, batch_size=st.integers(1, 64))
def test_shares_when_summed_over_ranks_then_are_one_in_every_step(rows, batch_size):
    plan = EpochPlan(tuple(rows), (0,) * len(rows), batch_size)
    for step in range(plan.steps):
        shares = [plan.share_at(rank, step) for rank in range(plan.world_size)]
        assert sum(shares) == pytest.approx(1.0)
        assert [share == 0 for share in shares] == [step >= plan.own_steps(rank) for rank in range(plan.world_size)]


@given(rows=sizes, batch_size=st.integers(1, 64), longest=st.integers(1, 9))
def test_runs_when_laid_end_to_end_then_are_the_plan_s_steps(rows, batch_size, longest):
    plan = EpochPlan(tuple(rows), (0,) * len(rows), batch_size)
    for rank, count in enumerate(rows):
        runs = runs_of_pass(count, batch_size, plan.steps, longest)
        assert all(1 <= run.batches <= longest for run in runs)
        lengths = [run.rows for run in runs for _ in range(run.batches)]
        assert lengths == [plan.rows_at(rank, step) for step in range(plan.steps)]
        ends = [run.start + run.batches * run.rows for run in runs]
        assert [run.start for run in runs] == [0, *ends][: len(runs)]


@given(rows=sizes, fraction=st.floats(0, 0.99))
def test_split_when_made_then_keeps_the_fraction_and_never_all_rows(rows, fraction):
    kept = split_validation(rows, fraction)
    assert all(0 <= part <= count for part, count in zip(kept, rows, strict=True))
    if fraction > 0 and sum(rows) > 1:
        assert sum(kept) == min(max(round(fraction * sum(rows)), 1), sum(rows) - 1)
    else:
        assert sum(kept) == 0


@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000), rank=st.integers(0, 50), rows=st.integers(0, 300))
def test_order_when_shuffled_then_is_a_permutation_that_repeats(seed, epoch, rank, rows):
    order = row_order(seed, epoch, rank, rows, shuffle=True)
    assert sorted(order) == list(range(rows))
    np.testing.assert_array_equal(order, row_order(seed, epoch, rank, rows, shuffle=True))


def test_order_when_seed_epoch_or_rank_differs_then_differs():
    base = row_order(1, 0, 0, 100, shuffle=True).tolist()
    others = [row_order(*key, 100, shuffle=True).tolist() for key in ((2, 0, 0), (1, 1, 0), (1, 0, 1))]
    assert all(other != base for other in others)


def test_order_when_not_shuffled_then_is_the_partition_s():
    assert row_order(1, 0, 0, 5, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@given(rows=st.integers(0, 100), data=st.data())
def test_random_rows_when_drawn_then_are_distinct_and_sorted(rows, data):
    count = data.draw(st.integers(0, rows))
    drawn = random_rows(3, 1, rows, count).tolist()
    assert drawn == sorted(set(drawn)) and len(drawn) == count
    assert all(0 <= row < rows for row in drawn)


def test_random_rows_when_seed_or_rank_differs_then_differ():
    draws = [random_rows(*key, 200, 40).tolist() for key in ((3, 0), (3, 1), (3, 2), (4, 0))]
    assert len({tuple(draw) for draw in draws}) == 4


@given(rows=sizes, batch_size=st.integers(1, 64), first=st.integers(0, 60), length=st.integers(1, 30))
def test_share_when_it_spans_steps_then_is_that_of_the_rows_counted_one_by_one(rows, batch_size, first, length):
    plan = EpochPlan(tuple(rows), (0,) * len(rows), batch_size)
    steps = -(-max(rows) // batch_size)
    counts = [
        sum(min(batch_size, max(count - step % steps * batch_size, 0)) for step in range(first, first + length))
        for count in rows
    ]
    for rank, count in enumerate(counts):
        assert plan.share_between(rank, first, first + length) == (count / sum(counts) if sum(counts) else 0.0)


class CountedRows(tuple):
    """Rows by rank that count how often they are looked at."""

    looks = 0

    def __getitem__(self, place):
        CountedRows.looks += 1
        return super().__getitem__(place)

    def __iter__(self):
        for value in super().__iter__():
            CountedRows.looks += 1
            yield value


def test_share_when_there_are_a_thousand_ranks_then_a_step_looks_at_a_few_numbers():
    plan = EpochPlan(CountedRows(range(1, 1025)), (0,) * 1024, batch_size=32)
    plan.share_at(0, 0)
    CountedRows.looks = 0
    shares = [plan.share_at(7, step) for step in range(3)]
    assert CountedRows.looks <= 20
    assert shares == [8 / (sum(range(1, 32)) + 32 * 993), 0.0, 0.0]
