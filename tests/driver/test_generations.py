"""What ranks that lost one of them do: begin again from a state, or end the fit; without ranks."""

import time
from types import SimpleNamespace

import pytest

from elephant.checkpoint.manager import CheckpointManager
from elephant.checkpoint.state import FitState
from elephant.config import FitConfig
from elephant.driver.recovery import generations
from elephant.driver.recovery.generations import Generations
from elephant.driver.recovery.restarts import Recovery
from elephant.errors import ConfigurationError, TrainingError, WorkerFailure
from elephant.monitor.events import RankFailure, Started, StateNeeded, StepEnded, TaskSilent
from elephant.monitor.meetings import Meetings
from elephant.monitor.record import FitRecord
from elephant.storage.folder import folder_at

LOST = WorkerFailure("its process was killed", rank=1, host="h")


class Recovering:
    def __init__(self, state=None, allowed=1):
        self.state, self.newest, self.allowed, self.errors = None, state, allowed, []

    def goes_on_after(self, error):
        self.errors.append(error)
        return error.retryable and len(self.errors) <= self.allowed

    def find_state(self):
        self.state = self.newest
        return self.state


class Channel:
    def __init__(self, is_over=True):
        self.meetings, self.sent = Meetings(are_repeated=True, is_over=is_over), []

    def send_state(self, state):
        self.sent.append(state)


def lost(retryable=True):
    error = WorkerFailure("its process was killed", rank=1, host="h")
    error.retryable = retryable
    return error


def generations_of(channel, recovering, *, turns=None, ended=None, slots_s=30.0):
    def end_attempt(attempt):
        ended.append(attempt)
        return attempt != 13

    return Generations(channel, recovering, turns, ranks=[0, 1], slots_s=slots_s, end_attempt=end_attempt)


def started(first_step):
    return Started(rank=0, host="h", device="CPU", threads=1, training_rows=8, validation_rows=0, first_step=first_step)


def test_generation_when_a_rank_was_lost_then_gets_the_newest_state_once_it_asks_and_the_cost_is_told():
    state = FitState(epochs=2, step=3)
    channel, recovering, begun = Channel(), Recovering(state), []
    turns = SimpleNamespace(begin_again=begun.append)
    made, record = generations_of(channel, recovering, turns=turns), FitRecord()
    record.add(RankFailure(rank=1, kind="elephant.ProcessEnded", message="killed", step=29))
    assert made.begin_after(lost(), record)
    assert (channel.meetings.generation, channel.meetings.is_over, channel.meetings.goes_on) == (1, False, True)
    assert begun == [state] and not channel.sent
    for event in (StateNeeded(rank=0), started(24), StepEnded(rank=0, epoch=2, step=4, steps=10, logs={})):
        made.add(event, record)
    assert channel.sent == [state]
    (recovery,) = made.recoveries
    assert recovery["rank"] == 1 and recovery["steps_again"] == 5
    phases = [recovery[phase] for phase in ("told_s", "processes_s", "state_s", "model_s", "step_s")]
    assert min(phases) >= 0 and recovery["resumed_at"] >= recovery["at"]


def test_generation_when_there_is_no_state_yet_then_begins_as_the_fit_has():
    channel = Channel()
    assert generations_of(channel, Recovering()).begin_after(lost(), FitRecord())
    assert channel.meetings.generation == 1 and not channel.meetings.goes_on


@pytest.mark.parametrize(
    ("error", "allowed", "is_over"),
    [
        (lost(retryable=False), 9, True),  # the user's code
        (lost(), 0, True),  # too often
        (ConfigurationError("code is missing"), 9, True),
        (lost(), 9, False),  # nobody had begun, and Spark's own attempts have been of no use
    ],
)
def test_fit_when_a_loss_is_not_to_be_made_up_for_then_no_meeting_is_called(error, allowed, is_over):
    channel = Channel(is_over)
    assert not generations_of(channel, Recovering(allowed=allowed)).begin_after(error, FitRecord())
    assert channel.meetings.generation == 0


@pytest.mark.parametrize("is_over", [True, False])
def test_task_when_it_is_frozen_then_its_attempt_is_ended_and_without_a_way_to_do_that_the_fit(is_over):
    for attempt, goes_on in ((12, True), (13, False)):
        channel, ended, record = Channel(is_over), [], FitRecord()
        record.add(TaskSilent(rank=1, host="h", executor="2", attempt=attempt, silent_s=60.0))
        assert generations_of(channel, Recovering(), ended=ended).begin_after(lost(), record) == goes_on
        # Where ranks had not met, the next attempt comes to the meeting that there is.
        assert ended == [attempt] and channel.meetings.generation == int(goes_on and is_over)


def test_fit_when_a_task_is_missing_for_too_long_then_ends_with_an_error_that_may_be_tried_again(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(generations.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(generations.random, "uniform", lambda low, high: low)
    channel = Channel(is_over=False)
    made = generations_of(channel, Recovering(), slots_s=30.0)
    now[0] += 1000.0
    # Tasks that are queued behind other jobs: Spark, and the look at the cluster before, say what there is to say.
    made.check()
    channel.meetings.enter(0, SimpleNamespace())
    now[0] += 29.0
    made.check()
    now[0] += 2.0
    with pytest.raises(
        TrainingError, match="all 2 workers.*nothing of 1 of them for 31 s.*rank 1's.*slots_s"
    ) as caught:
        made.check()
    # As a whole it waits for slots, as often as need be.
    assert caught.value.retryable and caught.value.is_counted
    channel.meetings.enter(1, SimpleNamespace())
    now[0] += 1000.0
    made.check()
    assert time.monotonic() == now[0]


def test_fit_when_resumed_from_a_folder_without_checkpoints_then_says_that_it_begins(tmp_path):
    # The path may have been mistyped.
    notes, path = [], str(tmp_path / "typo")
    progress = SimpleNamespace(note=notes.append)
    for resume in (False, True):
        config = FitConfig(checkpoint_path=path, resume=resume)
        assert Recovery(CheckpointManager(folder_at(path)), config, progress).latest() is None
    assert notes == [f"no checkpoint in {path}: the fit begins with epoch 1"]
