"""The processes of a fit, found from the driver's."""

import psutil


def processes_of(module):
    """Returns the processes that run a module, below this one: driver, its JVM, executors, their Python workers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if module in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
