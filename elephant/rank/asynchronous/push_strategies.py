"""Push strategies: every step, or the difference of a window of steps."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from elephant.backends.keras_private import has_schedule
from elephant.config import FitConfig
from elephant.errors import UnsupportedError
from elephant.modeling.optimizer_translation import inner_optimizer, translate
from elephant.modeling.push_hook import GradientPusher, PushHook, attach_exchange
from elephant.modeling.variables import optimizers_of, read_weights, write_weights
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.optimizers import clipping_of, without_clipping
from elephant.rank.rank_progress import TrainingPosition

if TYPE_CHECKING:
    from elephant.parameter_server.client import ParameterServerClient, Reply
    from elephant.rank.asynchronous.worker_tables import WorkerTables


class WorkerExchange(keras.callbacks.Callback, ABC):
    """Exchange between a worker's model and the servers' weights.

    Attributes:
        stop: Whether a server has said that the fit is to stop.
    """

    def __init__(self, position: TrainingPosition) -> None:
        super().__init__()
        self._position = position
        self.stop = False

    @abstractmethod
    def begin(self) -> None:
        """Gives the model the servers' weights, and forgets what was not pushed."""

    @abstractmethod
    def flush(self) -> None:
        """Returns when all that this worker has learned is at the servers, unless they have said stop."""

    @abstractmethod
    def fresh_weights(self) -> contextlib.AbstractContextManager[None]:
        """Gives the model the servers' weights for a ``with`` block; the worker then trains on from its own."""

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """Seconds in which this worker stood still for the servers."""

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Bytes sent to the servers."""

    @property
    def error(self) -> BaseException | None:
        """Error of an exchange within the compiled step, which TensorFlow replaces by an error of its own."""
        return None

    def finish(self) -> None:
        """Hands over what this worker has learned and nobody else has; after its last step."""
        return

    def close(self) -> None:
        """Ends what was started."""


def follow_rate(model: keras.Model, rate: float) -> None:
    """Gives a worker's own optimizer the learning rate that callbacks on the driver have set."""
    optimizer = inner_optimizer(model.optimizer)
    if not has_schedule(optimizer):
        optimizer.learning_rate = rate


class StepExchange(WorkerExchange):
    """Pushes every step's gradients from within the compiled step.

    Args:
        rows_at: Returns the rows of this worker's step of a number, from zero.
        hook: Of a model whose step was traced before there were servers; None attaches one.
        tables: The model's tables; None where it has none.
    """

    def __init__(
        self,
        model: keras.Model,
        servers: ParameterServerClient,
        layout: Layout,
        position: TrainingPosition,
        *,
        background: bool,
        num_servers: int,
        rows_at: Callable[[int], int],
        hook: PushHook | None = None,
        tables: WorkerTables | None = None,
    ) -> None:
        super().__init__(position)
        self._servers = servers
        self._layout = layout
        self._tables = tables
        self._rows_at = rows_at
        clip = without_clipping(translate(model.optimizer, layout))[1] if num_servers > 1 else None
        clipping = None if clip is None else clipping_of(clip, layout)
        self._pusher = GradientPusher(servers, layout, background=background, clipping=clipping, tables=tables)
        hook = hook or attach_exchange(None, model)
        hook.pusher = self._pusher

    @property
    def waited_s(self) -> float:
        return self._pusher.waited_s + (0.0 if self._tables is None else self._tables.waited_s)

    @property
    def bytes_sent(self) -> int:
        return self._servers.bytes_sent

    @property
    def error(self) -> BaseException | None:
        return self._pusher.error or (None if self._tables is None else self._tables.error)

    def begin(self) -> None:
        self._pusher.error = None
        if self._tables is not None:
            self._tables.begin()
        write_weights(self.model, self._layout, self._pusher.pull())
        self.stop = self._pusher.stop

    def flush(self) -> None:
        self._pusher.flush()
        self.stop = self._pusher.stop

    @contextlib.contextmanager
    def fresh_weights(self) -> Iterator[None]:
        self.begin()
        yield

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        number = self._position.number
        self._pusher.begin_step(number, self._rows_at(number - 1))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.stop = self._pusher.stop

    def close(self) -> None:
        self._pusher.close()


