"""The channel between ranks and the driver: events up, two words down, one meeting, and turns of callbacks.

A task that waits here waits on a socket of its own, see `elephant.monitor.channel.ChannelClient.meet`. In Spark's
``allGather``, which takes a second besides, it would take its executor down as soon as another rank's task fails
(3.5.9 and 4.3.0).

Events go up, kept apart from silence by heartbeats. Two words come down: that
everything was heard, which a rank waits for before it ends, and that the fit is
over, after which it ends at once. A connection that breaks means the same. Before, the
ranks' tasks speak for them, and meet here (`elephant.monitor.channel`). At the ends of epochs rank 0 waits here
for callbacks that run on the driver (`ChannelClient.await_callbacks`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np

from elephant.checkpoint.state import FitState
from elephant.config import Timeouts
from elephant.data.schema import RowSpec
from elephant.errors import (
    ClusterError,
    DeadlineExceededError,
    ElephantError,
    NetworkError,
    PeerLostError,
    ProtocolError,
    kind_of,
)
from elephant.monitor.events import (
    LIMITS,
    Alive,
    Arrived,
    CallbacksDone,
    CallbacksDue,
    EpochEnded,
    EpochPart,
    Event,
    FilesLeft,
    Finished,
    Joined,
    PeerReady,
    Peers,
    Printed,
    RankFailure,
    RankGone,
    RankSilent,
    Started,
    StateArrays,
    StateNeeded,
    StateSaved,
    StopRequested,
    TaskSilent,
    TaskStarted,
    TrainingFinished,
    from_message,
    to_message,
)
from elephant.monitor.meetings import MET, PING, SEND_S, Meetings
from elephant.net.addresses import Ports
from elephant.net.buffers import portable
from elephant.net.deadline import Deadline
from elephant.net.frames import Limits, Message, require
from elephant.net.server import Server
from elephant.net.stream import Listener, Stream, connect
from elephant.net.work_queue import WorkQueue

# An answer may hold what a thousand tasks with eight GPUs each tell.
ANSWER_LIMITS = Limits(max_manifest_bytes=64 * 2**20, max_payload_bytes=LIMITS.max_payload_bytes)
_RESULT_TIMEOUT_S = 600.0
_REFUSED_S = 5.0
_HEARD = "Heard"
_DISMISSED = "Dismissed"
# To rank 0: that somebody wants a state, and that the last one is with the driver.
_STATE_WANTED, _STATE_HERE = "StateWanted", "StateHere"


class Channel:
    """The driver's end: a server that puts what ranks say into one queue.

    Args:
        begins_again: Whether tasks of ranks stay connected, and form a new generation after a loss.

    Attributes:
        meetings: Those of the tasks.
    """

    def __init__(
        self,
        *,
        bind_host: str | Listener,
        token: bytes,
        run_id: str,
        timeouts: Timeouts,
        begins_again: bool = False,
        ports: Ports = None,
    ) -> None:
        self.meetings = Meetings(are_repeated=begins_again)
        self._begun_tasks: set[int] = set()
        # Events with the generation whose they are, where they are of one; and what this end itself has failed of.
        self._events: queue.Queue[tuple[int | None, Event | ElephantError]] = queue.Queue()
        self._timeouts = timeouts
        self._streams: set[Stream] = set()
        self._streams_changed = threading.Condition()
        self._waiting_streams: Stream | None = None
        self._answered_streams: Stream | None = None
        self._first_stream: Stream | None = None
        # Of workers in gossip mode: their latest attempts'.
        self._worker_streams: dict[int, Stream] = {}
        self._listener = Listener.bind(bind_host, ports=ports) if isinstance(bind_host, str) else bind_host
        self.port = int(self._listener.address[1])
        self._server = Server(
            self._listener, token=token, context=run_id, on_connect=self._serve, on_exhausted=self._lack_room
        )

    @property
    def turned_away(self) -> dict[str, int]:
        """Number of refused connections by host: they did not prove that they belong to the run."""
        return self._listener.turned_away

    @property
    def awaited(self) -> str:
        """Words for all that ranks wait for before they begin."""
        if self.meetings.is_over:
            return "workers have met, and import and prepare what they need"
        tasks = len(self._begun_tasks)
        if not tasks:
            return "Spark starts the workers' tasks"
        if tasks == 1:
            return "1 running task starts its worker and reads its rows"
        return f"{tasks} running tasks start workers and read their rows"

    def next_event(self, timeout_s: float) -> Event | None:
        """Returns the next event, or None when none comes in time.

        Raises:
            ClusterError: This process could not take what a rank has sent, for want of memory above all.
            ProtocolError: Who proved to belong to the fit did not say which rank it is, and sent no event.
        """
        while True:
            try:
                generation, event = self._events.get(timeout=timeout_s)
            except queue.Empty:
                return None
            if isinstance(event, ElephantError):
                raise event
            # What a generation tells that has been given up is of no use.
            if generation in (None, self.meetings.generation):
                return event

    def _put(self, event: Event | ElephantError, generation: int | None = None) -> None:
        self._events.put((generation, event))

    def _lack_room(self, error: NetworkError) -> None:
        self._put(ClusterError(f"the driver can hear no more ranks. {error}"))

    def _serve(self, stream: Stream) -> None:
        with self._streams_changed:
            self._streams.add(stream)
        try:
            self._receive(stream)
        except NetworkError:
            raise
        except Exception as error:
            failure = ClusterError(
                f"the driver failed while it received from {stream.peer}: {type(error).__name__}: {error}. "
                "The ranks have not failed. Where memory is short, give the driver more."
            )
            failure.__cause__ = error
            self._put(failure)
        finally:
            with self._streams_changed:
                self._streams.discard(stream)
                self._streams_changed.notify_all()

    def _receive(self, stream: Stream) -> None:
        rank: int | None = None
        task: TaskStarted | None = None
        generation: int | None = None

        def is_overtaken() -> bool:
            # By a later attempt, which is not to be taken for lost.
            return rank is not None and self._worker_streams.get(rank, stream) is not stream

        finished = failed = is_output = waits = False
        while True:
            try:
                waiting = Deadline(self._timeouts.heartbeat_s, "a heartbeat")
                event = from_message(stream.receive(waiting, LIMITS, whole_within_s=_RESULT_TIMEOUT_S))
            except DeadlineExceededError:
                if is_output or stream is self._answered_streams:
                    # A rank that receives much says nothing meanwhile.
                    continue
                if task is not None:
                    self._put_silence(task)
                elif rank is not None and not is_overtaken():
                    self._put(RankSilent(rank=rank, silent_s=self._timeouts.heartbeat_s), generation)
                return
            except ProtocolError as error:
                if rank is None:
                    self._put(ProtocolError(f"{stream.peer}, of no rank: {error}"))
                else:
                    self._put(RankFailure(rank=rank, host=stream.peer, kind=kind_of(error), message=str(error)))
                return
            except NetworkError:
                # The rank has ended or died. Its Spark task knows which, and says so unless it died as well. Of a task
                # Spark knows it; those that wait for it hear of it sooner.
                speaks = task is None or (waits and not self.meetings.is_over)
                if rank is not None and not finished and speaks and not is_overtaken():
                    self._put(RankGone(rank=rank), generation)
                return
            if isinstance(event, Printed):
                is_output = self._leave_alone(stream)
                self._put(event)
                continue
            rank = event.rank
            if isinstance(event, TaskStarted):
                self._begun_tasks.add(event.rank)
                if event.stays:
                    self._attend(stream, event)
                    return
                self._leave_alone(stream)
                task = event
                continue
            if isinstance(event, Joined):
                generation = event.generation
                continue
            if isinstance(event, CallbacksDue):
                self._waiting_streams = stream
            if isinstance(event, (Started, StateNeeded)) and rank == 0:
                self._first_stream = stream
            if isinstance(event, PeerReady):
                self._worker_streams[rank] = stream
            if isinstance(event, Arrived):
                waits = self._look_after(stream)
                self.meetings.add(event, stream)
                continue
            # A task that speaks for its rank says one thing and hangs up.
            failed = failed or isinstance(event, RankFailure)
            finished = finished or failed or isinstance(event, Finished)
            if isinstance(event, Finished):
                # Before anybody has the event, who may then dismiss the rank: it would take that for the answer.
                stream.send(Message(kind=_HEARD), Deadline(10.0, "answering a rank"))
            # A rank whose failure was reported here has not finished: another attempt may be on its way.
            is_end = isinstance(event, Finished) and (is_output or failed)
            if not isinstance(event, Alive) and not is_end:
                # What the user's code has left is the fit's, whichever ranks it was.
                self._put(event, None if isinstance(event, FilesLeft) else generation)

    def _put_silence(self, task: TaskStarted) -> None:
        self._put(TaskSilent(**vars(task), silent_s=self._timeouts.heartbeat_s))

    def _attend(self, stream: Stream, task: TaskStarted) -> None:
        """Receives what a task that stays says of its ranks, which form anew after losses, until its end."""
        generation: int | None = None
        self.meetings.enter(task.rank, stream, is_retry=task.is_retry)
        while True:
            try:
                waiting = Deadline(self._timeouts.heartbeat_s, "a heartbeat")
                event = from_message(stream.receive(waiting, LIMITS, whole_within_s=_RESULT_TIMEOUT_S))
            except DeadlineExceededError:
                # Of a copy that waits nobody needs anything.
                if self.meetings.holds(task.rank, stream):
                    self.meetings.leave(task.rank, stream)
                    self._put_silence(task)
                return
            except NetworkError:
                lost = self.meetings.leave(task.rank, stream)
                if lost is not None:
                    self._put(RankGone(rank=task.rank, with_task=True), lost)
                return
            self.meetings.hear(task.rank, stream)
            if isinstance(event, Joined):
                generation = event.generation
            elif isinstance(event, Arrived):
                self.meetings.add(event, stream)
            elif not isinstance(event, Alive):
                self._put(event, generation)

    def _leave_alone(self, stream: Stream) -> bool:
        """Has nobody wait for the end of a stream, as of one that carries output: its rank's process ends by itself."""
        with self._streams_changed:
            self._streams.discard(stream)
            self._streams_changed.notify_all()
        return True

    def _look_after(self, stream: Stream) -> bool:
        """Has a task that waits for others be told when there is no point in that any more."""
        with self._streams_changed:
            self._streams.add(stream)
        return True

    def answer(self, done: CallbacksDone) -> None:
        """Tells the rank that waits for callbacks what they ask for; one that is lost is heard of by its stream."""
        if self._waiting_streams is None:
            return
        self._answered_streams = self._waiting_streams
        try:
            with contextlib.suppress(NetworkError):
                self._waiting_streams.send(to_message(done), Deadline(_RESULT_TIMEOUT_S, "answering a rank"))
        finally:
            self._answered_streams = None

    def tell(self, peers: Peers) -> None:
        """Tells a worker in gossip mode who its peers are; one that is lost is heard of by its stream."""
        stream = self._worker_streams.get(peers.rank)
        if stream is not None:
            with contextlib.suppress(NetworkError):
                stream.send(to_message(peers), Deadline(SEND_S, "telling a worker its peers"))

    def ask_for_state(self) -> None:
        """Asks rank 0 for a state of the fit soon; one that is lost is heard of by its stream."""
        self._tell_first(_STATE_WANTED)

    def confirm_state(self, epochs: int, step: int) -> None:
        """Tells rank 0 that the state of so many epochs and steps is here."""
        self._tell_first(_STATE_HERE, epochs=epochs, step=step)

    def send_state(self, state: FitState) -> None:
        """Sends rank 0 the state that all ranks go on from; one that is lost is heard of by its stream."""
        stream = self._first_stream
        if stream is None:
            return
        self._answered_streams = stream
        try:
            with contextlib.suppress(NetworkError):
                for part in StateSaved.of(state, rank=0).in_parts():
                    stream.send(to_message(part), Deadline(_RESULT_TIMEOUT_S, "sending a rank the fit's state"))
        finally:
            self._answered_streams = None

    def _tell_first(self, kind: str, **fields: int) -> None:
        if self._first_stream is not None:
            with contextlib.suppress(NetworkError):
                self._first_stream.send(Message(kind=kind, fields=fields), Deadline(SEND_S, "telling rank 0"))

    def dismiss(self, timeout_s: float = 5.0) -> None:
        """Tells all ranks that the fit is over, and waits until their processes have let go.

        Args:
            timeout_s: For how long to wait for the next one: many need longer, one that is frozen never does.
        """
        with self._streams_changed:
            for stream in self._streams:
                with contextlib.suppress(NetworkError):
                    stream.send(Message(kind=_DISMISSED), Deadline(1.0, "dismissing a rank"))
            while left := len(self._streams):
                if not self._streams_changed.wait_for(lambda: len(self._streams) < left, timeout=timeout_s):
                    break

    def close(self) -> None:
        """Ends all connections and threads."""
        self._server.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class Met:
    """Word of the driver that the tasks of all ranks have come.

    Args:
        texts: What each of them told, by rank.
        generation: The number of the meeting, from zero.
        goes_on: Whether rank 0 is to ask for a state.
    """

    texts: list[str]
    generation: int = 0
    goes_on: bool = False


