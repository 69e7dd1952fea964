"""Two network namespaces of this machine with a rate-limited link between them: two hosts, for what ranks can see.

Needs root, and the programs ``ip`` and ``tc`` (iproute2). The namespaces have names of
their own, and go with everything in them when the ``with`` block ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from types import FrameType

_CLONE_NEWNET = 0x40000000
# Of the shared address space (RFC 6598), which the hosts' own networks do not use.
_ADDRESSES = ("100.64.77.1", "100.64.77.2")
_COMMAND_TIMEOUT_S = 30.0
# Longer than the largest packet that the kernel hands over at once.
_BURST_BYTES = 1 << 18


class Namespace:
    """One end of the link.

    Args:
        name: Of the namespace.
        address: Of this end.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Puts the calling thread into the namespace, and with it the processes that it starts."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            inside = os.open(f"/var/run/netns/{self.name}", os.O_RDONLY)
            try:
                _enter(inside)
            finally:
                os.close(inside)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)


@contextlib.contextmanager
def linked_namespaces(bits_per_s: float) -> Iterator[tuple[Namespace, Namespace]]:
    """Makes two namespaces with a link of this rate in each direction, and removes them.

    Args:
        bits_per_s: Of each direction, headers included.
    """
    suffix = secrets.token_hex(3)
    ends = [Namespace(f"elephant-{suffix}-{index}", address) for index, address in enumerate(_ADDRESSES)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_by_sigterm())
        for end in ends:
            _run("ip", "netns", "add", end.name)
            stack.callback(_run, "ip", "netns", "del", end.name)
        devices = [f"el{suffix}{index}" for index in range(2)]
        first, second = ((("name", device), ("netns", end.name)) for device, end in zip(devices, ends, strict=True))
        _run("ip", "link", "add", *_flat(first), "type", "veth", "peer", *_flat(second))
        for device, end in zip(devices, ends, strict=True):
            inside = ("ip", "-n", end.name)
            _run(*inside, "address", "add", f"{end.address}/30", "dev", device)
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", device, "up")
            _run(
                *("tc", "-n", end.name, "qdisc", "add", "dev", device, "root", "tbf"),
                *("rate", f"{bits_per_s:.0f}bit", "burst", str(_BURST_BYTES), "latency", "50ms"),
            )
        yield ends[0], ends[1]


def _flat(pairs: tuple[tuple[str, str], ...]) -> list[str]:
    return [word for pair in pairs for word in pair]


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}; it needs root")


def _run(*command: str) -> None:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=_COMMAND_TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()} (this benchmark needs root and iproute2)")


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
