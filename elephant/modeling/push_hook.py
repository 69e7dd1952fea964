"""Push hook: an optimizer whose gradients go to parameter servers, and the buffers it lends to the framework.

``apply`` of the innermost optimizer is replaced whole. One call on the host takes the
gradients of a step, packs them into the flat layout, pushes them and pulls fresh weights in one
round trip (Dean et al. 2012, Downpour SGD with n_push = n_fetch = 1), and gives these back
as views that a framework takes without a copy; the step assigns them. So custom losses, train_steps, sample
weights and regularizers are Keras' own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.keras_private import optimized_variables
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.optimizer_translation import inner_optimizer
from elephant.modeling.variables import optimizers_of
from elephant.net.buffers import RotatingBuffers, SharedBuffer
from elephant.net.work_queue import WorkQueue
from elephant.parameter_server.layout import Layout

if TYPE_CHECKING:
    from elephant.parameter_server.client import ParameterServerClient
    from elephant.parameter_server.optimizers import NormClipping
    from elephant.tables.stack import TableContribution


class WeightBuffer(SharedBuffer):
    """One flat vector, and the views of it that are handed on without a copy.

    Attributes:
        flat: float32, aligned to 64 bytes.
        views: Each variable's part, in its shape.
    """

    def __init__(self, layout: Layout) -> None:
        self.flat = layout.zeros()
        super().__init__(layout.views(self.flat))


def copy_parts(parts: Sequence[np.ndarray], positions: Sequence[int], places: Sequence[np.ndarray]) -> None:
    """Writes arrays to some of the places of a flat vector, and zeros to the others."""
    for position in set(range(len(places))) - set(positions):
        places[position][...] = 0
    for part, position in zip(parts, positions, strict=True):
        np.copyto(places[position], part)


def check_gradient_push(model: keras.Model) -> None:
    """Raises UnsupportedError for a model whose updates one optimizer of a parameter server cannot make.

    Whether that optimizer itself can be translated, `elephant.modeling.optimizer_translation` tells.
    """
    optimizers = optimizers_of(model)
    if len(optimizers) > 1:
        names = ", ".join(repr(optimizer.name) for optimizer in optimizers)
        raise UnsupportedError(
            f"model: expected one optimizer, which the parameter server takes over. Received: {names}. Pass a number "
            "of steps or 'epoch' as frequency: then each worker trains with its own optimizers, and pushes how far "
            "its weights have moved."
        )


class StepTables(Protocol):
    """Tables whose gradients are pushed with those of a step."""

    def taken(self) -> TableContribution | None:
        """Returns the sums of the gradients of the step, and takes them away; None where none have come."""


class GradientPusher:
    """Pushes the gradients of each step and keeps the weights that came back.

    In the background an exchange goes on while the next step is computed, on weights that are then one step
    old; ``flush`` waits for the last one.

    Args:
        clipping: Clips gradients by their norms before they are pushed, where no server sees a whole one.
        tables: Whose gradients of the step go with the others; None where the model has no tables.

    Attributes:
        stop: Whether a server has said that the fit is to stop.
        error: What an exchange raised, which a framework may replace by an error of its own.
        waited_s: Seconds in which the worker stood still for the servers; in the background most are not.
    """

    def __init__(
        self,
        servers: ParameterServerClient,
        layout: Layout,
        *,
        background: bool = False,
        clipping: NormClipping | None = None,
        tables: StepTables | None = None,
    ) -> None:
        self._servers = servers
        self._clipping = clipping
        self._tables = tables
        self._update = layout.zeros()
        self._places = layout.views(self._update)
        self._buffers = RotatingBuffers(lambda: WeightBuffer(layout))
        self._current = self._buffers.unused()
        self._thread = WorkQueue("elephant-push") if background else None
        self._step = self._call = self._rows = 0
        self.stop = False
        self.error: BaseException | None = None
        self.waited_s = 0.0

    def begin_step(self, step: int, rows: int = 0) -> None:
        """Gives the pushes that follow their number, and the rows that they are the mean of."""
        self._step, self._call, self._rows = step, 0, rows

    def exchange(self, gradients: Sequence[np.ndarray], positions: Sequence[int]) -> list[np.ndarray]:
        """Pushes gradients; returns the newest weights that have arrived, a view for each variable.

        Args:
            gradients: float32, for some of the variables; those of the others count as zero.

        Raises:
            NetworkError: The servers are gone, or another attempt has taken this worker's place.
            TrainingError: The servers have given the fit up.
        """
        self.flush()
        copy_parts(gradients, positions, self._places)
        if self._clipping is not None:
            self._clipping.prepare(self._update)
        step, call, buffer = self._step, self._call, self._unused()
        self._call += 1
        contribution = None if self._tables is None else self._tables.taken()
        if self._thread is None:
            with self._waiting():
                self._push(buffer, step, call, contribution)
            return self._current.views
        arrived = self._current
        self._thread.submit(lambda: self._push(buffer, step, call, contribution))
        return arrived.views

    def _unused(self) -> WeightBuffer:
        return self._buffers.unused(self._current, release=current().release)

    def _push(self, buffer: WeightBuffer, step: int, call: int, contribution: TableContribution | None) -> None:
        reply = self._servers.push_pull(
            self._update, buffer.flat, step=step, call=call, rows=self._rows, contribution=contribution
        )
        self._take(reply, buffer)

    def _take(self, reply: Any, buffer: WeightBuffer) -> None:
        self.stop = self.stop or reply.stop
        if reply.modified:
            self._current = buffer

    def flush(self) -> None:
        """Waits until the last push has been answered; raises what it raised."""
        if self._thread is not None:
            with self._waiting():
                self._thread.wait()

    def pull(self) -> np.ndarray:
        """Returns the servers' weights as they are now, flat; whoever wants to keep them makes a copy."""
        self.flush()
        buffer = self._unused()
        with self._waiting():
            self._take(self._servers.pull(buffer.flat), buffer)
        return self._current.flat

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - began

    def close(self) -> None:
        """Ends the thread of the background."""
        if self._thread is not None:
            self._thread.close()


