"""Programs of Spark's as child processes of a test: what they log, when they have started, and that all of it ends."""

import contextlib
import ctypes
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

END_TIMEOUT_S = 10.0
_POLL_S = 0.05
# Of what a process has printed, in an error: the end, in characters.
_SHOWN = 5000
# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_LOG4J2 = """\
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{{yy/MM/dd HH:mm:ss}} %p %c{{1}}: %m%n%ex
logger.one.name = {name}
logger.one.level = {level}
"""


class Daemons:
    """Base of what a test needs from ``with`` to the end of the block: processes, their folder, and an end to all."""

    def __init__(self):
        self._closing = contextlib.ExitStack()

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Ends all processes, with what they have started, and removes the folder."""
        self._closing.close()

    def _start(self):
        """Starts the processes; enters the end of each thing into `_closing` as soon as it is there."""
        raise NotImplementedError

    def _make_folder(self, name):
        """Returns a new folder, which goes after all that is entered into `_closing` from now on."""
        folder = Path(tempfile.mkdtemp(prefix=f"elephant-{name}-"))
        self._closing.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder


def log_settings(name, level):
    """Returns the content of ``log4j2.properties``: all warnings to standard error, and one logger at its own level."""
    return _LOG4J2.format(name=name, level=level)


def await_line(process, log, pattern, *, what, timeout_s):
    """Returns the match of a pattern in what a process has printed; raises RuntimeError when that does not come.

    Args:
        process: `subprocess.Popen` of it.
        log: The file that it prints to.
        pattern: A regular expression.
        what: What to call it.
        timeout_s: How long to wait.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        text = log.read_text(errors="replace")
        found = re.search(pattern, text)
        if found:
            return found
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"The {what} did not start:\n{text[-_SHOWN:]}")
        time.sleep(_POLL_S)


def end_with_parent():
    """Has the system end this process when its parent is gone, also one that was killed; for ``preexec_fn``."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def end_with_children(processes):
    """Ends processes that this one started, with all that they have started, and waits until they are gone.

    Args:
        processes: `subprocess.Popen` of them.
    """
    below = [rank_handle for process in processes for rank_handle in _below(process)]
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_TIMEOUT_S)
    # What ends with its parent needs a moment for it.
    _, left = psutil.wait_procs(below, timeout=END_TIMEOUT_S)
    for rank_handle in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank_handle.kill()
    psutil.wait_procs(left, timeout=END_TIMEOUT_S)


def _below(process):
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