class ChannelClient:
    """A rank's end, as the `elephant.rank.job.Reporter` of its training.

    Leaving its ``with`` block without an error waits until the driver has heard everything.

    Args:
        address: Host and port of the driver's channel.
        token: The run's secret.
        run_id: The run.
        rank: Whose end it is.
        timeouts: How long waits may last.
        on_dismissed: Called where the run is over, or the driver gone, before this end has hung up.
        generation: Of which it tells, where ranks form anew after losses.
        on_message: More that the driver may say, by its word; called in the thread that listens.

    Attributes:
        on_peers: Called with what the driver tells a worker in gossip mode, in the thread that listens.
        state_wanted: Whether the driver has asked for a state since this was set to false.
    """

    on_peers: Callable[[Peers], None] | None = None

    def __init__(
        self,
        address: tuple[str, int],
        *,
        token: bytes,
        run_id: str,
        rank: int,
        timeouts: Timeouts,
        on_dismissed: Callable[[], None] | None = None,
        generation: int | None = None,
        on_message: Mapping[str, Callable[[Message], None]] | None = None,
    ) -> None:
        self._rank = rank
        self._timeouts = timeouts
        self._on_dismissed = on_dismissed
        self._on_message = {
            MET: self._take_met,
            PING: lambda message: self._say_alive(),
            _STATE_WANTED: self._take_wish,
            _STATE_HERE: self._take_receipt,
            CallbacksDone.__name__: self._take_event,
            StateSaved.__name__: self._take_event,
            StateArrays.__name__: self._take_event,
            Peers.__name__: self._take_peers,
            **(on_message or {}),
        }
        self._stream = connect(
            address,
            token=token,
            context=run_id,
            deadline=Deadline(timeouts.connect_s, "connecting to the driver"),
            # It listens before any rank begins: where nobody does, the run is over.
            refused_s=_REFUSED_S,
        )
        # The driver gives up a rank that it does not hear for so long: then so does the rank, whose link may be cut.
        self._stream.lose_after(timeouts.heartbeat_s)
        # The word with which the driver has ended what it says; none where the connection broke.
        self.last_word = ""
        # What this end waits for, which is one thing at a time; None when the connection has ended.
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = threading.Event()
        # Sends the arrays of states, and how many parts of the last one are left.
        self._sending, self._unsent = WorkQueue(f"elephant-state-{rank}"), 0
        # Those of the last state, which the driver has.
        self._frozen_arrays: Mapping[str, np.ndarray] = {}
        self.state_wanted = False
        # Epochs and steps of the last state that was told of, and of the last one that the driver has.
        self._told, self._here = (-1, -1), (-1, -1)
        self._hearing = threading.Condition()
        self._closing = False
        if generation is not None:
            self.send(Joined(rank=rank, generation=generation))
        self._heart = threading.Thread(target=self._beat, name=f"elephant-heartbeat-{rank}", daemon=True)
        self._heart.start()

    def send(self, event: Event, *, timeout_s: float = 60.0) -> None:
        """Sends one event; raises NetworkError when the driver is gone."""
        self._stream.send(to_message(event), Deadline(timeout_s, f"telling the driver {type(event).__name__}"))

    def meet(self, text: str, *, num_tasks: int) -> Met:
        """Waits until the tasks of all ranks have come here; returns what each of them told.

        Raises:
            PeerLostError: The run has ended, or the driver.
        """
        self.send(Arrived(rank=self._rank, text=text, num_tasks=num_tasks))
        # It comes in any case: the thread that listens says so when the connection ends.
        message = self._received.get()
        if message is None:
            raise PeerLostError("expected all ranks to come. The driver has ended the run, or is gone.")
        return Met(**message.fields)

    def fetch_state(self) -> FitState:
        """Asks for the state that all ranks go on from; returns it when all of it has come.

        Raises:
            PeerLostError: The run has ended, or the driver.
        """
        self.send(StateNeeded(rank=self._rank))
        saved: StateSaved | None = None
        parts: list[np.ndarray] = []
        while True:
            event = self._received.get()
            if event is None:
                raise PeerLostError("expected the state of the fit. The driver has ended the run, or is gone.")
            if isinstance(event, StateSaved):
                saved = event
            else:
                parts += event.arrays
            if saved is not None and sum(map(len, parts)) >= sum(map(math.prod, saved.shapes or [])):
                arrays = saved.joined(parts)
                if arrays is not None:
                    return replace(saved, shapes=None, arrays=arrays).state

    def await_callbacks(self, timeout_s: float) -> CallbacksDone | None:
        """Returns the answer of callbacks on the driver, after `CallbacksDue`; None where they take longer.

        Raises:
            PeerLostError: The run has ended, or the driver.
        """
        try:
            done: CallbacksDone | None = self._received.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if done is None:
            raise PeerLostError("expected callbacks to run on the driver. It has ended the run, or is gone.")
        return done

    def epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Tells that an epoch has ended."""
        self.send(EpochEnded(rank=self._rank, epoch=epoch, logs=logs))

    def epoch_part(self, part: EpochPart) -> None:
        """Tells this worker's part of the numbers of an epoch."""
        self.send(part)

    def request_stop(self) -> None:
        """Asks the driver to stop all workers."""
        self.send(StopRequested(rank=self._rank))

    def keep(self, state: FitState) -> None:
        """Tells of the fit's state, and sends its arrays beside what goes on; waits for those of the last one.

        Frozen weights that the last state had, as the same arrays, are not sent again.
        """
        self._sending.wait()
        self._told = (state.epochs, state.step)
        frozen, before = state.frozen, self._frozen_arrays
        new = {name: one for name, one in state.arrays.items() if name not in frozen or before.get(name) is not one}
        self._frozen_arrays = frozen
        saved, *parts = StateSaved.of(replace(state, arrays=new), rank=self._rank).in_parts()
        self.send(saved)
        self._unsent = len(parts)
        for part in parts:
            self._sending.submit(functools.partial(self._send_part, part))

    def _send_part(self, part: Event) -> None:
        self.send(part, timeout_s=_RESULT_TIMEOUT_S)
        self._unsent -= 1

    def await_receipt(self, timeout_s: float) -> bool:
        """Waits until the driver has the last state, or for so long; returns whether it has."""
        with self._hearing:
            return self._hearing.wait_for(lambda: self._here == self._told or self._ended.is_set(), timeout_s) and (
                self._here == self._told
            )

    @property
    def is_free(self) -> bool:
        """True if all arrays of the last state have been sent."""
        return self._unsent == 0

    def result(self, variables: Sequence[np.ndarray], rows: RowSpec) -> None:
        """Sends the trained variables."""
        self._sending.wait()
        arrays = tuple(portable(variable) for variable in variables)
        self.send(TrainingFinished(rank=self._rank, rows=rows.to_json(), arrays=arrays), timeout_s=_RESULT_TIMEOUT_S)

    def _beat(self) -> None:
        try:
            self._listen()
        finally:
            self._ended.set()
            with self._hearing:
                self._hearing.notify_all()
            self._received.put(None)
            # However it ended: nobody else would hear that the run is over.
            if not self._closing and self.last_word != _HEARD and self._on_dismissed is not None:
                self._on_dismissed()

    def _listen(self) -> None:
        while not self._closing:
            try:
                waiting = Deadline(self._timeouts.heartbeat_interval_s, "the driver")
                message = self._stream.receive(waiting, ANSWER_LIMITS, whole_within_s=_RESULT_TIMEOUT_S)
                take = self._on_message.get(str(message.kind))
                if take is None:
                    self.last_word = str(message.kind)
                    return
                take(message)
            except DeadlineExceededError:
                self._say_alive()
            except NetworkError:
                return

    def _say_alive(self) -> None:
        with contextlib.suppress(NetworkError):
            self.send(Alive(rank=self._rank))

    def _take_event(self, message: Message) -> None:
        self._received.put(from_message(message, recorded=True))

    def _take_met(self, message: Message) -> None:
        require(message.fields, {"texts": list[str], "generation": int, "goes_on": bool}, MET)
        self._received.put(message)

    def _take_wish(self, message: Message) -> None:
        self.state_wanted = True

    def _take_receipt(self, message: Message) -> None:
        require(message.fields, {"epochs": int, "step": int}, _STATE_HERE)
        with self._hearing:
            self._here = (message.fields["epochs"], message.fields["step"])
            self._hearing.notify_all()

    def _take_peers(self, message: Message) -> None:
        peers = from_message(message, recorded=True)
        if self.on_peers is not None and isinstance(peers, Peers):
            self.on_peers(peers)

    def close(self) -> None:
        """Waits until the driver has heard everything that was told, and ends the connection.

        Raises:
            NetworkError: The driver is gone, or does not answer.
        """
        self._sending.wait()
        self.send(Finished(rank=self._rank))
        ended = self._ended.wait(_RESULT_TIMEOUT_S)
        self.hang_up()
        if not ended:
            raise DeadlineExceededError("expected the driver to confirm what it was told. Received: no answer.")
        if self.last_word != _HEARD:
            raise PeerLostError("expected the driver to confirm what it was told. It ended the fit, or is gone.")

    def await_end(self, timeout_s: float) -> bool:
        """Waits until this end or the driver has hung up, or for so long; returns whether one has."""
        return self._ended.wait(timeout_s)

    def hang_up(self) -> None:
        """Ends the connection, and waits for nothing."""
        self._closing = True
        self._stream.abort()
        self._sending.close()
        self._heart.join(timeout=5.0)

    def __enter__(self) -> ChannelClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.hang_up()
