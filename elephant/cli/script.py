"""``elephant run``: a Python file that every rank of an `elephant.run` runs as its main program.

The text of the file travels, so that executors need no copy of it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import linecache
import os
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elephant.config import Timeouts
from elephant.driver.run import run
from elephant.errors import ClusterError, ConfigurationError, ElephantError, UnsupportedError, short_text, shown_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run_script(given: argparse.Namespace) -> int:
    """Runs the script by the arguments that `elephant.cli.main` has read; returns the exit code."""
    path, alone = os.path.abspath(given.script), given.num_workers * given.gpus_per_worker == 1
    try:
        text = Path(path).read_bytes()
        compile(text, path, "exec", dont_inherit=True)
        timeouts = Timeouts.of(dict(given.timeouts))
    except OSError as error:
        return _failed(f"SCRIPT: expected a Python file. Received: {given.script!r}: {error.strerror}.", 2)
    except SyntaxError as error:
        return _failed("".join(traceback.format_exception_only(error)).strip(), 1)
    except ValueError as error:
        return _failed(shown_text(error), 2)
    session = None
    try:
        session = None if alone else _started_session(given)
        run(
            run_main,
            (given.script, os.getcwd(), text, given.arguments),
            num_workers=given.num_workers,
            spark=session,
            verbose=given.verbose,
            timeouts=timeouts,
            env=dict(given.env),
            use_gpu={"true": True, "false": False}.get(given.use_gpu, given.use_gpu),
            gpus_per_worker=given.gpus_per_worker,
            gpu_resource=given.gpu_resource,
            encryption={"true": True, "false": False}.get(given.encryption),
            ports=given.ports,
        )
    except ElephantError as error:
        if alone:
            # The script's own, of this very process: with its traceback.
            raise
        return _failed(shown_text(error), 2 if isinstance(error, ConfigurationError | UnsupportedError) else 1)
    finally:
        if session is not None:
            # A JVM may be gone. What the ranks came to stands.
            with contextlib.suppress(Exception):
                session.stop()
    return 0


def _started_session(given: argparse.Namespace) -> SparkSession:
    from elephant.cli.doctor import start_session

    try:
        return start_session(
            master=given.master,
            remote=given.remote,
            conf=dict(given.conf),
            workers=given.num_workers,
            app_name=f"elephant run {os.path.basename(given.script)}",
        )
    except Exception as error:
        raise ClusterError(f"expected a Spark session. Received: {short_text(error)}.") from error


def _failed(message: str, code: int) -> int:
    sys.stderr.write(f"elephant run: {message}\n")
    return code


def run_main(script: str, folder: str, text: bytes, arguments: Sequence[str]) -> None:
    """Runs the text of a script as ``python SCRIPT ARGUMENT...`` does, in a process that has nothing else to do.

    Args:
        script: The script's path, as the user wrote it.
        folder: The user's working folder, which becomes this process' where there is one of that name.
        text: What the script holds.
        arguments: What comes behind it in ``sys.argv``.
    """
    path = os.path.normpath(os.path.join(folder, script))
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    # For tracebacks and `inspect.getsource`, which TensorFlow asks for functions, where the file is not there.
    lines = importlib.util.decode_source(text).splitlines(keepends=True)
    linecache.cache[path] = (len(text), None, lines, path)
    with contextlib.suppress(OSError):
        os.chdir(folder)
    try:
        exec(compile(text, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102  (the user's program)
    except SystemExit as end:
        # Many scripts end so, and all is well.
        if end.code not in (None, 0):
            raise
