"""What the driver makes of the record of a run that rank 0 hosts, without Spark."""

import pytest
from fake_channel import Ended

from elephant.driver.replay import LoggedEvents, replay_coordinator
from elephant.errors import WorkerFailure
from elephant.monitor.event_log import EventLog
from elephant.monitor.events import RankEpoch, Started
from elephant.monitor.progress import Progress
from elephant.task.task import result_rows

EXECUTOR_LOST = RuntimeError(
    "Stage failed because barrier task ResultTask(8, 1) finished unsuccessfully.\nExecutorLostFailure (executor 2 "
    "exited caused by one of the running tasks) Reason: Command exited with code 137\n\nJVM stacktrace:\nat a.b.C\n"
)


def replayed(job, *, ranks_per_task=1):
    events, progress = LoggedEvents(), Progress(num_workers=2, epochs=1, verbose=0)
    coordinator = replay_coordinator(events, progress, ranks_per_task=ranks_per_task)
    events.follow(job)
    coordinator.until_ended(job)
    return coordinator


def told(*events):
    """Returns the rows of a job whose rank 0 has written events down."""
    log = EventLog()
    for event in events:
        log.show(event)
    return [{"rank": rank, "result": piece} for rank, piece in result_rows(-1, log.to_bytes())]


class Failed(Ended):
    rows = ()


class EndedWell(Ended):
    def __init__(self, rows):
        super().__init__(None)
        self.rows = rows


def test_failure_when_the_record_is_lost_with_an_executor_then_is_that_of_its_rank_and_may_pass():
    coordinator = replayed(Failed(EXECUTOR_LOST), ranks_per_task=2)
    # A worker may have trained: to begin anew is for the user to allow.
    assert coordinator.began
    with pytest.raises(WorkerFailure, match="Command exited with code 137$") as failed:
        coordinator.raise_failure(EXECUTOR_LOST)
    assert (failed.value.rank, failed.value.executor, failed.value.retryable) == (2, "2", True)
    assert "ExecutorLostFailure" in failed.value.summary and "what the ranks had said" in failed.value.summary


def test_run_when_its_record_is_there_then_has_begun_only_if_a_rank_has():
    started = Started(rank=0, host="h", device="CPU", threads=1, training_rows=0, validation_rows=0)
    assert replayed(EndedWell(told(started))).began
    assert not replayed(EndedWell([])).began


def test_run_when_its_record_is_there_then_has_the_times_of_its_ranks_by_epoch():
    numbers = {"seconds": 2.0, "training_s": 1.5, "wait_s": 0.5, "input_s": 0.25, "bytes_sent": 7}
    times = [RankEpoch(rank=rank, epoch=epoch, rows=9, **numbers) for epoch in (0, 1) for rank in (0, 1)]
    # A worker that is run again tells an epoch once more.
    before = RankEpoch(rank=1, epoch=0, rows=4, **numbers)
    assert replayed(EndedWell(told(before, times[2], times[1], times[3], times[0]))).record.rank_epochs == times
