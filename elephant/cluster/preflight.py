"""The pre-flight: what a fit needs of its Spark application, looked at before any data moves.

Every check is a pure function of plain facts (`elephant.cluster.session_checks`, `slots`,
`executor_checks`); here the facts are collected, from the session and from one small job
on the executors, whose answers are kept for the next fit. One error tells all that is
missing, not one thing after another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elephant.cluster.executor_checks import check_executors
from elephant.cluster.executor_facts import Look, driver_facts, known_executors
from elephant.cluster.executors import allocates_dynamically, awaited_slots, running_executors
from elephant.cluster.finding import UNKNOWN, WARNING, Finding, finding, refuse_failures
from elephant.cluster.occupancy import active_stages, says_what_it_waits_for
from elephant.cluster.resources import ResourcePlan, TaskProfile
from elephant.cluster.session_checks import check_disk_encryption, check_dynamic_allocation, check_encryption
from elephant.cluster.settings import session_settings
from elephant.cluster.slots import check_slots, check_some_slot
from elephant.config import FitConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANSWER_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a fit, or a run of a function, needs of its application.

    Args:
        num_workers: Workers.
        name: What the user calls that number.
        synchronous: Whether all of them run at the same time, as a barrier stage.
        servers: Parameter servers on executors.
        backend: The Keras backend to compute with; None leaves it to Keras.
        keras: Whether the executors need Keras.
        rows_bytes: What the rows take, by an estimate; None without one.
        slots_s: How long to wait for executors that are still to come.
        profile: What each worker's task takes; None means what the application's tasks take.
    """

    num_workers: int
    name: str = "numWorkers"
    synchronous: bool = True
    servers: int = 0
    backend: str | None = None
    keras: bool = True
    rows_bytes: int | None = None
    slots_s: float = 30.0
    profile: TaskProfile | None = None

    @classmethod
    def of_fit(cls, config: FitConfig, plan: ResourcePlan, *, backend: str, rows_bytes: int | None = None) -> Needs:
        """Returns what a fit needs.

        Args:
            config: Its options.
            plan: Where its ranks' devices come from.
            backend: The Keras backend of its model.
            rows_bytes: What its rows take, by an estimate; None without one.
        """
        on_executors = not config.is_synchronous and config.asynchronous.server_placement == "executors"
        return cls(
            num_workers=plan.slots_needed,
            profile=plan.profile,
            synchronous=config.is_synchronous,
            servers=config.asynchronous.parameter_servers if on_executors else 0,
            backend=backend,
            rows_bytes=rows_bytes,
            slots_s=config.timeouts.slots_s,
        )

    @property
    def slots(self) -> int:
        """Task slots without which nothing begins."""
        return self.num_workers if self.synchronous else self.servers + 1


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What the pre-flight came to.

    Args:
        findings: What each check found.
        slots: Task slots of the cluster; None where they are not known, or come and go.
    """

    findings: list[Finding]
    slots: int | None


@contextlib.contextmanager
def cleared(session: SparkSession, needs: Needs, note: Callable[[str], None]) -> Iterator[None]:
    """Looks whether a fit can run; the block, which runs it, says what it waits for as long as others hold its slots.

    Args:
        session: The Spark session.
        needs: What the fit needs.
        note: Told of warnings, and of waits.

    Raises:
        ClusterError: Something is missing; it names all that is.
    """
    seen = look_ahead(session, needs, note)
    refuse_failures(seen.findings)
    for found in seen.findings:
        if found.status == WARNING:
            note(str(found))
    with says_what_it_waits_for(session, needed=needs.slots, slots=seen.slots, note=note):
        yield


def look_ahead(session: SparkSession, needs: Needs, note: Callable[[str], None]) -> Preflight:
    """Returns what all checks of a fit found.

    Args:
        session: The Spark session.
        needs: What the fit needs.
        note: Told that the wait for executors has begun.
    """
    settings = session_settings(session)
    findings = [
        check_dynamic_allocation(
            settings, num_workers=needs.num_workers, synchronous=needs.synchronous, servers=needs.servers
        ),
        check_encryption(settings),
        check_disk_encryption(settings),
    ]
    slots = None
    if not allocates_dynamically(session):
        # Nobody waits for executors of a fit that is refused anyway.
        timeout_s = 0.0 if any(found.failed for found in findings) else needs.slots_s
        wanted, profile = needs.num_workers + needs.servers, needs.profile
        slots = awaited_slots(session, wanted, timeout_s, note, profile=profile)
        resource = "" if profile is None else f"{profile.amount} {profile.resource}"
        findings.append(
            check_slots(needs.name, needs.num_workers, slots, settings, resource=resource)
            if needs.synchronous
            else check_some_slot(needs.num_workers, slots, settings, servers=needs.servers)
        )
    return Preflight(findings=findings + _of_executors(session, needs, slots), slots=slots)


def _of_executors(session: SparkSession, needs: Needs, slots: int | None) -> list[Finding]:
    known = known_executors.known(session)
    findings = [] if known is None else _checked(known, needs)
    if known is not None and not any(found.failed for found in findings):
        return findings
    # Not asked yet; or something was wrong, which may be mended meanwhile.
    reason = _why_not_ask(session, slots)
    if reason:
        return findings or [_unasked(reason)]
    return _checked(known_executors.look(session, tasks=needs.num_workers, timeout_s=ANSWER_S), needs)


def _checked(look: Look, needs: Needs) -> list[Finding]:
    return check_executors(look, driver_facts(), backend=needs.backend, keras=needs.keras, rows_bytes=needs.rows_bytes)


def _why_not_ask(session: SparkSession, slots: int | None) -> str:
    """Returns why a small job would not run at once; nothing when it would."""
    if running_executors(session) == []:
        return "no executor that runs yet"
    if slots and sum(stage.tasks for stage in active_stages(session)) >= slots:
        return "executors whose task slots are all busy"
    return ""


def _unasked(reason: str) -> Finding:
    return finding(
        "executors",
        UNKNOWN,
        expected="an executor that can be asked",
        received=reason,
        remedy="Each worker is compared with the driver before it trains.",
    )
