"""What ends an asynchronous fit, and what is Spark's to repair."""

from dataclasses import replace

import pytest
from fake_channel import Ended, Told, failed
from tables import every_case

from elephant.driver.coordinator import Coordinator
from elephant.driver.coordinator_policy import AsynchronousPolicy, require_all_steps
from elephant.errors import (
    ENDED,
    FROZEN,
    ConfigurationError,
    DataError,
    JobCancelledError,
    PeerLostError,
    RowsMovedError,
    ServerFailedError,
    TrainingError,
    WorkerFailure,
)
from elephant.monitor.events import (
    EpochEnded,
    EpochPart,
    Finished,
    RankGone,
    RankSilent,
    Started,
    StepEnded,
    StopRequested,
    TaskSilent,
)
from elephant.monitor.progress import Progress

GAVE_UP = RuntimeError("preamble\nfinished unsuccessfully.\nTask 1 failed 4 times\n\tat org.apache.spark.X")


class Running:
    """A Spark job that goes on whatever is said."""

    running = True
    error = None


class Servers:
    """Servers that have something to say, once, or have failed."""

    def __init__(self, notes=(), error=None, count=1):
        self.notes, self.error, self.addresses = list(notes), error, [("h", 1)] * count

    def check(self):
        if self.error is not None:
            raise self.error
        notes, self.notes = self.notes, []
        return notes


class Epochs:
    """Takes every part for a whole epoch."""

    def __init__(self):
        self.stopped = self.reminded = self.looks = 0
        self.noted = []

    def add(self, part):
        return [EpochEnded(rank=0, epoch=part.epoch, logs=part.logs)]

    def stop(self):
        self.stopped += 1

    def remind(self):
        self.reminded += 1

    def note(self, event):
        self.noted.append(type(event))

    def keep_up(self, *, is_wanted=False):
        self.looks += 1
        raise PeerLostError("a server is about to come back")


def part(rank, epoch, loss):
    return EpochPart(rank=rank, epoch=epoch, rows=4, val_rows=0, steps=1, wait_s=0.0, logs={"loss": loss})


def training(rank, rows=4):
    return Started(rank=rank, host=f"h{rank}", device="CPU", threads=1, training_rows=rows, validation_rows=0)


def coordinator(*events, servers=None, epochs=None, verbose=0, overtaken=None, asks=True, patience_s=None):
    def end_attempt(attempt):
        if overtaken is not None:
            overtaken.append(attempt)
        return asks

    progress = Progress(num_workers=2, epochs=2, verbose=verbose)
    told = Coordinator(
        Told(*events),
        progress,
        AsynchronousPolicy(
            progress,
            servers=servers or Servers(),
            epochs=epochs or Epochs(),
            num_ranks=2,
            end_attempt=end_attempt,
            patience_s=patience_s,
        ),
    )
    return told


def error_of(told, job_error):
    with pytest.raises(Exception) as failure:
        told.raise_failure(job_error)
    return failure.value


@pytest.mark.parametrize("kind", [ENDED, FROZEN, "elephant.PeerLostError", "elephant.DeadlineExceededError"])
def test_fit_when_a_worker_is_lost_and_its_next_attempt_ends_then_is_well(kind, capsys):
    told = coordinator(
        training(0), training(1), RankGone(rank=1), failed(1, kind, "it was lost: why. More."), training(1),
        part(0, 0, 1.5), part(1, 1, 0.5), verbose=2,
    )  # fmt: skip
    told.until_ended(Ended(None))
    told.raise_failure(None)
    assert told.history() == {"loss": [1.5, 0.5]}
    assert told.policy.retries == 1
    shown = capsys.readouterr().out
    assert "rank 1 on h1 was lost: it was lost: why. Spark runs it again" in shown and "rank 1 goes on, on h1" in shown


def test_fit_when_the_next_attempt_of_a_worker_has_other_rows_then_warns():
    told = coordinator(training(0), failed(0, ENDED), training(0), failed(0, ENDED), training(0, rows=5))
    with pytest.warns(UserWarning, match=r"rank 0: expected the 4 .* Received: 5 and 0\..*checkpoint") as warned:
        told.until_ended(Ended(None))
    assert len(warned) == 1


