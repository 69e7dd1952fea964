"""Parameter servers and their clients, and the plain streams that they are measured against.

Each ``serve_...`` is the work of a team of `team.py`: processes that wait for their turn. Nothing is pinned to
a core here, because a fit pins neither its servers nor its workers.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from team import Member, Seat

from elephant.parameter_server.client import ParameterServers
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.process import ServerProcess, listening_sockets
from elephant.parameter_server.spec import ServerSpec

HOST = "127.0.0.1"
TIMEOUT_S = 120.0
RUN_ID = "benchmark"
RATE = 0.125
RULES: Mapping[str, dict[str, Any]] = {
    "add": {"name": "add"},
    "sgd": {"name": "sgd", "learning_rate": RATE},
    "adam": {"name": "adam", "learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7},
}
# How far values may be from what they should be, as a share of the largest: float32 itself, or two bytes, or one.
TOLERANCES = {None: 1e-6, "bfloat16": 0.01, "int8": 0.03}
ANYWHERE = Seat(None)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where servers are, and what they keep: what a client needs.

    Args:
        addresses: One per server.
        token: The secret that all share.
        layout: `Layout.to_json` of the whole vector.
        rule: Name of one in `RULES`.
    """

    addresses: Sequence[tuple[str, int]]
    token: bytes
    layout: Any
    rule: str

    def client(self, partition: int, compression: str | None = None) -> ParameterServers:
        """Returns a connection to the servers, as a worker has it."""
        return ParameterServers(
            self.addresses,
            token=self.token,
            run_id=RUN_ID,
            layout=Layout.from_json(self.layout),
            partition=partition,
            attempt=0,
            compression=compression,
        )


def vector_of(num_bytes: int) -> Layout:
    """Returns the layout of one matrix with so many bytes."""
    return Layout([("matrix", (num_bytes // 400, 100))])


@contextlib.contextmanager
def running(
    layout: Layout,
    rule: str | Mapping[str, Any],
    *,
    values: np.ndarray | None = None,
    host: str = HOST,
    count: int = 1,
    clients: int = 1,
    **options: Any,
) -> Iterator[Place]:
    """Runs servers, and ends them.

    Args:
        layout: Of what they keep.
        rule: Name of one in `RULES`, or the rule itself.
        values: The weights that they begin with; zeros when None.
        host: Where they listen.
        count: Into how many processes the weights are cut.
        clients: Workers that will come.
        options: Further ones of `ServerSpec`.
    """
    token = secrets.token_bytes(32)
    beginning = layout.zeros() if values is None else values
    with contextlib.ExitStack() as stack:
        servers = []
        for listener, part in zip(listening_sockets(host, 0, count), layout.cut(count), strict=True):
            spec = ServerSpec(
                run_id=RUN_ID,
                layout=layout,
                first_value=part.start,
                num_values=part.stop - part.start,
                rule=RULES[rule] if isinstance(rule, str) else dict(rule),
                num_partitions=clients,
                **options,
            )
            servers.append(stack.enter_context(ServerProcess(spec, listener, token, beginning[part])))
        addresses = [server.address for server in servers]
        yield Place(addresses=addresses, token=token, layout=layout.to_json(), rule=str(rule))


class Worker:
    """One client, with an update that is always the same, and weights that it keeps count of.

    Args:
        place: The servers.
        partition: Which client it is.
        compression: Of what travels.
        alone: Whether no other client pushes, so that what is pulled is known beforehand.
    """

    def __init__(self, place: Place, partition: int, compression: str | None = None, *, alone: bool = True) -> None:
        layout = Layout.from_json(place.layout)
        self.client = place.client(partition, compression)
        self.pulled = layout.zeros()
        self._update = layout.zeros()
        self._update[: layout.segments[-1].stop] = update_of(layout.segments[-1].stop)
        self._rule = place.rule
        self._tolerance = TOLERANCES[compression]
        self._alone = alone
        self._step = self._pulled_step = 0

    def push(self) -> None:
        """Pushes the update; the server has applied it when this returns."""
        self._step += 1
        _expect_taken(self.client.push(self._update, step=self._step))

    def pull(self) -> None:
        """Pulls the weights, which have changed since."""
        _expect_new(self.client.pull(self.pulled))
        self._pulled_step = self._step

    def push_pull(self) -> None:
        """Both in one round trip."""
        self._step += 1
        reply = self.client.push_pull(self._update, self.pulled, step=self._step)
        _expect_taken(reply)
        _expect_new(reply)
        self._pulled_step = self._step

    def cycle(self) -> None:
        """A pull and a push, one after the other."""
        self.pull()
        self.push()

    def check(self) -> None:
        """Raises unless what was pulled last is what the pushes up to then make of zeros."""
        if not self._pulled_step:
            return
        if not self._alone or self._rule == "adam":
            right = np.isfinite(self.pulled).all() and self.pulled.any()
        else:
            factor = -RATE if self._rule == "sgd" else 1.0
            expected = self._update * np.float32(factor * self._pulled_step)
            right = np.abs(self.pulled - expected).max() <= self._tolerance * np.abs(expected).max()
        if not right:
            raise SystemExit(
                f"{self._rule}, step {self._pulled_step}: expected other weights. Received: {self.pulled[:8]}."
            )


def update_of(count: int) -> np.ndarray:
    """Returns what every client pushes."""
    # Eighths: sums of a few thousand of them are exact.
    return (np.random.default_rng(0).integers(-64, 65, count) / 8).astype(np.float32)


def _expect_taken(reply: Any) -> None:
    if reply.refused or reply.stop:
        raise SystemExit(f"expected the push to be taken. Received: {reply}.")


def _expect_new(reply: Any) -> None:
    if not reply.modified:
        raise SystemExit(f"expected weights that had changed. Received: {reply}.")


def serve_client(
    member: Member, place: Place, compression: str | None = None, alone: bool = True, first: int = 0
) -> None:
    """The work of a client: a turn is (operation of a `Worker`, how often in a row, whether to check the weights)."""
    worker = Worker(place, first + member.rank, compression, alone=alone)
    worker.pull()
    worker.push()
    member.reply("ready")
    for operation, times, checked in member.turns():
        operate = getattr(worker, operation)
        interval = member.timed(lambda operate=operate, times=times: [operate() for _ in range(times)])
        if checked:
            worker.check()
        member.reply(interval)
    worker.client.close(finished=True)


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
