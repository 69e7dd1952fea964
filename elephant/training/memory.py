"""Memory of this container: whether it is short, and how often the kernel has killed a process for want of it.

The kernel counts kills for each control group: in ``memory.events`` (version 2) or
``memory.oom_control`` (version 1), on the line ``oom_kill``. A kill counts in the group of the process
that was killed, whether its own limit or the host's memory was at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_HOST = Path("/proc/meminfo")
# Of all memory, how much has to be free.
_SHARE_FREE = 0.1


def memory_kills(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int | None:
    """Returns the kernel's count for the control group of this process and of what it starts; None when unknown.

    Args:
        groups: Where the kernel says which groups this process is in.
        mount: Where control groups are mounted.
    """
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
    """Returns whether less than a tenth of the memory of this host, or of this container, can still be had.

    Args:
        host: Where the kernel says how much memory the host has.
        groups: Where the kernel says which control groups this process is in.
        mount: Where control groups are mounted.
    """
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
