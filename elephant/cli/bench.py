"""``elephant bench``: the user's own model and rows on the user's own cluster, with one worker and with more.

Each number of workers is a fit of its own, of a few epochs of so many steps; its first epoch, in which the model is
traced, does not count. `elephant.monitor.scaling` has what is made of them.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elephant import __version__
from elephant.cli.own_model import PLACE, failed, note, run_command, training_settings
from elephant.cluster.executors import awaited_slots
from elephant.config import Timeouts
from elephant.errors import ConfigurationError
from elephant.jobs.inputs import estimator_of, read_rows
from elephant.jobs.settings import Setting
from elephant.jobs.submission import json_line, line_of
from elephant.kinds import SWITCH, TEXT, Kind, integer
from elephant.options import OPTION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from elephant.monitor.scaling import ScalingRun
    from elephant.spark.file_formats import Files

NAME = "elephant bench"
DESCRIPTION = (
    "Trains your model on your rows for some steps with one worker and with more, and says what more workers bring, "
    "where their time goes, and what to change. "
    "Exit codes: 0 every run was measured; 1 a run failed; 2 wrong arguments; 130 interrupted."
)
DEFAULT_REPEATS = 5
_RUN_S, _FIRST_STEPS, _MOST_GROWTH = 60.0, 5, 200
_WIDTH = 140


def _counts(value: Any) -> list[int]:
    counts = [int(part) for part in (value.split(",") if isinstance(value, str) else value)]
    if not counts or min(counts) < 1:
        raise ValueError
    return sorted(set(counts))


SETTINGS = (
    *PLACE,
    Setting("workers", Kind(list, "numbers such as 1,2,4", _counts), "of each run: powers of two up to the slots"),
    Setting("steps", integer(1), "of an epoch; as many as make a run of about a minute"),
    Setting("repeats", integer(1), f"epochs of each run that count ({DEFAULT_REPEATS})"),
    Setting("strong", SWITCH, "divide batchSize by the workers, in place of one batchSize for each"),
    Setting("json", SWITCH, "print one line of JSON in place of the table"),
    Setting("output", TEXT, "a file for the same as an HTML page"),
    *training_settings(),
)


def bench(words: Sequence[str]) -> int:
    """Measures what the arguments ask for, prints it, and returns the exit code.

    Raises:
        SystemExit: ``--help`` was asked for, and has been printed.
    """
    return run_command(NAME, DESCRIPTION, SETTINGS, words, measure, _report)


def workers_up_to(slots: int) -> list[int]:
    """Returns the powers of two up to a number of slots.

    >>> workers_up_to(6)
    [1, 2, 4]
    """
    return [2**power for power in range(max(slots, 1).bit_length())]


def measure(session: SparkSession, settings: Mapping[str, Any]) -> list[ScalingRun]:
    """Returns a run for each number of workers; one that failed says why, and the others go on.

    Raises:
        ConfigurationError: Settings about rows exclude each other.
        DataError: Spark cannot read the rows.
    """
    from elephant.cli.doctor import DEFAULT_WORKERS

    files = read_rows(session, settings)
    slots_s = Timeouts.of(settings.get("timeouts", {})).slot_patience_s
    known = settings.get("workers")
    counts = known or workers_up_to(
        awaited_slots(session, DEFAULT_WORKERS, slots_s, functools.partial(note, NAME)) or DEFAULT_WORKERS
    )
    repeats, runs = settings.get("repeats", DEFAULT_REPEATS), []
    for workers in counts:
        try:
            steps = settings.get("steps") or _calibrated(files, settings, workers, repeats)
            run = _run(files, settings, workers, steps, repeats)
            note(NAME, f"workers={workers}, {repeats} times {steps} steps: {run.rows_per_s:,.0f} rows/s")
        except Exception as error:
            run = _empty(settings, workers, error=line_of(error))
            note(NAME, f"workers={workers}: {run.error}")
        runs.append(run)
    return runs


def grown_steps(steps: int, took_s: float, wanted_s: float) -> int:
    """Returns how many steps take so many seconds, when some have taken so long.

    >>> grown_steps(5, 0.5, 10.0), grown_steps(5, 60.0, 10.0), grown_steps(5, 0.0, 10.0)
    (100, 1, 1000)
    """
    return max(min(round(steps * wanted_s / max(took_s, 1e-9)), steps * _MOST_GROWTH), 1)


def _calibrated(files: DataFrame | Files, settings: Mapping[str, Any], workers: int, repeats: int) -> int:
    """Returns the steps of an epoch with which a run takes about a minute; what runs here warms the executors up."""
    steps = _FIRST_STEPS
    # A few steps are mostly an epoch's beginning and end: some seconds of them tell more.
    for wanted_s in (2.0, _RUN_S / (repeats + 1)):
        run = _run(files, settings, workers, steps, 1)
        steps = grown_steps(steps, steps * run.step_s, wanted_s)
    return steps


def _run(files: DataFrame | Files, settings: Mapping[str, Any], workers: int, steps: int, repeats: int) -> ScalingRun:
    from elephant.monitor.scaling import ScalingRun

    empty = _empty(settings, workers)
    own = {"numWorkers": workers, "epochs": 1 + repeats, "stepsPerEpoch": steps, "batchSize": empty.batch_size}
    fitted = estimator_of({**settings, **own, "verbose": 0}).fit(files)
    return ScalingRun.of(fitted.summary, workers=workers, batch_size=empty.batch_size, steps=steps)


def _empty(settings: Mapping[str, Any], workers: int, *, error: str = "") -> ScalingRun:
    from elephant.monitor.scaling import ScalingRun

    batch_size = settings.get("batchSize", OPTION["batch_size"].default)
    own = max(batch_size // workers, 1) if settings.get("strong") else batch_size
    return ScalingRun(workers=workers, batch_size=own, error=error)


def _report(runs: Sequence[ScalingRun], settings: Mapping[str, Any]) -> int:
    from elephant.monitor.advice import advice_on_runs
    from elephant.monitor.scaling import as_json, page

    texts = advice_on_runs(runs, settings)
    facts = {
        "elephant": __version__,
        "cluster": _cluster_of(settings),
        "scaling": "strong" if settings.get("strong") else "weak",
        **{name: value for name, value in settings.items() if name not in ("json", "output", "strong", "master")},
    }
    if settings.get("json"):
        text = json_line({**facts, "runs": as_json(runs), "advice": texts})
    else:
        text = as_text(runs, texts)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    if "output" in settings:
        try:
            Path(settings["output"]).write_text(page(runs, texts, facts), encoding="utf-8")
        except OSError as error:
            return failed(
                NAME, ConfigurationError(f"output: expected a file that can be written. Received: {error}."), 1
            )
    return 1 if any(run.error for run in runs) else 0


def _cluster_of(settings: Mapping[str, Any]) -> str:
    from elephant.cli.doctor import submitted

    return settings.get("master") or settings.get("remote") or ("spark-submit" if submitted() else "this machine")


def as_text(runs: Sequence[ScalingRun], texts: Sequence[str]) -> str:
    """Returns a line for each run, and the advice below."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from elephant.monitor.scaling import TITLES, counted, table_rows

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for title in TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    for row in table_rows(runs):
        table.add_row(*row)
    output = io.StringIO()
    console = Console(file=output, width=_WIDTH, force_terminal=False, force_jupyter=False)
    console.print(table)
    for run in runs:
        if run.error:
            console.print(Text(f"{counted(run.workers)} failed: {run.error}"))
    for text in texts:
        console.print()
        console.print(Text(text))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())
