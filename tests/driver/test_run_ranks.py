"""When the driver starts the ranks of a barrier job once more, without Spark."""

import contextlib
from types import SimpleNamespace

import pytest

from elephant.cluster.gpu_plan import ResourcePlan
from elephant.config import Timeouts
from elephant.driver import run_ranks
from elephant.driver.run_ranks import RETRIES, RunAttempt

TOO_FEW = RuntimeError("BarrierJobSlotsNumberCheckFailed: [SPARK-24819]: more slots than the total number")
LOST = RuntimeError("ExecutorLostFailure (executor 2 exited caused by one of the running tasks)")
CHAIN = RuntimeError("[SPARK-24820][SPARK-24821]: Barrier execution mode does not allow the following pattern")
OTHER = RuntimeError("Job aborted due to stage failure")


class FakeRows:
    session = None

    def __init__(self, number=None):
        self.number = number

    def repartitioned(self, number):
        return FakeRows(number)


class Ranks:
    """Launcher, channel and coordinator of attempts at a run, each of which ends with the next error."""

    def __init__(self, errors, began):
        self.left, self.began, self.log = list(errors), began, []

    @contextlib.contextmanager
    def attempt_on(self, rows):
        self.log.append(("open", rows.number))
        try:
            yield RunAttempt(self, None, self, self, lambda job: self.log.append("result") or "done")
        finally:
            self.log.append("close")

    def start(self, spec, context):
        error = self.left.pop(0)
        return SimpleNamespace(error=error, cancel=lambda: self.log.append("cancel"))

    def watch(self, timeouts):
        return None

    def until_ended(self, job, watch):
        if job.error is KeyboardInterrupt:
            raise KeyboardInterrupt

    def dismiss(self):
        self.log.append("dismiss")

    def bring_files(self):
        self.log.append("files")

    def raise_failure(self, error):
        if error is not None:
            raise error


@pytest.fixture
def run(monkeypatch):
    """Runs a barrier job of two tasks; returns its error or result, the errors that are left, the notes and the log.

    Args:
        errors: What each attempt ends with, in order.
        slots: What the cluster has after waiting.
        began: Whether a rank had begun.
        retries: Those of the run.
    """

    def run_job(*errors, slots=2, began=False, retries=RETRIES):
        ranks, notes = Ranks(errors, began), []
        monkeypatch.setattr(run_ranks, "awaited_slots", lambda session, wanted, *_: slots)
        spec = SimpleNamespace(plan=ResourcePlan(devices="none", slots_needed=2), timeouts=Timeouts())
        progress = SimpleNamespace(note=notes.append)
        try:
            outcome = run_ranks.run_ranks(FakeRows(), spec, progress, ranks.attempt_on, retries)
        except (RuntimeError, KeyboardInterrupt) as error:
            outcome = error
        return outcome, ranks.left, notes, ranks.log

    return run_job


ONCE = ["cancel", "dismiss", "files"]


def test_job_when_all_goes_well_then_is_started_once_and_all_is_closed_after_its_result(run):
    assert run(None, OTHER) == ("done", [OTHER], [], [("open", None), *ONCE, "result", "close"])


def test_job_when_it_is_interrupted_then_its_ranks_are_ended_all_the_same(run):
    outcome, left, notes, log = run(KeyboardInterrupt, None)
    assert isinstance(outcome, KeyboardInterrupt)
    assert (left, notes, log) == ([None], [], [("open", None), *ONCE, "close"])


def test_job_when_an_executor_was_lost_after_the_slots_were_counted_then_starts_again_once_another_has_come(run):
    outcome, left, notes, log = run(TOO_FEW, None, slots=2)
    assert (outcome, left) == ("done", []) and "starting once more" in notes[0]
    # The first attempt is closed before the second is opened.
    assert log == [("open", None), *ONCE, "close", ("open", None), *ONCE, "result", "close"]


@pytest.mark.parametrize("slots", [1, None])
def test_job_when_the_slots_do_not_come_then_keeps_its_error(run, slots):
    assert run(TOO_FEW, None, slots=slots)[:3] == (TOO_FEW, [None], [])


def test_job_when_ranks_had_begun_then_is_not_started_again(run):
    assert run(TOO_FEW, None, began=True)[:3] == (TOO_FEW, [None], [])
    assert run(LOST, None, began=True)[:3] == (LOST, [None], [])


def test_job_when_spark_refuses_the_rows_partitions_then_is_started_with_rows_dealt_out_anew(run):
    # Where rank 0 keeps the reports, nobody knows after an error whether a rank had begun: here Spark says so.
    outcome, left, notes, log = run(CHAIN, None, began=True)
    assert (outcome, left, notes) == ("done", [], [])
    assert [one for one in log if one[0] == "open"] == [("open", None), ("open", 2)]


def test_job_when_it_ends_in_several_ways_before_ranks_begin_then_each_is_tried_again_once(run):
    outcome, left, notes, _ = run(CHAIN, LOST, TOO_FEW, None)
    assert (outcome, left, len(notes)) == ("done", [], 2)
    assert run(LOST, LOST, None)[:2] == (LOST, [None])


def test_job_when_nothing_is_to_be_tried_again_then_has_its_error(run):
    assert run(OTHER, None)[:3] == (OTHER, [None], [])
    assert run(LOST, None, retries=())[:3] == (LOST, [None], [])
