"""The processes of a fit, found from the driver's."""

import contextlib
import os
from pathlib import Path

import psutil

from elephant.rank.process_pipe import STEP_FILE

_SERVER, _RANK = "elephant.task.forkserver", "elephant.rank"


def processes_of(module, above=None, folder=None):
    """Returns the processes that run a module, below this one, or another: JVM, executors, their Python workers.

    Those that a fork server has made are among them: its executor is below, and they are nobody's descendants.

    Args:
        module: What they run.
        above: Whose descendants they are; this process where nothing is given.
        folder: Spark's local folder. Those that work under it are found though their executor has ended, too.
    """
    below = (above or psutil.Process()).children(recursive=True)
    ids = {process.pid for process in below}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if _executor_of_server(process) in ids:
                below += process.children(recursive=True)
    if folder is not None:
        below += forked_in(folder)
    return [process for process in dict.fromkeys(below) if runs(process, module)]


def _executor_of_server(process):
    """Returns the id of the executor's Java process that a fork server belongs to; None for other processes."""
    words = process.cmdline()
    return int(words[words.index(_SERVER) + 5]) if _SERVER in words[:3] else None


def work_folder_of(process):
    """Returns the work folder of a process that trains or predicts, which has a file of its steps open, or None.

    One that was forked has the command line of its server.
    """
    for link in _links(process):
        path = Path(link.removesuffix(" (deleted)"))
        if path.name == STEP_FILE:
            return path.parent
    return None


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
        words = process.cmdline()
        is_forked = _SERVER in words[:3] and work_folder_of(process) is not None
        return module in ([_RANK] if is_forked else words) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ranks_in(folder):
    """Returns the processes that train, of those that work under Spark's local folder."""
    return [process for process in processes_of(_RANK, folder=folder) if not predicts(process)]


def predicts(process):
    """Returns whether a training process is one that a Python worker of Spark predicts with."""
    folder = work_folder_of(process)
    return folder is not None and folder.name.startswith("model-")


def task_of(process_id):
    """Returns the Python process of the Spark task that a training process works for, somewhere below this one.

    A forked one is no child of it: they share the pipe by which the process notices that its task is gone.
    """
    process = psutil.Process(process_id)
    parent = process.parent()
    if not runs(parent, _SERVER):
        return parent
    pipes = _pipes(process)
    return next(other for other in psutil.Process().children(recursive=True) if _pipes(other) & pipes)


def executor_of(process_id):
    """Returns the Java process of the executor that a training process belongs to."""
    return next(process for process in task_of(process_id).parents() if process.name() == "java")


def with_servers(process_ids):
    """Returns the processes that have these ids, and the fork servers that have made them."""
    processes = {psutil.Process(process_id) for process_id in process_ids}
    return [*processes, *{process.parent() for process in processes if runs(process.parent(), _SERVER)}]


def _pipes(process):
    return {link for link in _links(process) if link.startswith("pipe:")}


def _links(process):
    """Returns what a process has open; nothing of one that has ended."""
    found = set()
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{process.pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{process.pid}/fd/{number}"))
    return found
