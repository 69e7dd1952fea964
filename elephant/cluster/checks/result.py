"""What one check found, and the error of a fit for which some checks found that it cannot work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elephant.errors import ClusterError

OK, WARNING, FAILURE, UNKNOWN = "ok", "warning", "failure", "unknown"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What one check found.

    Args:
        name: What was looked at.
        status: ``"ok"``; ``"warning"``: a fit works, or begins, and there is something to know; ``"failure"``: a fit
            would fail; ``"unknown"``: it could not be looked at.
        expected: What a fit needs.
        received: What there is.
        remedy: What to do, as whole sentences; empty where there is nothing to do.
        text: The whole message, where it was made elsewhere; empty makes it of the other parts.
    """

    name: str
    status: str
    expected: str
    received: str
    remedy: str = ""
    text: str = ""

    @property
    def failed(self) -> bool:
        """Whether a fit would fail because of it."""
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
) -> CheckResult:
    """Returns a finding; its remedy is kept only where something is wrong.

    Args:
        otherwise: The status where all is not well.
        text: The whole message, where it was made elsewhere.

    >>> str(check_result("numWorkers=3", False, expected="3 task slots", received=2, remedy="Lower numWorkers to 2."))
    'numWorkers=3: expected 3 task slots. Received: 2. Lower numWorkers to 2.'
    >>> check_result("numWorkers=3", True, expected="3 task slots", received=4, remedy="Lower numWorkers.").remedy
    ''
    """
    if isinstance(status, bool):
        status = OK if status else otherwise
    return CheckResult(
        name=name,
        status=status,
        expected=expected,
        received=str(received),
        remedy="" if status == OK else remedy,
        text=text,
    )


def refuse_failures(check_results: Iterable[CheckResult]) -> None:
    """Raises one ClusterError of all findings for which a fit would fail.

    Raises:
        ClusterError: There is at least one.
    """
    failures = [str(found) for found in check_results if found.failed]
    if len(failures) == 1:
        raise ClusterError(failures[0])
    if failures:
        listed = "\n".join(f"{number}. {text}" for number, text in enumerate(failures, start=1))
        raise ClusterError(f"the Spark application lacks {len(failures)} things that this fit needs:\n{listed}")
