"""Checks of machines: the driver's, and those of executors. Plain facts go in, findings come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elephant.cli.setting_checks import TRAINING_PROCESS_MB
from elephant.cluster.executor_checks import FLOOR_BYTES, SCARCE_BYTES
from elephant.cluster.finding import FAILURE, OK, WARNING, Finding, finding

_FEW_DESCRIPTORS = 1024
_SKEW_S = 30.0
_NAMED = 3


def check_temporary_folder(folder: str, *, writable: bool, free_bytes: int) -> Finding:
    """Returns whether the driver's folder for temporary files can be written to, and has room.

    Args:
        folder: The folder.
        writable: Whether files can be made there.
        free_bytes: Room there.
    """
    enough = FAILURE if not writable or free_bytes < FLOOR_BYTES else WARNING if free_bytes < SCARCE_BYTES else OK
    return finding(
        "temporary folder",
        enough,
        expected=f"a folder that can be written to, with {SCARCE_BYTES / 1e9:.1f} GB or more free",
        received=f"{folder}, {free_bytes / 1e9:,.1f} GB free" + ("" if writable else ", which cannot be written to"),
        remedy="Set TMPDIR to a folder with room, or free some there.",
    )


def check_machine(cores: int, memory_bytes: int | None, *, workers: int, local: bool) -> Finding:
    """Returns whether this machine carries the training processes of executors that are its own.

    Args:
        cores: Its processors.
        memory_bytes: Its memory; None when unknown.
        workers: Workers of the fit.
        local: Whether executors run on this machine.
    """
    need = workers * TRAINING_PROCESS_MB * 1e6
    received = f"{cores} cores" + ("" if memory_bytes is None else f", {memory_bytes / 1e9:.1f} GB")
    return finding(
        "this machine",
        not local or memory_bytes is None or memory_bytes >= need,
        otherwise=WARNING,
        expected=f"{TRAINING_PROCESS_MB} MB for each of {workers} training processes, before any model",
        received=received,
        remedy="Use fewer workers, or a cluster.",
    )


def check_address(host: str, addresses: Sequence[str], error: str, *, needed: bool = True) -> Finding:
    """Returns whether the driver has an address that it can tell executors.

    Args:
        host: ``spark.driver.host``; empty for a client of Spark Connect, which has no such name.
        addresses: The address for executors, and the one to listen on.
        error: Why there is none; empty when there is.
        needed: Whether a fit fails without; elsewhere an executor takes the driver's part.
    """
    return finding(
        "driver's address",
        not error,
        otherwise=FAILURE if needed else WARNING,
        expected="an address of the driver that executors can be told",
        received=error.rstrip(".") if error else _described(host, *addresses),
        remedy="Set spark.driver.host to the address at which executors reach this machine.",
    )


def _described(host: str, advertised: str, listening: str) -> str:
    """Returns the driver's addresses, each once.

    >>> _described("driver", "10.0.0.1", "0.0.0.0"), _described("10.0.0.1", "10.0.0.1", "10.0.0.1")
    ('driver = 10.0.0.1, listening on 0.0.0.0', '10.0.0.1')
    """
    named = f"{host} = {advertised}" if host.strip("[]") not in ("", advertised) else advertised
    return named if listening == advertised else f"{named}, listening on {listening}"


def check_descriptors(limits: Mapping[str, int]) -> Finding:
    """Returns whether processes may open enough files and sockets.

    Args:
        limits: How many, by place.
    """
    few = {place: limit for place, limit in limits.items() if 0 <= limit < _FEW_DESCRIPTORS}
    return finding(
        "open files",
        not few,
        otherwise=WARNING,
        expected=f"{_FEW_DESCRIPTORS} or more files and sockets for each process (ulimit -n)",
        received=_listed({place: str(limit) for place, limit in few.items()})
        or f"{min(limits.values(), default=0)} or more everywhere",
        remedy="Raise the limit where Spark's workers are started (ulimit -n, LimitNOFILE of a service).",
    )


def check_shared_memory(sizes: Mapping[str, int]) -> Finding:
    """Returns whether /dev/shm has a usual size. Elephant itself shares memory without it; other libraries do not.

    Args:
        sizes: Free bytes, by place.
    """
    small = {place: size for place, size in sizes.items() if size < FLOOR_BYTES}
    return finding(
        "/dev/shm",
        not small,
        otherwise=WARNING,
        expected=f"{FLOOR_BYTES >> 20} MB or more for libraries that use it; elephant's ranks share memory without it",
        received=_listed({place: f"{size / 1e6:,.0f} MB free" for place, size in small.items()})
        or (f"{min(sizes.values()) / 1e6:,.0f} MB or more free everywhere" if sizes else "none"),
        remedy="Start containers with a larger one (docker run --shm-size; a Kubernetes emptyDir of medium Memory).",
    )


def check_clocks(offsets: Mapping[str, float]) -> Finding:
    """Returns whether executors have the driver's time. A fit does not need it; logs and tickets (Kerberos) do.

    Args:
        offsets: Seconds that an executor is ahead of the driver, by place.
    """
    off = {place: offset for place, offset in offsets.items() if abs(offset) > _SKEW_S}
    return finding(
        "clocks",
        not off,
        otherwise=WARNING,
        expected=f"clocks that agree within {_SKEW_S:.0f} s",
        received=_listed({place: f"{offset:+.0f} s" for place, offset in off.items()}) or "they agree",
        remedy="Let the hosts keep time (NTP): lines of logs cannot be put in order otherwise.",
    )


def _listed(values: Mapping[str, str]) -> str:
    """Returns what the first few places have, and how many more there are.

    >>> _listed({"a": "1 s", "b": "2 s", "c": "3 s", "d": "4 s"})
    '1 s on a, 2 s on b, 3 s on c, and so on: 4 in all'
    """
    named = ", ".join(f"{value} on {place}" for place, value in list(values.items())[:_NAMED])
    return named if len(values) <= _NAMED else f"{named}, and so on: {len(values)} in all"
