"""Parameter servers and their clients, as a fit has them, in processes that take turns.

Nothing is pinned to a core here, because a fit pins neither its servers nor its workers.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from team import ANYWHERE, Member, Seat, Team

from elephant.parameter_server.client import ParameterServerClient
from elephant.parameter_server.layout import Layout, ServerSpec
from elephant.parameter_server.process import ServerProcess, listening_sockets

MB = 10**6
HOST = "127.0.0.1"
RUN_ID = "benchmark"
RATE = 0.125
RULES: Mapping[str, dict[str, Any]] = {
    "add": {"name": "add"},
    "sgd": {"name": "sgd", "learning_rate": RATE},
    "adam": {"name": "adam", "learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7},
}
# How far values may be from what they should be, as a share of the largest: float32 itself, or two bytes, or one.
TOLERANCES = {None: 1e-6, "bfloat16": 0.01, "int8": 0.03}


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

    def client(self, partition: int, compression: str | None = None) -> ParameterServerClient:
        """Returns a connection to the servers, as a worker has it."""
        return ParameterServerClient(
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


def repetitions_of(size: int, asked: int | None) -> int:
    """Returns how many turns the median of a size is taken of."""
    return asked or (101 if size <= MB else 31 if size <= 10 * MB else 11)


def client_team(stack: contextlib.ExitStack, place: Place, *arguments: Any, seat: Seat = ANYWHERE) -> Team:
    """Starts one client, and waits until it has exchanged once."""
    team = stack.enter_context(Team(serve_client, [seat], place, *arguments))
    team.replies()
    return team


def turn(team: Team, operation: str, times: int = 1) -> float:
    """Lets all clients of a team do something, and returns the seconds of one operation."""
    team.ask((operation, times, True))
    intervals = team.timed()
    # From the first one's beginning: clients that begin late wait for the others' exchanges.
    return (max(end for _, end in intervals) - min(begin for begin, _ in intervals)) / times


def in_turns(actions: Mapping[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Returns what each action took, per repetition; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for repetition in range(repetitions + 1):
        for name, action in actions.items():
            took = action()
            if repetition:
                seconds[name].append(took)
    return seconds
