"""Events that ranks send to their coordinator, and those that coordinators make themselves.

A class here is all that it takes for an event to travel: frames, their checks, the log of a coordinator beside rank 0
and the event file follow from it. `elephant.monitor.record.FitRecord` remembers what there is to know of it afterwards.
"""

from __future__ import annotations

import enum
import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, get_type_hints

import numpy as np

from elephant.checkpoint.state import FitState
from elephant.data.virtual_shards import ElasticPlan
from elephant.errors import ProtocolError
from elephant.net.buffers import portable
from elephant.net.frames import HEADER_BYTES, Limits, Message, decode, decode_header, encode, require

# One event may be so large, because a trained model is one. Its sender has shown that it belongs to the run.
LIMITS = Limits(max_manifest_bytes=16 * 2**20, max_payload_bytes=64 * 2**30)
# What is sent beside training goes in parts, between which other events go.
_PART_BYTES = 4 << 20


class Logged(enum.Enum):
    """Selection of the events of a class that the log of a coordinator beside rank 0 keeps."""

    ALL = "all"
    FIRST = "the first ones, up to a number"
    LAST = "the last one of each rank"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened on a rank.

    Attributes:
        from_rank: Whether ranks send it; from them, others are refused.
        logged: Which ones of its class a log keeps.
        line: Name of its line in an event file; empty where it has none.
        of_moment: Whether its line stays only until the file is written again.
    """

    rank: int
    arrays: ClassVar[Sequence[np.ndarray]] = ()
    from_rank: ClassVar[bool] = True
    logged: ClassVar[Logged] = Logged.ALL
    line: ClassVar[str] = ""
    of_moment: ClassVar[bool] = False

    @property
    def num_arrays(self) -> int | None:
        """Number of its arrays, as far as its fields say it; None where they do not."""
        return None

    def line_values(self) -> dict[str, Any]:
        """Returns the values of its line in an event file, by name."""
        return vars(self)


@dataclass(frozen=True, kw_only=True)
class Alive(Event):
    """The rank's process runs, whatever it is doing."""


@dataclass(frozen=True, kw_only=True)
class TaskStarted(Event):
    """A rank's Spark task has begun, and says that it is alive until the rank's process says so itself."""

    host: str
    executor: str
    attempt: int
    # whether it stays connected, and starts its ranks' processes anew when others were lost
    stays: bool = False
    # whether it is another attempt in the same stage, of a task that was lost or that Spark takes for slow
    is_retry: bool = False


