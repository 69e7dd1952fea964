"""Pre-flight: checks before a fit, and what it waits for while other jobs hold the slots.

Slots are counted whether they are busy or not. A fit whose slots are held by another
job waits in Spark's queue, and Spark does not say so: this module does.

Facts are collected here, from the session and from one small job on the executors, whose answers
are kept for the next fit. One error tells all that is missing, not one thing after another.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from elephant.cluster.checks.executor_checks import check_executors, check_reach
from elephant.cluster.checks.executor_facts import ExecutorReport, driver_facts, known_executors
from elephant.cluster.checks.registry import (
    UNKNOWN,
    WARNING,
    CheckResult,
    Phase,
    check_result,
    refuse_failures,
    run_phase,
)
from elephant.cluster.checks.session_checks import ALLOCATION
from elephant.cluster.executors import allocates_dynamically, awaited_slots, running_executors, slots_of
from elephant.cluster.gpu_plan import NONE, ResourcePlan, ResourceRequest, scheduling_settings
from elephant.cluster.gpu_plan import plan as plan_devices
from elephant.cluster.preload import await_preload
from elephant.cluster.session import cpus_of_task, jvm_context, require_connect, require_running, session_settings
from elephant.cluster.spark_private import java_context
from elephant.config import FitConfig
from elephant.errors import ClusterError, first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REPEAT_S = 30.0
_NAMED, _MOST_LETTERS = 3, 80

# The first job of an application starts Python on every executor, which takes a busy machine long.
ANSWER_S = 60.0
_PROFILE_PATIENCE_S = 5.0
# What a fit waits for meanwhile, in a few words.
LOOKS = "the look at the cluster, which starts Python on the executors"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage that runs tasks now."""

    number: int  # Spark's id of it
    name: str  # what its job is described as; else the action, and the line of the driver's program
    tasks: int  # those that run
    job: int | None = None  # None when Spark does not tell
    own: bool = False  # of the fit that asks


def waiting_line(stages: Sequence[Stage], *, needed: int, slots: int) -> str | None:
    """Returns a line about the slots that a fit waits for; None where it need not wait for others.

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
    """Returns the application's stages that run tasks now, the tag's own among them; none on Spark Connect."""
    context = jvm_context(session)
    if context is None:
        return []
    spark = java_context(context).sc()
    tracker = spark.statusTracker()
    own = set(tracker.getJobIdsForTag(tag)) if tag else set()
    jobs = {stage: job for job in tracker.getActiveJobIds() for stage in _stages_of(tracker, job)}
    stages = []
    for number in tracker.getActiveStageIds():
        info = tracker.getStageInfo(number)
        if info.isDefined() and info.get().numActiveTasks():
            about, job = info.get(), jobs.get(number)
            name = _description_of(spark, job) or about.name()
            stages.append(Stage(number=number, name=name, tasks=about.numActiveTasks(), job=job, own=job in own))
    return stages


def _description_of(spark: Any, job: int | None) -> str:
    """Returns the words that a job was described with; none where it has none, or has just ended."""
    with contextlib.suppress(Exception):
        found = spark.statusStore().job(job).description()
        # Some notebooks describe a job by all of a cell.
        return first_line(str(found.get()))[:_MOST_LETTERS] if found.isDefined() else ""
    return ""


def _stages_of(tracker: Any, job: int) -> list[int]:
    info = tracker.getJobInfo(job)
    return list(info.get().stageIds()) if info.isDefined() else []


@contextlib.contextmanager
def reports_waiting(
    session: SparkSession,
    *,
    needed: int,
    slots: int | None,
    note: Callable[[str], None],
    patience_s: float = 0.0,
    repeat_s: float = REPEAT_S,
) -> Iterator[None]:
    """Says after a patience, and again from time to time, what holds the slots that this block's jobs wait for."""
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


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Needs of a fit, or of a run of a function."""

    num_workers: int
    name: str = "numWorkers"  # what the user calls that number
    synchronous: bool = True  # all workers run at the same time, as a barrier stage
    in_rounds: bool = False  # all workers run at the same time, as tasks of an ordinary stage
    servers: int = 0  # parameter servers on executors
    backend: str | None = None  # None leaves it to Keras
    keras: bool = True
    rows_bytes: int | None = None  # what the rows take, by an estimate
    packages: Sequence[str] = ()  # what callbacks that run on executors need there besides
    slots_s: float = 30.0  # how long to wait for executors that are still to come
    request: ResourceRequest | None = None
    encryption: bool | None = None  # None leaves it to the settings

    @classmethod
    def of_fit(
        cls, config: FitConfig, *, backend: str, rows_bytes: int | None = None, packages: Sequence[str] = ()
    ) -> Requirements:
        """Returns the needs of a fit."""
        on_executors = not config.is_synchronous and config.asynchronous.server_placement == "executors"
        return cls(
            num_workers=config.num_workers,
            synchronous=config.is_synchronous,
            in_rounds=config.trains_in_rounds or config.gossips,
            servers=config.asynchronous.parameter_servers if on_executors else 0,
            backend=backend,
            rows_bytes=rows_bytes,
            packages=packages,
            slots_s=config.timeouts.slot_patience_s,
            request=ResourceRequest.of_fit(config),
            encryption=config.encryption,
        )

    def as_tasks(self) -> Requirements:
        """Returns the needs of the same workers as tasks of an ordinary stage, with dynamic allocation."""
        request = None if self.request is None else replace(self.request, synchronous=False)
        return replace(self, synchronous=False, in_rounds=True, request=request)

    @property
    def slots(self) -> int:
        """Task slots without which nothing begins."""
        return self.servers + (self.num_workers if self.together else 1)

    @property
    def together(self) -> bool:
        """True if all workers run at the same time."""
        return self.synchronous or self.in_rounds


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Results of the pre-flight's checks, the task slots of the cluster as far as they are known, and the devices."""

    check_results: list[CheckResult]
    slots: int | None
    plan: ResourcePlan | None  # None when nothing was asked for, or what was cannot be had


