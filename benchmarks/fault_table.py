"""The promise for each fault in each mode, at each moment of a fit: how it ends, or why there is no such case.

Pure: `faults.py` carries the cases out, and a test holds them against the table of docs/failures.md.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from exact_fits import BATCH, ROWS

# Of every case's fit, and steps of each rank: in an epoch, and in a run without epochs.
RANKS, EPOCHS, EXECUTORS = 2, 4, 3
STEPS = ROWS // RANKS // BATCH
RUN_STEPS = 4 * STEPS


class Action(enum.Enum):
    """The signal that a process gets."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    CRASH = "SIGSEGV"


class Part(enum.Enum):
    """A kind of process of a fit; with its rank, where it has one."""

    TRAINING = "training process"
    PYTHON_WORKER = "Python worker"
    EXECUTOR = "executor's JVM"
    FORK_SERVER = "fork server"
    SERVER = "parameter server"
    DRIVER = "driver"


class Fault(enum.Enum):
    """An event that a fit did not ask for."""

    KILL_TRAINING = "kill-training"
    STOP_TRAINING = "stop-training"
    CRASH_TRAINING = "crash-training"
    KILL_PYTHON_WORKER = "kill-python-worker"
    STOP_PYTHON_WORKER = "stop-python-worker"
    CRASH_PYTHON_WORKER = "crash-python-worker"
    KILL_EXECUTOR = "kill-executor"
    STOP_EXECUTOR = "stop-executor"
    CRASH_EXECUTOR = "crash-executor"
    KILL_FORK_SERVER = "kill-fork-server"
    STOP_FORK_SERVER = "stop-fork-server"
    CRASH_FORK_SERVER = "crash-fork-server"
    KILL_SERVER = "kill-server"
    STOP_SERVER = "stop-server"
    CRASH_SERVER = "crash-server"
    KILL_DRIVER = "kill-driver"
    STOP_DRIVER = "stop-driver"
    CRASH_DRIVER = "crash-driver"
    CUT_LINK = "cut-link"
    HALF_OPEN_LINK = "half-open-link"
    FULL_DISK = "full-disk"
    MEMORY_LIMIT = "memory-limit"
    CLOCK_JUMP = "clock-jump"

    @property
    def action(self) -> Action | None:
        """The signal, where the fault is one."""
        return Action.__members__.get(self.name.partition("_")[0])

    @property
    def part(self) -> Part | None:
        """The process that gets the signal."""
        return Part.__members__.get(self.name.partition("_")[2]) if self.action else None

    @property
    def place(self) -> Place:
        """The kind of cluster in which it can be had."""
        return _PLACES.get(self, Place.LOCAL)


class Place(enum.Enum):
    """A cluster for cases."""

    LOCAL = "local"
    SHIFTED_CLOCK = "clock"
    SMALL_DISK = "disk"
    NAMESPACES = "namespaces"


_PLACES = {
    Fault.CUT_LINK: Place.NAMESPACES,
    Fault.HALF_OPEN_LINK: Place.NAMESPACES,
    Fault.FULL_DISK: Place.SMALL_DISK,
    Fault.CLOCK_JUMP: Place.SHIFTED_CLOCK,
}
_LINKS = (Fault.CUT_LINK, Fault.HALF_OPEN_LINK)


class Mode(enum.Enum):
    """The kind of run."""

    SYNCHRONOUS = "synchronous"
    RESTARTS = "restarts"
    ASYNCHRONOUS = "asynchronous"
    RUN = "run"


class Moment(enum.Enum):
    """A place in a fit."""

    MEETING = "meeting"
    FIRST_STEP = "first-step"
    MID_EPOCH = "mid-epoch"
    EPOCH_END = "epoch-end"
    FIT_END = "fit-end"


class Outcome(enum.Enum):
    """The end of a fit, and its weights: to the bit those of an undisturbed one, or the exact sum of all batches."""

    FAILS = "error that names the rank"
    ENDS = "all processes end"
    RECOVERS = "loss made up for, exact weights"
    UNHARMED = "nothing lost, exact weights"


@dataclass(frozen=True)
class Case:
    """One fault in one run."""

    fault: Fault
    mode: Mode
    moment: Moment

    def __str__(self) -> str:
        return f"{self.fault.value},{self.mode.value},{self.moment.value}"

    @classmethod
    def from_text(cls, text: str) -> Case:
        """Reads ``fault,mode,moment``."""
        fault, mode, moment = text.split(",")
        return cls(Fault(fault), Mode(mode), Moment(moment))


def every_case() -> Iterator[Case]:
    """Yields the cases that exist."""
    for fault in Fault:
        for mode in Mode:
            for moment in Moment:
                case = Case(fault, mode, moment)
                if why_absent(case) is None:
                    yield case


def why_absent(case: Case) -> str | None:
    """Returns why there is no such case, or None where there is one."""
    fault, mode, moment = case.fault, case.mode, case.moment
    if fault.part is Part.SERVER and mode is not Mode.ASYNCHRONOUS:
        return "has no parameter servers"
    if mode is Mode.RUN:
        if fault is Fault.FULL_DISK:
            return "writes no rows to disks"
        if moment is Moment.MEETING:
            return "reads no rows before its ranks meet"
        if moment is Moment.EPOCH_END:
            return "has no epochs"
    if fault in _LINKS and moment is Moment.MEETING:
        return "Spark's own connections are cut as well, and Spark decides"
    if fault is Fault.MEMORY_LIMIT and moment is not Moment.MID_EPOCH:
        return "a step is what takes memory"
    return None


def promised(case: Case) -> Outcome:
    """Returns how a case has to end."""
    fault, mode, moment = case.fault, case.mode, case.moment
    if fault is Fault.CLOCK_JUMP or fault.part is Part.FORK_SERVER:
        return Outcome.UNHARMED
    if fault is Fault.FULL_DISK:
        # Disks hold the rows, which all have been written before the first step.
        return Outcome.FAILS if moment is Moment.MEETING else Outcome.UNHARMED
    if fault.part is Part.SERVER:
        return Outcome.RECOVERS
    if fault.part is Part.DRIVER and fault.action is not Action.STOP:
        return Outcome.ENDS
    if mode is Mode.RUN:
        return Outcome.FAILS
    if fault.action is Action.STOP and _trains_on(case):
        return Outcome.UNHARMED
    return _promised_after_loss(case)


def _trains_on(case: Case) -> bool:
    """Returns whether nobody misses what is frozen: a rank's Python worker or executor, once it has its rows."""
    if case.fault.part is Part.PYTHON_WORKER and case.mode is not Mode.RESTARTS:
        return case.moment is not Moment.MEETING
    return case.fault.part in (Part.PYTHON_WORKER, Part.EXECUTOR) and case.moment is Moment.FIT_END


def _promised_after_loss(case: Case) -> Outcome:
    """Returns how a fit ends of which a rank is lost, or silent for too long."""
    if case.mode is Mode.ASYNCHRONOUS:
        return Outcome.RECOVERS
    # Where no rank has begun, there is nothing to make up for: the others wait, or the driver starts the job once more.
    if case.moment is Moment.MEETING and (case.mode is Mode.RESTARTS or case.fault.part is Part.EXECUTOR):
        return Outcome.UNHARMED
    return Outcome.RECOVERS if case.mode is Mode.RESTARTS else Outcome.FAILS