@dataclass(frozen=True, kw_only=True)
class Joined(Event):
    """Generation of ranks, which form anew after each loss, that is told of over this connection from here on."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class StateNeeded(Event):
    """The ranks have met again: rank 0 waits for the state that all go on from."""

    logged: ClassVar[Logged] = Logged.NONE


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """The rank has its rows and its peers, and begins to train."""

    line: ClassVar[str] = "worker_begin"
    host: str
    device: str  # what it computes on, as the plan shows it
    threads: int
    training_rows: int
    validation_rows: int
    executor: str = ""
    devices: list[str] = field(default_factory=list)  # its GPUs, as CUDA_VISIBLE_DEVICES names them; none for the CPU
    note: str = ""
    # the step that it begins with, counted from one over all epochs; None where it has no steps, or where they are
    # its own
    first_step: int | None = None
    warm: bool = False  # whether its process was forked from one that waited


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """The rank has ended a step; steps count from one, logs are its own."""

    logged: ClassVar[Logged] = Logged.LAST
    line: ClassVar[str] = "worker_step"
    of_moment: ClassVar[bool] = True
    epoch: int
    step: int
    steps: int
    logs: Mapping[str, float | list[Any]]
    rows: int = 0  # of its own that the epoch has used
    # Averages over the epoch's steps, without the first one of the process, which is traced; zero where there are none.
    rows_per_s: float = 0.0
    step_s: float = 0.0  # seconds of a step
    wait_s: float = 0.0  # of these, in which it exchanged with other ranks or servers, or waited for them


@dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    """All ranks have ended an epoch, counted from zero; logs are theirs together, seconds are told in records alone.

    Where workers were lost when they had trained the whole epoch and before they could say its numbers, these are NaN.
    """

    epoch: int
    logs: Mapping[str, float | list[Any]]
    seconds: float | None = None
    is_lost: bool = False


@dataclass(frozen=True, kw_only=True)
class CallbacksDue(Event):
    """Training begins, or all ranks have ended an epoch: rank 0 waits until callbacks on the driver have run."""

    logged: ClassVar[Logged] = Logged.NONE
    epoch: int | None  # from zero; None when training begins
    steps: int  # of an epoch
    logs: dict[str, Any]  # all ranks' together
    stopped: bool  # whether callbacks on workers have ended training
    learning_rate: float | None  # None where it follows a schedule
    iterations: int  # steps of the optimizer
    rows: dict[str, Any]  # `RowSpec.to_json` of the model's input
    row_shapes: Mapping[str, Sequence[int]]  # natural shape of a row of each array column that there is, by role
    # the model's variables, where callbacks on the driver may look at them
    arrays: Sequence[np.ndarray] = field(default=(), compare=False)  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class CallbacksDone(Event):
    """Answer to `CallbacksDue`, from the driver to rank 0: what the callbacks ask for."""

    from_rank: ClassVar[bool] = False
    stop: bool
    logs: dict[str, Any]  # as the callbacks have left them
    learning_rate: float | None = None  # None leaves it as it is
    # the model's weights, where callbacks have changed them
    arrays: Sequence[np.ndarray] = field(default=(), compare=False)  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class RankEpoch(Event):
    """The rank has ended an epoch, counted from zero: what its seconds went into."""

    line: ClassVar[str] = "worker_epoch"
    epoch: int
    rows: int  # training rows of its own
    seconds: float  # of the epoch, with validation and callbacks
    training_s: float  # of these, until the last step's end
    wait_s: float  # of the epoch, in which it exchanged with other ranks or servers, or waited for them
    input_s: float  # of the epoch, in which a step waited for its rows
    bytes_sent: int  # to other ranks, or to servers
    training_wait_s: float | None = None  # of wait_s, until the last step's end; files of events may lack it
    first_step_s: float = (
        0.0  # computing in the process' first step, in which the model is traced; later ones have none
    )
    # seconds by what its task and its process did before the process' first epoch; nothing in later ones
    start: Mapping[str, float] = field(default_factory=dict)
    # by the clock of who hears it, in seconds since 1970, told in records alone
    heard: float | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class RankTrace(Event):
    """The rank begins to train, or has ended an epoch: what it did until then and when, where a trace is asked for.

    Times are seconds of its monotonic clock; phases have a name, begin and end, and may have pairs of more.
    """

    epoch: int | None  # from zero; None when training begins
    phases: list[list[Any]]
    task_phases: list[list[Any]]  # of the Spark task that has started it
    clock_s: float  # its host's clock, seconds since 1970, without the monotonic one
    sent: float
    heard: float | None = None  # by the clock of who hears it, told in records alone
    # of steps one array, shape (steps, 5), of float64: number in the epoch from one, begin and end, and of its seconds
    # those of exchanges and of waiting for rows
    arrays: Sequence[np.ndarray] = field(default=(), compare=False)  # type: ignore[misc]

    @property
    def num_arrays(self) -> int | None:
        return 1


@dataclass(frozen=True, kw_only=True)
class EpochPart(Event):
    """One worker of an asynchronous fit has ended an epoch of its own; workers' parts make the epoch's numbers."""

    logged: ClassVar[Logged] = Logged.NONE
    epoch: int
    rows: int  # training rows that the sums are of: fewer than the worker has, where it began in mid-epoch
    val_rows: int  # validation rows that the sums are of
    steps: int  # batches that the training rows came in
    wait_s: float  # seconds of the epoch in which the worker waited for a server
    logs: dict[str, Any]  # what Keras logged for this worker's training rows alone
    # natural shape of a row of each array column that the worker has, by role
    row_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    stopped: bool = False
    # what the model's metrics have summed up, over the training and over the validation rows: two float64 vectors,
    # empty where there were no rows
    arrays: Sequence[np.ndarray] = field(default=(), compare=False)  # type: ignore[misc]

    @property
    def num_arrays(self) -> int | None:
        return 2 if self.rows or self.val_rows else None


@dataclass(frozen=True, kw_only=True)
class Printed(Event):
    """Lines that the rank's process has printed; left_out counts lines that were too many since the last time."""

    logged: ClassVar[Logged] = Logged.FIRST
    host: str
    lines: list[str]
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event):
    """A callback on a worker has set ``stop_training``: all workers are to stop."""


