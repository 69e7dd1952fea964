"""Which error a run that has failed ends with: the cause, and not what came of it."""

import linecache
from dataclasses import replace

import numpy as np
import pytest
from fake_channel import Ended, Told, failed

from elephant.data.schema import RowSpec, TensorSpec
from elephant.driver.coordinator import Coordinator
from elephant.driver.coordinator_policy import SynchronousPolicy
from elephant.errors import ClusterError, ConfigurationError, JobCancelledError, TrainingError, WorkerFailure
from elephant.monitor.events import (
    CallbacksDone,
    CallbacksDue,
    Finished,
    RankGone,
    RankSilent,
    Started,
    StateArrays,
    StateSaved,
    StepEnded,
    TaskSilent,
    TrainingFinished,
)
from elephant.monitor.progress import Progress

SPARK_SAYS = "preamble\nfinished unsuccessfully.\nExecutorLostFailure: gone\n\tat org.apache.spark.X"


def started(rank):
    return Started(
        rank=rank, host=f"h{rank}", executor=f"e{rank}", device="CPU", threads=1, training_rows=0, validation_rows=0
    )


class Running:
    """A Spark job that goes on whatever is said."""

    running = True
    error = None


class Turning:
    """A Spark job that runs for so many turns of who listens."""

    error = None

    def __init__(self, turns):
        self.turns = turns

    @property
    def running(self):
        self.turns -= 1
        return self.turns >= 0


def echo(rank):
    return failed(rank, "elephant.PeerLostError", f"Rank {rank} lost its neighbor")


def error_after(*events, job_error=None):
    coordinator = Coordinator(Told(*events), Progress(num_workers=2, epochs=0, verbose=0), SynchronousPolicy())
    job_error = job_error or RuntimeError(SPARK_SAYS)
    coordinator.until_ended(Ended(job_error))
    with pytest.raises(Exception) as failure:
        coordinator.raise_failure(job_error)
    assert failure.value.__cause__ in (job_error, None)
    return failure.value


def test_waiting_when_a_run_goes_on_then_is_for_ranks_then_for_their_first_step_then_for_nothing():
    step = StepEnded(rank=0, epoch=0, step=1, steps=4, logs={})
    told = Told(replace(started(0), training_rows=8), replace(started(1), training_rows=8), step)
    progress, heard = Progress(num_workers=2, epochs=1, verbose=0), []
    progress.awaits = heard.append
    Coordinator(told, progress, SynchronousPolicy()).until_ended(Turning(4))
    first = "workers prepare the model, and trace it in their first step"
    assert heard == ["nothing", first, first, ""]


class Turns:
    """Callbacks on the driver, which remember how often their turn has come."""

    turns = 0

    def take_turn(self, due):
        self.turns += 1
        return CallbacksDone(rank=0, stop=False, logs={}, learning_rate=None)

    def with_states(self, state):
        return replace(state, facts={**state.facts, "turns": self.turns}, arrays={**state.arrays, "own": np.ones(2)})


class Kept(list):
    """Takes the states of a fit."""

    def keep(self, state):
        self.append(state)
        return True

    is_wanted = False

    def check(self):
        """Nothing is written."""


