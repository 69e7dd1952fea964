"""Report of checks: a table, and checks that do not come back in time."""

from __future__ import annotations

import json
import textwrap
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

from elephant import __version__
from elephant.cluster.checks.result import FAILURE, UNKNOWN, WARNING, CheckResult, check_result

Result = TypeVar("Result")

_MARKS = {FAILURE: "FAIL", WARNING: "warn", UNKNOWN: "?"}
_WIDTH = 120


class CheckTimeoutError(Exception):
    """A check did not end in the time that it was given."""


def within(timeout_s: float, function: Callable[[], Result], name: str) -> Result:
    """Calls a function in a thread, and waits for it so long; a thread that hangs ends with the process.

    Raises:
        CheckTimeoutError: The function did not return in time.
        BaseException: What the function raised.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name=f"elephant-doctor-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise CheckTimeoutError(name)
    if errors:
        raise errors[0]
    return results[0]


def checked(
    name: str, timeout_s: float, check: Callable[[], list[CheckResult]], *, expected: str, remedy: str
) -> list[CheckResult]:
    """Returns what a check found, or, where it hangs or fails itself, a finding that says so.

    Args:
        remedy: What to do where the check does not come to an end.
    """
    try:
        return within(timeout_s, check, name)
    except CheckTimeoutError:
        received = f"nothing within {timeout_s:g} s"
    except Exception as error:
        received = short_text(error)
    return [check_result(name, FAILURE, expected=expected, received=received, remedy=remedy)]


def short_text(error: BaseException, limit: int = 500) -> str:
    """Returns an error in few words; of a page of Spark's the first paragraph.

    >>> short_text(ValueError("one\\ntwo"))
    'ValueError: one two'
    """
    text = " ".join(str(error).split("\n\n")[0].split()) or "no message"
    return f"{type(error).__name__}: {text[:limit].rstrip('.')}"


def as_table(check_results: Sequence[CheckResult]) -> str:
    """Returns one line for each check, and below those that found something what to do."""
    name_width = max((len(found.name) for found in check_results), default=0)
    lines = [_row("", "check", "found", name_width)]
    for found in check_results:
        lines.append(_row(_MARKS.get(found.status, found.status), found.name, found.received, name_width))
        if found.status in (FAILURE, WARNING):
            lines += _indented("expected", found.expected)
            lines += _indented("remedy", found.remedy)
    return "\n".join([*lines, "", _summary(check_results)])


def _row(mark: str, name: str, received: str, name_width: int) -> str:
    start = f"{mark:4}  {name:{name_width}}  "
    return textwrap.fill(
        received, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    )


def _indented(title: str, text: str) -> list[str]:
    start = f"      {title + ':':10}"
    return textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def _summary(check_results: Sequence[CheckResult]) -> str:
    failures = sum(found.failed for found in check_results)
    warnings = sum(found.status == WARNING for found in check_results)
    verdict = f"a fit would fail: {_counted(failures, 'check')} failed" if failures else "a fit would work"
    return verdict + (f"; {_counted(warnings, 'warning')}" if warnings else "")


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if number == 1 else "s")


def as_json(check_results: Sequence[CheckResult]) -> str:
    """Returns the same as one JSON object: ``healthy``, ``elephant`` (its version) and ``findings``."""
    healthy = not any(found.failed for found in check_results)
    return json.dumps(
        {"healthy": healthy, "elephant": __version__, "findings": [asdict(found) for found in check_results]}, indent=2
    )
