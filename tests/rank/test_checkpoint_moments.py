"""Moments of checkpoints within an epoch, by a clock that stands still but for the steps that are taken."""

import time

import pytest

from elephant.collective.communicator import LocalCommunicator
from elephant.data.epoch_plan import EpochPlan
from elephant.rank.callbacks import checkpoint_moments
from elephant.rank.callbacks.checkpoint_moments import CheckpointMoments
from elephant.rank.rank_progress import RankWeight

QUIET = {"is_wanted": False, "leaves": False}


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(checkpoint_moments.time, "monotonic", lambda: self.now)


def moments_of(steps, seconds, every=1):
    weight = RankWeight(EpochPlan((steps,), (0,), 1), 0)
    moments = CheckpointMoments(seconds, LocalCommunicator(), weight, every=every)
    moments.begin_epoch()
    return moments, weight


def test_moments_when_steps_become_ten_times_as_slow_then_moments_are_late_by_two_steps_at_most(monkeypatch):
    clock = Clock(monkeypatch)
    moments, weight = moments_of(2000, 7.0)
    kept, asked, began = [], 0, clock.now
    for done in range(1, 2001):
        step_s = 0.01 if done < 1000 else 0.1
        clock.now += step_s
        asked += done >= weight.pause
        if moments.is_due(done, is_free=True, **QUIET):
            late = clock.now - began - 7.0
            # One was planned with steps of before.
            assert 0 <= late <= (0.5 if 1000 <= done < 1050 else 2 * step_s + 1e-6)
            moments.end_turn(time.monotonic())
            began = clock.now
            kept.append(done)
        # Somebody who wants one does not wait longer, whatever the steps were like before.
        assert (weight.pause - done) * 0.01 <= 0.5
    assert len(kept) == 15 and asked < 1000


def test_moments_when_weights_are_equal_every_few_steps_then_are_after_these_alone(monkeypatch):
    clock = Clock(monkeypatch)
    moments, weight = moments_of(100, 0.5, every=8)
    kept = []
    for done in range(1, 101):
        clock.now += 0.05
        if moments.is_due(done, is_free=True, **QUIET):
            kept.append(done)
            moments.end_turn(time.monotonic())
    assert kept and all(done % 8 == 0 for done in kept)


@pytest.mark.parametrize("seconds", [None, 60.0])
@pytest.mark.parametrize("wish", ["is_wanted", "leaves"])
def test_moments_when_somebody_wants_one_or_leaves_then_is_the_next_step_that_is_asked_in(monkeypatch, seconds, wish):
    clock = Clock(monkeypatch)
    moments, weight = moments_of(500, seconds)
    for done in range(1, 200):
        clock.now += 0.01
        assert not moments.is_due(done, is_free=True, **QUIET)
    due = []
    for done in range(200, 300):
        clock.now += 0.01
        if moments.is_due(done, is_free=False, **{**QUIET, wish: not due}):
            due.append(done)
            assert moments.someone_leaves == (wish == "leaves")
    assert len(due) == 1 and due[0] <= 250


def test_moments_when_the_last_state_is_still_on_its_way_then_wait_for_it_and_an_epoch_s_end_asks_too(monkeypatch):
    clock = Clock(monkeypatch)
    moments, weight = moments_of(50, 0.1)
    for done in range(1, 50):
        clock.now += 0.01
        assert not moments.is_due(done, is_free=False, **QUIET)
    weight.step = 49
    assert not moments.is_due(50, is_free=True, **QUIET)
    assert moments.is_due_at_end(**QUIET)


def test_moments_when_states_are_for_memory_then_are_a_second_or_50_steps_apart_or_as_far_as_they_cost(monkeypatch):
    for step_s, stood_s, sending_s, expected_s in ((0.01, 0.0, 0.0, 1.0), (0.1, 0.0, 0.0, 5.0), (0.01, 0.05, 0.2, 2.5)):
        clock = Clock(monkeypatch)
        weight = RankWeight(EpochPlan((4000,), (0,), 1), 0)
        moments = CheckpointMoments(None, LocalCommunicator(), weight, in_memory=True)
        moments.begin_epoch()
        kept = []
        for done in range(1, 4001):
            clock.now += step_s
            is_free = not kept or clock.now - kept[-1] >= sending_s
            if moments.is_due(done, is_free=is_free, **QUIET):
                began = clock.now
                clock.now += stood_s
                moments.end_turn(began)
                kept.append(clock.now)
        apart = [later - before - stood_s for before, later in zip(kept[1:], kept[2:], strict=False)]
        # What sending takes is seen when ranks ask next, half a second later at most.
        assert expected_s - 1e-6 <= min(apart) and max(apart) <= max(expected_s, 10 * (sending_s + 0.5)) + 3 * step_s
        clock.now += 0.3
        assert moments.is_due_at_end(**QUIET)
        moments.end_turn(clock.now)
        assert not moments.is_due_at_end(**QUIET)