def test_state_when_its_arrays_come_later_then_is_kept_whole_with_what_the_driver_knew_when_it_was_told():
    values, shapes = [np.zeros(3), np.arange(4.0), np.ones((2, 2))], [[3], [4], [2, 2]]
    saved = StateSaved(rank=0, epochs=1, step=5, history={}, facts={}, names=["a", "b", "c"], shapes=shapes)
    due = CallbacksDue(
        rank=0, epoch=1, steps=9, logs={}, stopped=False, learning_rate=None, iterations=1, rows={}, row_shapes={}
    )
    # A large one comes in pieces.
    pieces = [values[0], values[1][:3], values[1][3:], values[2].ravel()]
    told = Told(saved, StateArrays(rank=0, arrays=pieces[:2]), due, StateArrays(rank=0, arrays=pieces[2:]))
    kept, turns, shown, confirmed = Kept(), Turns(), [], []
    told.answer, told.confirm_state = lambda done: None, lambda *place: confirmed.append((len(kept), place))
    policy = SynchronousPolicy(turns=turns, first_rank=told)
    progress = Progress(num_workers=2, epochs=0, verbose=0)
    progress.show = shown.append
    Coordinator(told, progress, policy, checkpoint_writer=kept).until_ended(Ended(None))
    (state,) = kept
    assert confirmed == [(1, (1, 5))]
    assert (state.epochs, state.step, state.facts, turns.turns) == (1, 5, {"turns": 0}, 1)
    np.testing.assert_array_equal(state.arrays.pop("own"), np.ones(2))
    assert all(np.array_equal(state.arrays[name], value) for name, value in zip("abc", values, strict=True))
    assert [type(event) for event in shown] == [CallbacksDue, StateSaved] and shown[-1].shapes is None


def test_state_when_it_comes_without_frozen_weights_then_has_those_of_the_state_before_as_long_as_they_are_named():
    def saved(epochs, frozen, **arrays):
        facts = {"frozen": frozen}
        return StateSaved(
            rank=0, epochs=epochs, history={}, facts=facts, names=[*arrays], arrays=tuple(arrays.values())
        )

    base, count, head = np.ones(3), np.zeros(2), np.arange(2.0)
    first = saved(1, ["base", "count"], base=base, count=count, head=head)
    told, kept = Told(first, saved(2, ["base", "count"], head=head + 1), saved(3, ["base"], count=count + 1)), Kept()
    told.confirm_state = lambda *place: None
    progress = Progress(num_workers=2, epochs=0, verbose=0)
    Coordinator(told, progress, SynchronousPolicy(first_rank=told), checkpoint_writer=kept).until_ended(Ended(None))
    assert [sorted(state.arrays) for state in kept] == [["base", "count", "head"]] * 2 + [["base", "count"]]
    assert all(state.arrays["base"] is base for state in kept) and kept[1].arrays["count"] is count
    np.testing.assert_array_equal(kept[1].arrays["head"], [1, 2])
    np.testing.assert_array_equal(kept[2].arrays["count"], [1, 1])


def test_failure_when_peers_speak_first_then_is_that_of_the_rank_that_has_a_cause():
    error = error_after(started(0), started(1), RankGone(rank=0), echo(0), RankGone(rank=1), failed(1, "ValueError"))
    assert (type(error), error.rank, error.host, error.summary) == (WorkerFailure, 1, "h1", "ValueError: said")


def test_failure_when_it_is_about_what_the_user_passed_then_keeps_its_class():
    error = error_after(started(0), failed(0, "elephant.ConfigurationError", "wrong"))
    assert type(error) is ConfigurationError and str(error) == "wrong"


def test_failure_when_it_is_in_a_notebook_s_cell_then_the_driver_adds_the_lines_that_ranks_lack(monkeypatch):
    cell = "<ipython-input-3-0a1b>"
    monkeypatch.setitem(linecache.cache, cell, (9, None, ["def boom():\n", "    raise ValueError(1)\n"], cell))
    known = '  File "callbacks.py", line 7, in step\n    boom()\n'
    trace = f'Traceback:\n{known}  File "{cell}", line 2, in boom\n  File "/gone.py", line 1, in f\nValueError: 1\n'
    error = error_after(started(0), replace(failed(0, "ValueError"), traceback=trace))
    assert error.traceback.splitlines() == [
        "Traceback:",
        *known.splitlines(),
        f'  File "{cell}", line 2, in boom',
        "    raise ValueError(1)",
        '  File "/gone.py", line 1, in f',
        "ValueError: 1",
    ]


def test_failure_when_a_rank_fell_silent_then_says_so():
    error = error_after(started(0), RankSilent(rank=0, silent_s=60.0))
    assert (error.rank, error.host) == (0, "h0") and "nothing was heard from it for 60 s" in error.summary


