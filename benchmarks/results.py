"""Runs the comparisons with the native way, and writes a dated file of each theme and one chart.

::

    python benchmarks/results.py --torch FOLDER          # what `make bench` runs: about a quarter of an hour
    python benchmarks/results.py --only inference        # one theme; those that were measured before stay in the chart
    python benchmarks/results.py --runs 1 --repetitions 1

Each theme is measured in several runs, each of them in new processes; a table has their median, least and most.
Measure on a machine that does nothing else. The lines of JSON stand at the end of each file.
"""

from __future__ import annotations

import argparse
import datetime
import html
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from report import Measurement
from table import TITLES, case_of, machine, run_script

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Theme:
    """What one file is about.

    Args:
        title: Of the file.
        script: The benchmark.
        arguments: Its arguments.
        about: What its ratios are, and what each side pays.
        repetitions: Of which the medians of a run are.
    """

    title: str
    script: str
    arguments: Sequence[str]
    about: str
    repetitions: int = 3


def _text(lines: str) -> str:
    return " ".join(lines.split())


_RATES = "100 % is the other side's rate, or the ideal of so many ranks; more is faster."
_UNDISTURBED = _text("""
    Those epochs count that lasted at most 1.3 times as long as the quickest of that side in the run: on one core,
    threads of `model.fit` itself slept for 0.6 to 8 s of many epochs.
""")
THEMES: Mapping[str, Theme] = {
    "training": Theme(
        "Training against model.fit and DistributedDataParallel",
        "parity",
        ("--only", "training"),
        _text(f"""
            {_RATES} Ranks pay for the exchange of gradients, for metrics over all ranks and for reading their rows from
            a mapped file; the other sides have their rows in memory. Nobody pays for imports, for Spark, or for the
            first epoch, in which a step is traced or compiled. A tuned `model.fit` takes 32 steps per call of the
            runtime, on arrays or on a `tf.data.Dataset`, whichever is quicker. {_UNDISTURBED}
        """),
    ),
    "fits": Theme(
        "Whole fits against one process",
        "fit",
        (),
        _text("""
            100 % are the other side's seconds; less is faster. A later fit pays for reading its table, for starting its
            ranks and for tracing; the other side is a tuned `model.fit` alone, in a process that has imported Keras and
            has its arrays in memory. The first fit of a session pays for the import on its executors as well, not for
            that on its driver, and a program for all imports and for Spark's start and end; the other side is a process
            from its start, with its import and with reading its arrays.
        """),
    ),
    "scaling": Theme(
        "Weak scaling between network namespaces",
        "parity",
        ("--only", "namespaces"),
        f"{_RATES} All sides are ranks, and pay for the same but for the exchange. {_UNDISTURBED}",
    ),
    "inference": Theme(
        "Inference against model.predict and predict_batch_udf",
        "inference",
        ("--rows", "100000"),
        _text(f"""
            {_RATES} `transform` and `evaluate` pay for reading a Parquet table and for the way of rows and results
            between processes, of DataFrames for Spark's rows as well; `model.predict` and `model.evaluate` have their
            rows in memory, all cores, and the quicker of two sizes of batches. `predict_batch_udf` pays for the same as
            `predict_udf`. Nobody pays for loading and tracing the model.
        """),
    ),
}
# What the chart shows of a measure.
_SHOWN = {
    "rank_against_tuned_model_fit": "{workload}, one core against model.fit, tuned",
    "ranks_against_tuned_model_fit_on_all_cores": "{workload}, {ranks} ranks against model.fit, tuned, all cores",
    "ranks_against_silent_processes": "{workload}, {ranks} ranks against as many that do not talk",
    "ranks_against_compiled_ddp": "{workload}, {ranks} ranks against PyTorch DDP, compiled",
    "weak_scaling_by_processor_time": "{workload}, {ranks} hosts against one rank, processor time",
    "predict_udf_against_predict_batch_udf": "predict_udf against predict_batch_udf",
    "predict_udf_against_predict_on_batch": "predict_udf against the same with predict_on_batch",
}
_MOST_PERCENT = 450
# Differences, which stand among the lines of JSON.
_NO_RATIOS = ("fit_seconds_beyond_steps", "fit_accuracy_lost")
_LABELS, _BARS, _ROW, _TOP = 340, 400, 22, 40
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .axis { stroke: #8c959f } .bar { fill: #2563eb }
.span { stroke: #ea580c; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .bar { fill: #58a6ff } .span { stroke: #f0883e } }
"""


def by_case(measured: Sequence[Measurement]) -> dict[tuple[str, str], list[Measurement]]:
    """Returns the runs of each comparison by its measure and case, in the order of the titles."""
    order = list(TITLES)
    groups: dict[tuple[str, str], list[Measurement]] = {}
    unknown = [each.measure for each in measured if each.measure not in TITLES]
    if unknown:
        raise SystemExit(f"results: expected measures that table.TITLES has. Received: {', '.join(unknown)}.")
    for each in sorted(measured, key=lambda each: order.index(each.measure)):
        groups.setdefault((each.measure, case_of(each)), []).append(each)
    return groups


def table(measured: Sequence[Measurement]) -> Iterable[str]:
    """Yields the lines of a Markdown table: the ratios of all runs in per cent, and the medians behind them."""
    yield "| What | Case | Median | Least to most | Runs | Medians of the last run |"
    yield "|---|---|---|---|---|---|"
    for (measure, case), runs in by_case(measured).items():
        if measure in _NO_RATIOS:
            continue
        ratios = [each.ratio for each in runs]
        shown = {name: value for name, value in runs[-1].medians.items() if "rows" in name or "seconds" in name}
        behind = ", ".join(f"{name} {value:,.{0 if value > 100 else 1}f}" for name, value in shown.items())
        cells = (TITLES[measure], case, percent(statistics.median(ratios)), f"{percent(min(ratios))} to "
                 f"{percent(max(ratios))}", str(len(runs)), behind)  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def percent(ratio: float) -> str:
    """Returns a ratio in per cent.

    >>> percent(1.234)
    '123 %'
    """
    return f"{100 * ratio:.0f} %"


def cpu_model() -> str:
    """Returns what the processor calls itself."""
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0].strip() if names else platform.machine()


def hardware() -> str:
    """Returns the processor and its cores as a part of a file's name."""
    words = re.sub(r"\(\w+\)|@|processor|cpu", " ", cpu_model(), flags=re.IGNORECASE)
    return "-".join(re.findall(r"[\w.]+", f"{words} {len(os.sched_getaffinity(0))} cores".lower()))


def commit() -> str:
    """Returns the commit that is checked out, and whether files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def page(theme: Theme, measured: Sequence[Measurement], facts: Mapping[str, str]) -> str:
    """Returns the file of a theme as Markdown, with the lines of JSON at its end."""
    return "\n".join(
        (
            f"# {theme.title}",
            "",
            theme.about,
            "",
            *table(measured),
            "",
            *(f"- {name}: {value}" for name, value in facts.items()),
            "",
            "```json",
            *(each.to_line() for each in measured),
            "```",
            "",
        )
    )


def lines_in(text: str) -> list[Measurement]:
    """Returns the measurements in a text that has them as lines of JSON."""
    return [Measurement.from_line(line) for line in text.splitlines() if line.startswith('{"measure"')]


def chart(measured: Sequence[Measurement]) -> str:
    """Returns a drawing of the medians in per cent, with a stroke from the least to the most of the runs."""
    shown = {key: runs for key, runs in by_case(measured).items() if key[0] in _SHOWN}
    width, height = _LABELS + _BARS + 70, _TOP + _ROW * len(shown) + 10
    scale = _BARS / _MOST_PERCENT

    def place(ratio: float) -> float:
        return _LABELS + min(100 * ratio, _MOST_PERCENT) * scale

    native = place(1.0)
    drawn = [
        f"<title>elephant's rows per second over those of the other side, in per cent</title><style>{_STYLE}</style>",
        f'<text x="{native:.1f}" y="16" text-anchor="middle">100 %: the other side</text>',
    ]
    for line, ((measure, _), runs) in enumerate(shown.items()):
        ratios, y = [each.ratio for each in runs], _TOP + line * _ROW
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        label = html.escape(_SHOWN[measure].format(**runs[0].case))
        drawn += [
            f'<text x="{_LABELS - 8}" y="{y + 12}" text-anchor="end">{label}</text>',
            f'<rect class="bar" x="{_LABELS}" y="{y}" width="{place(middle) - _LABELS:.1f}" height="{_ROW - 6}"/>',
            f'<line class="span" x1="{place(low):.1f}" x2="{place(high):.1f}" y1="{y + 8}" y2="{y + 8}"/>',
            f'<text x="{place(high) + 6:.1f}" y="{y + 12}">{percent(middle)}</text>',
        ]
    drawn.append(
        f'<line class="axis" x1="{native:.1f}" x2="{native:.1f}" y1="22" y2="{height}" stroke-dasharray="4 3"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"{''.join(drawn)}</svg>\n"
    )


def newest(folder: Path) -> list[Measurement]:
    """Returns the measurements of the last file of each theme."""
    files = [sorted(folder.glob(f"{name}_*.md"), key=lambda path: path.stem.rsplit("_", 1)[1]) for name in THEMES]
    return [each for paths in files if paths for each in lines_in(paths[-1].read_text())]


def measure(name: str, options: argparse.Namespace) -> list[Measurement]:
    """Returns what all runs of a theme have measured."""
    theme = THEMES[name]
    repetitions = options.repetitions or theme.repetitions
    words = [*theme.arguments, "--repetitions", str(repetitions)]
    if options.torch is not None and name == "training":
        words += ["--torch", str(options.torch)]
    return [each for _ in range(options.runs) for each in run_script(theme.script, words)]


def main() -> None:
    """Measures what the arguments ask for, and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=THEMES, default=list(THEMES), help="themes; none for the chart")
    parser.add_argument("--runs", type=int, default=3, help="of each theme (3)")
    parser.add_argument("--repetitions", type=int, help="of every measurement in a run; each theme's own without it")
    parser.add_argument("--torch", type=Path, metavar="FOLDER", help="where PyTorch is, if not in this environment")
    parser.add_argument("--from", type=Path, dest="lines", help="a file of lines that were measured before")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results", help="for the files")
    parser.add_argument("--chart", type=Path, default=ROOT / "docs" / "images" / "parity.svg", help="for the chart")
    options = parser.parse_args()
    if options.torch is not None:
        # So that its version is told.
        sys.path.append(str(options.torch.resolve()))
    options.folder.mkdir(parents=True, exist_ok=True)
    date = datetime.date.today().isoformat()
    # Before anything is measured: that is a load, and what is written makes the work tree another one.
    facts = {
        "date": date,
        "processor": f"{cpu_model()}, {machine()}",
        "commit": commit(),
        # Where PyTorch is concerns nobody else.
        "command": shlex.join(
            "FOLDER" if word == str(options.torch) else word
            for word in ("python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:])
        ),
    }
    for name in options.only:
        measured = lines_in(options.lines.read_text()) if options.lines is not None else measure(name, options)
        if measured:
            target = options.folder / f"{name}_{hardware()}_{date}.md"
            target.write_text(page(THEMES[name], measured, facts))
            print(target)
    options.chart.parent.mkdir(parents=True, exist_ok=True)
    options.chart.write_text(chart(newest(options.folder)))


if __name__ == "__main__":
    main()
