"""Network namespaces of this machine with rate-limited links between them: hosts, for what ranks can see.

They are those of the tests (``tests/support/network_namespaces.py``), which say what is needed: root and iproute2.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

# Last, because some modules there and here share a name.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from network_namespaces import Host, Network, NetworkUnavailableError

__all__ = ["Host", "linked_namespaces"]


@contextlib.contextmanager
def linked_namespaces(bits_per_s: float, count: int = 2) -> Iterator[tuple[Host, ...]]:
    """Makes namespaces with a link between every two, and removes them.

    Args:
        bits_per_s: Of each direction, headers included.
        count: How many.
    """
    try:
        with _ended_by_sigterm(), Network(count) as network:
            network.limit(bits_per_s)
            yield tuple(network.hosts)
    except NetworkUnavailableError as error:
        raise SystemExit(f"{error} (this benchmark needs root and iproute2)") from error


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM unwind the stack, as Ctrl-C does."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