@dataclass(frozen=True, kw_only=True)
class PeerReady(Event):
    """A worker of a fit in gossip mode listens for its peers, and waits to be told who these are."""

    logged: ClassVar[Logged] = Logged.NONE
    attempt: int  # Spark's number of the attempt at its task
    host: str
    port: int
    labels: Mapping[str, float]  # how many of its rows have each class; empty where labels are no classes


@dataclass(frozen=True, kw_only=True)
class Peers(Event):
    """The driver tells a worker in gossip mode who its peers are, and what it has to know of the fit."""

    from_rank: ClassVar[bool] = False
    attempt: int  # the latest attempt at the worker's partition
    peers: list[list[Any]]  # partition, attempt, host and port of each other worker that runs now
    stop: bool
    rate: float | None  # learning rate that callbacks have set; None leaves it as it is
    ahead: bool  # whether others have trained, from whose weights one that comes now is to begin
    done: bool  # whether the partition is trained to its end
    steps: list[int]  # by partition, the last step whose effect is in the arrays
    asked: int = 0  # number of the question for the worker's weights; zero where there is none
    # weights and moving statistics to begin from, unless others are ahead and one tells its own: float32 and float64;
    # or nothing
    arrays: Sequence[np.ndarray] = field(default=(), compare=False)  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class WorkerModel(Event):
    """Weights of a worker in gossip mode: at the end of an epoch, or of its training, or where the driver has asked."""

    logged: ClassVar[Logged] = Logged.NONE
    epochs: int  # that it has ended
    final: bool  # whether it has trained to its end
    share: float  # push-sum weight
    steps: list[int]  # by partition, the last step whose effect is in the weights
    exchanges: int  # that it has asked for and that came about
    missed: int  # that it has asked for and that did not come about
    refused: int  # moves of its own with NaN or infinities, which were left out
    bytes_sent: int  # to peers
    asked: int = 0  # number of the question that it answers; zero where nobody has asked
    # the weights times the share, float32, and the moving statistics, float64
    arrays: Sequence[np.ndarray] = field(default=(), compare=False)  # type: ignore[misc]

    @property
    def num_arrays(self) -> int | None:
        return 2


@dataclass(frozen=True, kw_only=True)
class Serving(Event):
    """A parameter server listens; rank is its number among the servers of the fit."""

    host: str
    port: int
    restarts: int


@dataclass(frozen=True, kw_only=True)
class TrainingFinished(Event):
    """Training has ended; the arrays are the model's variables, and rows is `RowSpec.to_json` of its input."""

    rows: dict[str, Any]
    arrays: Sequence[np.ndarray] = field(default=(), compare=False)  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class WorkersChanged(Event):
    """An elastic fit begins, or goes on, with so many workers: what was told of ranks before counts no more."""

    from_rank: ClassVar[bool] = False
    line: ClassVar[str] = "workers"
    workers: int
    rank: int = 0

    def line_values(self) -> dict[str, Any]:
        return {"workers": self.workers}


