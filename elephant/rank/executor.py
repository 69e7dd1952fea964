"""This executor: its id, the memory of its container, and the GPUs that a framework sees.

The kernel counts kills for each control group: in ``memory.events`` (version 2) or
``memory.oom_control`` (version 1), on the line ``oom_kill``. A kill counts in the group of the process
that was killed, whether its own limit or the host's memory was at its end.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from elephant.backends import asked_for, backend_named

_FLAG = "--executor-id"
# The main class of a driver's own Java process, whose threads are the executor where the master is local.
_DRIVER = "org.apache.spark.deploy.SparkSubmit"
DRIVER = "driver"
# For processes that are no descendants of the executor, because a fork server of it has made them.
EXECUTOR_VARIABLE = "ELEPHANT_EXECUTOR_ID"
# The process of the Spark task that a process works for, and for how many seconds one that is stopped is waited for.
TASK_VARIABLE = "ELEPHANT_TASK_PROCESS"
_MOST_PARENTS = 20
# Keras imports these where they are there, and no process here needs them.
UNNEEDED = ("matplotlib", "sklearn")

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_HOST = Path("/proc/meminfo")
# The part of all memory that has to be free.
_SHARE_FREE = 0.1


@functools.cache
def executor_id() -> str:
    """Returns Spark's id of the executor that this process works for: its number, or ``driver`` in a local master.

    Spark tells its Python workers nothing of it, but says it on the command line of the executor's
    Java process. Empty where that cannot be read, as on systems without ``/proc``.
    """
    if EXECUTOR_VARIABLE in os.environ:
        return os.environ[EXECUTOR_VARIABLE]
    found = executor_above(os.getpid())
    return "" if found is None else found[1]


def executor_above(process: int) -> tuple[int, str] | None:
    """Returns the process id of the executor's Java process above a process, and Spark's id of that executor."""
    for parent in parents_of(process):
        try:
            command = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return None
        known = executor_in([part.decode(errors="replace") for part in command])
        if known:
            return parent, known
    return None


def parents_of(process: int) -> Iterator[int]:
    """Yields the ids of a process' parent, of that one's parent, and so on, as far as they can be read."""
    for _ in range(_MOST_PARENTS):
        try:
            process = int(_status(process)[1])
        except (OSError, ValueError):
            return
        if process <= 1:
            return
        yield process


def process_start(process: int) -> int:
    """Returns when a process has started, in ticks since the system has: with its id, it names a process for good.

    Raises:
        OSError: There is no such process.
    """
    return int(_status(process)[19])


def is_gone(process: int) -> bool:
    """Returns whether a process has ended, also where nobody has taken note of that yet."""
    try:
        return _status(process)[0] in "ZX"
    except OSError:
        return True


def is_stopped(process: int) -> bool:
    """Returns whether a process is stopped, as by SIGSTOP; no where that cannot be read."""
    try:
        return _status(process)[0] == "T"
    except (OSError, IndexError):
        return False


def _status(process: int) -> list[str]:
    # The name of the program comes before, in brackets, and may hold anything.
    return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()


def executor_in(command: Sequence[str]) -> str:
    """Returns the executor's id that a command line says, or nothing.

    >>> executor_in(["java", "-cp", "x", "org.apache.spark.executor.Backend", "--executor-id", "7", "--cores", "1"])
    '7'
    >>> executor_in(["java", "org.apache.spark.deploy.SparkSubmit", "pyspark-shell"]), executor_in(["bash"])
    ('driver', '')
    """
    for flag, value in zip(command, command[1:], strict=False):
        if flag == _FLAG:
            return value
    return DRIVER if _DRIVER in command else ""


def memory_kills(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int | None:
    """Returns the kernel's count for the control group of this process and of what it starts; None when unknown."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None
    for place in _places(lines, mount):
        try:
            text = place.read_text()
        except OSError:
            continue
        for line in text.splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdigit():
                return int(number)
    return None


def memory_is_short(host: Path = _HOST, groups: Path = _GROUPS, mount: Path = _MOUNT) -> bool:
    """Returns whether less than a tenth of the memory of this host, or of this container, can still be had."""
    try:
        lines = [line.split() for line in host.read_text().splitlines()]
        known = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
        if known["MemAvailable"] < _SHARE_FREE * known["MemTotal"]:
            return True
        own = groups.read_text().splitlines()
    except (OSError, KeyError, ValueError):
        return False
    return any(_is_nearly_full(place.parent) for place in _places(own, mount) if place.name == "memory.events")


def _is_nearly_full(group: Path) -> bool:
    """Returns whether a control group (version 2) uses most of its limit, besides files that the kernel could drop."""
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        counted = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return False
    return limit.isdigit() and used - int(counted.get("inactive_file", 0)) > (1 - _SHARE_FREE) * int(limit)


def _places(lines: list[str], mount: Path) -> Iterator[Path]:
    """Yields the files that may hold the count, by the lines of ``/proc/self/cgroup``: ``number:controllers:path``."""
    for line in lines:
        number, controllers, path = line.split(":", 2)
        # In a container the path may be the host's, and the group then is what is mounted there.
        for group in (path.lstrip("/"), ""):
            if number == "0" and not controllers:
                yield mount / group / "memory.events"
            elif "memory" in controllers.split(","):
                yield mount / "memory" / group / "memory.oom_control"


def unseen_note(devices: Sequence[str], host: str) -> str:
    """Returns a note for a framework that sees none of the devices of a rank; nothing where all is well.

    A framework that is not imported in this process is not asked.

    Args:
        devices: The rank's, as ``CUDA_VISIBLE_DEVICES`` names them.
    """
    backend = backend_named(asked_for())
    if not devices or backend.name not in sys.modules or backend.sees_gpu():
        return ""
    return (
        f"GPU {','.join(devices)} of {host} was given to a rank, and {backend.name} sees none there: it computes on "
        "the CPU. See that the executors' environment has the libraries of the GPU (pip install "
        f"'{backend.gpu_package}', in a build for the CUDA of these hosts) and its driver."
    )


def computes_on_gpu(backend: str) -> bool:
    """Returns whether Keras computes on a GPU in this process, which has imported it."""
    return backend in sys.modules and backend_named(backend).sees_gpu()


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Imports meanwhile in less time, for a process that keeps what it imports until it ends.

    Matplotlib and scikit-learn are passed over, and the collector rests. What is there afterwards it never walks
    again, which makes it quicker for as long as the process lives.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with passed_over(*UNNEEDED):
            yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


@contextlib.contextmanager
def passed_over(*packages: str) -> Iterator[None]:
    """Makes what is imported meanwhile believe that these packages are not installed.

    Afterwards they can be imported as ever. Packages that have been imported before stay.
    """
    hidden = [package for package in packages if package not in sys.modules]
    for package in hidden:
        sys.modules[package] = None  # type: ignore[assignment]  # as the import system asks for
    try:
        yield
    finally:
        for package in hidden:
            sys.modules.pop(package, None)
