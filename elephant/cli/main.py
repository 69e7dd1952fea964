"""The arguments of the program ``elephant``. They are read without Spark and without Keras."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence

from elephant import __version__
from elephant.options import MODES

_EPILOG = """\
exit codes: 0 a fit would work; 1 a fit would fail; 2 wrong arguments; 130 interrupted

without --master and --remote the executors are processes of this machine, and under
spark-submit they are those of its application
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code.

    Raises:
        SystemExit: The arguments are wrong (2), or ask for help (0).
    """
    given = _parser().parse_args(arguments)
    from elephant.cli.doctor import run

    try:
        return run(given)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 128 + 2
    except BrokenPipeError:
        # The reader of the output, such as head, has gone: Python would complain of it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


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
    where = doctor.add_mutually_exclusive_group()
    where.add_argument("--master", type=_text, help="a Spark master, such as spark://host:7077, yarn or local[4]")
    where.add_argument("--remote", type=_text, help="a Spark Connect server, such as sc://host:15002")
    doctor.add_argument(
        "--conf", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="a Spark setting; repeatable"
    )
    doctor.add_argument("--workers", type=_count, metavar="N", help="workers of the fit (as many as there are slots)")
    doctor.add_argument("--mode", choices=MODES, default="synchronous", help="of the fit (synchronous)")
    doctor.add_argument("--gpu", action="store_true", help="expect a GPU for every worker, which TensorFlow can use")
    doctor.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="S", help="seconds that a single check may take (60)"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON in place of the table")
    return parser


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("expected some text, received nothing")
    return text


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


def _setting(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, received {text!r}")
    return name.strip(), value