def test_failure_when_a_task_fell_silent_before_the_ranks_had_met_then_is_that_of_its_python_worker():
    silent = TaskSilent(rank=1, silent_s=60.0, host="h1", executor="4", attempt=7)
    coordinator = Coordinator(Told(silent), Progress(num_workers=2, epochs=0, verbose=0), SynchronousPolicy())
    coordinator.until_ended(Running())
    with pytest.raises(WorkerFailure, match="from its Spark task for 60 s: its Python worker is frozen") as failure:
        coordinator.raise_failure(None)
    assert (failure.value.rank, failure.value.host, failure.value.executor) == (1, "h1", "4")
    assert failure.value.retryable


@pytest.mark.parametrize("events", [(echo(0),), ()], ids=["a peer was left", "nobody spoke"])
def test_failure_when_a_rank_vanished_with_its_task_then_is_that_rank_s(events):
    error = error_after(started(0), started(1), RankGone(rank=1), RankGone(rank=0), *events)
    assert (type(error), error.rank, error.host) == (WorkerFailure, 1, "h1")
    assert error.summary.endswith("were lost without an error report: ExecutorLostFailure: gone")


def test_failure_when_a_rank_vanished_with_a_pod_that_had_too_little_memory_then_says_what_to_raise():
    words = "exited with exit code 137(SIGKILL, possible container OOM).\n\t exit code: 137"
    lost = RuntimeError(SPARK_SAYS.replace("gone", words))
    error = error_after(started(0), started(1), RankGone(rank=1), job_error=lost)
    assert error.rank == 1 and "possible container OOM).\nexit code: 137\nRaise spark.executor.memoryOverhead" in str(
        error
    )


def test_failure_when_only_a_peer_speaks_then_is_that_of_the_peer(monkeypatch):
    monkeypatch.setattr("elephant.driver.coordinator._CAUSE_GRACE_S", 0.0)
    error = error_after(started(0), started(1), echo(1))
    assert (type(error), error.rank) == (WorkerFailure, 1) and "PeerLostError: Rank 1 lost" in error.summary


def test_failure_when_no_rank_had_begun_then_passes_on_what_spark_says(monkeypatch):
    monkeypatch.setattr("elephant.driver.coordinator._CAUSE_GRACE_S", 0.0)
    error = error_after(echo(1))
    assert type(error) is TrainingError and str(error).endswith("no rank said why: ExecutorLostFailure: gone")
    missing = error_after(job_error=RuntimeError("No module named 'elephant'"))
    assert type(missing) is ClusterError and "Install elephant-spark there" in str(missing)


def test_failure_when_a_rank_has_said_why_then_the_job_is_not_waited_for():
    coordinator = Coordinator(
        Told(started(0), started(1), failed(1, "ValueError")),
        Progress(num_workers=2, epochs=0, verbose=0),
        SynchronousPolicy(),
    )
    coordinator.until_ended(Running())
    with pytest.raises(WorkerFailure, match=r"rank 1 on h1 failed: ValueError: said"):
        coordinator.raise_failure(None)


def test_failure_when_nobody_says_why_then_the_job_is_not_waited_for_either(monkeypatch):
    monkeypatch.setattr("elephant.driver.coordinator._CAUSE_GRACE_S", 0.2)
    step = StepEnded(rank=0, epoch=1, step=3, steps=10, logs={})
    coordinator = Coordinator(
        Told(started(0), started(1), step, RankGone(rank=1)),
        Progress(num_workers=2, epochs=0, verbose=0),
        SynchronousPolicy(),
    )
    coordinator.until_ended(Running())
    with pytest.raises(
        WorkerFailure, match=r"rank 1 on h1 \(executor e1\) failed in step 14: its process and its Spark"
    ):
        coordinator.raise_failure(None)


def test_failure_when_spark_names_the_executor_that_was_lost_then_is_that_of_its_rank():
    said = "barrier task ResultTask(8, 0) finished unsuccessfully.\nExecutorLostFailure (executor e1 exited caused by"
    error = error_after(started(0), started(1), RankGone(rank=0), RankGone(rank=1), job_error=RuntimeError(said))
    assert (error.rank, error.host, error.executor) == (1, "h1", "e1")


