"""Scaling of a fit: what more workers bring, where their time goes, and what to change."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Protocol

from elephant.monitor.report import (
    PARTS,
    Chart,
    bars_svg,
    document,
    drawing,
    items_html,
    label,
    legend,
    scrolling,
    table_html,
)

_WIDTH, _HEIGHT, _MARGIN = 860, 260, 60
_LINE, _IDEAL = "#2563eb", "#9ca3af"


class FitTimes(Protocol):
    """Times of a fit; see `elephant.monitor.summary.FitSummary`."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole fit."""

    @property
    def plan(self) -> Sequence[Mapping[str, Any]]:
        """Places of the ranks."""

    @property
    def ranks(self) -> Sequence[Mapping[str, Any]]:
        """A dictionary for each epoch and rank."""


@dataclass(frozen=True, kw_only=True)
class ScalingRun:
    """Fit of some steps with one number of workers.

    Args:
        workers: How many.
        batch_size: Rows of a worker and step.
        rates: Rows of all workers in a second, one for each epoch that counts.
        shares: Parts of the ranks' time, by the names in `elephant.monitor.report.PARTS`; they add up to 1.
        startup_s: Seconds of the fit beyond its epochs at their median: processes, rows, tracing, the result.
        bytes_per_step: Bytes that a rank sent in a step, on average.
        hosts: Machines that the ranks were on.
        error: Why the run has none of these; empty where it has them.
    """

    workers: int
    batch_size: int
    rates: Sequence[float] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    startup_s: float = 0.0
    bytes_per_step: float = 0.0
    hosts: int = 1
    error: str = ""

    @classmethod
    def of(cls, fit: FitTimes, *, workers: int, batch_size: int, steps: int) -> ScalingRun:
        """Returns the run that a fit was, without its first epoch, in which the model is traced.

        Args:
            fit: Of two epochs or more.
            steps: Of an epoch.
        """
        by_epoch = groupby(sorted(fit.ranks, key=lambda part: part["epoch"]), key=lambda part: part["epoch"])
        epochs = [list(parts) for _, parts in by_epoch]
        counted = [part for parts in epochs[1:] for part in parts]
        total_s = sum(part["seconds"] for part in counted)
        epoch_s = statistics.median(max(part["seconds"] for part in parts) for parts in epochs[1:])
        return cls(
            workers=workers,
            batch_size=batch_size,
            rates=[sum(part["rows_per_s"] for part in parts) for parts in epochs[1:]],
            shares={name: sum(part[name] for part in counted) / total_s for name in PARTS},
            startup_s=max(fit.seconds - len(epochs) * epoch_s, 0.0),
            bytes_per_step=sum(part["bytes_sent"] for part in counted) / len(counted) / steps,
            hosts=len({place["host"] for place in fit.plan}) or 1,
        )

    @property
    def rows_per_s(self) -> float:
        """The median of the rates."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def spread(self) -> float:
        """Distance between the rates, over their median."""
        return (max(self.rates) - min(self.rates)) / self.rows_per_s if self.rates else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step of all workers."""
        return self.workers * self.batch_size / self.rows_per_s


def efficiencies(runs: Sequence[ScalingRun]) -> dict[int, float]:
    """Returns the rate of one worker over that of one in the smallest run that was measured, by the number of workers.

    >>> efficiencies([ScalingRun(workers=n, batch_size=8, rates=[r]) for n, r in ((1, 100.0), (4, 300.0))])
    {1: 1.0, 4: 0.75}
    """
    scaling_runs = measured_runs(runs)
    return {
        run.workers: run.rows_per_s / run.workers * scaling_runs[0].workers / scaling_runs[0].rows_per_s
        for run in scaling_runs
    }


def measured_runs(runs: Sequence[ScalingRun]) -> list[ScalingRun]:
    """Returns the runs that have not failed, by their number of workers."""
    return sorted((run for run in runs if not run.error), key=lambda run: run.workers)


def counted(workers: int) -> str:
    """Returns a number of workers as text.

    >>> counted(1), counted(4)
    ('1 worker', '4 workers')
    """
    return f"{workers} worker{'' if workers == 1 else 's'}"


