"""A TensorFlow step that XLA compiles: two functions, with the exchange between them, which XLA cannot contain."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from elephant.backends.tensorflow_slices import lookups_of

if TYPE_CHECKING:
    import keras

logger = logging.getLogger(__name__)


def cut_step(model: keras.Model, average: Callable[..., list[Any]], host_calls: Callable[[], int]) -> None:
    """Has the first function compute gradients, by the model's own step, and the second one apply their averages.

    Two things are left to TensorFlow alone. One are slices of embeddings, which would be a program for each number of
    them when they are applied. The other is a step that calls the host, such as for batch normalization over all ranks.

    Args:
        model: A compiled one, whose step applies gradients once.
        average: Puts the average over the ranks into a graph; takes gradients, their variables and `Lookups`.
        host_calls: How often calls of the host were put into graphs.
    """
    import tensorflow as tf

    optimizer, step, make_test_function = model.optimizer, model.train_step, model.make_test_function
    apply = optimizer.apply
    # Of the trace.
    variables: Sequence[Any] | None = None
    numbers: list[tuple[int, ...]] = []
    calls_host = False

    def compute(data: Any) -> tuple[Any, list[Any], list[Any]]:
        nonlocal variables, numbers, calls_host
        taken: list[tuple[list[Any], Sequence[Any] | None]] = []
        calls = host_calls()
        optimizer.apply = lambda grads, trainable_variables=None: taken.append((list(grads), trainable_variables))
        try:
            logs = step(data)
        finally:
            optimizer.apply = apply
        ((gradients, variables),) = taken
        lookups = [lookups_of(gradient.indices) for gradient in gradients if isinstance(gradient, tf.IndexedSlices)]
        numbers, calls_host = [known for known, _ in lookups], host_calls() > calls
        return logs, gradients, [sizes for _, sizes in lookups]

    def train_step(data: Any) -> Any:
        compiled.get_concrete_function(data)
        if calls_host:
            logger.warning("jit_compile is switched off: XLA cannot contain what the step exchanges between ranks.")
        logs, gradients, sizes = compute(data) if calls_host else compiled(data)
        averages = average(gradients, variables, list(zip(numbers, sizes, strict=True)))
        (finish if numbers or calls_host else compiled_finish)(averages)
        return logs

    def finish(averages: list[Any]) -> None:
        apply(averages, variables)

    def make_compiled_test_function(force: bool = False) -> Any:
        model.jit_compile = True
        try:
            return make_test_function(force)
        finally:
            model.jit_compile = False

    compiled = tf.function(compute, jit_compile=True, reduce_retracing=True, autograph=False)
    compiled_finish = tf.function(finish, jit_compile=True, reduce_retracing=True, autograph=False)
    model.train_step, model.make_test_function, model.jit_compile = train_step, make_compiled_test_function, False