def test_failure_when_spark_names_the_task_that_was_lost_then_is_that_of_its_rank():
    said = "barrier task ResultTask(8, 1) finished unsuccessfully.\nPython worker exited unexpectedly (crashed)"
    lost = replace(echo(0), step=7)
    error = error_after(started(0), started(1), lost, RankGone(rank=0), RankGone(rank=1), job_error=RuntimeError(said))
    assert (error.rank, error.executor, error.step) == (1, "e1", 7)


def test_failure_when_a_rank_vanishes_before_a_step_has_ended_then_was_in_the_first_one():
    begun = [replace(started(rank), first_step=31) for rank in (0, 1)]
    error = error_after(*begun, RankGone(rank=1), job_error=RuntimeError("Python worker exited unexpectedly (crashed)"))
    assert (error.rank, error.step) == (1, 31)


def test_failure_when_somebody_cancels_the_job_then_is_no_rank_s():
    said = RuntimeError("[SPARK_JOB_CANCELLED] Job 3 cancelled part of cancelled job group mine")
    error = error_after(started(0), started(1), RankGone(rank=0), echo(1), job_error=said)
    assert type(error) is JobCancelledError and str(error).endswith("cancelled job group mine")


def test_failure_when_the_driver_s_jvm_has_ended_then_is_no_rank_s():
    refused = ConnectionRefusedError(111, "Connection refused")
    error = error_after(started(0), started(1), RankGone(rank=0), RankGone(rank=1), job_error=refused)
    assert isinstance(error, ClusterError) and "Received: its end (ConnectionRefusedError" in str(error)


def test_failure_when_executors_do_not_reach_the_driver_then_says_what_to_set():
    """A blocked port is the cluster's: the report of Spark, which alone has the cause, is a page."""
    cause = "connecting to the driver did not end within 120 s. 10.0.0.1:4000 last failed with: timed out"
    said = f"elephant.errors.TrainingError: rank 1 on h1: elephant.DeadlineExceededError: {cause}"
    error = error_after(job_error=RuntimeError(f"Traceback\n  File\n{said}\n at X"))
    assert type(error) is ClusterError and error.topic == "a-port-that-is-blocked"
    assert str(error).startswith(f"expected executors that reach the driver. Received: {cause}. Set spark.driver.host ")


def test_failure_when_a_rank_tells_executor_and_step_then_the_error_has_them():
    error = error_after(started(0), replace(failed(0, "ValueError"), executor="5", step=9, log_tail="last"))
    assert (error.executor, error.step, error.log_tail) == ("5", 9, "last")
    assert "rank 0 on h0 (executor 5) failed in step 9: ValueError: said" in str(error)


CANCELLED = RuntimeError("[SPARK_JOB_CANCELLED] Job 7 cancelled part of cancelled job group nightly")
KILLED = failed(1, "elephant.ProcessEnded", "its process was killed (signal 9): often memory")
EXITED = failed(1, "elephant.ProcessEnded", "its process exited with 3: something called os._exit")


@pytest.mark.parametrize(
    ("events", "job_error", "retryable"),
    [
        ((started(0), KILLED), None, True),
        ((started(0), EXITED), None, True),
        ((started(0), failed(0, "SystemExit")), None, False),
        ((started(0), failed(0, "ValueError")), None, False),
        ((started(0), failed(0, "elephant.DeadlineExceededError", "too late")), None, True),
        ((started(0), RankSilent(rank=0, silent_s=60.0)), None, True),
        ((started(0), started(1), RankGone(rank=1)), None, True),
        ((started(0), RankGone(rank=0)), CANCELLED, False),
        ((), RuntimeError("PythonException: a mistake in a UDF"), False),
        ((), RuntimeError("ExecutorLostFailure (executor 2 exited)"), True),
        # One more was lost while the fit started again.
        ((), RuntimeError("[SPARK-24819]: Barrier execution mode does not allow run a barrier stage that"), True),
    ],
)
def test_failure_when_it_may_not_come_again_then_says_so(events, job_error, retryable, monkeypatch):
    monkeypatch.setattr("elephant.driver.coordinator._CAUSE_GRACE_S", 0.0)
    error = error_after(*events, job_error=job_error)
    assert isinstance(error, TrainingError) and error.retryable is retryable


