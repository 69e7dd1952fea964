"""A plain stream of bytes from one process to another over TCP, tuned: what an exchange is measured against."""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from team import ANYWHERE, Member, Seat, Team

HOST = "127.0.0.1"
TIMEOUT_S = 120.0
_CALIBRATION_TURNS = 5


@dataclass(frozen=True)
class Tuning:
    """How a plain stream is sent and received.

    Args:
        buffer_bytes: Socket buffers; zero leaves them to the system.
        piece_bytes: Received at a time.
        keeps: Whether the receiver lays what comes into an array of the whole length, as whoever wants it must; or
            into the same piece again and again, which stays in the processor's cache.
    """

    buffer_bytes: int
    piece_bytes: int
    keeps: bool


def tunings(keeps: bool) -> list[Tuning]:
    """Returns all that are tried."""
    pieces = (1 << 18, 1 << 20, 1 << 22)
    return [Tuning(buffer, piece, keeps) for buffer in (0, 1 << 20, 1 << 22) for piece in pieces]


class _Link:
    """One connection from member 0 to member 1, with the buffers of a tuning."""

    def __init__(self, member: Member, buffer_bytes: int, hosts: Sequence[str]) -> None:
        with socket.socket() as listening:
            if member.rank == 0:
                listening.bind((hosts[0], 0))
                if buffer_bytes:
                    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
                listening.listen()
                listening.settimeout(TIMEOUT_S)
                member.exchange(listening.getsockname())
                self.sock = listening.accept()[0]
            else:
                address = member.exchange(None)[0]
                self.sock = socket.socket()
                if buffer_bytes:
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
                self.sock.settimeout(TIMEOUT_S)
                self.sock.connect(address)
        self.sock.settimeout(None)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def serve_stream(member: Member, size: int, tried: Sequence[Tuning], hosts: Sequence[str] = (HOST, HOST)) -> None:
    """The work of two processes, the first of which sends ``size`` bytes; a turn is the index of a tuning.

    It is timed by the sender, from the first byte to the receiver's one-byte answer.
    """
    links = {width: _Link(member, width, hosts) for width in sorted({each.buffer_bytes for each in tried})}
    array = memoryview(np.ones(size, np.uint8)).cast("B")
    member.reply("ready")
    for index, times in member.turns():
        tuning = tried[index]
        sock = links[tuning.buffer_bytes].sock
        work = _send if member.rank == 0 else _receive
        member.reply(member.timed(lambda: [work(sock, array, tuning) for _ in range(times)]))  # noqa: B023


def _send(sock: socket.socket, array: memoryview, tuning: Tuning) -> None:
    sock.sendall(array)
    if sock.recv(1) != b"k":
        raise EOFError("the other end of the stream is gone")


def _receive(sock: socket.socket, array: memoryview, tuning: Tuning) -> None:
    done = 0
    while done < len(array):
        start = done if tuning.keeps else 0
        stop = start + min(tuning.piece_bytes, len(array) - done)
        count = sock.recv_into(array[start:stop], 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError("the other end of the stream is gone")
        done += count
    sock.sendall(b"k")


class Streams:
    """A plain stream from one process to another, tuned.

    Args:
        stack: What ends it.
        size: Bytes.
        hosts: Addresses of the two processes.
        places: Where they run.
        tried: The tunings from which the fastest one is taken, by the median of some turns.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        size: int,
        tried: Sequence[Tuning],
        hosts: Sequence[str] | None = None,
        places: Sequence[Seat] = (ANYWHERE, ANYWHERE),
    ) -> None:
        arguments = (size, tried) if hosts is None else (size, tried, hosts)
        self._team = stack.enter_context(Team(serve_stream, places, *arguments))
        for _ in {each.buffer_bytes for each in tried}:
            self._team.exchange()
        self._team.replies()
        times = [
            statistics.median([self._turn(index) for _ in range(_CALIBRATION_TURNS + 1)][1:])
            for index in range(len(tried))
        ]
        self._best = times.index(min(times))
        self.tuning = tried[self._best]

    def turn(self) -> float:
        """Returns the seconds of one stream, from its first byte to the receiver's answer."""
        return self._turn(self._best)

    def _turn(self, index: int) -> float:
        self._team.ask((index, 1))
        began, ended = self._team.timed()[0]
        return ended - began
