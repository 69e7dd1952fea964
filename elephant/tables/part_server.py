"""Server of one rank's parts of tables: ranks look rows up in them, and update them together, round by round.

A round has one contribution of each rank to all tables. They are kept apart until all are there, and are applied in the
order of the ranks, so that every run has the same bits; who looks rows up says how many rounds they are to have seen,
and waits for these. Where a rank is gone, whoever waits for it is told so.

Messages about rows have one array for each stack of tables, in the order of the stacks: numbers of rows, and of
gradients and rows those of their numbers.
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
from elephant.tables.stack import StackPart, TableContribution, checked_contribution, checked_numbers
from elephant.tables.table import TablePart

HELLO, STEP, PUSH, READ, BYE = "Hello", "Step", "Push", "Read", "Bye"
ROWS_FOUND, VALUES, FAILED = "Rows", "Values", "Failed"
_FIELDS = {"round": int, "tables": list[int]}
_READ_FIELDS = {"table": int, "round": int, "name": str, "first": int, "count": int}
_IDLE_S = 3600.0


def tables_context(run_id: str) -> str:
    """Returns the purpose of connections between the ranks of a run for their tables."""
    return f"tables/{run_id}"


class PartServer:
    """Parts of all tables of one rank, for itself and for the others.

    Args:
        stack_parts: One of each stack of tables, in the same order on all ranks.
        world_size: Number of ranks.
        listener: Its listening socket; owned from here on.
        token: The run's secret.
        run_id: The run.
        wait_s: Seconds that a rank may keep the others waiting.
    """

    def __init__(
        self,
        stack_parts: Sequence[StackPart],
        world_size: int,
        listener: Listener,
        *,
        token: bytes,
        run_id: str,
        wait_s: float,
    ) -> None:
        self._stack_parts = list(stack_parts)
        self._table_parts = {
            table: table_part
            for one in stack_parts
            for table, table_part in zip(one.stack.tables, one.parts, strict=True)
        }
        self._world_size = world_size
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._applied = 0
        self._contributions: dict[int, TableContribution] = {}
        self._left: set[int] = set()
        # Bytes of rows that other ranks have looked up.
        self.bytes_sent = 0
        self._lost: PeerLostError | None = None
        self._server = Server(listener, token, tables_context(run_id), self._serve, name="elephant-tables")

    @property
    def address(self) -> Address:
        """Host and port that it listens on."""
        return self._server.address

    def contribute(self, rank: int, number: int, contribution: TableContribution) -> None:
        """Takes a rank's contribution to a round, and applies the round where it is the last one.

        Args:
            number: Of the round, from one.
            contribution: To this part's rows.
        """
        with self._changed:
            if number != self._applied + 1 or rank in self._contributions:
                raise ProtocolError(
                    f"Expected round {self._applied + 1} once from rank {rank}. Received: round {number}."
                )
            if any(one.tables != contribution.tables for one in self._contributions.values()):
                raise ProtocolError(f"Expected the same tables of all ranks. Received: {contribution.tables}.")
            self._contributions[rank] = contribution
            if len(self._contributions) == self._world_size:
                given = [self._contributions[rank] for rank in range(self._world_size)]
                for place, stack_part in enumerate(self._stack_parts):
                    numbers = np.concatenate([one.numbers[place] for one in given])
                    gradients = np.concatenate([one.gradients[place] for one in given])
                    stack_part.update(numbers, gradients, contribution.tables)
                self._contributions.clear()
                self._applied = number
                self._changed.notify_all()

    def take(self, number: int, numbers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns rows as they are after so many rounds, float32 of shape (numbers, width) for each stack.

        Args:
            number: Of the round.
            numbers: Of this part's rows, for each stack.

        Raises:
            PeerLostError: A rank is gone that has not contributed.
            DeadlineExceededError: One did not in time.
        """
        with self._changed:
            self._await_round(number)
            return [one.take(given) for one, given in zip(self._stack_parts, numbers, strict=True)]

    def values(self, table: int, number: int, name: str, first: int, count: int) -> np.ndarray:
        """Returns a copy of some rows of an array of a part, as they are after so many rounds."""
        with self._changed:
            self._await_round(number)
            return self._table_parts[table].arrays[name][first : first + count].copy()

    def part(self, table: int, number: int) -> TablePart:
        """Returns a part as it is after so many rounds, until this rank contributes to the next one."""
        with self._changed:
            self._await_round(number)
            return self._table_parts[table]

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

    def _await_round(self, number: int) -> None:
        if self._applied >= number:
            return
        deadline = Deadline(self._wait_s, "Waiting for all ranks' gradients of tables")
        while self._applied < number:
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
        number, arrays, count = int(message.fields["round"]), message.arrays, len(self._stack_parts)
        counts = {PUSH: (2,), STEP: (1, 3), READ: (0,)}.get(str(message.kind), ())
        if len(arrays) not in [one * count for one in counts]:
            raise ProtocolError(f"Expected {STEP}, {PUSH} or {READ} with their arrays. Received: {message.kind!r}.")
        if len(arrays) > count:
            given = TableContribution(
                tuple(message.fields["tables"]), list(arrays[:count]), list(arrays[count : 2 * count])
            )
            stacks = [one.stack for one in self._stack_parts]
            self.contribute(rank, number, checked_contribution(stacks, self._stack_parts[0].part, given))
        if message.kind == PUSH:
            return
        try:
            if message.kind == READ:
                reply = Message(kind=VALUES, arrays=(self._values_for(number, message.fields),))
            else:
                reply = Message(kind=ROWS_FOUND, arrays=tuple(self.take(number, self._checked_all(arrays[-count:]))))
        except (PeerLostError, DeadlineExceededError) as error:
            reply = Message(kind=FAILED, fields={"text": str(error)})
        stream.send(reply, Deadline(self._wait_s, "Answering a rank"))
        self.bytes_sent += sum(array.nbytes for array in reply.arrays)

    def _values_for(self, number: int, fields: Mapping[str, Any]) -> np.ndarray:
        table, name = int(fields["table"]), str(fields["name"])
        if table not in self._table_parts or name not in self._table_parts[table].arrays:
            raise ProtocolError(f"Expected an array of a table. Received: {name!r} of table {table}.")
        return self.values(table, number, name, int(fields["first"]), int(fields["count"]))

    def _checked_all(self, numbers: Sequence[np.ndarray]) -> list[np.ndarray]:
        pairs = zip(self._stack_parts, numbers, strict=True)
        return [checked_numbers(stack_part.stack, stack_part.part, given) for stack_part, given in pairs]
