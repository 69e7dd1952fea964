"""How often the kernel has killed a process of this container for want of memory.

The kernel counts it for each control group: in ``memory.events`` (version 2) or
``memory.oom_control`` (version 1), on the line ``oom_kill``. A kill counts in the group of the process
that was killed, whether its own limit or the host's memory was at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


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
