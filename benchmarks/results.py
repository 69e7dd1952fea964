"""Runs the comparisons with other ways, and writes a dated file of each theme and the pictures of the pages.

::

    python benchmarks/results.py --torch FOLDER          # what `make bench` runs: about a quarter of an hour
    python benchmarks/results.py --only inference        # one theme; others stay in the pictures as they are
    python benchmarks/results.py --only restart exactness --peers FOLDER   # the pictures at the top of the README
    python benchmarks/results.py --runs 1 --repetitions 1

Each theme is measured in several runs, each of them in new processes; a table has their median, least and most.
Measure on a machine that does nothing else. The lines of JSON stand at the end of each file.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import drawing
from report import Measurement
from table import TITLES, case_of, machine, run_script

ROOT = Path(__file__).resolve().parent.parent


def percent(ratio: float) -> str:
    """Returns a ratio in per cent.

    >>> percent(1.234)
    '123 %'
    """
    return f"{100 * ratio:.0f} %"


def in_seconds(ratio: float) -> str:
    """Returns a number of seconds as a table shows it."""
    return f"{ratio:.2f} s"


def in_powers(ratio: float) -> str:
    """Returns a number whose size is what matters."""
    return f"{ratio:.1e}"


@dataclass(frozen=True)
class Theme:
    """What one file is about.

    Args:
        title: Of the file.
        script: The benchmark.
        arguments: Its arguments.
        about: What its ratios are, and what each side pays.
        repetitions: Of which the medians of a run are.
        runs: Of the script, whatever was asked for; None where a run more says more.
        words: A ratio as the table has it.
    """

    title: str
    script: str
    arguments: Sequence[str]
    about: str
    repetitions: int = 3
    runs: int | None = None
    words: Callable[[float], str] = percent


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
    "restart": Theme(
        "A fit of which a training process is killed",
        "killed_fit",
        (),
        _text("""
            Seconds from the SIGKILL until all ranks have taken the next step together. The same fit, left alone, has
            the same losses and the same weights, to the bit, or the program fails. `benchmarks/restarts.py` kills more.
        """),
        repetitions=5,
        runs=1,
        words=in_seconds,
    ),
    "exactness": Theme(
        "Weights of four workers against one process in float64",
        "exactness",
        (),
        _text("""
            The largest difference of a weight over the largest weight, after full-batch gradient descent on 1,797 rows
            in four files of 700, 600, 400 and 97 rows. All sides make as many steps, and nothing but the rows that
            count makes a difference. Nothing here depends on the machine's speed.
        """),
        repetitions=1,
        runs=1,
        words=in_powers,
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
# Differences, which stand among the lines of JSON.
_NO_RATIOS = ("fit_seconds_beyond_steps", "fit_accuracy_lost")


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


def table(measured: Sequence[Measurement], words: Callable[[float], str] = percent) -> Iterable[str]:
    """Yields the lines of a Markdown table: the ratios of all runs, in per cent or in other words, and the medians."""
    yield "| What | Case | Median | Least to most | Runs | Medians of the last run |"
    yield "|---|---|---|---|---|---|"
    for (measure, case), runs in by_case(measured).items():
        if measure in _NO_RATIOS:
            continue
        ratios = [each.ratio for each in runs]
        shown = {name: value for name, value in runs[-1].medians.items() if "rows" in name or "seconds" in name}
        behind = ", ".join(f"{name} {value:,.{0 if value > 100 else 1}f}" for name, value in shown.items())
        cells = (TITLES[measure], case, words(statistics.median(ratios)), f"{words(min(ratios))} to "
                 f"{words(max(ratios))}", str(len(runs)), behind)  # fmt: skip
        yield f"| {' | '.join(cells)} |"


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
            *table(measured, theme.words),
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


def pictures(measured: Sequence[Measurement]) -> Mapping[str, str]:
    """Returns the drawings of what was measured, by the names of their files."""
    shown = {
        _SHOWN[measure].format(**runs[0].case): [each.ratio for each in runs]
        for (measure, _), runs in by_case(measured).items()
        if measure in _SHOWN
    }
    drawn = {"parity.svg": drawing.rates(shown)} if shown else {}
    killed = [each for each in measured if each.measure == "killed_fit"]
    if killed:
        drawn["killed_fit.svg"] = drawing.killed_fit(killed[-1])
    different = [each for each in measured if each.measure == "difference_from_one_process"]
    if different:
        drawn["exactness.svg"] = drawing.differences(different)
    return drawn


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
    if options.peers is not None and name == "exactness":
        words += ["--peers", str(options.peers)]
    return [each for _ in range(theme.runs or options.runs) for each in run_script(theme.script, words)]


def main() -> None:
    """Measures what the arguments ask for, and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=THEMES, default=list(THEMES), help="themes; none for the pictures")
    parser.add_argument("--runs", type=int, default=3, help="of each theme (3)")
    parser.add_argument("--repetitions", type=int, help="of every measurement in a run; each theme's own without it")
    parser.add_argument("--torch", type=Path, metavar="FOLDER", help="where PyTorch is, if not in this environment")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="environment with PyTorch and Ray, for exactness")
    parser.add_argument("--from", type=Path, dest="lines", help="a file of lines that were measured before")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results", help="for the files")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "images", help="for the pictures")
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
        # Where peers are concerns nobody else.
        "command": shlex.join(
            "FOLDER" if word in (str(options.torch), str(options.peers)) else word
            for word in ("python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:])
        ),
    }
    for name in options.only:
        measured = lines_in(options.lines.read_text()) if options.lines is not None else measure(name, options)
        if measured:
            target = options.folder / f"{name}_{hardware()}_{date}.md"
            target.write_text(page(THEMES[name], measured, facts))
            print(target)
    options.pictures.mkdir(parents=True, exist_ok=True)
    for name, drawn in pictures(newest(options.folder)).items():
        (options.pictures / name).write_text(drawn)


if __name__ == "__main__":
    main()
