"""Arguments, output and exit code of the program ``elephant``. Arguments are read without Spark and without Keras."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from elephant import __version__
from elephant.cluster.session import require_master
from elephant.errors import ConfigurationError, shown_text
from elephant.kinds import METRIC
from elephant.options import MODES, full_mode

if TYPE_CHECKING:
    from rich.table import Table

    from elephant.cluster.checks.registry import CheckResult

_EPILOG = """\
exit codes: 0 a fit would work; 1 a fit would fail; 2 wrong arguments; 130 interrupted

without --master and --remote the executors are processes of this machine, and under
spark-submit they are those of its application
"""


_RUN_EPILOG = """\
arguments of the script come behind two dashes: elephant run train.py --num-workers 4 -- --epochs 3

exit codes: 0 every rank has ended well; 1 a rank, or the cluster, failed; 2 wrong arguments; 130 interrupted.
One worker is this very process, without Spark, and exits as the script does

without --master and --remote the executors are processes of this machine, and under
spark-submit they are those of its application
"""


_REPORT_EPILOG = """\
exit codes: 0 the page is written; 1 a file cannot be read or written; 2 wrong arguments, or no events there

Of a fit that still runs, or that has died, the page shows what has come so far, and says so
"""
_ATTACH_EPILOG = """\
exit codes: 0 the fit has ended well; 1 it has failed, or tells nothing within --timeout; 2 wrong arguments, or no
events there; 130 left with Ctrl-C, which the fit does not notice
"""
_RUN = "a file of events, the folder of eventsPath (its newest file), or the id of an MLflow run"
_CHECKPOINTS_EPILOG = """\
exit codes: 0 all are whole; 1 some are damaged, or there are none; 2 wrong arguments

A checkpoint has the numbers of a model, and not its layers: --model says what these are,
a .keras file or module:function, compiled as it was for the fit
"""
# Commands whose arguments are settings, as those of a job are.
_OF_SETTINGS = {
    "bench": "measure what more workers bring to your own model and rows",
    "verify": "compare two workers with one process on your own model and rows",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code.

    Raises:
        SystemExit: The arguments are wrong (2), or ask for help (0); or the script of ``elephant run`` raises it.
    """
    given = _read(sys.argv[1:] if arguments is None else arguments)
    try:
        if given.command == "run":
            from elephant.cli.script import run_script

            return run_script(given)
        if given.command == "bench":
            from elephant.cli.bench import bench

            return bench(given.arguments)
        if given.command == "verify":
            from elephant.cli.verify import verify

            return verify(given.arguments)
        if given.command == "checkpoint":
            from elephant.cli.checkpoint_request import request_checkpoint

            return request_checkpoint(given)
        if given.command == "checkpoints":
            from elephant.cli.checkpoints import checkpoints

            return checkpoints(given)
        if given.command == "attach":
            from elephant.cli.attach import attach

            return attach(given)
        return _report(given) if given.command == "report" else _diagnose(given)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 128 + 2
    except BrokenPipeError:
        # The reader of the output, such as head, has gone: Python would complain of it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _read(words: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    if words and words[0] in _OF_SETTINGS:
        return argparse.Namespace(command=words[0], arguments=list(words[1:]))
    # Words behind two dashes are the script's.
    own = list(words[: words.index("--")]) if "--" in words else list(words)
    given, unknown = parser.parse_known_args(own)
    if unknown or (given.command != "run" and len(own) < len(words)):
        hint = ". Arguments of the script come behind --" if given.command == "run" else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown or words[len(own) :])}{hint}")
    given.arguments = list(words[len(own) + 1 :])
    return given


def _diagnose(given: argparse.Namespace) -> int:
    from elephant.cli.doctor import examine

    check_results = examine(given)
    text = as_json(check_results) if given.json else as_table(check_results, is_terminal=sys.stdout.isatty())
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return 1 if any(found.failed for found in check_results) else 0