def test_fit_when_an_executor_is_lost_with_its_worker_then_the_next_attempt_counts(monkeypatch):
    monkeypatch.setattr("elephant.driver.coordinator._CAUSE_GRACE_S", 0.0)
    told = coordinator(training(0), training(1), RankGone(rank=1), training(1), failed(0, ENDED), training(0))
    told.until_ended(Ended(None))
    told.raise_failure(None)
    assert told.policy.retries == 2


def test_fit_when_a_worker_is_lost_before_it_begins_then_counts_as_well():
    told = coordinator(failed(1, ENDED), training(1))
    told.until_ended(Ended(None))
    assert told.policy.retries == 1


def test_fit_when_an_attempt_is_overtaken_then_it_is_ended_and_no_failure():
    overtaken = []
    superseded = replace(failed(1, "elephant.SupersededError"), attempt=17)
    told = coordinator(
        training(0), training(1), training(1), superseded, part(0, 0, 1.5), part(1, 0, 1.5), overtaken=overtaken
    )
    told.until_ended(Ended(None))
    told.raise_failure(None)
    assert overtaken == [17]


def test_fit_when_spark_gives_a_worker_up_then_its_last_loss_is_the_error():
    losses = [failed(rank, ENDED, f"its process was killed at {number}.") for number, rank in enumerate((1, 0, 1))]
    told = coordinator(training(0), training(1), *losses)
    told.until_ended(Ended(GAVE_UP))
    error = error_of(told, GAVE_UP)
    assert (type(error), error.rank, error.host) == (WorkerFailure, 1, "h1")
    assert "its process was killed at 2." in error.summary and "spark.task.maxFailures" in error.summary


def test_fit_when_an_executor_vanishes_for_good_then_says_whose_it_was():
    told = coordinator(training(0), training(1), RankGone(rank=1))
    told.until_ended(Ended(GAVE_UP))
    error = error_of(told, GAVE_UP)
    assert (error.rank, error.host) == (1, "h1") and "Task 1 failed 4 times" in error.summary


@every_case(
    ("kind", "expected"),
    [
        ("ValueError", WorkerFailure),
        ("elephant.ConfigurationError", ConfigurationError),
        ("elephant.DataError", DataError),
        ("elephant.ServerFailedError", ServerFailedError),
        ("elephant.RowsMovedError", RowsMovedError),
        ("ConnectionResetError", WorkerFailure),
    ],
)
def test_fit_when_a_worker_fails_by_itself_then_ends_while_the_job_runs(kind, expected):
    told = coordinator(training(0), failed(0, kind))
    told.until_ended(Running())
    assert type(error_of(told, None)) is expected


def test_fit_when_an_attempt_was_superseded_or_silent_then_goes_on(capsys):
    told = coordinator(
        training(0), failed(0, "elephant.SupersededError"), RankSilent(rank=1, silent_s=4.0), part(0, 0, 1.0), verbose=2
    )
    told.until_ended(Ended(None))
    told.raise_failure(None)
    assert told.policy.retries == 0
    assert "nothing was heard from rank 1 for 4 s" in capsys.readouterr().out


@pytest.mark.parametrize("job", [Running(), Ended(GAVE_UP)], ids=["frozen", "lost"])
def test_fit_when_all_workers_are_done_then_tasks_that_freeze_or_are_lost_take_nothing(job, monkeypatch):
    monkeypatch.setattr("elephant.driver.coordinator._END_GRACE_S", 0.0)
    # The second one begins when the first has ended.
    told = coordinator(
        training(0), part(0, 0, 1.5), Finished(rank=0), training(1), part(1, 1, 0.5), Finished(rank=1)
    )  # fmt: skip
    told.until_ended(job)
    told.raise_failure(job.error)
    assert told.history() == {"loss": [1.5, 0.5]}


def silent_task(attempt):
    return TaskSilent(rank=1, silent_s=4.0, host="h1", executor="e1", attempt=attempt)


def test_fit_when_a_task_falls_silent_before_its_worker_begins_then_it_is_run_again_once(capsys):
    ended = []
    told = coordinator(training(0), silent_task(7), training(1), overtaken=ended, verbose=2)
    told.until_ended(Ended(None))
    told.raise_failure(None)
    assert ended == [7] and told.policy.retries == 1
    assert "rank 1 on h1 was lost: nothing was heard from its Spark task for 4 s. Spark" in capsys.readouterr().out
    told = coordinator(training(0), silent_task(7), silent_task(9), overtaken=ended)
    told.until_ended(Running())
    error = error_of(told, None)
    assert ended == [7, 7] and (error.rank, error.executor) == (1, "e1") and "Python worker is frozen" in error.summary
    told = coordinator(training(0), silent_task(7), asks=False)
    told.until_ended(Running())
    assert "Python worker is frozen" in error_of(told, None).summary


