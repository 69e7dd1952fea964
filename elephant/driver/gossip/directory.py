"""Directory of the workers of a fit in gossip mode, and the average of what they have told of their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elephant.driver.gossip.label_skew import skewed_partitions
from elephant.driver.server_model import ServerModel
from elephant.errors import ProtocolError, warn_user
from elephant.monitor.events import EpochPart, PeerReady, Peers, WorkerModel
from elephant.net.addresses import Address
from elephant.parameter_server.control_client import FetchedModel, ServerState
from elephant.parameter_server.tables import TablesWanted


@dataclass(eq=False)
class ModelMean:
    """Mean of the weights of several workers, by their push-sum weights, and of their moving statistics.

    Attributes:
        partitions: Whose weights are in it.
        share: The sum of their push-sum weights.
        steps: By partition, the last step whose effect is in it.
    """

    values: np.ndarray
    state: np.ndarray
    steps: np.ndarray
    share: float = 0.0
    partitions: set[int] = field(default_factory=set)

    def add(self, model: WorkerModel) -> None:
        """Adds the weights of a worker, unless they are there."""
        if model.rank in self.partitions:
            return
        values, state = model.arrays
        # What float64 adds up is the same in any order, to the last bits of float32.
        self.values += values
        self.state += state
        self.share += model.share
        np.maximum(self.steps, model.steps, out=self.steps)
        self.partitions.add(model.rank)

    def fetched(self) -> FetchedModel:
        """Returns the mean."""
        values, state = self.values / self.share, self.state / len(self.partitions)
        return FetchedModel(values=values.astype(np.float32), slots=(), iterations=0, state=state)


class GossipDirectory:
    """Tells workers who their peers are, and knows the mean of the weights that they have told.

    It stands where other asynchronous fits have their servers: callbacks set rates and stop the fit through it, and
    get the weights that they look at. The thread of the coordinator uses it.

    Args:
        model: The driver's copy of the model, and what it begins with.
        tell: Tells a worker who its peers are.
        num_workers: Workers of the fit.
        resumes: Whether the fit goes on from a checkpoint, with whose weights workers then begin.
        positions: By partition, its last step in these, as far as that is known.
    """

    def __init__(
        self,
        model: ServerModel,
        tell: Callable[[Peers], None],
        *,
        num_workers: int,
        resumes: bool = False,
        positions: Mapping[int, int] | None = None,
    ) -> None:
        self._tell = tell
        self._num_workers = num_workers
        self._start = FetchedModel(values=model.weights(), slots=(), iterations=0, state=model.state())
        self._start_steps = np.zeros(num_workers, np.int64)
        for partition, step in (positions or {}).items():
            self._start_steps[partition] = step
        self._resumes = resumes
        self._ready: dict[int, PeerReady] = {}
        self._attempts: dict[int, int] = {}
        self._labels: dict[int, dict[str, float]] = {}
        self._stop = False
        self._rate: float | None = None
        self._epochs: dict[int, ModelMean] = {}
        self._parts: dict[int, set[int]] = {}
        self._ended_model: FetchedModel | None = None
        self._ended_steps = np.zeros(num_workers, np.int64)
        self._is_over = False
        self._final = self._new_mean()
        self._last_models: dict[tuple[int, int], WorkerModel] = {}
        # Questions for all workers' weights, and the answers to the last one where it is open.
        self._asked = 0
        self._worker_models: dict[int, WorkerModel] | None = None

    def _new_mean(self) -> ModelMean:
        start = self._start
        values, steps = np.zeros(len(start.values)), np.zeros(self._num_workers, np.int64)
        return ModelMean(values, np.zeros_like(start.state, np.float64), steps)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """No addresses: there are no servers."""
        return ()

    def check(self) -> list[str]:
        """Returns nothing: there are no servers to repair."""
        return []

    def join(self, ready: PeerReady) -> None:
        """Takes a worker that listens now, and tells it and all others."""
        rank = ready.rank
        if not 0 <= rank < self._num_workers:
            raise ProtocolError(f"Expected a worker below {self._num_workers}. Received: {rank}.")
        known = self._attempts.get(rank)
        if known is not None and ready.attempt < known:
            # It hears that another attempt has taken its place.
            self._tell_one(rank)
            return
        self._attempts[rank] = ready.attempt
        if rank not in self._final.partitions:
            self._ready[rank] = ready
        self._note_labels(ready)
        self._tell_one(rank, begins=True, again=known is not None)
        self._tell_all(but=rank)

    def leave(self, rank: int) -> None:
        """Takes a worker that has finished, or was lost, from the directory."""
        if self._ready.pop(rank, None) is not None:
            self._tell_all(but=rank)

    def _note_labels(self, ready: PeerReady) -> None:
        is_first = ready.rank not in self._labels
        self._labels[ready.rank] = dict(ready.labels)
        if not is_first or len(self._labels) < self._num_workers:
            return
        skewed = skewed_partitions(self._labels)
        if skewed:
            warn_user(
                f"mode='gossip': expected partitions with samples of all rows. Received: labels that differ strongly "
                f"between partitions (of workers {', '.join(map(str, skewed))}). Workers that average in pairs learn "
                f"less well then. Shuffle the rows first: df.repartition({self._num_workers}), without columns."
            )

    def add_model(self, model: WorkerModel) -> None:
        """Takes the weights of a worker."""
        values, state = model.arrays
        expected = (len(self._start.values), len(self._start.state), self._num_workers)
        received = (len(values), len(state), len(model.steps))
        if received != expected or model.share <= 0:
            raise ProtocolError(
                f"Expected weights, moving statistics and steps of lengths {expected}. Received: {received}, with the "
                f"push-sum weight {model.share}."
            )
        self._last_models[model.rank, self._attempts.get(model.rank, 0)] = model
        if self._worker_models is not None and (model.final or model.asked == self._asked):
            self._worker_models[model.rank] = model
        if model.asked:
            return
        if model.final:
            self._final.add(model)
            self.leave(model.rank)
        else:
            self._epochs.setdefault(model.epochs - 1, self._new_mean()).add(model)

    def count(self, part: EpochPart) -> None:
        """Takes a worker's report of an epoch: with the last one the weights of that epoch are those to look at."""
        parts = self._parts.setdefault(part.epoch, set())
        parts.add(part.rank)
        if len(parts) == self._num_workers:
            mean = self._epochs.get(part.epoch)
            if mean is not None and mean.share:
                self._ended_model, self._ended_steps = mean.fetched(), mean.steps
            self._epochs = {epoch: one for epoch, one in self._epochs.items() if epoch > part.epoch}
            # What was told before may lack steps of the epoch, which count as trained from now on.
            self._worker_models = None

    def fetch(self, wanted: TablesWanted | None = None) -> FetchedModel:
        """Returns the mean of the weights: at the end of the fit, or at the end of the last epoch of all workers."""
        if self._final.share and self._is_over:
            return self._final.fetched()
        return self._ended_model or self._start

    def keep(self, wanted: TablesWanted | None = None) -> ServerState:
        """Returns the mean at the end of the last epoch, from which the fit can go on.

        What faster workers had given to slower ones by then is in it too, and is trained once more.
        """
        return ServerState(fetched=self._ended_model or self._start, ledgers=())

    def keep_now(self) -> ServerState | None:
        """Returns the mean where workers are, from which the fit can go on: each by its own last step in it.

        It is None until all that train have answered: each does so after its next exchange, and as often as somebody
        asks here, it is the same question.
        """
        if self._worker_models is None:
            self._asked += 1
            self._worker_models = {model.rank: model for model in self._last_models.values() if model.final}
            self._tell_all()
        if not self._worker_models or not self._ready.keys() <= self._worker_models.keys():
            return None
        models, self._worker_models = self._worker_models, None
        mean = self._new_mean()
        for model in models.values():
            mean.add(model)
        steps = dict(enumerate(mean.steps.tolist())) | {rank: model.steps[rank] for rank, model in models.items()}
        return ServerState(fetched=mean.fetched(), ledgers=({rank: (step, 0, 0) for rank, step in steps.items()},))

    def open_epochs(self, count: int) -> None:
        """Does nothing: no worker waits for an epoch."""

    def remind(self) -> None:
        """Does nothing: there is nobody who forgets."""

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of all workers."""
        self._rate = rate
        self._tell_all()

    def stop(self) -> None:
        """Tells all workers that the fit is to end."""
        self._stop = True
        self._tell_all()

    def end(self) -> None:
        """Notes that all workers have ended: the mean of what they have contributed is the result."""
        self._is_over = True

    @property
    def statistics(self) -> dict[str, Any]:
        """Counts of all workers' exchanges, those of lost ones up to their last report."""
        told = list(self._last_models.values())
        return {
            name: sum(getattr(model, name) for model in told)
            for name in ("exchanges", "missed", "refused", "bytes_sent")
        }

    @property
    def contributors(self) -> int:
        """Workers whose weights are in the result."""
        return len(self._final.partitions)

    def _tell_all(self, but: int | None = None) -> None:
        for rank in self._ready:
            if rank != but:
                self._tell_one(rank)

    def _tell_one(self, rank: int, *, begins: bool = False, again: bool = False) -> None:
        steps = np.zeros(self._num_workers, np.int64)
        begin: FetchedModel | None = None
        if begins:
            begin, steps = self._begin()
        arrays = () if begin is None else (begin.values, begin.state)
        has_trained = bool(self._final.share or self._epochs or self._ended_model)
        ahead = begins and (again or has_trained)
        peers = [
            [ready.rank, ready.attempt, ready.host, ready.port] for ready in self._ready.values() if ready.rank != rank
        ]
        self._tell(
            Peers(
                rank=rank,
                attempt=self._attempts[rank],
                peers=peers,
                stop=self._stop,
                rate=self._rate,
                ahead=ahead,
                done=rank in self._final.partitions,
                steps=steps.tolist(),
                asked=0 if self._worker_models is None else self._asked,
                arrays=arrays,
            )
        )

    def _begin(self) -> tuple[FetchedModel | None, np.ndarray]:
        """Returns the weights of the driver's that a worker may begin from, and the steps in them, if there are any."""
        if self._final.share:
            return self._final.fetched(), self._final.steps
        epochs = [epoch for epoch, mean in self._epochs.items() if mean.share]
        if epochs:
            mean = self._epochs[max(epochs)]
            return mean.fetched(), mean.steps
        if self._ended_model is not None:
            return self._ended_model, self._ended_steps
        return (self._start if self._resumes else None), self._start_steps
