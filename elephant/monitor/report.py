"""HTML of models and fits, for notebooks and for files: nothing of it is loaded from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

# Colors that stand out from light and dark backgrounds alike, and from each other, by lightness too.
TRAINING, VALIDATION = "#3b82f6", "#c2410c"
_MARGIN = 4
# Room for the axes of a curve, to its left and below.
_AXIS_WIDTH, _AXIS_HEIGHT = 58, 24
# Text and lines have the color of the text around them: a notebook has a theme of its own.
_TEXT, _RULE = 'fill="currentColor" fill-opacity="0.75"', 'stroke="currentColor" stroke-opacity="0.25"'
# Parts of a rank's seconds, each with its name and its color.
PARTS = {
    "compute_s": ("computing", "#2563eb"),
    "exchange_s": ("exchanging", "#0f766e"),
    "others_s": ("waiting for other ranks", "#d97706"),
    "input_s": ("waiting for rows", "#e11d48"),
}
_FIRST_STEP = ("the first step, with its trace", "#3b82f6")
# Parts of a fit beside its epochs, by what a summary calls them, and their colors.
_BESIDE = {
    "preparing on the driver": "#0d9488",
    "pre-flight": "#a8720a",
    "until tasks began": "#64748b",
    "earlier attempts": "#64748b",
    "starting the process": "#8b5cf6",
    "reading rows": "#db2777",
    "meeting other ranks": "#c2610c",
    "importing Keras": "#0891b2",
    "building the model": "#0284c7",
    "waiting for rows and ranks": "#a16207",
    "connecting to ranks": "#4d8a1f",
    "preparing": "#c026d3",
    "in epochs": "#6366f1",
    "between and after them": "#78716c",
}
_OTHER, _NOTHING = "#64748b", "none"
# Less is 0.0 s where it is shown.
SHORTEST_S = 0.05
# Length, color, and what is said of it.
Bar = tuple[float, str, str]
_LINE_WIDTH, _LINE_HEIGHT, _LABEL_WIDTH = 860, 22, 70
# More bars of a time line could not be told apart.
MOST_BARS = 2000
# Nobody reads more lines of a table of layers.
MOST_LAYERS = 200
# A page of its own has the colors of the browser's theme. There alone the background is known, without which what is
# scrolled below the first line and the first column of a table would shine through.
_PAGE_STYLE = """
html { color-scheme: light dark; background: Canvas; color: CanvasText }
body { margin: 0 auto; max-width: 1240px; padding: 1rem }
.elephant-fit th, .elephant-fit .numbers td:first-child { position: sticky; background: Canvas }
.elephant-fit th { top: 0; z-index: 1 } .elephant-fit th:first-child { z-index: 2 }
.elephant-fit th:first-child, .elephant-fit .numbers td:first-child { left: 0 }
"""
# The style is for these parts alone: in a notebook they stand beside others, and inherit the colors of its theme.
_STYLE = """
.elephant-fit { font: 15px/1.5 system-ui, sans-serif; color: inherit; overflow-wrap: anywhere }
.elephant-fit h1 { font-size: 1.4rem; line-height: 1.25; margin: 0 0 1rem }
.elephant-fit h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; padding-bottom: .25rem; border-bottom: 1px solid #8886 }
.elephant-fit .state { background: #fef3c7; border-left: 4px solid #b45309; padding: .5rem .75rem; color: #451a03 }
.elephant-fit .tiles { display: flex; flex-wrap: wrap; gap: .5rem; margin: 0 }
.elephant-fit .tiles div { background: #8882; border-radius: 6px; padding: .4rem .8rem; flex: 1 0 auto }
.elephant-fit .tiles span, .elephant-fit figure p, .elephant-fit th, .elephant-fit .pairs td:first-child {
  color: color-mix(in srgb, currentColor 75%, transparent) }
.elephant-fit .tiles span { display: block; font-size: .8rem }
.elephant-fit .tiles b { font-size: 1.15rem; font-weight: 600 }
.elephant-fit .legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: .5rem 0; font-size: .9rem }
.elephant-fit .legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em }
.elephant-fit .share { display: flex; height: 1rem; border-radius: 4px; overflow: hidden }
.elephant-fit .share i { flex: 0 1 auto }
.elephant-fit .curves { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)) }
.elephant-fit figure { margin: 0 } .elephant-fit figcaption { font-weight: 600 }
.elephant-fit figure p { margin: 0; font-size: .85rem }
.elephant-fit svg { display: block; max-width: 100%; height: auto }
.elephant-fit .curves svg, .elephant-fit .line svg { width: 100%; max-width: none }
.elephant-fit .scroll { overflow: auto; box-sizing: border-box; max-width: 100%; margin: .5rem 0; width: fit-content }
.elephant-fit .numbers { max-height: 28rem; border: 1px solid #8888; border-radius: 6px }
.elephant-fit .line { width: 100% } .elephant-fit .line svg { min-width: 800px }
.elephant-fit table { border-collapse: separate; border-spacing: 0; margin: 0; font-size: inherit;
  font-variant-numeric: tabular-nums }
.elephant-fit tr, .elephant-fit tbody tr:nth-child(n) { background: none }
.elephant-fit th, .elephant-fit td { padding: .25rem .75rem; border: 0; border-bottom: 1px solid #8884;
  text-align: right; white-space: nowrap }
.elephant-fit tr:last-child td { border-bottom: 0 }
.elephant-fit th { font-size: .85rem; font-weight: 600; vertical-align: bottom }
.elephant-fit .ranks th { white-space: normal; overflow-wrap: normal }
.elephant-fit .ranks th:nth-child(6), .elephant-fit .ranks th:nth-child(7) { min-width: 4.8rem }
.elephant-fit .ranks th:nth-last-child(-n+2), .elephant-fit .ranks td:nth-last-child(-n+2) { text-align: left }
.elephant-fit .layers th:nth-child(-n+3), .elephant-fit .layers td:nth-child(-n+3) { text-align: left }
.elephant-fit th:first-child, .elephant-fit td:first-child { text-align: left }
.elephant-fit .pairs td { white-space: normal; text-align: left; vertical-align: top }
.elephant-fit .pairs td:first-child { padding-left: 0; white-space: nowrap }
.elephant-fit ul { padding-left: 1.2rem; margin: .5rem 0 } .elephant-fit li { margin: .3rem 0 }
.elephant-card { font-size: 14px; max-width: 60rem; box-sizing: border-box; margin: .25rem 0; padding: .75rem 1rem;
  border: 1px solid #8888; border-radius: 8px }
.elephant-fit.elephant-card > * { margin: .75rem 0 0 } .elephant-fit.elephant-card > style + * { margin: 0 }
.elephant-fit.elephant-card .tiles b { font-size: 1rem }
.elephant-card summary { cursor: pointer; font-weight: 600 }
.elephant-fit.elephant-card .curves { grid-template-columns: repeat(auto-fill, minmax(min(100%, 260px), 1fr)) }
.elephant-fit.elephant-card .curves svg { max-width: 320px }
"""


def table_html(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table whose cells are text.

    >>> table_html(["a"], [["<"]])
    '<table><tr><th>a</th></tr><tr><td>&lt;</td></tr></table>'
    """
    lines = [f"<tr>{''.join(f'<th>{html.escape(title)}</th>' for title in titles)}</tr>"] if titles else []
    lines += [f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def curve_svg(
    name: str, history: Mapping[str, Sequence[float]], *, width: int = 220, height: int = 60, has_axes: bool = False
) -> str:
    """Returns a drawing of a metric over the epochs, training and validation; empty where there are no numbers.

    Args:
        name: Of the metric; ``val_`` before it marks validation.
        history: One number per epoch by metric.
        width: Pixels.
        height: Pixels.
        has_axes: Whether there are numbers beside it, and epochs below.
    """
    lines = {key: list(history[key]) for key in (name, f"val_{name}") if key in history}
    numbers = [value for line in lines.values() for value in line if is_number(value)]
    if not numbers:
        return ""
    low, high, count = min(numbers), max(numbers), max(map(len, lines.values()))
    left, bottom = (_AXIS_WIDTH, _AXIS_HEIGHT) if has_axes else (_MARGIN, _MARGIN)
    chart = Chart(
        left=left,
        top=_MARGIN,
        across=width - left - _MARGIN,
        down=height - bottom - _MARGIN,
        most=max(count - 1, 1),
        low=low,
        high=high,
    )
    parts = [f"<title>{html.escape(name)}: lowest {low:.4g}, highest {high:.4g}</title>"]
    parts += _axes(chart, max(count, 2)) if has_axes else []
    for key, line in lines.items():
        color = TRAINING if key == name else VALIDATION
        points = [(epoch, value) for epoch, value in enumerate(line) if is_number(value)]
        # Where both are equal, both can be seen.
        parts.append(chart.line(points, color, is_dashed=key != name))
        parts += [chart.dot(*point, color) for point in points[-1:]]
    return drawing(width, height, parts)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Rectangle in a drawing of curves: numbers become places in it.

    Args:
        left: Pixels to its left.
        top: Pixels above it.
        across: Its width, in pixels.
        down: Its height, in pixels.
        most: The number at its right; zero is at its left.
        low: The number at its bottom.
        high: The number at its top; if it is the lowest one too, it is in the middle.
    """

    left: float
    top: float
    across: float
    down: float
    most: float
    low: float
    high: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Returns the place of a pair of numbers, in pixels from the left and from above."""
        part = (self.high - y) / (self.high - self.low) if self.high > self.low else 0.5
        return self.left + self.across * x / self.most, self.top + self.down * part

    def line(
        self, points: Iterable[tuple[float, float]], color: str, *, width: float = 1.5, is_dashed: bool = False
    ) -> str:
        """Returns a line through pairs of numbers."""
        corners = " ".join("{:.1f},{:.1f}".format(*self.place(x, y)) for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
        return f'<polyline points="{corners}" fill="none" stroke="{color}" stroke-width="{width}"{dashes}/>'

    def dot(self, x: float, y: float, color: str, *, radius: int = 2) -> str:
        """Returns a dot at a pair of numbers."""
        across, down = self.place(x, y)
        return f'<circle cx="{across:.1f}" cy="{down:.1f}" r="{radius}" fill="{color}"/>'


def drawing(width: int, height: int, parts: Iterable[str]) -> str:
    """Returns parts of a drawing as one, with its size in pixels."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"{''.join(parts)}</svg>"
    )


def _axes(chart: Chart, epochs: int) -> list[str]:
    parts = []
    for part in (0.0, 0.5, 1.0) if chart.high > chart.low else (0.5,):
        y, value = chart.top + chart.down * part, chart.high + (chart.low - chart.high) * part
        right = chart.left + chart.across
        parts.append(f'<line x1="{chart.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" {_RULE}/>')
        parts.append(label(f"{value:.3g}", chart.left - 6, y + (10 if part == 0 else 4 * (1 - part)), "end"))
    below = chart.top + chart.down + 17
    ends = (("epoch 1", chart.left, "start"), (str(epochs), chart.left + chart.across, "end"))
    return [*parts, *(label(text, x, below, anchor) for text, x, anchor in ends)]


def label(text: str, x: float, y: float, anchor: str) -> str:
    """Returns text in a drawing, without characters that HTML reserves."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" {_TEXT} text-anchor="{anchor}">{text}</text>'


def is_number(value: object) -> bool:
    """Returns whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def document(title: str, body: str) -> str:
    """Returns a page with parts of HTML below its title."""
    about = '<meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
    head = f"{about}<title>{html.escape(title)}</title><style>{_PAGE_STYLE}</style>"
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>{styled(title, body)}</body></html>'


def styled(title: str, body: str) -> str:
    """Returns parts of HTML below their title, as one element with its style."""
    return f'<div class="elephant-fit"><style>{_STYLE}</style><h1>{html.escape(title)}</h1>{body}</div>'


def card_html(kind: str, about: str, *parts: str) -> str:
    """Returns parts of HTML as one compact element with its style, which is headed by what it is of.

    >>> card_html("KerasModel", "<m>", "<p>1 epoch</p>").rpartition("</style>")[2]
    '<div><b>KerasModel</b> &lt;m&gt;</div><p>1 epoch</p></div>'
    """
    head = f"<div><b>{html.escape(kind)}</b> {html.escape(about)}</div>"
    return f'<div class="elephant-fit elephant-card"><style>{_STYLE}</style>{head}{"".join(parts)}</div>'


def folded(title: str, content: str, *, is_open: bool = False) -> str:
    """Returns content that a click on its title shows or hides; empty without any.

    >>> folded("Layers", "")
    ''
    """
    state = ' open="open"' if is_open else ""
    return f"<details{state}><summary>{html.escape(title)}</summary>{content}</details>" if content else ""


def timeline_svg(
    ranks: Sequence[Mapping[str, Any]],
    starts: Sequence[Mapping[str, Any]] = (),
    parts_s: Mapping[str, float] | None = None,
    *,
    width: int = _LINE_WIDTH,
    most_bars: int = MOST_BARS,
) -> str:
    """Returns a line for the fit, and one for each rank below, from left to right as time went; empty without ranks.

    Args:
        ranks: Times of each epoch and rank; see `elephant.monitor.rank_times.rank_times`.
        starts: What came before; see `elephant.monitor.rank_times.rank_starts`. Where it is not known, the seconds of a
            rank follow one another, and there is no line for the fit.
        parts_s: Parts of the fit's seconds; see `elephant.monitor.summary.FitSummary.parts_s`.
        width: Pixels.
        most_bars: Bars of epochs of all ranks; where there would be more, epochs that follow each other share theirs.
    """
    parts = sorted(ranks, key=lambda part: (part["rank"], part["epoch"]))
    by_rank = {rank: list(own) for rank, own in groupby(parts, key=lambda part: part["rank"])}
    if not sum(part["seconds"] for part in parts):
        return ""
    together = -(-len(PARTS) * len(ranks) // most_bars)
    lines = []
    for rank, own in by_rank.items():
        groups = [
            (epochs[0].get("began_s", 0.0) if starts else 0.0, _time_bars(f"rank {rank}", epochs))
            for epochs in (own[first : first + together] for first in range(0, len(own), together))
        ]
        groups += [(start["began_s"], _start_bars(f"rank {rank}", start)) for start in starts if start["rank"] == rank]
        lines.append((f"rank {rank}", _in_time(groups)))
    if parts_s:
        whole = [
            (seconds, _BESIDE.get(name, _OTHER), f"fit: {seconds:.2f} s {name}") for name, seconds in parts_s.items()
        ]
        lines.insert(0, ("fit", [whole]))
    longest = max(sum(bar[0] for bars in groups for bar in bars) for _, groups in lines)
    return bars_svg(lines, f"{longest:.1f} s", width=width)


def timeline_colors(parts_s: Mapping[str, float]) -> dict[str, str]:
    """Returns the colors of a time line by what they are of.

    Args:
        parts_s: Parts of the fit's seconds, as `timeline_svg` has them.
    """
    first = dict([_FIRST_STEP] if parts_s else [])
    return {**first, **dict(PARTS.values()), **{name: color for name, (_, color) in parts_with_colors(parts_s).items()}}


def parts_with_colors(parts_s: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Returns the parts of a fit's seconds that are worth showing, each with its color."""
    return {name: (part, _BESIDE.get(name, _OTHER)) for name, part in parts_s.items() if part >= SHORTEST_S}


def _in_time(groups: Sequence[tuple[float, Sequence[Bar]]]) -> list[list[Bar]]:
    """Returns groups of bars in the order of their begins, each behind a bar that is not seen where nothing was."""
    placed, at = list[list[Bar]](), 0.0
    for began_s, bars in sorted(groups, key=lambda group: group[0]):
        gap_s = max(began_s - at, 0.0)
        placed.append([*([(gap_s, _NOTHING, "")] if gap_s else []), *bars])
        at += gap_s + sum(bar[0] for bar in bars)
    return placed


def _start_bars(rank: str, start: Mapping[str, Any]) -> list[Bar]:
    seconds = {name: part for name, part in start.items() if name not in ("rank", "began_s")}
    return [(part, _BESIDE.get(name, _OTHER), f"{rank}: {part:.2f} s {name}") for name, part in seconds.items()]


def _time_bars(rank: str, epochs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    named = f"{rank}, epoch {epochs[0]['epoch'] + 1}"
    first_s = sum(part.get("first_step_s", 0.0) for part in epochs)
    sums = {name: sum(part[name] for part in epochs) for name in PARTS}
    sums["compute_s"] -= first_s
    bars = [(sums[name], color, f"{named}: {sums[name]:.2f} s {title}") for name, (title, color) in PARTS.items()]
    title, color = _FIRST_STEP
    return [*([(first_s, color, f"{named}: {first_s:.2f} s {title}")] if first_s else []), *bars]


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
        drawn.append(label(html.escape(name), 0, y + 15, "start"))
        for group in groups:
            for length, color, about in group:
                if color != _NOTHING:
                    drawn.append(
                        f'<rect x="{x:.2f}" y="{y + 3}" width="{length * scale:.2f}" height="{_LINE_HEIGHT - 6}" '
                        f'fill="{color}"><title>{html.escape(about)}</title></rect>'
                    )
                x += length * scale
            drawn.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{y}" y2="{y + _LINE_HEIGHT}" stroke="currentColor"/>')
    height = (len(lines) + 1) * _LINE_HEIGHT
    drawn.append(label(longest, width, height - 6, "end"))
    return drawing(width, height, drawn)


def epochs_table(history: Mapping[str, Sequence[Any]]) -> str:
    """Returns a table with a line for each epoch; empty without any."""
    count = max(map(len, history.values()), default=0)
    cells = {
        name: [f"{value:.4g}" if is_number(value) else "" if value is None else str(value) for value in line]
        for name, line in history.items()
    }
    rows = [
        (epoch + 1, *(line[epoch] if epoch < len(line) else "" for line in cells.values())) for epoch in range(count)
    ]
    return scrolling(table_html(("epoch", *history), rows), "numbers") if rows else ""


def curve_with_ends(name: str, history: Mapping[str, Sequence[float]], *, width: int = 400, height: int = 180) -> str:
    """Returns the curve of a metric with its first and its last number below; empty where there are no numbers.

    Args:
        name: Of the metric.
        history: One number per epoch by metric.
        width: Pixels.
        height: Pixels.
    """
    curve = curve_svg(name, history, width=width, height=height, has_axes=True)
    if not curve:
        return ""
    ends = [
        f"{about} {line[0]:.4g} to {line[-1]:.4g}"
        for about, line in (("training", history.get(name)), ("validation", history.get(f"val_{name}")))
        if line and is_number(line[0]) and is_number(line[-1])
    ]
    return f"<figure><figcaption>{html.escape(name)}</figcaption>{curve}<p>{'; '.join(ends)}</p></figure>"


def share_html(parts: Mapping[str, tuple[float, str]]) -> str:
    """Returns a line divided into seconds, and their names above; empty without any.

    Args:
        parts: Seconds and color by name.
    """
    whole = sum(seconds for seconds, _ in parts.values())
    if not whole:
        return ""
    bars = (
        f'<i style="width:{100 * seconds / whole:.2f}%;background:{color}"></i>' for seconds, color in parts.values()
    )
    names = legend({f"{name} {seconds:.1f} s": color for name, (seconds, color) in parts.items()})
    return f'{names}<div class="share">{"".join(bars)}</div>'


def layers_table(layers: Sequence[Mapping[str, Any]], more: int = 0) -> str:
    """Returns a table with a line for each layer; empty without any.

    Args:
        layers: Each with ``name``, ``kind``, ``shape`` of its output, as text, ``params``, and ``trained``, how many of
            these training changes; the numbers are None before they are known.
        more: Number of layers behind these.
    """
    shown = layers[:MOST_LAYERS]
    rest = len(layers) + more - len(shown)
    # Most models are trained as a whole.
    is_partly = any(layer["trained"] != layer["params"] for layer in shown)
    columns = {"layer": "name", "type": "kind", "output": "shape", "parameters": "params"}
    columns |= {"trained": "trained"} if is_partly else {}
    rows = [[_count(layer[column]) for column in columns.values()] for layer in shown]
    rows += [[f"and {rest:,} more", *[""] * (len(columns) - 1)]] if rest > 0 else []
    return scrolling(table_html(list(columns), rows), "numbers layers") if rows else ""


def _count(value: str | int | None) -> str:
    return f"{value:,}" if isinstance(value, int) else value or ""


def legend(colors: Mapping[str, str]) -> str:
    """Returns a line that says which color is what."""
    parts = (f'<span><i style="background:{color}"></i>{html.escape(title)}</span>' for title, color in colors.items())
    return f'<span class="legend">{"".join(parts)}</span>'


def items_html(texts: Sequence[str]) -> str:
    """Returns a list of texts; empty without any."""
    return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</ul>" if texts else ""


def pairs_html(values: Mapping[Any, object], *titles: str) -> str:
    """Returns a table of names and values; empty without any."""
    return scrolling(table_html(titles, values.items()), "pairs") if values else ""


def scrolling(content: str, kind: str) -> str:
    """Returns content that is wider than a narrow screen in a box of its own, which a keyboard can scroll too."""
    return f'<div class="scroll {kind}" tabindex="0">{content}</div>'
