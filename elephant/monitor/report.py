"""HTML of models and fits, for notebooks and for files: nothing of it is loaded from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from elephant.monitor.progress import curve_names

if TYPE_CHECKING:
    from elephant.monitor.summary import FitSummary

_TRAINING, _VALIDATION = "#2563eb", "#ea580c"
_MARGIN = 4
# What a rank's seconds go into, with what it is called and its color.
PARTS = {
    "compute_s": ("computing", "#2563eb"),
    "exchange_s": ("exchanging", "#7c3aed"),
    "others_s": ("waiting for other ranks", "#f59e0b"),
    "input_s": ("waiting for rows", "#dc2626"),
}
# Length, color, and what is said of it.
Bar = tuple[float, str, str]
_LINE_WIDTH, _LINE_HEIGHT, _LABEL_WIDTH = 860, 22, 70
# Of a time line: more could not be told apart.
_MOST_BARS = 2000
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 960px; padding: 0 1em; color: #1f2937 }
table { border-collapse: collapse; margin: .5em 0 1.5em }
th, td { padding: 2px 10px; border-bottom: 1px solid #e5e7eb; text-align: right }
th:first-child, td:first-child { text-align: left }
figure { display: inline-block; margin: 0 1em 1em 0 }
svg { background: #f9fafb; max-width: 100% } li { margin: .3em 0 }
"""