@contextlib.contextmanager
def preflight_checked(
    session: SparkSession, requirements: Requirements, note: Callable[[str], None]
) -> Iterator[ResourcePlan]:
    """Looks whether a fit can run; the block, which runs it, says what it waits for as long as others hold its slots.

    Yields:
        Where the ranks' devices come from.

    Raises:
        ClusterError: The session was stopped, or something is missing; it names all that is.
        ConfigurationError: What is asked for contradicts itself, or a setting is no number.
        UnsupportedError: The session is one of Spark Connect, of a PySpark that is too old for it.
    """
    require_connect(session)
    require_running(session)
    seen = run_checks(session, requirements, note)
    refuse_failures(seen.check_results)
    for found in seen.check_results:
        if found.status == WARNING:
            note(str(found))
    plan = seen.plan or ResourcePlan(devices=NONE, slots_needed=requirements.num_workers)
    for text in plan.notes:
        note(text)
    # What others hold is counted in tasks of theirs, which may take less: only if this one's do not start is it said.
    patience_s = 0.0 if plan.profile is None else _PROFILE_PATIENCE_S
    with reports_waiting(session, needed=requirements.slots, slots=seen.slots, note=note, patience_s=patience_s):
        yield plan


def run_checks(session: SparkSession, requirements: Requirements, note: Callable[[str], None]) -> Preflight:
    """Runs all checks of a fit."""
    seen = check_session(session, session_settings(session), requirements, note)
    return replace(seen, check_results=seen.check_results + _of_executors(session, requirements, seen.slots))


def check_session(
    session: SparkSession, settings: Mapping[str, str], requirements: Requirements, note: Callable[[str], None]
) -> Preflight:
    """Checks the session's settings and its slots."""
    facts = {
        "settings": settings,
        "name": requirements.name,
        "num_workers": requirements.num_workers,
        "synchronous": requirements.synchronous,
        "together": requirements.together,
        "servers": requirements.servers,
        "encryption": requirements.encryption,
        "cryptography": importlib.util.find_spec("cryptography") is not None,
    }
    check_results = run_phase(Phase.SETTINGS, **facts)
    plan, obstacle = None, ""
    # Spark refuses a barrier stage with dynamic allocation, whatever the devices.
    refused = any(found.failed and found.name == ALLOCATION for found in check_results)
    if requirements.request is not None and not refused:
        try:
            request = requirements.request.named_in(session)
            plan = plan_devices(scheduling_settings(session, request.gpu_resource), request)
        except ClusterError as error:
            obstacle = str(error)
    slots, resource, dynamic = None, "", allocates_dynamically(session)
    if not dynamic:
        # Nobody waits for executors of a fit that is refused anyway.
        timeout_s = 0.0 if obstacle or any(found.failed for found in check_results) else requirements.slots_s
        profile = None if plan is None else plan.profile
        slots = awaited_slots(session, requirements.num_workers + requirements.servers, timeout_s, note, profile)
        resource = "" if profile is None else f"{profile.amount} {profile.resource}"
    check_results += run_phase(
        Phase.SLOTS, **facts, plan=plan, obstacle=obstacle, slots=slots, resource=resource, dynamic=dynamic
    )
    return Preflight(check_results=check_results, slots=slots, plan=plan)


def _of_executors(session: SparkSession, requirements: Requirements, slots: int | None) -> list[CheckResult]:
    await_preload()
    known_report = known_executors.known(session)
    check_results = [] if known_report is None else _checked(known_report, requirements)
    if known_report is not None and not any(found.failed for found in check_results):
        return check_results
    # Not asked yet; or something was wrong, which may be mended meanwhile.
    reason = _why_not_ask(session, slots)
    if reason:
        return check_results or [_unasked(reason)]
    # What needs no Keras is a function, which has no rows.
    look = functools.partial(known_executors.look, timeout_s=ANSWER_S, without_rows=not requirements.keras)
    report = look(session, tasks=requirements.num_workers)
    if any(one.unreached for one in report.facts):
        # A machine that is very busy may answer too late once.
        report = look(session, tasks=requirements.num_workers)
    return _checked(report, requirements)


def _checked(report: ExecutorReport, requirements: Requirements) -> list[CheckResult]:
    check_results = check_executors(
        report,
        driver_facts(),
        backend=requirements.backend,
        keras=requirements.keras,
        rows_bytes=requirements.rows_bytes,
        packages=requirements.packages,
    )
    unreached = {one.place: one.unreached for one in report.facts if one.unreached}
    if unreached:
        check_results.append(check_reach(unreached, len(report.facts), report.place, needed=True))
    return check_results


def _why_not_ask(session: SparkSession, slots: int | None) -> str:
    """Returns why a small job would not run at once; nothing when it would."""
    running = running_executors(session)
    if running is None:
        return ""
    if not running:
        return "no executor that runs yet"
    if slots is None:
        slots = slots_of(running, task_cpus=cpus_of_task(session_settings(session)))
    if sum(stage.tasks for stage in active_stages(session)) >= slots:
        return "executors whose task slots are all busy"
    return ""


def _unasked(reason: str) -> CheckResult:
    return check_result(
        "executors",
        UNKNOWN,
        expected="an executor that can be asked",
        received=reason,
        remedy="Each worker is compared with the driver before it trains.",
    )