TITLES = ("workers", "rows/s", "spread", "efficiency", *(title for title, _ in PARTS.values()), "step", "start-up")


def table_rows(runs: Sequence[ScalingRun]) -> list[tuple[str, ...]]:
    """Returns a row of texts for each run that was measured, under `TITLES`."""
    shares = efficiencies(runs)
    return [
        (
            str(run.workers),
            f"{run.rows_per_s:,.0f}",
            f"{run.spread:.0%}",
            f"{shares[run.workers]:.0%}",
            *(f"{run.shares[name]:.0%}" for name in PARTS),
            f"{run.step_s * 1000:,.1f} ms",
            f"{run.startup_s:.1f} s",
        )
        for run in measured_runs(runs)
    ]


def as_json(runs: Sequence[ScalingRun]) -> list[dict[str, Any]]:
    """Returns the runs as they were made, each with its ``rows_per_s``, ``efficiency`` and ``step_s``."""
    shares = efficiencies(runs)
    return [
        {"workers": run.workers, "batch_size": run.batch_size, "error": run.error}
        if run.error
        else {
            **asdict(run),
            "rows_per_s": run.rows_per_s,
            "efficiency": shares[run.workers],
            "step_s": run.step_s,
        }
        for run in runs
    ]


def page(runs: Sequence[ScalingRun], texts: Sequence[str], facts: Mapping[str, object]) -> str:
    """Returns the runs as an HTML page that loads nothing.

    Args:
        texts: The advice.
        facts: What was measured, by name.
    """
    scaling_runs = measured_runs(runs)
    steps = [(str(run.workers), [_step_bars(run)]) for run in scaling_runs]
    slowest = max((run.step_s for run in scaling_runs), default=0.0)
    parts = [
        ("Advice", items_html(texts)),
        (
            "Rows per second",
            scaling_runs and f"<p>{legend({'measured': _LINE, 'ideal': _IDEAL})}</p>{_rates_svg(scaling_runs)}",
        ),
        (
            "A step",
            f"<p>{legend(dict(PARTS.values()))}</p>{scrolling(bars_svg(steps, f'{slowest * 1000:,.1f} ms'), 'line')}",
        ),
        ("Runs", scrolling(table_html(TITLES, table_rows(runs)), "numbers")),
        ("Failed", items_html([f"{counted(run.workers)}: {run.error}" for run in runs if run.error])),
        ("What was measured", scrolling(table_html((), facts.items()), "pairs")),
    ]
    body = "".join(f"<h2>{title}</h2>{part}" for title, part in parts if part)
    return document("elephant bench", body)


def _step_bars(run: ScalingRun) -> list[tuple[float, str, str]]:
    return [
        (run.step_s * run.shares[name], color, f"{counted(run.workers)}: {run.shares[name]:.0%} {title}")
        for name, (title, color) in PARTS.items()
    ]


def _rates_svg(runs: Sequence[ScalingRun]) -> str:
    """Returns a drawing of rows per second over workers: medians, the span of the rates, and the ideal line."""
    most = runs[-1].workers
    ideal = runs[0].rows_per_s / runs[0].workers * most
    chart = Chart(
        left=_MARGIN,
        top=_MARGIN / 2,
        across=_WIDTH - 2 * _MARGIN,
        down=_HEIGHT - _MARGIN,
        most=most,
        low=0.0,
        high=max(*(rate for run in runs for rate in run.rates), ideal),
    )
    drawn = [chart.line([(0, 0), (most, ideal)], _IDEAL, width=1, is_dashed=True)]
    drawn.append(chart.line([(run.workers, run.rows_per_s) for run in runs], _LINE, width=2))
    for run in runs:
        x, y = chart.place(run.workers, run.rows_per_s)
        drawn += [
            chart.line([(run.workers, max(run.rates)), (run.workers, min(run.rates))], _LINE, width=1),
            chart.dot(run.workers, run.rows_per_s, _LINE, radius=3),
            label(f"{run.rows_per_s:,.0f}", x, y - 8, "end"),
            label(counted(run.workers), x, _HEIGHT - 8, "middle"),
        ]
    return drawing(_WIDTH, _HEIGHT, drawn)