def test_fit_when_servers_are_lost_for_good_then_ends_at_once():
    told = coordinator(servers=Servers(error=ServerFailedError("gone")))
    with pytest.raises(TrainingError, match="gone"):
        told.until_ended(Running())


def test_fit_when_servers_or_workers_have_something_to_say_then_it_is_passed_on(capsys):
    epochs = Epochs()
    told = coordinator(training(0), StopRequested(rank=0), servers=Servers(["it came back"]), epochs=epochs, verbose=2)
    told.until_ended(Ended(None))
    assert (epochs.stopped, epochs.reminded) == (1, 1)
    assert "it came back" in capsys.readouterr().out


def test_fit_when_workers_train_then_checkpoints_within_epochs_are_seen_to_and_one_that_is_missed_is_no_error():
    epochs = Epochs()
    step = StepEnded(rank=0, epoch=0, step=1, steps=2, logs={})
    told = coordinator(training(0), step, part(0, 0, 1.0), epochs=epochs)
    told.until_ended(Ended(None))
    assert epochs.noted == [Started, StepEnded] and epochs.looks > 3


def test_fit_when_no_worker_had_training_rows_then_says_so():
    told = coordinator(training(0, rows=0), training(1, rows=0))
    told.until_ended(Ended(None))
    with pytest.raises(DataError, match="all marked for validation"):
        told.history()


def test_steps_when_a_server_that_came_back_lacks_some_then_are_an_error():
    known = coordinator(training(0, rows=10), training(1, rows=0), training(2, rows=7))
    known.until_ended(Ended(None))
    require_all_steps(known.record, {"0": 6, "2": 4}, epochs=2, batch_size=4)
    with pytest.raises(TrainingError, match=r"expected all 4 steps of rank 2 in the model. Received: 3"):
        require_all_steps(known.record, {"0": 6, "2": 3}, epochs=2, batch_size=4)
    with pytest.raises(TrainingError, match=r"all 6 steps of rank 0 in the model. Received: 0"):
        require_all_steps(known.record, {}, epochs=2, batch_size=4)
    # Epochs that go on in the rows where the last one ended; a worker without rows takes no step.
    require_all_steps(known.record, {"0": 10, "2": 10}, epochs=2, batch_size=4, steps_per_epoch=5)
    with pytest.raises(TrainingError, match=r"expected all 10 steps of rank 2"):
        require_all_steps(known.record, {"0": 10, "2": 4}, epochs=2, batch_size=4, steps_per_epoch=5)


def test_fit_when_somebody_cancels_its_job_then_says_that_and_not_which_worker_was_lost():
    said = RuntimeError("[SPARK_JOB_CANCELLED] Job 3 cancelled part of cancelled job group mine")
    told = coordinator(training(0), training(1), RankGone(rank=0), failed(0, ENDED), RankGone(rank=1))
    told.until_ended(Ended(said))
    assert type(error_of(told, said)) is JobCancelledError


def test_rounds_when_a_lost_worker_does_not_come_back_then_the_fit_ends_and_may_be_started_again():
    told = coordinator(training(0), training(1), RankGone(rank=1), patience_s=0.0)
    with pytest.raises(TrainingError, match="expected rank 1, which was lost, to be started again within 0 s") as found:
        told.until_ended(Running())
    assert found.value.retryable
    back = coordinator(training(0), RankGone(rank=0), training(0), Finished(rank=0), RankGone(rank=0), patience_s=60.0)
    back.until_ended(Ended(None))
    back.raise_failure(None)


def test_rounds_when_one_of_several_servers_comes_back_then_the_fit_ends_and_may_be_started_again():
    alone = coordinator(servers=Servers(["it is back"]), patience_s=60.0)
    alone.until_ended(Ended(None))
    several = coordinator(servers=Servers(["it is back"], count=2), patience_s=60.0)
    with pytest.raises(ServerFailedError, match="to be in the same round. Received: one of 2 that was lost") as found:
        several.until_ended(Running())
    assert found.value.retryable
