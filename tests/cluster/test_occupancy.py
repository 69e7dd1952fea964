"""What a fit waits for."""

import threading

import pytest
from tables import every_case

from elephant.cluster.checks import preflight
from elephant.cluster.checks.preflight import Stage, waiting_line
from elephant.errors import TrainingError


def stage(number, tasks, *, own=False, job=None):
    return Stage(number=number, name=f"collect at program.py:{number}", tasks=tasks, own=own, job=job)


@every_case(
    ("stages", "needed", "slots", "line"),
    [
        ([], 2, 2, None),
        ([stage(1, 2)], 2, 4, None),
        ([stage(1, 3, job=7)], 2, 4, "1 of 4 are free, job 7 holds 3 (stage 1, collect at program.py:1)"),
        ([stage(1, 4)], 1, 4, "0 of 4 are free, stage 1 holds 4 (collect at program.py:1)"),
        # The fit itself runs already, or is on its way.
        ([stage(1, 2), stage(2, 2, own=True)], 2, 4, None),
        ([stage(2, 2, own=True)], 4, 4, None),
        ([stage(1, 1), stage(2, 3)], 4, 4, "0 of 4 are free, stage 2 holds 3"),
        ([stage(number, 1) for number in range(5)], 5, 5, "and 2 more stages"),
        ([stage(1, 0)], 4, 2, None),
    ],
)
def test_waiting_line_when_others_hold_slots_then_names_them(stages, needed, slots, line):
    said = waiting_line(stages, needed=needed, slots=slots)
    if line is None:
        assert said is None
    else:
        assert said.startswith(f"waiting for {needed} task slots at the same time: ")
        assert line in said


class Context:
    """A context whose JVM goes away while a fit runs."""

    def addJobTag(self, tag):
        self.tag = tag

    def removeJobTag(self, tag):
        raise ConnectionRefusedError("the JVM is gone")


def test_wait_when_the_jvm_is_gone_then_the_fit_s_own_error_comes_through(monkeypatch):
    monkeypatch.setattr(preflight, "jvm_context", lambda session: Context())
    with pytest.raises(TrainingError, match="the Spark job failed"):
        with preflight.reports_waiting(object(), needed=1, slots=1, note=print):
            raise TrainingError("the Spark job failed")
    assert "elephant-waiting" not in {thread.name for thread in threading.enumerate()}
