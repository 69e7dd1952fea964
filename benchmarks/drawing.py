"""Pictures of measurements as SVG, in the colors of a light or a dark page."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from report import Measurement

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .axis { stroke: #8c959f } .bar { fill: #2563eb }
.other { fill: #8c959f } .span { stroke: #ea580c; stroke-width: 2 } .lost { fill: #ea580c; fill-opacity: 0.2 }
.note { font-weight: 600 } polyline { fill: none; stroke: #2563eb; stroke-width: 2.5 }
polyline.beside { stroke: #8c959f; stroke-width: 1.5; stroke-dasharray: 5 3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .bar { fill: #58a6ff } .span { stroke: #f0883e } .lost { fill: #f0883e; fill-opacity: 0.3 }
polyline { stroke: #58a6ff } }
"""
_LABELS, _BARS, _ROW, _TOP = 340, 400, 22, 40
_MOST_PERCENT = 450
_CURVES = (820, 320)
# What is left of, above, right of and below the curves.
_EDGES = (60, 44, 24, 42)
# What the bars of `differences` are called, in their order.
_PROGRAMS = {
    "keras": "Keras, one process in float32",
    "elephant": "elephant, 4 workers",
    "sampler": "TorchDistributor, PyTorch's DistributedSampler",
    "ray": "Ray Train on ray.data",
    "files": "TorchDistributor, each process its own file",
}


def rates(runs_by_label: Mapping[str, Sequence[float]]) -> str:
    """Returns bars of medians in per cent, with a stroke from the least to the most of the runs.

    Args:
        runs_by_label: Ratios of the runs of each comparison.
    """
    width, height = _LABELS + _BARS + 70, _TOP + _ROW * len(runs_by_label) + 10
    scale = _BARS / _MOST_PERCENT

    def place(ratio: float) -> float:
        return _LABELS + min(100 * ratio, _MOST_PERCENT) * scale

    native = place(1.0)
    drawn = [f'<text x="{native:.1f}" y="16" text-anchor="middle">100 %: the other side</text>']
    for line, (label, ratios) in enumerate(runs_by_label.items()):
        y = _TOP + line * _ROW
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        drawn += [
            *_bar(label, y, place(middle), "bar"),
            f'<line class="span" x1="{place(low):.1f}" x2="{place(high):.1f}" y1="{y + 8}" y2="{y + 8}"/>',
            f'<text x="{place(high) + 6:.1f}" y="{y + 12}">{100 * middle:.0f} %</text>',
        ]
    drawn.append(
        f'<line class="axis" x1="{native:.1f}" x2="{native:.1f}" y1="22" y2="{height}" stroke-dasharray="4 3"/>'
    )
    return _svg(width, height, "elephant's rows per second over those of the other side, in per cent", drawn)


def differences(measured: Sequence[Measurement]) -> str:
    """Returns bars on a logarithmic scale: how far weights are from those of one process, and what rows counted."""
    by_program = {each.case["program"]: each for each in measured}
    shown = [by_program[name] for name in _PROGRAMS if name in by_program]
    # A place of its own where there is no difference at all.
    digits = [math.floor(math.log10(each.ratio)) if each.ratio else -9 for each in shown]
    least, most = min(digits), max(digits) + 1
    top = _TOP + 24
    width, height = _LABELS + _BARS + 240, top + (_ROW + 8) * len(shown) + 14

    def place(value: float) -> float:
        return _LABELS + _BARS * (math.log10(max(value, 10.0**least)) - least) / (most - least)

    passes, rows = shown[0].case["passes"], shown[0].case["rows"]
    title = f"Largest difference from one process' weights in float64, {passes} passes over {rows:,} rows"
    drawn = [f'<text x="{_LABELS}" y="16">{title}</text>']
    for power in range(least, most + 1):
        x = place(10.0**power)
        drawn.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="46" y2="{height - 8}" stroke-opacity="0.35"/>')
        drawn.append(f'<text x="{x:.1f}" y="40" text-anchor="middle">{_power(power)}</text>')
    for line, each in enumerate(shown):
        y, end = top + line * (_ROW + 8), place(each.ratio)
        own = each.case["program"] == "elephant"
        drawn += _bar(_PROGRAMS[each.case["program"]], y, end, "bar" if own else "other", "note" if own else "")
        said = f"{_scientific(each.ratio)}, {_counted(each.case)}"
        drawn.append(f'<text x="{end + 6:.1f}" y="{y + 12}"{_class("note" if own else "")}>{said}</text>')
    return _svg(width, height, title, drawn)