@dataclass(frozen=True, kw_only=True)
class ShardsMoved(Event):
    """Virtual shards of an elastic fit have moved to other ranks, after an epoch, counted from zero."""

    line: ClassVar[str] = "shards_moved"
    epoch: int
    # each from a rank to a rank: how many, and how many times the seconds of a row the first one took
    moves: list[list[Any]]
    pieces: int  # virtual shards of all ranks
    rows: list[int]  # training rows of each rank from now on
    seconds: float  # that it took

    @classmethod
    def between(
        cls, last_plan: ElasticPlan, next_plan: ElasticPlan, *, epoch: int, busy_s: np.ndarray, took_s: float
    ) -> ShardsMoved:
        """Returns the event of a move, by the seconds of each rank in the steps of the epoch before it."""
        row_s = busy_s / np.maximum(last_plan.training_rows, 1)
        sizes = zip(last_plan.piece_rows, last_plan.piece_validation, strict=True)
        pairs = zip(last_plan.owners, next_plan.owners, map(sum, sizes), strict=True)
        counts = Counter((source, target) for source, target, size in pairs if source != target and size)
        moves = [
            [source, target, count, round(float(row_s[source] / max(row_s[target], 1e-12)), 2)]
            for (source, target), count in sorted(counts.items())
        ]
        pieces, rows = len(next_plan.owners), list(next_plan.training_rows)
        return cls(rank=0, epoch=epoch, moves=moves, pieces=pieces, rows=rows, seconds=round(took_s, 3))

    @property
    def texts(self) -> list[str]:
        """Lines for the user: one for each pair of ranks.

        >>> moved = ShardsMoved(rank=0, epoch=4, moves=[[1, 0, 3, 2.0]], pieces=32, rows=[60, 40], seconds=0.5)
        >>> moved.texts
        ['epoch 5: 3 of 32 virtual shards move from rank 1 to rank 0: a row takes rank 1 2.0 times as long']
        """
        return [
            f"epoch {self.epoch + 1}: {count} of {self.pieces} virtual shards move from rank {source} to rank "
            f"{target}: a row takes rank {source} {factor:.1f} times as long"
            for source, target, count, factor in self.moves
        ]


@dataclass(frozen=True, kw_only=True)
class RunNote(Event):
    """A line about the run as a whole, of its coordinator."""

    from_rank: ClassVar[bool] = False
    line: ClassVar[str] = "note"
    text: str
    rank: int = 0

    def line_values(self) -> dict[str, Any]:
        return {"text": self.text}


@dataclass(frozen=True, kw_only=True)
class Awaited(Event):
    """The run waits for something before it trains, and for so long; without a text, it waits for nothing.

    Its coordinator says so again and again, also while it trains: who reads an event file sees that it is there.
    """

    from_rank: ClassVar[bool] = False
    logged: ClassVar[Logged] = Logged.LAST
    line: ClassVar[str] = "waiting"
    of_moment: ClassVar[bool] = True
    text: str
    seconds: int
    rank: int = 0

    def line_values(self) -> dict[str, Any]:
        return {"text": self.text, "seconds": self.seconds}


