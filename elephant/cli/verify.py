"""``elephant verify``: two workers against one process, on the user's own model and rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elephant import __version__
from elephant.cli.own_model import PLACE, run_command, training_settings
from elephant.jobs.inputs import estimator_of, read_rows
from elephant.jobs.settings import Setting
from elephant.jobs.submission import json_line
from elephant.kinds import SWITCH, integer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.driver.verification import Verification

NAME = "elephant verify"
DESCRIPTION = (
    "Usage: elephant verify MODEL ROWS [OPTION ...]. "
    "Trains your model on some of your rows with two workers and with one process of Keras, which take the same global "
    "batches, and prints how far apart they are, and what makes the rows of a batch meet where anything does. "
    "Exit codes: 0 equal; 1 not equal, or a failure; 2 wrong arguments; 130 interrupted."
)
# What a model and rows are, where no option says so.
_PLACES = ("--model", "--data")
_DEFAULT_ROWS = 1000
SETTINGS = (
    *PLACE,
    Setting("rows", integer(2), f"how many of them ({_DEFAULT_ROWS})"),
    Setting("json", SWITCH, "print one line of JSON in place of the text"),
    *training_settings(("mode", "shuffle", "augmentation")),
)


def verify(words: Sequence[str]) -> int:
    """Compares what the arguments ask for, prints it, and returns the exit code.

    Raises:
        SystemExit: ``--help`` was asked for, and has been printed.
    """
    return run_command(NAME, DESCRIPTION, SETTINGS, _with_options(words), _compare, _report)


def _with_options(words: Sequence[str]) -> list[str]:
    """Returns arguments whose first ones, MODEL and ROWS, are options as well.

    >>> _with_options(["net:build", "rows.parquet", "--rows", "500"])
    ['--model', 'net:build', '--data', 'rows.parquet', '--rows', '500']
    """
    count = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    count = min(count, len(_PLACES))
    named = [word for pair in zip(_PLACES, words[:count], strict=False) for word in pair]
    return [*named, *words[count:]]


def _compare(session: SparkSession, settings: Mapping[str, Any]) -> Verification:
    rows = read_rows(session, settings)
    return estimator_of({**settings, "verbose": 0}).verify(rows, rows=settings.get("rows", _DEFAULT_ROWS))


def _report(verification: Verification, settings: Mapping[str, Any]) -> int:
    if settings.get("json"):
        text = json_line({"elephant": __version__, **verification.as_json()})
    else:
        text = str(verification)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return 0 if verification.equal else 1
