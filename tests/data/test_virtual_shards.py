"""Virtual shards against the properties that make them right, for any sizes of pieces and any owners."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.data.epoch_plan import split_validation
from elephant.data.virtual_shards import (
    ElasticPlan,
    PieceOrder,
    elastic_plan,
    number_of_pieces,
    owner_of,
    rows_before,
    validation_places,
)
from elephant.errors import TrainingError

sizes_of_pieces = st.lists(st.integers(0, 60), min_size=1, max_size=24).filter(lambda sizes: sum(sizes) > 0)


def plan_of(sizes, world_size, global_rows, owners=None, **options):
    owners = [owner_of(piece, world_size) for piece in range(len(sizes))] if owners is None else owners
    counts = np.zeros((world_size, len(sizes), 2), np.int64)
    counts[owners, np.arange(len(sizes)), 0] = sizes
    given = {"validation_fraction": 0.0, "is_marked": False, **options}
    return elastic_plan(list(counts), batch_size=4, global_rows=global_rows, **given)


@given(sizes=sizes_of_pieces, global_rows=st.integers(1, 50))
def test_rows_when_cut_into_steps_then_each_counts_once_and_every_step_but_the_last_is_full(sizes, global_rows):
    total = sum(sizes)
    cuts = np.array([*range(0, total, global_rows), total])
    before = rows_before(np.array(sizes), cuts)
    steps = np.diff(before, axis=0)
    assert before[0].tolist() == [0] * len(sizes) and before[-1].tolist() == sizes
    assert np.all(steps >= 0) and steps.sum(axis=1).tolist() == np.diff(cuts).tolist()


@given(sizes=sizes_of_pieces, global_rows=st.integers(1, 50))
def test_rows_when_cut_into_steps_then_a_piece_has_its_share_of_every_step_within_a_row_or_two(sizes, global_rows):
    total = sum(sizes)
    cuts = np.array([*range(0, total, global_rows), total])
    before = rows_before(np.array(sizes), cuts)
    expected = np.outer(cuts, sizes) / total
    # Half a row is rounding; the threshold of a cut is off by as many rows as there are pieces that round alike.
    assert np.all(np.abs(before - expected) <= 1 + len(sizes) / 2 * np.array(sizes) / total + 1e-9)


@given(
    sizes=sizes_of_pieces,
    global_rows=st.integers(1, 50),
    world_size=st.integers(1, 5),
    steps_per_epoch=st.none() | st.integers(1, 30),
)
def test_plan_when_of_any_number_of_ranks_then_steps_have_the_same_rows_of_all(
    sizes, global_rows, world_size, steps_per_epoch
):
    plan = plan_of(sizes, world_size, global_rows, steps_per_epoch=steps_per_epoch)
    alone = plan_of(sizes, 1, global_rows, steps_per_epoch=steps_per_epoch)
    assert (plan.pass_steps, plan.steps) == (alone.pass_steps, alone.steps)
    for number in range(2 * plan.pass_steps):
        brought = [plan.rows_at(rank, number) for rank in range(world_size)]
        assert sum(brought) == alone.rows_at(0, number)
        assert sum(plan.share_at(rank, number) for rank in range(world_size)) == pytest.approx(1.0)
        change = plan.next_change(number)
        assert change > number
        idle = [rows == 0 for rows in brought]
        for one in range(number, change):
            assert [plan.rows_at(rank, one) == 0 for rank in range(world_size)] == idle
    for rank in range(world_size):
        idle = sum(plan.rows_at(rank, step) == 0 for step in range(plan.pass_steps))
        assert plan.own_steps(rank) == plan.pass_steps - idle
        assert plan.rows_between(rank, 0, plan.pass_steps) == plan.training_rows[rank]


@given(
    sizes=sizes_of_pieces,
    global_rows=st.integers(1, 50),
    owners=st.data(),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_order_when_pieces_have_any_owners_then_every_global_step_takes_the_same_rows(
    sizes, global_rows, owners, seed, shuffle
):
    # Rows are numbered by piece; positions are the numbers themselves.
    bounds = np.cumsum([0, *sizes])
    rows = {piece: np.arange(bounds[piece], bounds[piece + 1]) for piece in range(len(sizes))}

    def steps_of(world_size, owned, number):
        plan = plan_of(sizes, world_size, global_rows, owned)
        steps = [set() for _ in range(plan.pass_steps)]
        for rank in range(world_size):
            mine = {piece: rows[piece] for piece in plan.pieces_of(rank)}
            order = PieceOrder(mine, plan, rank, seed=seed, shuffle=shuffle).of_pass(number)
            runs = plan.runs_of_pass(rank)
            assert len(order) == plan.training_rows[rank] and len(runs) == plan.pass_steps
            for step, run in enumerate(runs):
                assert run.rows == plan.rows_at(rank, step)
                steps[step] |= set(order[run.start : run.start + run.rows].tolist())
        return steps

    alone = steps_of(1, [0] * len(sizes), 3)
    assert sorted(row for step in alone for row in step) == list(range(sum(sizes)))
    drawn = owners.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    # Pieces without rows have no owner that anybody could see.
    assert steps_of(4, drawn, 3) == alone


def test_order_when_shuffled_then_passes_differ_and_repeat():
    plan = plan_of([30, 20], 1, 10)
    rows = {0: np.arange(30), 1: np.arange(30, 50)}
    first, again = (PieceOrder(rows, plan, 0, seed=1, shuffle=True) for _ in range(2))
    assert first.of_pass(0).tolist() == again.of_pass(0).tolist() != first.of_pass(1).tolist()
    assert first.of_pass(0).tolist() != PieceOrder(rows, plan, 0, seed=2, shuffle=True).of_pass(0).tolist()


@given(sizes=sizes_of_pieces, fraction=st.floats(0.01, 0.9), world_size=st.integers(1, 4))
def test_validation_when_a_fraction_is_kept_then_is_of_the_same_rows_on_any_number_of_ranks(
    sizes, fraction, world_size
):
    bounds = np.cumsum([0, *sizes])

    def kept_by(ranks):
        plan, found = plan_of(sizes, ranks, 7, validation_fraction=fraction), set()
        for rank in range(ranks):
            own = [piece for piece in range(len(sizes)) if owner_of(piece, ranks) == rank]
            pieces = np.repeat(own, [sizes[piece] for piece in own]).astype(np.int64)
            rows = np.concatenate([np.arange(0), *(np.arange(bounds[piece], bounds[piece + 1]) for piece in own)])
            places = validation_places(pieces, plan.piece_validation, seed=3)
            assert len(places) == plan.validation_rows[rank] == len(rows) - plan.training_rows[rank]
            found |= set(rows[places].tolist())
        return found

    alone = kept_by(1)
    assert kept_by(world_size) == alone and len(alone) == sum(split_validation(sizes, fraction))


def test_plan_when_a_piece_is_on_two_ranks_then_says_what_to_do():
    counts = [np.array([[3, 0], [0, 0]]), np.array([[1, 0], [2, 0]])]
    with pytest.raises(TrainingError, match=r"rows of shard 0 on ranks 0, 1\. Rows whose values change"):
        elastic_plan(counts, batch_size=4, global_rows=4, validation_fraction=0.0, is_marked=False)


def test_plan_when_a_column_marks_rows_then_those_are_not_trained_on():
    counts = [np.array([[5, 2], [0, 0]]), np.array([[0, 0], [4, 4]])]
    plan = elastic_plan(counts, batch_size=4, global_rows=2, validation_fraction=0.0, is_marked=True)
    assert plan.training_rows == (3, 0) and plan.validation_rows == (2, 4) and plan.piece_rows == (3, 0)
    assert plan.pass_steps == 2 and plan.own_steps(1) == 0


def test_gradients_when_ranks_change_between_steps_then_weights_equal_those_of_one_process():
    # 10,003 rows, logistic regression in numpy: sums over ranks, weighted by their rows, against whole batches.
    rng, rows, batch = np.random.default_rng(0), 10_003, 256
    features, label = rng.normal(size=(rows, 5)), rng.integers(0, 2, rows)
    pieces = rng.integers(0, number_of_pieces(8), rows)
    order = np.argsort(pieces, kind="stable")
    by_piece = {piece: order[pieces[order] == piece] for piece in range(number_of_pieces(8))}
    sizes = [len(by_piece[piece]) for piece in by_piece]

    def gradient(weights, chosen):
        error = 1 / (1 + np.exp(-features[chosen] @ weights)) - label[chosen]
        return features[chosen].T @ error / len(chosen)

    def train(schedule):
        weights, steps = np.zeros(5), plan_of(sizes, 1, batch).pass_steps
        orders = {}
        for number in range(2 * steps):
            world_size = schedule(number)
            plan = plan_of(sizes, world_size, batch) if world_size not in orders else orders[world_size][0]
            parts = np.zeros(5)
            passed, step = divmod(number, steps)
            if world_size not in orders:
                own = [{piece: by_piece[piece] for piece in plan.pieces_of(rank)} for rank in range(world_size)]
                made = [PieceOrder(mine, plan, rank, seed=7, shuffle=True) for rank, mine in enumerate(own)]
                runs = [plan.runs_of_pass(rank) for rank in range(world_size)]
                orders[world_size] = (
                    plan,
                    runs,
                    {0: [one.of_pass(0) for one in made], 1: [one.of_pass(1) for one in made]},
                )
            _, runs, of_passes = orders[world_size]
            for rank in range(world_size):
                run = runs[rank][step]
                chosen = of_passes[passed][rank][run.start : run.start + run.rows]
                if len(chosen):
                    parts += plan.share_at(rank, number) * gradient(weights, chosen)
            weights = weights - 0.5 * parts
        return weights

    alone = train(lambda number: 1)
    changing = train(lambda number: (2, 8, 3, 5)[number // 7 % 4])
    assert np.abs(alone - changing).max() < 1e-14 and np.abs(alone).max() > 0.005


def test_plan_when_ranks_are_many_then_their_parts_of_a_step_differ_by_few_rows():
    sizes = np.random.default_rng(1).multinomial(100_003, np.full(128, 1 / 128)).tolist()
    plan = plan_of(sizes, 8, 256)
    parts = np.array([[plan.rows_at(rank, step) for rank in range(8)] for step in range(0, plan.pass_steps - 1, 7)])
    assert parts.min() >= 26 and parts.max() <= 38
    assert isinstance(plan, ElasticPlan) and plan.varies
