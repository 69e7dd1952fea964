"""What a worker exchanges with parameter servers, as a callback of its ``model.fit``: in general, and step by step."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras

from elephant.modeling.optimizer_translation import translate
from elephant.modeling.push_hook import ExchangeHook, GradientExchange, attach_exchange
from elephant.modeling.variables import write_weights
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.optimizers import clipping_of, without_clipping
from elephant.training.place import Place

if TYPE_CHECKING:
    from elephant.parameter_server.client import ParameterServers


class WorkerExchange(keras.callbacks.Callback, ABC):
    """How a worker's model and the servers' weights come together.

    Args:
        place: Where the worker is; whoever trains keeps it up to date.

    Attributes:
        stop: Whether a server has said that the fit is to stop.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place
        self.stop = False

    @abstractmethod
    def begin(self) -> None:
        """Gives the model the servers' weights, and forgets what was not pushed."""

    @abstractmethod
    def flush(self) -> None:
        """Returns when all that this worker has learnt is at the servers, unless they have said stop."""

    @abstractmethod
    def fresh_weights(self) -> contextlib.AbstractContextManager[None]:
        """Gives the model the servers' weights for a ``with`` block; the worker then trains on from its own."""

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """Seconds in which this worker stood still for the servers."""

    @property
    def error(self) -> BaseException | None:
        """What an exchange within the compiled step raised, which TensorFlow replaces by an error of its own."""
        return None

    def close(self) -> None:
        """Ends what was started."""


class StepExchange(WorkerExchange):
    """Pushes every step's gradients from within the compiled step.

    Args:
        model: The worker's model, before its first step.
        servers: This worker's connections.
        layout: The places of the model's weights.
        place: Where the worker is.
        background: Whether an exchange goes on while the next step is computed.
        num_servers: Of several servers none sees a whole gradient: this worker then clips it by its norms.
        hook: Of a model whose step was traced before there were servers; None attaches one.
    """

    def __init__(
        self,
        model: keras.Model,
        servers: ParameterServers,
        layout: Layout,
        place: Place,
        *,
        background: bool,
        num_servers: int,
        hook: ExchangeHook | None = None,
    ) -> None:
        super().__init__(place)
        self._layout = layout
        clip = without_clipping(translate(model.optimizer, layout))[1] if num_servers > 1 else None
        clipping = None if clip is None else clipping_of(clip, layout)
        self._exchange = GradientExchange(servers, layout, background=background, clipping=clipping)
        hook = hook or attach_exchange(None, model)
        hook.exchange = self._exchange

    @property
    def waited_s(self) -> float:
        return self._exchange.waited_s

    @property
    def error(self) -> BaseException | None:
        return self._exchange.error

    def begin(self) -> None:
        self._exchange.error = None
        write_weights(self.model, self._layout, self._exchange.pull())
        self.stop = self._exchange.stop

    def flush(self) -> None:
        self._exchange.flush()
        self.stop = self._exchange.stop

    @contextlib.contextmanager
    def fresh_weights(self) -> Iterator[None]:
        self.begin()
        yield

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._exchange.begin_step(self._place.number)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.stop = self._exchange.stop

    def close(self) -> None:
        self._exchange.close()