@dataclass(frozen=True, kw_only=True)
class ServerCounts(Event):
    """Counts of parameter servers beside rank 0."""

    from_rank: ClassVar[bool] = False
    statistics: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StateSaved(Event):
    """An epoch has ended from which the fit could go on; see `elephant.checkpoint.state.FitState`."""

    logged: ClassVar[Logged] = Logged.LAST
    epochs: int
    history: dict[str, Any]  # one number per epoch and metric
    facts: dict[str, Any]
    names: Sequence[str]
    step: int = 0
    shapes: list[list[int]] | None = None  # of arrays that come in events of their own; None where they are here
    arrays: Sequence[np.ndarray] = field(default=(), compare=False)  # type: ignore[misc]

    @property
    def num_arrays(self) -> int | None:
        return len(self.names) if self.shapes is None else 0

    @classmethod
    def of(cls, state: FitState, *, rank: int) -> StateSaved:
        """Returns the event that carries a state."""
        return cls(
            rank=rank,
            epochs=state.epochs,
            step=state.step,
            history=dict(state.history),
            facts=dict(state.facts),
            names=list(state.arrays),
            arrays=tuple(portable(array) for array in state.arrays.values()),
        )

    @property
    def state(self) -> FitState:
        """The state that it carries."""
        arrays = dict(zip(self.names, self.arrays, strict=self.shapes is None))
        return FitState(epochs=self.epochs, step=self.step, history=self.history, arrays=arrays, facts=self.facts)

    def in_parts(self) -> Iterator[Event]:
        """Yields this event without the arrays, and these in events of some megabytes, so that others come between."""
        yield replace(self, shapes=[list(array.shape) for array in self.arrays], arrays=())
        part: list[np.ndarray] = []
        for array in self.arrays:
            flat = array.reshape(-1)
            length = max(_PART_BYTES // max(flat.itemsize, 1), 1)
            for start in range(0, max(len(flat), 1), length):
                part.append(flat[start : start + length])
                if sum(one.nbytes for one in part) >= _PART_BYTES:
                    yield StateArrays(rank=self.rank, arrays=part)
                    part = []
        if part:
            yield StateArrays(rank=self.rank, arrays=part)

    def joined(self, parts: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """Returns the arrays of what has come of `in_parts`, in their order; None where more is to come.

        Raises:
            ProtocolError: A piece is none of the array whose turn it is.

        >>> values = [np.eye(2), np.ones(())]
        >>> saved = StateSaved(rank=0, epochs=1, history={}, facts={}, names=["a", "b"], arrays=values)
        >>> first, arrays = saved.in_parts()
        >>> [array.tolist() for array in first.joined(arrays.arrays)], first.joined(arrays.arrays[:1])
        ([[[1.0, 0.0], [0.0, 1.0]], 1.0], None)
        """
        arrays, left = [], iter(parts)
        for shape in self.shapes or []:
            pieces: list[np.ndarray] = []
            missing = math.prod(shape)
            while not pieces or missing > 0:
                if (piece := next(left, None)) is None:
                    return None
                if piece.ndim != 1 or not 0 <= missing - len(piece) < max(missing, 1):
                    raise ProtocolError(f"expected pieces of an array of shape {shape}. Received: {piece.shape}.")
                pieces.append(piece)
                missing -= len(piece)
            arrays.append((pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).reshape(shape))
        return arrays


@dataclass(frozen=True, kw_only=True)
class StateArrays(Event):
    """The next pieces of the arrays of the state that rank 0 has told of last: flat, large ones in several."""

    arrays: Sequence[np.ndarray] = field(default=(), compare=False)  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class FilesLeft(Event):
    """Files that the user's code has written to relative paths."""

    names: list[str]
    left_out: list[str]  # in words: those that were too many, or too large
    of_coordinator: bool = False  # whether the process beside rank 0 has them, in which callbacks run
    # contents, bytes as uint8
    arrays: Sequence[np.ndarray] = field(default=(), compare=False)  # type: ignore[misc]

    @property
    def num_arrays(self) -> int | None:
        return len(self.names)

    @classmethod
    def of(
        cls, files: Mapping[str, bytes], left_out: Sequence[str], *, rank: int, of_coordinator: bool = False
    ) -> FilesLeft:
        """Returns the event that carries files."""
        arrays = tuple(np.frombuffer(content, np.uint8) for content in files.values())
        return cls(rank=rank, names=list(files), left_out=list(left_out), of_coordinator=of_coordinator, arrays=arrays)

    @property
    def files(self) -> dict[str, bytes]:
        """The contents by relative path."""
        return {name: array.tobytes() for name, array in zip(self.names, self.arrays, strict=True)}


@dataclass(frozen=True, kw_only=True)
class Arrived(Event):
    """A rank's task is ready, and waits until all others are; see `elephant.monitor.channel.ChannelClient.meet`."""

    text: str  # what it has to tell them
    num_tasks: int  # how many they are, with itself


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """The rank has nothing more to say and waits for an answer."""

    logged: ClassVar[Logged] = Logged.NONE


@dataclass(frozen=True, kw_only=True)
class RankFailure(Event):
    """Failure of a rank, from its process to the user: each that hands it on adds what it knows.

    The rank's process knows the error. The Spark task that has started it adds its last lines and step, and the place.
    """

    kind: str  # what `elephant.errors.kind_of` says of the error
    message: str
    traceback: str = ""
    log_tail: str = ""
    step: int | None = None  # the step that it was in, counted from one over all epochs; None before the first
    rank: int = -1
    host: str = ""
    executor: str = ""  # Spark's id of the executor that it ran on; empty where that is not known
    attempt: int = 0  # Spark's number of the attempt at its task
    topic: str = ""  # what `elephant.errors.topic_of` says of the error

    def at(self, task: TaskStarted) -> RankFailure:
        """Returns the failure with the place of the task, of whose first rank it is unless it says another one."""
        rank = task.rank if self.rank < 0 else self.rank
        return replace(self, rank=rank, host=task.host, executor=task.executor, attempt=task.attempt)

    @property
    def is_echo(self) -> bool:
        """True if the rank failed only because another one was gone."""
        return self.kind == "elephant.PeerLostError"


@dataclass(frozen=True, kw_only=True)
class RankSilent(Event):
    """The driver has heard nothing from the rank for too long. Made by the driver itself."""

    from_rank: ClassVar[bool] = False
    silent_s: float


@dataclass(frozen=True, kw_only=True)
class TaskSilent(TaskStarted):
    """The driver has heard nothing from the rank's Spark task for too long. Made by the driver itself."""

    from_rank: ClassVar[bool] = False
    silent_s: float


@dataclass(frozen=True, kw_only=True)
class RankGone(Event):
    """The rank's connection ended without a word: it failed, was ended or died. Made by the driver itself."""

    from_rank: ClassVar[bool] = False
    with_task: bool = False  # whether its Spark task is gone as well, and nobody is left to say why


def _subclasses(kind: type[Event]) -> Iterator[type[Event]]:
    for own in kind.__subclasses__():
        yield own
        yield from _subclasses(own)


@functools.cache
def _kinds(*, from_ranks: bool = False) -> dict[str, type[Event]]:
    """Returns the classes of events by name: all, or those that ranks send. Asked first when all are there."""
    return {kind.__name__: kind for kind in _subclasses(Event) if kind.from_rank or not from_ranks}


@functools.cache
def kinds_by_line() -> dict[str, type[Event]]:
    """Returns the classes of events that have a line in an event file, by its name."""
    return {kind.line: kind for kind in _subclasses(Event) if kind.line}


def to_message(event: Event) -> Message:
    """Returns the frame that carries an event."""
    values = {name: value for name, value in _fields(event).items() if name != "arrays"}
    return Message(kind=type(event).__name__, fields=values, arrays=tuple(event.arrays))


def from_message(message: Message, *, recorded: bool = False) -> Event:
    """Returns the event that a frame carries; raises ProtocolError when it carries none."""
    known = _kinds(from_ranks=not recorded)
    kind = known.get(str(message.kind))
    if kind is None:
        raise ProtocolError(f"expected one of the events {', '.join(known)}. Received: {message.kind!r}.")
    values, (annotations, optional, has_arrays) = message.fields, _form(kind.__name__)
    require(values, annotations, kind.__name__, optional=optional)
    if not has_arrays:
        return kind(**values)
    event = kind(**{**values, "arrays": message.arrays})
    expected = event.num_arrays
    if expected is not None and len(event.arrays) != expected:
        raise ProtocolError(f"expected {kind.__name__} with {expected} arrays. Received: {len(event.arrays)}.")
    return event


@functools.cache
def _form(name: str) -> tuple[dict[str, Any], frozenset[str], bool]:
    """Returns annotations of fields by name, the names of those that have a default, and whether there are arrays."""
    kind = _kinds()[name]
    annotations, parts = get_type_hints(kind), {part.name: part for part in fields(kind)}
    has_arrays = parts.pop("arrays", None) is not None
    defaults = {own for own, part in parts.items() if (part.default, part.default_factory) != (MISSING, MISSING)}
    return {own: annotations[own] for own in parts}, frozenset(defaults - {"rank"}), has_arrays


def _fields(event: Event) -> dict[str, Any]:
    # asdict would copy the arrays.
    return {part.name: getattr(event, part.name) for part in fields(event)}


def packed(events: Sequence[Event]) -> bytes:
    """Returns events as frames, one after the other."""
    return b"".join(b"".join(encode(to_message(event))) for event in events)


def unpacked(record: bytes) -> list[Event]:
    """Returns the events of `packed`; raises ProtocolError when there is something else."""
    events, view = [], memoryview(record)
    while len(view):
        header = decode_header(bytes(view[:HEADER_BYTES]), LIMITS)
        size = HEADER_BYTES + header.manifest_bytes + header.payload_bytes
        events.append(from_message(decode(view[:size], LIMITS), recorded=True))
        view = view[size:]
    return events
