"""Server of one rank's parts of tables: ranks look rows up in them, and update them together, round by round.

A round of a table has one contribution of each rank. They are kept apart until all are there, and are applied in the
order of the ranks, so that every run has the same bits; who looks rows up says how many rounds they are to have seen,
and waits for these. Where a rank is gone, whoever waits for it is told so.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elephant.errors import DeadlineExceededError, NetworkError, PeerLostError, ProtocolError
from elephant.net.addresses import Address
from elephant.net.deadline import Deadline
from elephant.net.frames import Message, require
from elephant.net.server import Server
from elephant.net.stream import Listener, Stream
from elephant.tables.table import TablePart

HELLO, STEP, PUSH, READ, BYE = "Hello", "Step", "Push", "Read", "Bye"
ROWS_FOUND, VALUES, FAILED = "Rows", "Values", "Failed"
_FIELDS = {"table": int, "round": int}
_READ_FIELDS = {**_FIELDS, "name": str, "first": int, "count": int}
_IDLE_S = 3600.0

Contribution = tuple[np.ndarray, np.ndarray]


def tables_context(run_id: str) -> str:
    """Returns the purpose of connections between the ranks of a run for their tables."""
    return f"tables/{run_id}"


class PartServer:
    """Parts of all tables of one rank, for itself and for the others.

    Args:
        parts: One of each table, in the same order on all ranks.
        world_size: Number of ranks.
        listener: Its listening socket; owned from here on.
        token: The run's secret.
        run_id: The run.
        wait_s: Seconds that a rank may keep the others waiting.
    """

    def __init__(
        self,
        parts: Sequence[TablePart],
        world_size: int,
        listener: Listener,
        *,
        token: bytes,
        run_id: str,
        wait_s: float,
    ) -> None:
        self._parts = list(parts)
        self._world_size = world_size
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._applied = [0] * len(parts)
        self._waiting: list[dict[int, Contribution]] = [{} for _ in parts]
        self._left: set[int] = set()
        # Bytes of rows that other ranks have looked up.
        self.bytes_sent = 0
        self._lost: PeerLostError | None = None
        self._server = Server(listener, token, tables_context(run_id), self._serve, name="elephant-tables")

    @property
    def address(self) -> Address:
        """Host and port that it listens on."""
        return self._server.address

    def contribute(self, table: int, rank: int, number: int, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Takes a rank's contribution to a round, and applies the round where it is the last one.

        Args:
            number: Of the round, from one.
            ids: Of this part's rows.
            gradients: float32 of shape (ids, width).
        """
        with self._changed:
            waiting = self._waiting[table]
            if number != self._applied[table] + 1 or rank in waiting:
                raise ProtocolError(
                    f"Expected round {self._applied[table] + 1} of table {table} once from rank {rank}. "
                    f"Received: round {number}."
                )
            waiting[rank] = ids, gradients
            if len(waiting) == self._world_size:
                given = [waiting[rank] for rank in range(self._world_size)]
                together = (np.concatenate([one[place] for one in given]) for place in range(2))
                self._parts[table].update(*together)
                waiting.clear()
                self._applied[table] = number
                self._changed.notify_all()

    def take(self, table: int, number: int, ids: np.ndarray) -> np.ndarray:
        """Returns rows as they are after so many rounds, float32 of shape (ids, width).

        Raises:
            PeerLostError: A rank is gone that has not contributed.
            DeadlineExceededError: One did not in time.
        """
        with self._changed:
            self._await_round(table, number)
            return self._parts[table].take(ids)

    def values(self, table: int, number: int, name: str, first: int, count: int) -> np.ndarray:
        """Returns a copy of some rows of an array of a part, as they are after so many rounds."""
        with self._changed:
            self._await_round(table, number)
            return self._parts[table].arrays[name][first : first + count].copy()

    def part(self, table: int, number: int) -> TablePart:
        """Returns a part as it is after so many rounds, until this rank contributes to the next one."""
        with self._changed:
            self._await_round(table, number)
            return self._parts[table]

    def await_others(self) -> None:
        """Returns when all other ranks have said that they need this one no more."""
        deadline = Deadline(self._wait_s, "Waiting for the other ranks to be done with this one's tables")
        with self._changed:
            while len(self._left) < self._world_size - 1:
                self._require_all()
                self._changed.wait(min(deadline.remaining(), 1.0))

    def close(self) -> None:
        """Ends all connections and threads."""
        with self._changed:
            self._lost = self._lost or PeerLostError("This rank's tables are closed.")
            self._changed.notify_all()
        self._server.close()

    def _await_round(self, table: int, number: int) -> None:
        if self._applied[table] >= number:
            return
        deadline = Deadline(self._wait_s, f"Waiting for all ranks' gradients of table {table}")
        while self._applied[table] < number:
            self._require_all()
            self._changed.wait(min(deadline.remaining(), 1.0))

    def _require_all(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _serve(self, stream: Stream) -> None:
        rank = None
        try:
            while True:
                try:
                    message = stream.receive(Deadline(_IDLE_S, "Waiting for a rank"))
                except DeadlineExceededError:
                    continue
                if message.kind == HELLO:
                    require(message.fields, {"rank": int}, HELLO)
                    rank = int(message.fields["rank"])
                    if rank >= self._world_size:
                        raise ProtocolError(f"Expected one of {self._world_size} ranks. Received: {rank}.")
                elif rank is None:
                    raise ProtocolError(f"Expected {HELLO} first. Received: {message.kind!r}.")
                elif message.kind == BYE:
                    with self._changed:
                        self._left.add(rank)
                        self._changed.notify_all()
                else:
                    self._answer(stream, rank, message)
        except NetworkError as error:
            with self._changed:
                if rank is not None and rank not in self._left and self._lost is None:
                    self._lost = PeerLostError(f"Rank {rank} is gone, which had looked rows of tables up: {error}")
                self._changed.notify_all()
            raise

    def _answer(self, stream: Stream, rank: int, message: Message) -> None:
        require(message.fields, _READ_FIELDS if message.kind == READ else _FIELDS, str(message.kind))
        table, number = int(message.fields["table"]), int(message.fields["round"])
        if not 0 <= table < len(self._parts):
            raise ProtocolError(f"Expected one of {len(self._parts)} tables. Received: {table}.")
        counts = {PUSH: (2,), STEP: (1, 3), READ: (0,)}.get(str(message.kind), ())
        if len(message.arrays) not in counts:
            raise ProtocolError(f"Expected {STEP}, {PUSH} or {READ} with their arrays. Received: {message.kind!r}.")
        if len(message.arrays) > 1:
            self.contribute(table, rank, number, *self._checked(table, *message.arrays[:2]))
        if message.kind == PUSH:
            return
        try:
            if message.kind == READ:
                reply = Message(kind=VALUES, arrays=(self._values_for(table, number, message.fields),))
            else:
                ids = self._checked_ids(table, message.arrays[-1])
                reply = Message(kind=ROWS_FOUND, arrays=(self.take(table, number, ids),))
        except (PeerLostError, DeadlineExceededError) as error:
            reply = Message(kind=FAILED, fields={"text": str(error)})
        stream.send(reply, Deadline(self._wait_s, "Answering a rank"))
        self.bytes_sent += sum(array.nbytes for array in reply.arrays)

    def _values_for(self, table: int, number: int, fields: Mapping[str, Any]) -> np.ndarray:
        name = str(fields["name"])
        if name not in self._parts[table].arrays:
            raise ProtocolError(f"Expected an array of table {table}. Received: {name!r}.")
        return self.values(table, number, name, int(fields["first"]), int(fields["count"]))

    def _checked_ids(self, table: int, ids: np.ndarray) -> np.ndarray:
        part = self._parts[table]
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ProtocolError(f"Expected ids of shape (ids,). Received: {ids!r}.")
        ids = ids.astype(np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= part.spec.num_rows or (ids % part.parts != part.part).any()):
            raise ProtocolError(f"Expected ids of part {part.part} of {part.parts}. Received: others.")
        return ids

    def _checked(self, table: int, ids: np.ndarray, gradients: np.ndarray) -> Contribution:
        ids = self._checked_ids(table, ids)
        expected = (len(ids), self._parts[table].spec.width)
        if gradients.shape != expected or gradients.dtype != np.float32:
            raise ProtocolError(
                f"Expected float32 gradients of shape {expected}. Received: {gradients.dtype} {gradients.shape}."
            )
        return ids, gradients
