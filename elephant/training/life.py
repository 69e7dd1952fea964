"""Signs of life of a training process, and its end when the Spark task that started it is gone."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
from pathlib import Path

_PULSE_INTERVAL_S = 0.5
_GENERATED = "__autograph_generated_file"


def notice_end_of_parent() -> None:
    """Sees to it that this process hears of the end of the Spark task that started it, and outlives it to clean up.

    It hears of it by its standard input, which closes; it then removes what it has on the disk,
    the rows among it, and ends. One that is stopped hears nothing: where the kernel is Linux, it has
    the process go on when that pipe closes, whichever process this one was forked from. And what ends all
    Python processes of an executor, a hang-up of their group, is not for this one, which would have no time left.
    """
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGCONT)
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def keep_pulse(path: Path) -> None:
    """Touches a file twice a second from now on, in a thread of its own, until the file or this process is gone.

    Args:
        path: A file that is there: it is never made, so that a folder that is removed stays removed.
    """
    threading.Thread(target=_beat, args=(path,), name="elephant-pulse", daemon=True).start()


def remove_generated_code() -> None:
    """Removes the files that TensorFlow has written to the temporary folder for the functions it has compiled.

    It would remove them itself at a normal exit, and this process makes none.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(_GENERATED) and getattr(module, "__file__", None):
            Path(str(module.__file__)).unlink(missing_ok=True)


def _beat(path: Path) -> None:
    while True:
        try:
            os.utime(path)
        except FileNotFoundError:
            return
        time.sleep(_PULSE_INTERVAL_S)
