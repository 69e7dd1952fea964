"""When the driver starts a barrier job a second time, without Spark."""

from types import SimpleNamespace

import pytest

from elephant.cluster.gpu_plan import ResourcePlan
from elephant.config import Timeouts
from elephant.driver import launch

TOO_FEW = RuntimeError("BarrierJobSlotsNumberCheckFailed: [SPARK-24819]: more slots than the total number")


@pytest.fixture
def run(monkeypatch):
    """Runs a barrier job of two tasks; returns what came of it and the notes.

    Args:
        errors: What each attempt ends with, in order.
        slots: What the cluster has after waiting.
        began: Whether a rank had begun.
    """

    def run_job(*errors, slots, began=False):
        attempts, notes = iter(errors), []
        monkeypatch.setattr(launch, "coordinates_on_executors", lambda session: False)
        monkeypatch.setattr(
            launch,
            "coordinate_here",
            lambda *_: (SimpleNamespace(began=began), SimpleNamespace(error=next(attempts))),
        )
        monkeypatch.setattr(launch, "awaited_slots", lambda session, wanted, *_: slots)
        spec = SimpleNamespace(plan=ResourcePlan(devices="none", slots_needed=2), timeouts=Timeouts())
        job = launch._run(SimpleNamespace(session=None), spec, SimpleNamespace(note=notes.append))[1]
        return job.error, list(attempts), notes

    return run_job


def test_job_when_an_executor_was_lost_after_the_slots_were_counted_then_starts_again_once_another_has_come(run):
    error, left, notes = run(TOO_FEW, None, slots=2)
    assert (error, left) == (None, []) and "starting once more" in notes[0]


@pytest.mark.parametrize("slots", [1, None])
def test_job_when_the_slots_do_not_come_then_keeps_its_error(run, slots):
    assert run(TOO_FEW, None, slots=slots) == (TOO_FEW, [None], [])


def test_job_when_ranks_had_begun_then_is_not_started_again(run):
    assert run(TOO_FEW, None, slots=2, began=True) == (TOO_FEW, [None], [])
