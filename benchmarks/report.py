"""Measurements as lines of JSON: what was compared, the ratio, its target, and the medians behind it."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Of the last minute before anything was measured: others' work.
_LOAD_BEFORE = os.getloadavg()[0]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One comparison within one run.

    Args:
        measure: Name of the row in the table of targets.
        case: Which of the row's cases this is, such as ``{"ranks": 2, "bytes": 4096}``.
        ratio: What is compared with the target.
        target: Its bound, or None where there is none.
        at_least: Whether the ratio shall not be below the target; else it shall not be above.
        medians: The medians that the ratio was made of, and others of interest, by name with unit.
        repetitions: Of which the medians are.
        series: Values in a row that a picture shows, by name with unit.
        load_before: Load average of the machine before the script began.
    """

    measure: str
    case: Mapping[str, Any] = field(default_factory=dict)
    ratio: float
    target: float | None
    at_least: bool
    medians: Mapping[str, float]
    repetitions: int
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    load_before: float = _LOAD_BEFORE

    @property
    def reached(self) -> bool | None:
        """Whether the target was met; None without one."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    def to_line(self) -> str:
        """Returns one line of JSON."""
        shown = {**asdict(self), "ratio": rounded(self.ratio), "reached": self.reached}
        shown["medians"] = {name: rounded(value) for name, value in self.medians.items()}
        shown["series"] = {name: [rounded(value) for value in values] for name, values in self.series.items()}
        return json.dumps({name: value for name, value in shown.items() if name != "series" or value})

    @classmethod
    def from_line(cls, line: str) -> Measurement:
        """Returns what `to_line` was made of, to four digits."""
        values = json.loads(line)
        del values["reached"]
        return cls(**values)


def report(measurement: Measurement) -> None:
    """Prints the measurement."""
    print(measurement.to_line(), flush=True)


def rounded(value: float) -> float:
    """Returns the value to four significant digits."""
    return float(f"{value:.4g}")


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Returns the ratio of the medians of two series that took turns."""
    return statistics.median(over) / statistics.median(under)
