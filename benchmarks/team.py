"""Teams of processes that take turns on this machine, each of them on a core of its own from its first instruction.

A team is one contender of a comparison: two ranks that train together, or three
that run somebody else's allreduce. Between its turns a team waits in a pipe and
uses no processor, so several teams can be measured in turns within one run.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 900.0
_JOIN_S = 20.0
# Long enough for every member to be awake and spinning when the moment comes.
_HEAD_START_S = 0.003
# Of mlockall(2): what is mapped now and later, as soon as it is touched.
_LOCKED = 1 | 2 | 4

Interval = tuple[float, float]


class TeamError(Exception):
    """A member of a team ended, or did not answer in time."""


@dataclass(frozen=True)
class Seat:
    """Where one member runs.

    Args:
        core: The only core that it may use; None lets the system place it, as it places a user's processes.
        entered: A context in which its process is started, such as a network namespace.
    """

    core: int | None
    entered: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


# Wherever the system puts it.
ANYWHERE = Seat(None)


def seats(count: int) -> list[Seat]:
    """Returns so many seats on the cores of this machine, round robin."""
    cores = sorted(os.sched_getaffinity(0))
    return [Seat(cores[index % len(cores)]) for index in range(count)]


class Member:
    """A member of a team, as its own process sees it.

    Args:
        rank: Which one it is.
        size: How many there are.
        pipe: To the process that made the team.
    """

    def __init__(self, rank: int, size: int, pipe: Connection) -> None:
        self.rank = rank
        self.size = size
        self._pipe = pipe

    def exchange(self, value: Any) -> list[Any]:
        """Returns every member's value, by rank; all members call it, as `Team.exchange` does."""
        self._pipe.send(value)
        return self._pipe.recv()

    def turns(self) -> Iterator[Any]:
        """Yields what each turn asks for, until the team is closed."""
        while True:
            try:
                yield self._pipe.recv()
            except EOFError:
                return

    def reply(self, value: Any) -> None:
        """Answers a turn."""
        self._pipe.send(value)

    def timed(self, action: Callable[[], Any]) -> Interval:
        """Runs the action when all members are ready; returns when it began and ended, by the clock that all share."""
        self._pipe.send(None)
        start = self._pipe.recv()
        while time.monotonic() < start:
            # Not a busy wait: another member may need this core to get here.
            os.sched_yield()
        began = time.monotonic()
        action()
        return began, time.monotonic()


class Team:
    """One contender: as many processes as there are seats. Leaving the ``with`` block ends them.

    Args:
        work: What a member does: ``work(member, *arguments)``, a function of a module.
        seats: Where the members run, by rank.
        arguments: Further arguments of ``work``.
        environment: Environment variables of the members.
    """

    def __init__(
        self,
        work: Callable[..., None],
        seats: Sequence[Seat],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for rank, seat in enumerate(seats):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                process = context.Process(target=_serve, args=(work, rank, len(seats), theirs, arguments), daemon=True)
                with _inherited(seat, environment or {}), theirs:
                    process.start()
                self._processes.append(process)
            stack.pop_all()

    def exchange(self) -> None:
        """Hands every member's value to all members."""
        values = self.replies()
        self.ask(values)

    def ask(self, message: Any) -> None:
        """Gives every member the same turn."""
        for pipe in self._pipes:
            pipe.send(message)

    def replies(self) -> list[Any]:
        """Returns what the members answer, by rank."""
        return [self._reply(rank) for rank in range(len(self._pipes))]

    def all_answered(self) -> bool:
        """Returns whether every member's answer is there, or its end."""
        return all(pipe.poll() for pipe in self._pipes)

    def timed(self) -> list[Interval]:
        """Starts what the members run in `Member.timed`, at one moment; returns their replies."""
        self.replies()
        self.ask(time.monotonic() + _HEAD_START_S)
        return self.replies()

    def _reply(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        if not pipe.poll(DEADLINE_S):
            raise TeamError(f"expected an answer of member {rank} within {DEADLINE_S:.0f} s. Received: nothing.")
        try:
            return pipe.recv()
        except EOFError:
            raise TeamError(f"member {rank} ended; its own message is above.") from None

    def close(self) -> None:
        """Ends the members."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lasted(intervals: Sequence[Interval]) -> float:
    """Returns the seconds from the moment at which all members had begun to the one at which all were done."""
    return max(end for _, end in intervals) - max(begin for begin, _ in intervals)


def _serve(work: Callable[..., None], rank: int, size: int, pipe: Connection, arguments: Sequence[Any]) -> None:
    keep_in_memory()
    with pipe:
        work(Member(rank, size, pipe), *arguments)


def keep_in_memory() -> None:
    """Keeps what this process has touched in memory, its libraries' code included, if the system allows that.

    A machine that takes back the memory of files lets a process that waits for its turn read hundreds of megabytes of
    its own code again: epochs of one side then took 2 to 21 seconds longer, at equal processor time.
    """
    ctypes.CDLL(None, use_errno=True).mlockall(_LOCKED)


@contextlib.contextmanager
def _inherited(seat: Seat, environment: Mapping[str, str]) -> Iterator[None]:
    """Gives this thread what a process started in it shall have, for a moment.

    Libraries count the cores when they are imported, which is before a process could pin itself.
    """
    cores, before = os.sched_getaffinity(0), dict(os.environ)
    if seat.core is not None:
        os.sched_setaffinity(0, {seat.core})
    os.environ.update(environment)
    try:
        with seat.entered():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.sched_setaffinity(0, cores)
