"""What doctor found, for people and for machines."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from elephant import __version__
from elephant.cluster.finding import FAILURE, UNKNOWN, WARNING, Finding

_MARKS = {FAILURE: "FAIL", WARNING: "warn", UNKNOWN: "?"}
_WIDTH = 120


def as_table(findings: Sequence[Finding]) -> str:
    """Returns one line for each check, and below those that found something what to do.

    Args:
        findings: What the checks found.
    """
    name_width = max((len(found.name) for found in findings), default=0)
    lines = [_row("", "check", "found", name_width)]
    for found in findings:
        lines.append(_row(_MARKS.get(found.status, found.status), found.name, found.received, name_width))
        if found.status in (FAILURE, WARNING):
            lines += _indented("expected", found.expected)
            lines += _indented("remedy", found.remedy)
    return "\n".join([*lines, "", _summary(findings)])


def _row(mark: str, name: str, received: str, name_width: int) -> str:
    start = f"{mark:4}  {name:{name_width}}  "
    return textwrap.fill(
        received, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    )


def _indented(title: str, text: str) -> list[str]:
    start = f"      {title + ':':10}"
    return textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def _summary(findings: Sequence[Finding]) -> str:
    failures = sum(found.failed for found in findings)
    warnings = sum(found.status == WARNING for found in findings)
    verdict = f"a fit would fail: {_counted(failures, 'check')} failed" if failures else "a fit would work"
    return verdict + (f"; {_counted(warnings, 'warning')}" if warnings else "")


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if number == 1 else "s")


def as_json(findings: Sequence[Finding]) -> str:
    """Returns the same as one JSON object: ``healthy``, ``elephant`` (its version) and ``findings``.

    Args:
        findings: What the checks found.
    """
    healthy = not any(found.failed for found in findings)
    return json.dumps(
        {"healthy": healthy, "elephant": __version__, "findings": [asdict(found) for found in findings]}, indent=2
    )
