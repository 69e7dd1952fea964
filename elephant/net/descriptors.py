"""Limit of open files: raised where a process needs more connections than it was started with."""

from __future__ import annotations

import contextlib
import resource

# What else a process of a fit has open, with room for libraries and user code.
_OTHERS = 512


def allow_descriptors(connections: int) -> None:
    """Raises this process' limit of open files, as far as the system lets it, so that there is room for connections.

    Systems start processes with 1,024, and let each raise that to thousands. It is never lowered. Where there is no
    more room, the connection that does not find any says so; see `elephant.errors.text_of`.

    Args:
        connections: How many this process is going to have.

    Examples:
        >>> from elephant.net.descriptors import allow_descriptors
        >>> allow_descriptors(2)
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHERS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