def check_local_optimizers(model: keras.Model, config: FitConfig) -> None:
    """Raises UnsupportedError when workers' own optimizers do not go with the algorithm."""
    for optimizer in optimizers_of(model):
        inner = inner_optimizer(optimizer)
        if inner.use_ema:
            raise UnsupportedError(
                f"optimizer: moving averages of weights (use_ema) would be lost: "
                f"{'workers average weights alone' if config.gossips else 'the servers keep the weights'}. "
                f"Received: {inner.name!r} with use_ema=True. Leave it out, or use mode='synchronous'."
            )
        if not config.gossips and config.new_algorithm().needs_momentum:
            has_momentum = isinstance(inner, keras.optimizers.SGD) and inner.momentum > 0
            if not has_momentum:
                raise UnsupportedError(
                    f"algorithm={config.asynchronous.algorithm!r}: expected keras.optimizers.SGD with momentum, best "
                    "with nesterov=True. "
                    f"Received: {type(inner).__name__}{' without momentum' if type(inner).__name__ == 'SGD' else ''}. "
                    "algorithm='aeasgd' takes any optimizer."
                )


class WindowExchange(WorkerExchange):
    """Exchanges weights with the servers every few steps and at the end of each epoch.

    Momenta and other state of the worker's optimizer stay its own.
    """

    def __init__(
        self, servers: ParameterServerClient, layout: Layout, config: FitConfig, position: TrainingPosition
    ) -> None:
        super().__init__(position)
        self._servers = servers
        self._layout = layout
        self._algorithm = config.new_algorithm()
        self._every = position.steps if config.frequency == "epoch" else 1
        if isinstance(config.frequency, int):
            self._every = config.frequency
        # What the servers had when this worker last looked.
        self._center = layout.zeros()
        self._local = layout.zeros()
        self._window = 0
        self._rate = float("nan")

    @property
    def waited_s(self) -> float:
        return self._servers.waited_s

    @property
    def bytes_sent(self) -> int:
        return self._servers.bytes_sent

    def begin(self) -> None:
        self._window = 0
        write_weights(self.model, self._layout, self._pull())

    def _pull(self) -> np.ndarray:
        self._take(self._servers.pull(self._center))
        return self._center

    @contextlib.contextmanager
    def fresh_weights(self) -> Iterator[None]:
        if not self._algorithm.is_elastic:
            self.begin()
            yield
            return
        own = read_weights(self.model, self._layout)
        write_weights(self.model, self._layout, self._pull())
        try:
            yield
        finally:
            write_weights(self.model, self._layout, own)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._window += 1
        if (self._position.batch + 1) % self._every == 0 or self._position.ends_epoch:
            self.flush()

    def flush(self) -> None:
        steps, self._window = self._window, 0
        if not steps or self.stop:
            return
        local = read_weights(self.model, self._layout, self._local)
        if self._algorithm.is_elastic:
            self._exchange_elastic(local, steps)
        else:
            update = self._algorithm.update(local, self._center, steps)
            self._take(self._servers.push_pull(update, self._center, step=self._position.number))
            write_weights(self.model, self._layout, self._center)

    def _exchange_elastic(self, local: np.ndarray, steps: int) -> None:
        own = local.copy()
        difference = self._algorithm.update(local, self._pull(), steps)
        reply = self._servers.push(difference, step=self._position.number)
        self._take(reply)
        if reply.refused:
            # This worker's weights are not finite, and would not become so by themselves.
            own = self._center
        else:
            own -= difference
        write_weights(self.model, self._layout, own)

    def _take(self, reply: Reply) -> None:
        self.stop = self.stop or reply.stop
        if np.isfinite(reply.rate) and reply.rate != self._rate:
            self._rate = reply.rate
            follow_rate(self.model, reply.rate)
