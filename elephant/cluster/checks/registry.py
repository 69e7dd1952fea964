"""Registry of checks, which the pre-flight of a fit and ``elephant doctor`` share, and their results.

A check is a pure function of plain facts, registered with `check`; its parameters name the facts of its phase that
it takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

from elephant.errors import ClusterError

OK, WARNING, FAILURE, UNKNOWN = "ok", "warning", "failure", "unknown"


class Phase(Enum):
    """Point at which checks run, by the facts that are collected then. Doctor runs all phases, in this order."""

    PACKAGES = auto()
    MACHINE = auto()
    JAVA = auto()
    SETTINGS = auto()  # in the pre-flight too
    SLOTS = auto()  # in the pre-flight too
    APPLICATION = auto()
    ADDRESS = auto()
    EXECUTORS = auto()  # in the pre-flight too
    HOSTS = auto()
    GPUS = auto()
    TRIAL = auto()


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of one check.

    Args:
        name: What was looked at.
        status: ``"ok"``; ``"warning"``: a fit works, or begins, and there is something to know; ``"failure"``: a fit
            would fail; ``"unknown"``: it could not be looked at.
        expected: What a fit needs.
        received: What there is.
        remedy: What to do, as whole sentences; empty where there is nothing to do.
        text: The whole message, where it was made elsewhere; empty makes it of the other parts.
        topic: The section on troubleshooting that an error of it points to; empty is that of `ClusterError`.
    """

    name: str
    status: str
    expected: str
    received: str
    remedy: str = ""
    text: str = ""
    topic: str = ""

    @property
    def failed(self) -> bool:
        """True if a fit would fail because of it."""
        return self.status == FAILURE

    def __str__(self) -> str:
        if self.text:
            return self.text
        remedy = f" {self.remedy}" if self.remedy else ""
        return f"{self.name}: expected {self.expected}. Received: {self.received}.{remedy}"


def check_result(
    name: str,
    status: str | bool,
    *,
    expected: str,
    received: object,
    remedy: str = "",
    otherwise: str = FAILURE,
    text: str = "",
    topic: str = "",
) -> CheckResult:
    """Returns a result, with the status ``otherwise`` for False; its remedy stays only where something is wrong.

    >>> str(check_result("numWorkers=3", False, expected="3 task slots", received=2, remedy="Lower numWorkers to 2."))
    'numWorkers=3: expected 3 task slots. Received: 2. Lower numWorkers to 2.'
    >>> check_result("numWorkers=3", True, expected="3 task slots", received=4, remedy="Lower numWorkers.").remedy
    ''
    """
    if isinstance(status, bool):
        status = OK if status else otherwise
    remedy = "" if status == OK else remedy
    return CheckResult(
        name=name, status=status, expected=expected, received=str(received), remedy=remedy, text=text, topic=topic
    )


Found = CheckResult | list[CheckResult]
Function = TypeVar("Function", bound=Callable[..., Found])


@dataclass(frozen=True)
class Check:
    """A registered check: its function, the facts that it needs, and the condition on facts under which it runs."""

    run: Callable[..., Found]
    needs: tuple[str, ...]
    when: Callable[[Mapping[str, Any]], bool]


CHECKS: dict[Phase, dict[str, Check]] = {phase: {} for phase in Phase}


def check(phase: Phase, *, when: Callable[[Mapping[str, Any]], bool] = bool) -> Callable[[Function], Function]:
    """Registers a check; it runs where facts are such as ``when`` asks for."""

    def register(function: Function) -> Function:
        place = f"{function.__module__}.{function.__qualname__}"
        # In the place of the same one, when a notebook loads its module again.
        CHECKS[phase][place] = Check(function, tuple(inspect.signature(function).parameters), when)
        return function

    return register


def run_phase(phase: Phase, **facts: Any) -> list[CheckResult]:
    """Returns the results of the checks of a phase, in the order of their registration."""
    results: list[CheckResult] = []
    for one in CHECKS[phase].values():
        if one.when(facts):
            found = one.run(**{name: facts[name] for name in one.needs})
            results += [found] if isinstance(found, CheckResult) else found
    return results


def refuse_failures(check_results: Iterable[CheckResult]) -> None:
    """Raises one ClusterError of all results for which a fit would fail."""
    failures = [found for found in check_results if found.failed]
    if len(failures) == 1:
        raise ClusterError(str(failures[0]), topic=failures[0].topic)
    if failures:
        listed = "\n".join(f"{number}. {found}" for number, found in enumerate(failures, start=1))
        raise ClusterError(f"the Spark application lacks {len(failures)} things that this fit needs:\n{listed}")