@dataclass
class PushHook:
    """Receiver of the gradients of a step.

    Args:
        pusher: Of a worker; set before its first step, which may have been traced before there were servers.
    """

    pusher: GradientPusher | None = None


def attach_exchange(pusher: GradientPusher | None, model: keras.Model) -> PushHook:
    """Makes the model's optimizer push gradients and assign the weights that come back, and nothing else.

    With loss scaling the inner optimizer is the one: a step whose gradients overflow pushes nothing. A
    gradient that is absent counts as zero. Gradients of embeddings, which are slices, are
    made dense: all rows of the embedding travel.

    Args:
        pusher: Where they go; None where the hook is told later.

    Raises:
        UnsupportedError: See `check_gradient_push`.
    """
    check_gradient_push(model)
    hook, optimizer = PushHook(pusher), inner_optimizer(model.optimizer)
    variables = list(model.trainable_variables)
    places = {id(variable): place for place, variable in enumerate(variables)}

    def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        given = optimized_variables(optimizer) if trainable_variables is None else list(trainable_variables)
        present = [(grad, _place(places, variable)) for grad, variable in zip(grads, given, strict=True)]
        present = [(grad, place) for grad, place in present if grad is not None]
        _push_and_assign(hook, present, variables)
        optimizer.iterations.assign_add(1)

    optimizer.apply = apply
    return hook


def _place(places: dict[int, int], variable: Any) -> int:
    if id(variable) not in places:
        raise ConfigurationError(
            f"optimizer.apply: expected trainable variables of the model. Received: {variable.path!r}, which is none "
            "of them. Make it a weight of a layer of the model."
        )
    return places[id(variable)]


def _push_and_assign(hook: PushHook, present: Sequence[tuple[Any, int]], variables: Sequence[Any]) -> None:
    """Puts one exchange into the step: a call on the host, and the assignment of all variables."""
    positions = [place for _, place in present]
    # convert_to_tensor makes slices dense.
    tensors = [keras.ops.cast(keras.ops.convert_to_tensor(grad, sparse=False), "float32") for grad, _ in present]
    specs = [(tuple(variable.shape), "float32") for variable in variables]
    arrived = current().call_on_host(_noting_failure(hook, positions), tensors, specs)
    for variable, value in zip(variables, arrived, strict=True):
        variable.assign(value)


def _noting_failure(hook: PushHook, positions: Sequence[int]) -> Callable[..., list[np.ndarray]]:
    def push(*gradients: np.ndarray) -> list[np.ndarray]:
        pusher = hook.pusher
        if pusher is None:
            raise RuntimeError("expected a step to be trained with servers")
        try:
            return pusher.exchange(gradients, positions)
        except BaseException as error:
            pusher.error = pusher.error or error
            raise

    return push