def killed_fit(measured: Measurement) -> str:
    """Returns two curves of losses over seconds: of a fit in which a process was killed, and of one left alone."""
    series = measured.series
    width, height = _CURVES
    left, top, right, bottom = _EDGES
    last_s = max(series["killed_s"][-1], series["undisturbed_s"][-1])
    losses = (*series["killed_loss"], *series["undisturbed_loss"])
    low, high = math.log10(min(losses)), math.log10(max(losses))

    def point(seconds: float, loss: float) -> tuple[float, float]:
        x = left + (width - left - right) * seconds / last_s
        return x, top + (height - top - bottom) * (high - math.log10(loss)) / (high - low)

    def line(name: str, of_class: str) -> str:
        points = map(point, series[f"{name}_s"], series[f"{name}_loss"])
        return f'<polyline{_class(of_class)} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'

    begin, end = (point(seconds, max(losses))[0] for seconds in series["lost_s"])
    base = height - bottom
    drawn = [
        f'<rect class="lost" x="{begin:.1f}" y="{top}" width="{end - begin:.1f}" height="{base - top}"/>',
        f'<line class="span" x1="{begin:.1f}" x2="{begin:.1f}" y1="{top}" y2="{base}"/>',
        f'<line class="axis" x1="{left}" x2="{width - right}" y1="{base}" y2="{base}"/>',
        f'<line class="axis" x1="{left}" x2="{left}" y1="{top}" y2="{base}"/>',
        line("undisturbed", "beside"),
        line("killed", ""),
    ]
    for seconds in range(0, int(last_s) + 1, max(round(last_s / 8), 1)):
        x, _ = point(seconds, max(losses))
        drawn.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{seconds}</text>')
    for loss in _round_values(min(losses), max(losses)):
        _, y = point(0, loss)
        drawn.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{loss:g}</text>')
    lost_s = series["lost_s"][1] - series["lost_s"][0]
    lost = f"SIGKILL ends one of {measured.case['ranks']} training processes."
    equal = "the same to the bit" if measured.medians["weights_as_expected"] else "different"
    drawn += [
        _right(width - right, height - 8, "seconds since the first epoch ended"),
        f'<text x="{left - 44}" y="{top - 12}">loss</text>',
        _right(width - right, top + 14, lost, "note"),
        _right(width - right, top + 32, f"All take the next step {lost_s:.1f} s later."),
        _right(width - right, top + 50, f"In the end the weights are {equal}"),
        _right(width - right, top + 66, "as of the same fit left alone (dashed)."),
    ]
    return _svg(width, height, "Loss of a fit in which a training process is killed", drawn)


def _bar(label: str, y: int, end: float, of_class: str, text_class: str = "") -> tuple[str, str]:
    name = _right(_LABELS - 8, y + 12, label, text_class)
    return name, f'<rect class="{of_class}" x="{_LABELS}" y="{y}" width="{end - _LABELS:.1f}" height="{_ROW - 6}"/>'


def _right(x: int, y: int, words: str, of_class: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="end"{_class(of_class)}>{html.escape(words)}</text>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _counted(case: Mapping[str, Any]) -> str:
    """Returns how the rows of a pass were counted, in words."""
    more = case["counted"] - case["rows"]
    if case["program"] == "files":
        return "rows count unequally"
    if not more:
        return "each row once"
    return f"{more} rows twice" if more > 0 else f"{-more} row{'s' if more < -1 else ''} left out"


def _power(power: int) -> str:
    digits = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"


def _scientific(value: float) -> str:
    """Returns a number with the power of ten that tells its size.

    >>> _scientific(0.00073)
    '7.3 × 10⁻⁴'
    """
    digits, power = f"{value:.1e}".split("e")
    return f"{digits} × {_power(int(power))}"


def _round_values(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten within bounds.

    >>> _round_values(0.04, 0.6)
    [0.05, 0.1, 0.2, 0.5]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]


def _svg(width: int, height: int, title: str, drawn: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>{''.join(drawn)}</svg>\n"
    )
