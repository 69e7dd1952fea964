"""What other jobs of the application hold, for as long as a fit has to wait for it.

Slots are counted whether they are busy or not. A fit whose slots are held by another
job waits in Spark's queue, and Spark does not say so: this module does.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elephant.cluster.sessions import jvm_context

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REPEAT_S = 30.0
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage that runs tasks now.

    Args:
        number: Spark's id of it.
        name: What Spark calls it: the action, and the line of the driver's program.
        tasks: Its tasks that run.
        job: The job that it belongs to; None when Spark does not tell.
        own: Whether it belongs to the fit that asks.
    """

    number: int
    name: str
    tasks: int
    job: int | None = None
    own: bool = False


def waiting_line(stages: Sequence[Stage], *, needed: int, slots: int) -> str | None:
    """Returns what a fit waits for; None where it need not wait for others, or has what it needs.

    Args:
        stages: Those that run tasks.
        needed: Slots that the fit needs at the same time.
        slots: Slots of the cluster, whether they are busy or not.

    >>> busy = Stage(number=4, name="count at report.py:7", tasks=2, job=3)
    >>> waiting_line([busy], needed=3, slots=4)
    'waiting for 3 task slots at the same time: 2 of 4 are free, job 3 holds 2 (stage 4, count at report.py:7)'
    >>> waiting_line([busy], needed=2, slots=4) is None
    True
    """
    others = [stage for stage in stages if not stage.own and stage.tasks]
    held = sum(stage.tasks for stage in others)
    running = sum(stage.tasks for stage in stages if stage.own)
    if not others or running >= needed or slots - held >= needed:
        return None
    listed = [_described(stage) for stage in sorted(others, key=lambda stage: -stage.tasks)]
    more = f", and {len(listed) - _NAMED} more stages" if len(listed) > _NAMED else ""
    free = max(slots - held - running, 0)
    return (
        f"waiting for {needed} task slots at the same time: {free} of {slots} are free, "
        f"{', '.join(listed[:_NAMED])}{more}"
    )


def _described(stage: Stage) -> str:
    holder = f"stage {stage.number}" if stage.job is None else f"job {stage.job}"
    place = f"stage {stage.number}, {stage.name}" if stage.job is not None else stage.name
    return f"{holder} holds {stage.tasks} ({place})"


def active_stages(session: SparkSession, tag: str = "") -> list[Stage]:
    """Returns the application's stages that run tasks now; none on Spark Connect, which does not tell.

    Args:
        session: The Spark session.
        tag: Marks the jobs of the fit that asks; empty when it has none yet.
    """
    context = jvm_context(session)
    if context is None:
        return []
    tracker = context._jsc.sc().statusTracker()
    own = set(tracker.getJobIdsForTag(tag)) if tag else set()
    jobs = {stage: job for job in tracker.getActiveJobIds() for stage in _stages_of(tracker, job)}
    stages = []
    for number in tracker.getActiveStageIds():
        info = tracker.getStageInfo(number)
        if info.isDefined() and info.get().numActiveTasks():
            about, job = info.get(), jobs.get(number)
            stages.append(
                Stage(number=number, name=about.name(), tasks=about.numActiveTasks(), job=job, own=job in own)
            )
    return stages


def _stages_of(tracker: Any, job: int) -> list[int]:
    info = tracker.getJobInfo(job)
    return list(info.get().stageIds()) if info.isDefined() else []


@contextlib.contextmanager
def says_what_it_waits_for(
    session: SparkSession,
    *,
    needed: int,
    slots: int | None,
    note: Callable[[str], None],
    patience_s: float = 0.0,
    repeat_s: float = REPEAT_S,
) -> Iterator[None]:
    """Says at once, and again from time to time, what holds the slots that the jobs of this block wait for.

    Args:
        session: The Spark session.
        needed: Slots that the jobs of the block need at the same time.
        slots: Slots of the cluster; None when unknown, and then nothing is said.
        note: Told what the wait is for.
        patience_s: Time before the first line; zero says it at once.
        repeat_s: Time between two lines.
    """
    context = jvm_context(session)
    if context is None or slots is None:
        yield
        return
    tag, done = f"elephant-waiting-{uuid.uuid4().hex}", threading.Event()

    def say() -> None:
        if patience_s and done.wait(patience_s):
            return
        while True:
            # The last one of a session that is being stopped finds nobody to ask.
            with contextlib.suppress(Exception):
                line = waiting_line(active_stages(session, tag), needed=needed, slots=slots)
                if line is not None and not done.is_set():
                    note(line)
            if done.wait(repeat_s):
                return

    thread = threading.Thread(target=say, name="elephant-waiting", daemon=True)
    # Jobs that this thread starts, or a thread that inherits from it, are the fit's own.
    context.addJobTag(tag)
    thread.start()
    try:
        yield
    finally:
        done.set()
        # What the block raised tells more than a JVM that is gone.
        with contextlib.suppress(Exception):
            context.removeJobTag(tag)
        thread.join(timeout=repeat_s)
