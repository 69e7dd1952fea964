"""Gossip of one worker: its place among its peers, and the exchange between them and its model."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from elephant.config import FitConfig
from elephant.errors import DeadlineExceededError, NetworkError, PeerLostError, SupersededError
from elephant.gossip.node import GossipNode, PeerModel, exchange_seconds, read_model
from elephant.gossip.peers import CHOICES
from elephant.gossip.weights import WEIGHTS, Parcel
from elephant.modeling.variables import assign_flat, flatten, moving_statistics, read_weights, write_weights
from elephant.monitor.events import PeerReady, Peers, WorkerModel
from elephant.net.deadline import Deadline
from elephant.net.stream import Listener
from elephant.parameter_server.layout import Layout
from elephant.rank.asynchronous.push_strategies import WorkerExchange, follow_rate
from elephant.rank.job import StepReporter
from elephant.rank.rank_info import RankInfo
from elephant.rank.rank_progress import TrainingPosition


class PeersReporter(StepReporter, Protocol):
    """Reporter of a worker, by which the driver tells it who its peers are."""

    on_peers: Callable[[Peers], None] | None


class GossipMember:
    """Place of a worker among its peers, from the moment in which it listens to the one in which it has left.

    Args:
        rank_info: The worker's.
        config: The options of the fit.
        listener: Its listening socket; owned from here on.
        reporter: Tells the driver that it is ready, and hears from it who its peers are.
        labels: How many of its rows have each class.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        config: FitConfig,
        listener: Listener,
        reporter: PeersReporter,
        labels: dict[str, float] | None = None,
    ) -> None:
        self._rank_info, self._config, self._listener, self._reporter = rank_info, config, listener, reporter
        self._labels = labels or {}
        self._member = (rank_info.rank, rank_info.attempt)
        self._token = bytes.fromhex(rank_info.token)
        self._first_peers: Peers | None = None
        self._last_peers: Peers | None = None
        self._changed = threading.Condition()
        self._node: GossipNode | None = None
        self._first_model: PeerModel | None = None
        self._layout = rank_info.weights_layout

    @functools.cached_property
    def position(self) -> int:
        """The last step of this partition whose effect is in the weights that it begins from; asks for all of these.

        Says first that the worker is ready, and waits to be told its peers: its model is to be there.

        Raises:
            SupersededError: A later attempt trains this partition.
            DeadlineExceededError: The driver does not answer.
        """
        host, port = self._listener.address
        rank, attempt = self._member
        self._reporter.on_peers = self._hear
        self._reporter.send(PeerReady(rank=rank, attempt=attempt, host=host, port=port, labels=self._labels))
        with self._changed:
            if not self._changed.wait_for(lambda: self._last_peers is not None, self._rank_info.timeouts.connect_s):
                raise DeadlineExceededError("expected the driver to tell this worker its peers. Received: no answer.")
        told = self.latest_peers
        # The driver knows the weights of a fit that goes on, and of a partition that was trained to its end.
        of_peer = self._model_of_a_peer() if told.ahead and not told.done else None
        self._first_model = of_peer or self._model_of_driver()
        return 0 if self._first_model is None else int(self._first_model.parcel.steps[rank])

    def _hear(self, peers: Peers) -> None:
        with self._changed:
            # What to begin from is told once.
            self._first_peers = self._first_peers or peers
            self._last_peers = peers
            self._give_peers()
            self._changed.notify_all()

    @property
    def latest_peers(self) -> Peers:
        """The driver's latest message; raises SupersededError where a later attempt trains this partition."""
        told = self._last_peers
        if told is None:
            raise PeerLostError("expected the driver to tell this worker its peers. Received: nothing yet.")
        if told.attempt > self._member[1]:
            raise SupersededError(f"attempt {told.attempt} at partition {told.rank} has taken the place of this one")
        return told

    def _peers(self) -> dict[tuple[int, int], tuple[str, int]]:
        told = [] if self._last_peers is None else self._last_peers.peers
        return {(int(part), int(attempt)): (str(host), int(port)) for part, attempt, host, port in told}

    def _give_peers(self) -> None:
        if self._node is not None:
            self._node.set_peers(self._peers())

    def _model_of_a_peer(self) -> PeerModel | None:
        """Returns the weights of the first peer that tells them; None where none does."""
        num_values = self._layout.num_values
        for _, address in sorted(self._peers().items()):
            deadline = Deadline(exchange_seconds(num_values), "Reading the weights of a peer")
            with contextlib.suppress(NetworkError):
                return read_model(
                    address,
                    deadline,
                    token=self._token,
                    run_id=self._rank_info.run_id,
                    num_values=num_values,
                    num_partitions=self._rank_info.world_size,
                )
        return None

    def _model_of_driver(self) -> PeerModel | None:
        first = self._first_peers
        if first is None or len(first.arrays) != 2:
            return None
        values, state = first.arrays
        return PeerModel(Parcel(np.asarray(values), 1.0, np.array(first.steps, np.int64)), np.asarray(state))

    def begin(self, values: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Begins to answer peers.

        Args:
            values: The weights that the worker's model begins with, float32.
            state: Its moving statistics, float64.

        Returns:
            The moving statistics to begin from.
        """
        parcel = Parcel(values, 1.0, np.zeros(self._rank_info.world_size, np.int64))
        if self._first_model is not None:
            parcel, state = self._first_model.parcel, self._first_model.state
        algorithm, (rank, _) = self._config.gossip_algorithm, self._member
        self.weights = WEIGHTS[algorithm](parcel.values, parcel.steps)
        with self._changed:
            self._node = GossipNode(
                self.weights,
                self._member,
                self._listener,
                token=self._token,
                run_id=self._rank_info.run_id,
                peer_choice=CHOICES[algorithm](rank, self._config.seed),
                state=state,
            )
            self._give_peers()
        return state

    @property
    def node(self) -> GossipNode:
        """Its node; raises PeerLostError before `begin`."""
        if self._node is None:
            raise PeerLostError("expected a worker that has begun. Received: one that has not.")
        return self._node

    def close(self, *, finished: bool = True) -> None:
        """Ends its connections. It has left its peers, or fails."""
        if self._node is not None:
            self._node.close()
        else:
            self._listener.close()

    def __enter__(self) -> GossipMember:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GossipExchange(WorkerExchange):
    """Exchanges weights with one peer every few steps, and at the end of each epoch.

    Steps change the model alone; at an exchange, what they have changed is added to weights that peers have changed
    meanwhile. Momenta and other state of the worker's optimizer stay its own.
    """

    def __init__(
        self,
        gossip_member: GossipMember,
        layout: Layout,
        config: FitConfig,
        position: TrainingPosition,
        reporter: StepReporter,
        partition: int,
    ) -> None:
        super().__init__(position)
        self._gossip_member = gossip_member
        self._layout = layout
        self._reporter = reporter
        self._partition = partition
        self._every = position.steps if config.frequency == "epoch" else 1
        if isinstance(config.frequency, int):
            self._every = config.frequency
        # The weights when the model last got them.
        self._base = layout.zeros()
        self._local = layout.zeros()
        self._window = self._trained = self._refused = self._epochs = self._answered = 0
        self._rate: float | None = None
        self._waited_s = 0.0
        self._begun = False

    @property
    def waited_s(self) -> float:
        return self._waited_s

    @property
    def bytes_sent(self) -> int:
        return self._gossip_member.node.bytes_sent if self._begun else 0

    def begin(self) -> None:
        if not self._begun:
            statistics = moving_statistics(self.model)
            own = flatten(statistics)
            state = self._gossip_member.begin(read_weights(self.model, self._layout), own)
            if statistics and len(state) == len(own):
                assign_flat(statistics, state)
            self._begun = True
        self._window = 0
        self._listen()
        self._load()

    def _listen(self) -> None:
        told = self._gossip_member.latest_peers
        self.stop = self.stop or told.stop
        if told.rate is not None and math.isfinite(told.rate) and told.rate != self._rate:
            self._rate = told.rate
            follow_rate(self.model, told.rate)

    def _load(self) -> None:
        """Gives the model the weights that peers have changed meanwhile."""
        self._base = self._gossip_member.weights.trained().values
        write_weights(self.model, self._layout, self._base)

    @contextlib.contextmanager
    def fresh_weights(self) -> Iterator[None]:
        # Its own: nobody has others.
        yield

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._window += 1
        self._trained += 1
        if (self._position.batch + 1) % self._every == 0 or self._position.ends_epoch:
            self.flush()

    def flush(self) -> None:
        if not self._window or self.stop:
            return
        self._merge()
        began = time.monotonic()
        self._gossip_member.node.exchange()
        self._waited_s += time.monotonic() - began
        self._listen()
        self._load()
        asked = self._gossip_member.latest_peers.asked
        if asked > self._answered:
            self._answered = asked
            self._send_model(final=False, asked=asked)

    def _merge(self) -> None:
        """Adds what the model's steps have changed to the weights that peers may change."""
        self._window = 0
        move = read_weights(self.model, self._layout, self._local)
        move -= self._base
        finite = self._gossip_member.weights.move(move, self._partition, self._position.number)
        self._refused += not finite
        self._gossip_member.node.set_state(flatten(moving_statistics(self.model)))

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if self._position.ends_epoch and not self.stop:
            self.flush()
            self._epochs = epoch + 1
            self._send_model(final=False)

    def finish(self) -> None:
        """Leaves the peers, and tells the driver the weights that it contributes to the result."""
        if self._window:
            self._merge()
        self._gossip_member.node.leave()
        if self._trained or self._gossip_member.position:
            self._send_model(final=True)

    def _send_model(self, *, final: bool, asked: int = 0) -> None:
        held, node = self._gossip_member.weights.held(), self._gossip_member.node
        self._reporter.send(
            WorkerModel(
                rank=self._partition,
                epochs=self._epochs,
                final=final,
                share=held.share,
                steps=held.steps.tolist(),
                exchanges=node.exchanges,
                missed=node.missed,
                refused=self._refused,
                bytes_sent=node.bytes_sent,
                asked=asked,
                arrays=(held.values, flatten(moving_statistics(self.model))),
            )
        )


def label_counts(labels: np.ndarray, *, most_classes: int = 1000) -> dict[str, float]:
    """Returns how many labels are of each class; nothing where they are no classes.

    Args:
        labels: Of shape (rows,) or (rows, 1) with class numbers, or (rows, classes), one-hot.
        most_classes: Labels of more different numbers are no classes.

    >>> label_counts(np.array([0, 2, 2])), label_counts(np.array([0.5])), label_counts(np.eye(2))
    ({'0': 1.0, '2': 2.0}, {}, {'0': 1.0, '1': 1.0})
    """
    values = np.asarray(labels)
    if values.ndim > 2 or not values.size or values.dtype.kind not in "biuf":
        return {}
    if values.ndim == 2 and values.shape[1] > 1:
        is_one_hot = bool(((values == 0) | (values == 1)).all() and (values.sum(axis=1) == 1).all())
        if not is_one_hot:
            return {}
        values = values.argmax(axis=1)
    classes, counts = np.unique(values.reshape(-1), return_counts=True)
    if len(classes) > most_classes or (classes % 1).any():
        return {}
    return {str(int(one)): float(count) for one, count in zip(classes, counts, strict=True)}
