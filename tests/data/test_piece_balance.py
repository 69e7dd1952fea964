"""Balance of virtual shards: equal ranks keep theirs, slow ones give some away, and that comes to an end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.data.piece_balance import PieceBalance, RankSpeeds, balanced_owners
from elephant.data.virtual_shards import ElasticPlan, owner_of

PIECES_PER_RANK, PIECE_ROWS = 16, 60
ROOM = 1e9


def plan_of(ranks, sizes=None):
    sizes = [PIECE_ROWS] * PIECES_PER_RANK * ranks if sizes is None else sizes
    nothing = (0,) * len(sizes)
    plan = ElasticPlan(
        (0,) * ranks, (0,) * ranks, 32, piece_rows=tuple(sizes), piece_validation=nothing, owners=nothing
    )
    return plan.with_owners([owner_of(piece, ranks) for piece in range(len(sizes))])


def balanced(plan, row_s, room=None):
    row_s = np.array(row_s, np.float64)
    room = np.full(plan.world_size, ROOM) if room is None else np.array(room)
    return balanced_owners(plan, RankSpeeds(row_s * plan.training_rows, row_s, row_s, room))


class Simulation:
    """Ranks with seconds for a row and for an epoch, and noise; counts the moves of a fit.

    Args:
        row_s: Seconds for a row of each rank, from an epoch on.
        fixed_s: Seconds that an epoch takes each rank beside its rows.
    """

    def __init__(self, ranks, row_s, *, epochs=60, noise=0.0, fixed_s=0.0, room=ROOM, seed=0):
        rng = np.random.default_rng(seed)
        self.plan = plan_of(ranks)
        balance = PieceBalance(self.plan, row_bytes=100.0)
        self.moves, self.seconds = [], []
        for epoch in range(epochs):
            now = row_s[max(begin for begin in row_s if begin <= epoch)]
            busy = (fixed_s + np.array(now) * self.plan.training_rows) * (1 + noise * rng.uniform(-1, 1, ranks))
            self.seconds.append(busy.max())
            owners = balance.epoch_ended(busy.tolist(), float(busy.max()), [room] * ranks, epochs - epoch - 1)
            if owners is not None:
                self.moves.append((epoch, sum(np.array(owners) != self.plan.owners)))
                self.plan = self.plan.with_owners(owners)
                balance.moved(self.plan, took_s=1.0)


@given(
    sizes=st.lists(st.integers(0, 60), min_size=4, max_size=40),
    speeds=st.lists(st.floats(0.1, 10), min_size=2, max_size=5),
)
def test_owners_when_balanced_then_each_piece_has_one_no_rank_loses_all_and_none_gets_slower_than_the_slowest(
    sizes, speeds
):
    plan = plan_of(len(speeds), sizes)
    before = np.array(speeds) * plan.training_rows
    owners, seconds = balanced(plan, speeds)
    after = plan.with_owners(owners)
    assert len(owners) == len(sizes) and set(owners) <= set(range(len(speeds)))
    assert sum(after.training_rows) == sum(sizes)
    assert all((then > 0) >= (now > 0) for now, then in zip(plan.training_rows, after.training_rows, strict=True))
    np.testing.assert_allclose(seconds, np.array(speeds) * after.training_rows, atol=1e-6)
    assert seconds.max() <= before.max() + 1e-9
    assert balanced(plan, speeds)[0] == owners


@given(ranks=st.integers(2, 6), row_s=st.floats(0.001, 10))
def test_owners_when_ranks_are_equal_then_stay_as_they_are(ranks, row_s):
    plan = plan_of(ranks)
    assert balanced(plan, [row_s] * ranks)[0] == plan.owners


@pytest.mark.parametrize("factor", [1.3, 2.0, 4.0, 30.0])
def test_owners_when_a_rank_is_slower_then_has_rows_by_its_speed_within_a_piece(factor):
    plan = plan_of(2)
    owners, _ = balanced(plan, [1.0, factor])
    rows = plan.with_owners(owners).training_rows
    exact = sum(rows) / (1 + factor)
    assert abs(rows[1] - max(exact, PIECE_ROWS)) <= PIECE_ROWS
    # As few as it takes: none comes the other way.
    assert sum(np.array(owners) != plan.owners) == (plan.training_rows[1] - rows[1]) // PIECE_ROWS


def test_rows_when_a_rank_is_ever_slower_then_never_become_more():
    rows = [
        plan.with_owners(balanced(plan, [1, 1, factor])[0]).training_rows[2]
        for plan in [plan_of(3)]
        for factor in np.linspace(1, 8, 40)
    ]
    assert rows == sorted(rows, reverse=True) and rows[-1] < rows[0] / 2


def test_owners_when_a_rank_has_no_room_then_takes_nothing():
    plan = plan_of(3)
    owners, _ = balanced(plan, [1, 1, 4], room=[plan.training_rows[0] + PIECE_ROWS, ROOM, ROOM])
    rows = plan.with_owners(owners).training_rows
    assert rows[0] == plan.training_rows[0] + PIECE_ROWS and rows[1] > rows[0]


def test_owners_when_a_rank_has_no_rows_then_gets_none_as_nobody_knows_its_speed():
    plan = plan_of(2).with_owners([0] * 32)
    row_s = np.array([1.0, np.inf])
    speeds = RankSpeeds(np.array([1920.0, 0.1]), np.array([1.0, 0.0]), row_s, np.full(2, ROOM))
    assert balanced_owners(plan, speeds)[0] == plan.owners


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("epoch_s", [0.3, 2.0, 20.0, 100.0])
def test_fit_when_ranks_are_equal_but_for_noise_of_15_percent_then_no_row_moves(ranks, epoch_s):
    row_s = epoch_s / (PIECE_ROWS * PIECES_PER_RANK)
    for seed in range(5):
        fit = Simulation(ranks, {0: [row_s] * ranks}, noise=0.15, seed=seed, epochs=100)
        assert not fit.moves


@pytest.mark.parametrize("slow", [[2.0, 1.0], [1.0, 3.0, 1.0], [1.0, 1.0, 1.0, 2.0, 1.5, 1.0, 1.0, 2.0]])
@pytest.mark.parametrize("epoch_s", [0.3, 3.0, 100.0])
def test_fit_when_ranks_are_slow_then_is_balanced_by_at_most_three_moves_under_noise(slow, epoch_s):
    row_s = epoch_s / (PIECE_ROWS * PIECES_PER_RANK) * np.array(slow)
    best = PIECE_ROWS * PIECES_PER_RANK * len(slow) / np.sum(1 / row_s)
    for seed in range(4):
        fit = Simulation(len(slow), {0: row_s}, noise=0.1, seed=seed, epochs=100)
        assert 1 <= len(fit.moves) <= 3
        assert max(row_s * fit.plan.training_rows) <= 1.25 * best


def test_fit_when_another_rank_becomes_slow_then_rows_move_back():
    row_s = 3.0 / (PIECE_ROWS * PIECES_PER_RANK)
    fit = Simulation(2, {0: [row_s, 2 * row_s], 40: [row_s, row_s], 70: [2 * row_s, row_s]}, epochs=120, noise=0.05)
    assert 2 <= len(fit.moves) <= 4
    assert fit.plan.training_rows[0] < fit.plan.training_rows[1]


def test_fit_when_the_time_of_a_slow_rank_does_not_go_with_its_rows_then_stops_to_move_them():
    fit = Simulation(2, {0: [1e-4, 1e-4]}, fixed_s=np.array([1.0, 4.0]), epochs=300, noise=0.05)
    assert len(fit.moves) == 1 and fit.plan.training_rows[1] > 0


def test_fit_when_few_epochs_are_left_then_rows_stay_where_they_are():
    row_s = 6.0 / (PIECE_ROWS * PIECES_PER_RANK)
    assert [move[0] for move in Simulation(2, {0: [row_s, 2 * row_s]}, epochs=6).moves] == [2]
    # The move would take 30 s, and saves 4 s of an epoch.
    plan = plan_of(2)
    balance = PieceBalance(plan, row_bytes=50e6 * 30 / (1280))
    found = [balance.epoch_ended([6.0, 12.0], 12.0, [ROOM] * 2, left) for left in (9, 8, 7, 7, 7)]
    assert found == [None] * 5
    assert balance.epoch_ended([6.0, 12.0], 12.0, [ROOM] * 2, 30) is not None


def test_fit_when_a_disk_has_no_room_for_the_new_rows_then_none_move():
    row_s = 6.0 / (PIECE_ROWS * PIECES_PER_RANK)
    assert not Simulation(2, {0: [row_s, 2 * row_s]}, room=100).moves
