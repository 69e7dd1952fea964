"""Scaling of a fit: what more workers bring, where their time goes, and what to change."""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from elephant.monitor.report import PARTS, bars_svg, document, items_html, legend, scrolling, table_html
from elephant.monitor.summary import FitSummary

# Shares of the time, and ratios, from which on something is worth a change.
_MUCH_EXCHANGE, _MUCH_WAITING, _MUCH_INPUT, _SLOWER, _SPREAD = 0.2, 0.15, 0.1, 1.3, 0.2
# Of the highest rate: fewer workers that reach so much are enough. Of the ideal rate: more workers may pay off.
_ENOUGH, _SCALES = 0.9, 0.8
_WIDTH, _HEIGHT, _MARGIN = 860, 260, 60
_LINE, _IDEAL = "#2563eb", "#9ca3af"


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
    def of(cls, summary: FitSummary, *, workers: int, batch_size: int, steps: int) -> ScalingRun:
        """Returns the run that a fit was, without its first epoch, in which the model is traced.

        Args:
            summary: Of a fit of two epochs or more.
            steps: Of an epoch.
        """
        by_epoch = groupby(sorted(summary.ranks, key=lambda part: part["epoch"]), key=lambda part: part["epoch"])
        epochs = [list(parts) for _, parts in by_epoch]
        counted = [part for parts in epochs[1:] for part in parts]
        total_s = sum(part["seconds"] for part in counted)
        epoch_s = statistics.median(max(part["seconds"] for part in parts) for parts in epochs[1:])
        return cls(
            workers=workers,
            batch_size=batch_size,
            rates=[sum(part["rows_per_s"] for part in parts) for parts in epochs[1:]],
            shares={name: sum(part[name] for part in counted) / total_s for name in PARTS},
            startup_s=max(summary.seconds - len(epochs) * epoch_s, 0.0),
            bytes_per_step=sum(part["bytes_sent"] for part in counted) / len(counted) / steps,
            hosts=len({place["host"] for place in summary.plan}) or 1,
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
    measured = _measured(runs)
    return {
        run.workers: run.rows_per_s / run.workers * measured[0].workers / measured[0].rows_per_s for run in measured
    }


def _measured(runs: Sequence[ScalingRun]) -> list[ScalingRun]:
    return sorted((run for run in runs if not run.error), key=lambda run: run.workers)


def advice(runs: Sequence[ScalingRun], options: Mapping[str, Any]) -> list[str]:
    """Returns changes to make, with the numbers that say so; nothing where nothing stands out.

    Args:
        runs: Of the same fit, with different numbers of workers.
        options: Params of the estimator that were chosen, by name.
    """
    measured = _measured(runs)
    if not measured:
        return []
    first, last = measured[0], measured[-1]
    # Of a run with other batches a step is another one.
    slower = _compute_s(last) / _compute_s(first) if first.batch_size == last.batch_size else 1.0
    texts = _advice_on_workers(measured)
    if slower > _SLOWER:
        texts.append(
            f"Computing a step takes {slower:.1f} times as long with {counted(last.workers)} as with {first.workers}: "
            "they share cores or memory. Give each worker cores of its own (spark.task.cpus, executors on more "
            "machines), or use fewer workers."
        )
    texts += _advice_on_exchange(last, options)
    if last.shares["others_s"] > _MUCH_WAITING and slower <= _SLOWER:
        texts.append(
            f"{counted(last.workers)} wait for slower ones {last.shares['others_s']:.0%} of their time. Where machines "
            "differ for good, mode='asynchronous' lets each go at its own pace; compare the accuracy then."
        )
    if last.shares["input_s"] > _MUCH_INPUT:
        texts.append(
            f"Steps wait for their rows {last.shares['input_s']:.0%} of the time. Let preprocessing run once "
            "(without a generator), do less in augmentation, or hold the rows (cache='memory')."
        )
    noisy = max(measured, key=lambda run: run.spread)
    if noisy.spread > _SPREAD:
        texts.append(
            f"Rates with {counted(noisy.workers)} differ by {noisy.spread:.0%} from epoch to epoch: smaller "
            "differences say nothing. Measure on a quieter cluster, or take more steps."
        )
    return texts


def counted(workers: int) -> str:
    """Returns a number of workers as text.

    >>> counted(1), counted(4)
    ('1 worker', '4 workers')
    """
    return f"{workers} worker{'' if workers == 1 else 's'}"


def _compute_s(run: ScalingRun) -> float:
    return run.step_s * run.shares["compute_s"]


def _advice_on_workers(measured: Sequence[ScalingRun]) -> list[str]:
    first, last, texts = measured[0], measured[-1], []
    best = max(measured, key=lambda run: run.rows_per_s)
    enough = next(run for run in measured if run.rows_per_s >= _ENOUGH * best.rows_per_s)
    if enough is not last:
        gain = last.rows_per_s / enough.rows_per_s - 1
        texts.append(
            f"Use {counted(enough.workers)}: {last.workers} train {abs(gain):.0%} {'more' if gain >= 0 else 'fewer'} "
            f"rows per second ({last.rows_per_s:,.0f} after {enough.rows_per_s:,.0f})."
        )
    elif last is not first and (share := efficiencies(measured)[last.workers]) >= _SCALES:
        texts.append(
            f"More workers are likely to pay off: {last.workers} reach {share:.0%} of what they could by the rate of "
            f"{first.workers}."
        )
    return texts


def _advice_on_exchange(run: ScalingRun, options: Mapping[str, Any]) -> list[str]:
    share = run.shares["exchange_s"]
    if share <= _MUCH_EXCHANGE:
        return []
    by_step = options.get("frequency", "batch") == "batch"
    # A step with twice the rows computes twice as long, and exchanges as long as before.
    texts = [
        f"Exchanging takes {share:.0%} of a step of {counted(run.workers)}, however many rows the step has: "
        f"batchSize={2 * run.batch_size} would train up to {2 / (2 - share) - 1:.0%} more rows per second. The "
        "learning rate may have to rise with it."
    ]
    if by_step and options.get("mode", "synchronous") != "synchronous":
        if not options.get("backgroundExchange"):
            texts.append("backgroundExchange=True computes the next step while an exchange goes on.")
    if by_step and run.hosts > 1 and not options.get("compression"):
        rate = run.bytes_per_step / (run.step_s * share)
        texts.append(
            f"compression='bfloat16' halves the {run.bytes_per_step / 1e6:,.1f} MB that a worker sends in a step, at "
            f"{rate / 1e6:,.0f} MB/s: up to {1 / (1 - share / 2) - 1:.0%} more rows per second."
        )
    if by_step:
        texts.append(
            f"frequency=8 exchanges weights every 8 steps: up to {1 / (1 - share * 7 / 8) - 1:.0%} more rows per "
            "second. Workers differ in between: compare the accuracy."
        )
    return texts


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
        for run in _measured(runs)
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
    measured = _measured(runs)
    steps = [(str(run.workers), [_step_bars(run)]) for run in measured]
    slowest = max((run.step_s for run in measured), default=0.0)
    parts = [
        ("Advice", items_html(texts)),
        ("Rows per second", measured and f"<p>{legend({'measured': _LINE, 'ideal': _IDEAL})}</p>{curve_svg(measured)}"),
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


def curve_svg(runs: Sequence[ScalingRun]) -> str:
    """Returns a drawing of rows per second over workers: medians, the span of the rates, and the ideal line."""
    first, most = runs[0], runs[-1].workers
    top = max(*(rate for run in runs for rate in run.rates), first.rows_per_s / first.workers * most)

    def place(workers: float, rate: float) -> tuple[float, float]:
        return (
            _MARGIN + (_WIDTH - 2 * _MARGIN) * workers / most,
            _HEIGHT - _MARGIN / 2 - (_HEIGHT - _MARGIN) * rate / top,
        )

    (x0, y0), (x1, y1) = place(0, 0), place(most, first.rows_per_s / first.workers * most)
    corners = " ".join("{:.1f},{:.1f}".format(*place(run.workers, run.rows_per_s)) for run in runs)
    drawn = [
        f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{_IDEAL}" stroke-dasharray="5 4"/>',
        f'<polyline points="{corners}" fill="none" stroke="{_LINE}" stroke-width="2"/>',
    ]
    for run in runs:
        (x, y), (_, high), (_, low) = (place(run.workers, rate) for rate in (run.rows_per_s, *_span(run.rates)))
        drawn += [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{high:.1f}" y2="{low:.1f}" stroke="{_LINE}"/>',
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_LINE}"/>',
            f'<text x="{x:.1f}" y="{y - 8:.1f}" font-size="12" text-anchor="end">{run.rows_per_s:,.0f}</text>',
            f'<text x="{x:.1f}" y="{_HEIGHT - 8}" font-size="12" text-anchor="middle">'
            f"{html.escape(counted(run.workers))}</text>",
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f"{''.join(drawn)}</svg>"
    )


def _span(rates: Sequence[float]) -> tuple[float, float]:
    return max(rates), min(rates)
