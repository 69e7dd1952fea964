"""Checks that end in time, whatever they look at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from elephant.cluster.finding import FAILURE, Finding, finding

Result = TypeVar("Result")


class CheckTimeoutError(Exception):
    """A check did not end in the time that it was given."""


def within(timeout_s: float, function: Callable[[], Result], name: str) -> Result:
    """Calls a function in a thread, and waits for it so long; a thread that hangs ends with the process.

    Args:
        timeout_s: How long to wait.
        function: What to call.
        name: Of the thread.

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
    name: str, timeout_s: float, check: Callable[[], list[Finding]], *, expected: str, remedy: str
) -> list[Finding]:
    """Returns what a check found, or, where it hangs or fails itself, a finding that says so.

    Args:
        name: What is looked at.
        timeout_s: How long it may take.
        check: What looks.
        expected: What a fit needs.
        remedy: What to do where the check does not come to an end.
    """
    try:
        return within(timeout_s, check, name)
    except CheckTimeoutError:
        received = f"nothing within {timeout_s:g} s"
    except Exception as error:
        received = said(error)
    return [finding(name, FAILURE, expected=expected, received=received, remedy=remedy)]


def said(error: BaseException, limit: int = 500) -> str:
    """Returns an error in few words; of a page of Spark's the first paragraph.

    Args:
        error: The error.
        limit: Characters that are enough.

    >>> said(ValueError("one\\ntwo"))
    'ValueError: one two'
    """
    text = " ".join(str(error).split("\n\n")[0].split()) or "no message"
    return f"{type(error).__name__}: {text[:limit].rstrip('.')}"
