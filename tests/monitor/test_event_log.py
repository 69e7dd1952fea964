"""What a rank that hosts a run writes down, as the driver reads it."""

import numpy as np
import pytest

from elephant.errors import ProtocolError
from elephant.monitor.event_log import EventLog
from elephant.monitor.events import (
    EpochEnded,
    Finished,
    Printed,
    RankFailure,
    RankGone,
    RankSilent,
    RunNote,
    ServerCounts,
    Started,
    StateSaved,
    StepEnded,
    TaskSilent,
    TrainingFinished,
    from_message,
    packed,
    to_message,
    unpacked,
)

STARTED = Started(rank=1, host="h", device="CPU", threads=1, training_rows=3, validation_rows=0)


def test_unpacked_when_events_of_all_kinds_were_packed_then_gives_them_back():
    arrays = (np.arange(6, dtype=np.float32).reshape(2, 3), np.float64(2.5) * np.ones(()))
    events = [
        STARTED,
        RankFailure(rank=0, host="h", kind="ValueError", message="x", traceback="T", log_tail="L", step=4),
        RankSilent(rank=2, silent_s=3.0),
        TaskSilent(rank=2, host="h", executor="e", attempt=1, silent_s=3.0),
        RankGone(rank=2),
        RunNote(rank=0, text="said"),
        ServerCounts(rank=0, statistics={"updates": 3}),
        TrainingFinished(rank=0, rows={"shape": [2]}, arrays=arrays),
    ]
    read = unpacked(packed(events))
    assert read == events
    for value, expected in zip(read[-1].arrays, arrays, strict=True):
        np.testing.assert_array_equal(value, expected)
    assert unpacked(b"") == []


def test_unpacked_when_the_bytes_are_no_record_then_says_so():
    with pytest.raises(ProtocolError, match="Expected a frame"):
        unpacked(b"x" * 100)


def test_recording_when_steps_and_states_come_then_keeps_the_last_ones():
    recording = EventLog()
    for step in range(1, 5):
        recording.show(StepEnded(rank=0, epoch=0, step=step, steps=4, logs={}))
    for epochs in (1, 2):
        recording.show(StateSaved(rank=0, epochs=epochs, history={}, facts={}, names=[]))
    for number in range(1000):
        recording.show(Printed(rank=0, host="h", lines=[str(number)]))
    events = unpacked(recording.to_bytes())
    assert [event.step for event in events if isinstance(event, StepEnded)] == [4]
    assert [event.epochs for event in events if isinstance(event, StateSaved)] == [2]
    assert len([event for event in events if isinstance(event, Printed)]) == 500


def test_recording_when_ranks_end_then_knows_them_and_the_seconds_of_epochs():
    recording = EventLog()
    recording.show(STARTED)
    recording.show(EpochEnded(rank=0, epoch=0, logs={"loss": 1.0}))
    recording.show(Finished(rank=0))
    recording.show(RankGone(rank=1))
    assert recording.record.ended == {0, 1}
    (epoch,) = [event for event in unpacked(recording.to_bytes()) if isinstance(event, EpochEnded)]
    assert epoch.logs == {"loss": 1.0} and epoch.seconds >= 0


def test_from_message_when_a_rank_sends_what_only_records_hold_then_is_refused():
    message = to_message(RunNote(rank=0, text="said"))
    assert from_message(message, recorded=True) == RunNote(rank=0, text="said")
    with pytest.raises(ProtocolError, match="expected one of the events"):
        from_message(message)