def table_html(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table whose cells are text.

    >>> table_html(["a"], [["<"]])
    '<table><tr><th>a</th></tr><tr><td>&lt;</td></tr></table>'
    """
    lines = [f"<tr>{''.join(f'<th>{html.escape(title)}</th>' for title in titles)}</tr>"] if titles else []
    lines += [f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def curve_svg(name: str, history: Mapping[str, Sequence[float]], *, width: int = 220, height: int = 60) -> str:
    """Returns a drawing of a metric over the epochs, training and validation; empty where there are no numbers.

    Args:
        name: Of the metric; ``val_`` before it marks validation.
        history: One number per epoch by metric.
        width: Pixels.
        height: Pixels.
    """
    lines = {key: list(history[key]) for key in (name, f"val_{name}") if key in history}
    numbers = [value for line in lines.values() for value in line if _is_number(value)]
    if not numbers:
        return ""
    low, high, last = min(numbers), max(numbers), max(max(map(len, lines.values())) - 1, 1)
    parts = [f"<title>{html.escape(name)}: lowest {low:.4g}, highest {high:.4g}</title>"]
    for key, line in lines.items():
        color = _TRAINING if key == name else _VALIDATION
        points = [
            (
                _MARGIN + (width - 2 * _MARGIN) * place / last,
                _MARGIN + (height - 2 * _MARGIN) * ((high - value) / (high - low) if high > low else 0.5),
            )
            for place, value in enumerate(line)
            if _is_number(value)
        ]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{color}"/>' for x, y in points[-1:]]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"{''.join(parts)}</svg>"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def page(summary: FitSummary) -> str:
    """Returns the summary of a fit as an HTML page that loads nothing."""
    return document(f"Fit of {summary.model}", sections(summary))


def document(title: str, body: str) -> str:
    """Returns a page with parts of HTML below its title."""
    title = html.escape(title)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head><body><h1>{title}</h1>{body}</body></html>'


def sections(summary: FitSummary) -> str:
    """Returns the summary of a fit as parts of an HTML page."""
    figures = "".join(
        f"<figure><figcaption>{html.escape(name)}</figcaption>{_with_ends(name, summary.history)}</figure>"
        for name in curve_names(summary.history)
    )
    curves = f"<p>{legend({'training': _TRAINING, 'validation': _VALIDATION})}</p>{figures}"
    timeline = timeline_svg(summary.ranks)
    counts = {name: value for name, value in summary.statistics.items() if isinstance(value, int | float)}
    parts = [
        ("Advice", items_html(summary.advice)),
        ("Curves", figures and curves),
        ("Time line", timeline and f"<p>{legend(dict(PARTS.values()))}</p>{timeline}"),
        ("Ranks", _ranks_table(summary)),
        ("Epochs", _epochs_table(summary.history)),
        ("Staleness", _pairs(dict(sorted(summary.staleness.items())), "staleness", "updates")),
        ("Counts", _pairs(counts)),
        ("Notes", items_html(summary.notes)),
        ("Params", _pairs(summary.options)),
        ("Versions", _pairs(summary.versions)),
    ]
    shown = "".join(f"<h2>{title}</h2>{part}" for title, part in parts if part)
    return f"<p>{html.escape(repr(summary))}</p>{shown}"


def timeline_svg(ranks: Sequence[Mapping[str, Any]], *, width: int = _LINE_WIDTH) -> str:
    """Returns a line for each rank, on which its seconds follow one another; empty where there are none.

    Args:
        ranks: Times of each epoch and rank; see `elephant.monitor.summary.rank_times`.
        width: Pixels.
    """
    parts = sorted(ranks, key=lambda part: (part["rank"], part["epoch"]))
    by_rank = {rank: list(own) for rank, own in groupby(parts, key=lambda part: part["rank"])}
    longest = max((sum(part["seconds"] for part in own) for own in by_rank.values()), default=0.0)
    if not longest:
        return ""
    together = -(-len(PARTS) * len(ranks) // _MOST_BARS)
    lines = []
    for rank, own in by_rank.items():
        groups = [own[first : first + together] for first in range(0, len(own), together)]
        lines.append((f"rank {rank}", [_time_bars(f"rank {rank}", epochs) for epochs in groups]))
    return bars_svg(lines, f"{longest:.1f} s", width=width)


def _time_bars(rank: str, epochs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    sums = {name: sum(part[name] for part in epochs) for name in PARTS}
    return [
        (sums[name], color, f"{rank}, epoch {epochs[0]['epoch'] + 1}: {sums[name]:.2f} s {title}")
        for name, (title, color) in PARTS.items()
    ]


def bars_svg(lines: Sequence[tuple[str, Sequence[Sequence[Bar]]]], longest: str, *, width: int = _LINE_WIDTH) -> str:
    """Returns lines of bars that follow one another, with a stroke after each group of them; empty without bars.

    Args:
        lines: What each is called, and its groups of bars.
        longest: What is said of the length of the longest line.
        width: Pixels.
    """
    most = max((sum(bar[0] for group in groups for bar in group) for _, groups in lines), default=0.0)
    if not most:
        return ""
    scale, drawn = (width - _LABEL_WIDTH) / most, []
    for line, (name, groups) in enumerate(lines):
        x, y = float(_LABEL_WIDTH), line * _LINE_HEIGHT
        drawn.append(f'<text x="4" y="{y + 15}" font-size="12">{html.escape(name)}</text>')
        for group in groups:
            for length, color, label in group:
                drawn.append(
                    f'<rect x="{x:.2f}" y="{y + 3}" width="{length * scale:.2f}" height="{_LINE_HEIGHT - 6}" '
                    f'fill="{color}"><title>{html.escape(label)}</title></rect>'
                )
                x += length * scale
            drawn.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{y}" y2="{y + _LINE_HEIGHT}" stroke="#1f2937"/>')
    height = (len(lines) + 1) * _LINE_HEIGHT
    drawn.append(f'<text x="{width - 4}" y="{height - 6}" font-size="12" text-anchor="end">{longest}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"{''.join(drawn)}</svg>"
    )


def _ranks_table(summary: FitSummary) -> str:
    plan = {place["rank"]: place for place in summary.plan}
    rows = [
        (
            own["rank"],
            plan.get(own["rank"], {}).get("host", ""),
            plan.get(own["rank"], {}).get("device", ""),
            f"{own['rows']:,}",
            f"{own['rows_per_s']:,.0f}",
            *(f"{own[name]:.1f} s" for name in PARTS),
            f"{own['bytes_sent'] / 1e6:,.1f} MB",
        )
        for own in summary.by_rank
    ]
    titles = ("rank", "host", "device", "rows", "rows/s", *(title for title, _ in PARTS.values()), "sent")
    return table_html(titles, rows) if rows else ""


def _epochs_table(history: Mapping[str, Sequence[Any]]) -> str:
    count = max(map(len, history.values()), default=0)
    cells = {
        name: [f"{value:.4g}" if _is_number(value) else str(value) for value in line] for name, line in history.items()
    }
    rows = [
        (epoch + 1, *(line[epoch] if epoch < len(line) else "" for line in cells.values())) for epoch in range(count)
    ]
    return table_html(("epoch", *history), rows) if rows else ""


def _with_ends(name: str, history: Mapping[str, Sequence[float]]) -> str:
    """Returns the curve of a metric with its first and its last number below."""
    ends = [
        f"{label} {line[0]:.4g} to {line[-1]:.4g}"
        for label, line in (("training", history.get(name)), ("validation", history.get(f"val_{name}")))
        if line and _is_number(line[0]) and _is_number(line[-1])
    ]
    return f"{curve_svg(name, history, width=400, height=150)}<br><small>{', '.join(ends)}</small>"


def legend(colors: Mapping[str, str]) -> str:
    """Returns a line that says which color is what."""
    return " &nbsp; ".join(f'<span style="color:{color}">&#9632;</span> {title}' for title, color in colors.items())


def items_html(texts: Sequence[str]) -> str:
    """Returns a list of texts; empty without any."""
    return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</ul>" if texts else ""


def _pairs(values: Mapping[Any, object], *titles: str) -> str:
    return table_html(titles, values.items()) if values else ""
