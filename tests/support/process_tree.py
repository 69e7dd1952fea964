"""The processes of a fit, found from the driver's."""

import contextlib
import os

import psutil

def processes_of(module, above=None, folder=None):
    """Returns the processes that run a module, below this one, or another: JVM, executors, their Python workers.

    Args:
        module: What they run.
        above: Whose descendants they are; this process where nothing is given.
        folder: Spark's local folder, under which are also those that a fork server has made: nobody's descendants.
    """
    found = [process for process in (above or psutil.Process()).children(recursive=True) if runs(process, module)]
    if folder is not None:
        below = {process.pid for process in found}
        found += [process for process in forked_in(folder) if process.pid not in below and runs(process, module)]
    return found


def forked_in(folder):
    """Returns this user's processes whose command line has a folder, or something in it: servers and the forked."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()[:8]
            named = any(word == str(folder) or word.startswith(f"{folder}{os.sep}") for word in words)
            if named and process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def runs(process, module):
    """Returns whether a process is alive and runs a module."""
    try:
        return module in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