def done(*ranks):
    rows = RowSpec(0, (TensorSpec((2,), "float32"),)).to_json()
    return [started(0), started(1), TrainingFinished(rank=0, rows=rows), *(Finished(rank=rank) for rank in ranks)]


def following_of(events):
    return Coordinator(Told(*events), Progress(num_workers=2, epochs=0, verbose=0), SynchronousPolicy())


@pytest.mark.parametrize("job", [Running(), Ended(RuntimeError(SPARK_SAYS))], ids=["frozen", "lost"])
def test_fit_when_all_ranks_are_done_then_tasks_that_freeze_or_are_lost_take_nothing(job, monkeypatch):
    monkeypatch.setattr("elephant.driver.coordinator._END_GRACE_S", 0.0)
    coordinator = following_of(done(1, 0))
    coordinator.until_ended(job)
    coordinator.raise_failure(job.error)
    assert coordinator.result().rows.tensors[0].shape == (2,)


def test_fit_when_a_rank_fails_after_the_model_has_come_then_is_that_rank_s_failure(monkeypatch):
    monkeypatch.setattr("elephant.driver.coordinator._CAUSE_GRACE_S", 0.0)
    coordinator = following_of([*done(0), failed(1, "ValueError")])
    coordinator.until_ended(Running())
    with pytest.raises(WorkerFailure, match="ValueError: said"):
        coordinator.raise_failure(None)
    coordinator = following_of([*done(0), RankGone(rank=1)])
    coordinator.until_ended(Ended(RuntimeError(SPARK_SAYS)))
    with pytest.raises(WorkerFailure, match="rank 1 on h1"):
        coordinator.raise_failure(RuntimeError(SPARK_SAYS))


def test_run_when_strangers_come_then_says_so_once_a_minute_and_in_the_end(capsys):
    channel, beats = Told(), iter(range(1, 200))

    class Beating(Ended):
        """A Spark job that goes on for a hundred looks, at each of which another stranger has come."""

        @property
        def running(self):
            channel.turned_away = {"10.0.0.7": next(beats), "10.0.0.9": 1}
            return channel.turned_away["10.0.0.7"] < 100

    coordinator = Coordinator(channel, Progress(num_workers=2, epochs=0, verbose=1), SynchronousPolicy())
    coordinator.until_ended(Beating(None))
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("refused connections: 2, from 10.0.0.7 (1), 10.0.0.9 (1): they did not prove")
    assert last.startswith("refused connections: 102, from 10.0.0.7 (101), 10.0.0.9 (1): ")
    assert coordinator.statistics == {"refused_connections": {"10.0.0.7": 101, "10.0.0.9": 1}}


def test_run_when_its_job_can_never_end_then_is_not_waited_for():
    def refuse():
        raise ClusterError("no executors")

    with pytest.raises(ClusterError, match="no executors"):
        following_of([started(0)]).until_ended(Running(), refuse)


def test_failure_when_spark_reports_a_long_traceback_then_keeps_what_it_is_about(monkeypatch):
    monkeypatch.setattr("elephant.driver.coordinator._CAUSE_GRACE_S", 0.0)
    frames = "".join(f'  File "rows.py", line {number}, in clean\n    call()\n' for number in range(20))
    said = f"PythonException: Traceback\n{frames}ValueError: bad row\n\n\tat org.apache.X\nCaused by: Y\n\tat Z"
    error = error_after(job_error=RuntimeError(f"preamble finished unsuccessfully.{said}"))
    assert "PythonException: Traceback\n..." in str(error) and str(error).endswith("ValueError: bad row")
