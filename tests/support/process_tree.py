"""The processes of a fit, found from the driver's."""

import psutil


def processes_of(module, above=None):
    """Returns the processes that run a module, below this one, or another: JVM, executors, their Python workers."""
    return [process for process in (above or psutil.Process()).children(recursive=True) if runs(process, module)]


def runs(process, module):
    """Returns whether a process is alive and runs a module."""
    try:
        return module in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