def _report(given: argparse.Namespace) -> int:
    """Writes the page of a fit from the file of its events."""
    from elephant.cli.event_file import find_events
    from elephant.monitor.summary import FitSummary

    try:
        events = find_events(given.run)
        page = os.path.join(given.output, f"{events.name}.html") if os.path.isdir(given.output) else given.output
        path = FitSummary.of_events(events.read().splitlines()).report(page)
    except ConfigurationError as error:
        sys.stderr.write(f"elephant report: {given.run}: {shown_text(error)}\n")
        return 2
    except OSError as error:
        expected = "expected a file that can be read, and one that can be written"
        sys.stderr.write(f"elephant report: {given.run}: {expected}. Received: {error}. Look at both paths.\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elephant", description="Distributed Keras 3 training on Apache Spark.")
    parser.add_argument("--version", action="version", version=f"elephant {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="look whether a fit would work here, and say what to do where it would not",
        description="Looks whether a fit would work, and says what to do where it would not.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_session(doctor)
    doctor.add_argument("--workers", type=_count, metavar="N", help="workers of the fit (as many as there are slots)")
    doctor.add_argument("--mode", type=full_mode, choices=MODES, default="synchronous", help="of the fit (synchronous)")
    doctor.add_argument("--gpu", action="store_true", help="expect a GPU for every worker, which Keras can use")
    doctor.add_argument(
        "--fit",
        action="store_true",
        help="train a built-in model for ten seconds, synchronously and asynchronously, and tell each phase's seconds",
    )
    doctor.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="S", help="seconds that a single check may take (60)"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON in place of the table")
    _add_run(commands.add_parser)
    _add_report(commands.add_parser)
    _add_attach(commands.add_parser)
    _add_checkpoints(commands.add_parser)
    _add_checkpoint_request(commands.add_parser)
    for name, text in _OF_SETTINGS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _add_report(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    report = add_parser(
        "report",
        help="make a page of a fit from its events, as eventsPath has them written",
        description="Makes one HTML page of a fit, which loads nothing: where its time went, curves, advice.",
        epilog=_REPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("run", type=_text, metavar="RUN", help=_RUN)
    report.add_argument(
        "--output", type=_text, default=".", metavar="PATH", help="file, or folder, to write to (this folder)"
    )


def _add_attach(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    attach = add_parser(
        "attach",
        help="watch a fit that runs elsewhere, from its events, as eventsPath has them written",
        description="Shows how far a fit is that runs elsewhere, until it ends, and then how it has ended.",
        epilog=_ATTACH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    attach.add_argument("run", type=_text, metavar="RUN", help=_RUN)
    attach.add_argument(
        "--timeout", type=_seconds, metavar="S", help="leave when the fit has told nothing for so many seconds (never)"
    )


def _add_checkpoints(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    checkpoints = add_parser(
        "checkpoints",
        help="list the checkpoints of a fit, check their files, and save one as a .keras file",
        description="Lists the checkpoints in a folder and reads all their files; saves one as a .keras file.",
        epilog=_CHECKPOINTS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    checkpoints.add_argument(
        "path", type=_text, metavar="PATH", help="the fit's checkpointPath: a path, or a URL that pyarrow opens"
    )
    checkpoints.add_argument("--json", action="store_true", help="print a line of JSON for each in place of the table")
    checkpoints.add_argument("--export", type=_text, metavar="FILE.keras", help="save the newest one that is whole")
    checkpoints.add_argument("--epochs", type=_count, metavar="N", help="save the one at the end of so many epochs")
    checkpoints.add_argument(
        "--best", type=_metric, metavar="METRIC", help="save that of the best epoch: val_loss, val_auc, val_gain:max"
    )
    checkpoints.add_argument(
        "--model", type=_text, metavar="MODEL", help="its layers: a .keras file, or module:function"
    )


def _add_checkpoint_request(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    request = add_parser(
        "checkpoint",
        help="have a fit that runs make a checkpoint now",
        description="Asks the fit that writes its checkpoints to a folder for one now, and waits until it is written.",
    )
    request.add_argument(
        "path", type=_text, metavar="PATH", help="the fit's checkpointPath: a path, or a URL that pyarrow opens"
    )
    request.add_argument("--timeout", type=_seconds, default=60.0, metavar="S", help="seconds to wait for it (60)")


def _add_run(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    run = add_parser(
        "run",
        help="run a Python file on N workers, connected with each other",
        usage="elephant run SCRIPT [--num-workers N] [OPTION ...] [-- ARGUMENT ...]",
        description="Runs a Python file as __main__ on N workers at the same time, connected by elephant.collective.",
        epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("script", metavar="SCRIPT", help="a Python file of this machine; executors need no copy")
    run.add_argument("--num-workers", type=_count, default=1, metavar="N", help="workers (1)")
    _add_session(run)
    run.add_argument(
        "--env", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="for the workers; repeatable"
    )
    run.add_argument("--use-gpu", choices=("auto", "true", "false"), default="auto", help="a GPU for each rank (auto)")
    run.add_argument("--gpus-per-worker", type=_count, default=1, metavar="N", help="ranks of each worker (1)")
    run.add_argument("--gpu-resource", type=_text, default="gpu", metavar="NAME", help="Spark's name of GPUs (gpu)")
    run.add_argument(
        "--encryption",
        choices=("auto", "true", "false"),
        default="auto",
        help="TLS for all connections; auto where Spark is told to encrypt (auto)",
    )
    run.add_argument("--ports", type=_text, metavar="FIRST-LAST", help="those that may be listened on")
    run.add_argument(
        "--timeouts",
        type=_timeout,
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="how long a wait may last, such as collective_s=60; repeatable",
    )
    run.add_argument("--verbose", type=int, choices=(0, 1, 2), default=1, help="0 shows nothing of the workers (1)")


def _add_session(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--master", type=_master, help="a Spark master, such as spark://host:7077, yarn or local[4]")
    where.add_argument("--remote", type=_text, help="a Spark Connect server, such as sc://host:15002")
    parser.add_argument(
        "--conf", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="a Spark setting; repeatable"
    )


def _master(text: str) -> str:
    try:
        require_master(_text(text))
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("expected some text, received nothing")
    return text


def _metric(text: str) -> str:
    try:
        return str(METRIC.value_of(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, received {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    # More than a day is more than a thread can be told to wait for on some systems.
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0 and at most 86400, received {text!r}")
    return seconds


def _timeout(text: str) -> tuple[str, float]:
    name, seconds = _setting(text)
    try:
        return name, float(seconds)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected NAME=SECONDS, received {text!r}") from error


def _setting(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, received {text!r}")
    return name.strip(), value


# By the status of a check: its mark in the table, and its color on a terminal.
_MARKS = {
    "ok": ("ok", "green"),
    "warning": ("warn", "yellow"),
    "failure": ("FAIL", "bold red"),
    "unknown": ("?", "dim"),
}
_WIDTH = 120


def as_table(check_results: Sequence[CheckResult], *, is_terminal: bool = False) -> str:
    """Returns one line for each check, and below those that found something what to do; in color for a terminal."""
    try:
        from rich.console import Console
    except ImportError:
        # An environment that lacks Keras, and what comes with it: that is what the user is to read.
        return "\n".join([*map(str, check_results), "", _summary(check_results)])
    output = io.StringIO()
    # Not to the cell of a notebook, past the caller.
    width = None if is_terminal else _WIDTH
    console = Console(file=output, width=width, force_terminal=is_terminal, force_jupyter=False)
    name_width = max(len(name) for name in ("check", *(found.name for found in check_results)))
    console.print(_columns(("", "", 4), ("check", "", name_width), ("found", "", None)))
    for found in check_results:
        mark, color = _MARKS[found.status]
        console.print(_columns((mark, color, 4), (found.name, "", name_width), (found.received, "", None)))
        if found.status in ("failure", "warning"):
            for title, text in (("expected:", found.expected), ("remedy:", found.remedy)):
                if text:
                    console.print(_columns(("", "", 5), (title, "dim", 9), (text, "", None), gap=1))
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    return "\n".join([*lines, "", _summary(check_results)])


def _columns(*cells: tuple[str, str, int | None], gap: int = 2) -> Table:
    """Returns one row of texts, each with its style and width, of which the last one is wrapped."""
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, gap, 0, 0))
    for _, _, width in cells:
        row.add_column(width=width, overflow="fold")
    row.add_row(*(Text(text, style=style) for text, style, _ in cells))
    return row


def _summary(check_results: Iterable[CheckResult]) -> str:
    statuses = [found.status for found in check_results]
    failures, warnings = statuses.count("failure"), statuses.count("warning")
    verdict = f"a fit would fail: {_counted(failures, 'check')} failed" if failures else "a fit would work"
    return verdict + (f"; {_counted(warnings, 'warning')}" if warnings else "")


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if number == 1 else "s")


def as_json(check_results: Sequence[CheckResult]) -> str:
    """Returns the same as one JSON object: ``healthy``, ``elephant`` (its version) and ``findings``."""
    healthy = not any(found.failed for found in check_results)
    return json.dumps(
        {"healthy": healthy, "elephant": __version__, "findings": [asdict(found) for found in check_results]}, indent=2
    )
