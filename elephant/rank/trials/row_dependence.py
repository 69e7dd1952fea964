"""Dependence of a row on the others of its batch, in a model's call: read off the graph, or found by calling it.

A model is called on some rows, and again on as many with a part of them replaced. All calls have batches of one
size, equal seeds and equal state, so that a row that is computed by itself comes out as before, with dropout and other
draws too. What layers add to the loss is compared in the same way.

Batch normalization of Keras, which makes rows meet by design, takes its moving statistics meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from elephant.backends import current
from elephant.backends.keras_private import (
    added_losses,
    flat_layers,
    give_mask,
    has_moments,
    inbound_nodes,
    mask_of,
    replace_moments,
)
from elephant.modeling.archive_inspection import PROGRAMS
from elephant.modeling.layers.sync_batch_norm import batch_norm_layers
from elephant.modeling.variables import seeded

logger = logging.getLogger(__name__)

# So many rows tell; more would take longer.
MOST_ROWS = 32
_FEWEST_ROWS = 4
# The most multiplications in one call, by a rough count.
_MOST_PRODUCTS = 1e9
# Weights that are all alike are changed by so much. A branch that begins with zeros would hide what goes through it.
_SHAKEN = 0.1
# Losses that draw at random are averaged over so many calls.
_CALLS = 4

# Keras' layers that run what they are given.
_OPEN = frozenset({"Lambda", *PROGRAMS})
_ELEMENTWISE = frozenset({
    "Abs", "Absolute", "Add", "Cast", "Clip", "Divide", "Elu", "Exp", "Gelu", "LeakyRelu", "Log", "Maximum", "Minimum",
    "Multiply", "Negative", "Power", "Relu", "Rsqrt", "Sigmoid", "Silu", "Softplus", "Sqrt", "Square", "Subtract",
    "Tanh", "TrueDivide",
})  # fmt: skip


class AddedLoss(NamedTuple):
    """Sum of what layers add to the loss of some rows, where it is no mean over them.

    Attributes:
        whole: Of the rows together.
        mean: The mean of their parts.
    """

    whole: float
    mean: float


class RowTrial(NamedTuple):
    """Result of calling a model on rows beside others.

    Attributes:
        outputs: Of the rows as they are, tensors.
        moved: Of each output in turn by how much its rows change with others, and how large they are; None where they
            do not change.
        can_be_cut: Whether all that changes with the rows has one part of each row.
        added: What layers add to the loss, where it is no mean over rows.
    """

    outputs: Any
    moved: Sequence[tuple[float, float] | None]
    can_be_cut: bool
    added: AddedLoss | None


class _Call(NamedTuple):
    outputs: Any
    losses: np.ndarray


def may_depend(model: keras.Model) -> bool:
    """Returns whether a model's graph has operations that are not known to act row by row, or layers with a loss."""
    return not all(_is_by_row(layer) for layer in flat_layers(model))


def _is_by_row(layer: keras.layers.Layer) -> bool:
    if not type(layer).__module__.startswith("keras.") or type(layer).__name__ in _OPEN:
        return False
    operations = [one for one in getattr(layer, "operations", ()) if not isinstance(one, keras.layers.Layer)]
    if not all(map(_is_elementwise, operations)) or layer.activity_regularizer is not None:
        return False
    functions = (getattr(layer, name, None) for name in ("activation", "recurrent_activation"))
    if not all(one is None or _is_of_keras(one) for one in functions):
        return False
    if isinstance(layer, keras.layers.BatchNormalization):
        return True
    return _keeps_rows(getattr(layer, "equation", None)) and not any(
        axis == 0
        for name in ("axis", "axes", "_attention_axes")
        for axis in keras.tree.flatten(getattr(layer, name, None))
    )


def _is_of_keras(code: Any) -> bool:
    return str(getattr(code, "__module__", type(code).__module__)).startswith("keras.")


def _is_elementwise(operation: Any) -> bool:
    """Returns whether an operation of a functional model takes each element by itself, without adding an axis."""
    if not _is_of_keras(type(operation)) or type(operation).__name__ not in _ELEMENTWISE:
        return False
    nodes = inbound_nodes(operation)
    ranks = [len(tensor.shape) for node in nodes for tensor in (*node.input_tensors, *node.output_tensors)]
    return len(set(ranks)) == 1


def _keeps_rows(equation: str | None) -> bool:
    """Returns whether an equation of `keras.layers.EinsumDense` has its first axis in front of what it gives.

    >>> _keeps_rows("abc,cd->abd"), _keeps_rows("...x,xy->...y"), _keeps_rows("ab,ac->bc"), _keeps_rows("ab,bc->ca")
    (True, True, False, False)
    """
    if equation is None:
        return True
    (rows, kernel), given = equation.split("->")[0].split(","), equation.split("->")[1]
    return rows[:1] == given[:1] and (rows.startswith("...") or rows[:1] not in kernel)


def rows_worth_trying(model: keras.Model, x: Any) -> int:
    """Returns on how many rows a model is called: the fewer, the longer a call takes.

    Args:
        x: The model's input, of as many rows as there are.
    """
    inputs = keras.tree.flatten(x)
    fixed = {tensor.shape[0] for tensor in getattr(model, "inputs", None) or () if tensor.shape}
    num_rows = int(inputs[0].shape[0])
    if fixed and fixed != {None}:
        return min(num_rows, *(size for size in fixed if size))
    positions = max(math.prod(int(size or 1) for size in tensor.shape[1:-1]) for tensor in inputs)
    products = positions * sum(math.prod(variable.shape) for variable in model.trainable_variables)
    rows = min(num_rows, MOST_ROWS, max(int(_MOST_PRODUCTS / max(products, 1)), _FEWEST_ROWS))
    return rows // 4 * 4 if rows >= 4 else rows


@contextlib.contextmanager
def undisturbed(model: keras.Model) -> Iterator[Callable[[], None]]:
    """Has a model called without a trace, in the block of a ``with`` statement; gives what resets it in between.

    Variables are afterwards as before, and so are the generators of random numbers. Nothing is traced: a graph that
    a layer keeps for its calls would have been made under other conditions than those of the fit.
    """
    state = [(variable, np.array(ops.convert_to_numpy(variable))) for variable in _variables(model)]
    changing: list[tuple[keras.Variable, np.ndarray]] = []
    resets = itertools.count()

    def reset() -> None:
        # What the first call has changed, the others change too: of a large frozen part nothing is.
        if next(resets) == 1:
            changing.extend(one for one in state if not one[0].trainable and _has_changed(*one))
        for variable, value in changing:
            variable.assign(value)

    layers = [layer for layer in batch_norm_layers(model) if has_moments(layer)]
    for layer in layers:
        replace_moments(layer, _moving_moments(layer))
    try:
        with current().without_graphs(), seeded(0):
            yield reset
    finally:
        for layer in layers:
            replace_moments(layer, None)
        for variable, value in state:
            if _has_changed(variable, value):
                variable.assign(value)
        model.reset_metrics()


def _variables(model: keras.Model) -> list[Any]:
    """Returns a model's variables, with those that layers and losses hold and Keras does not know of.

    Such are the states of recurrent layers that go on from batch to batch.
    """
    found = {id(variable): variable for variable in model.variables}
    for owner in (*flat_layers(model), *keras.tree.flatten(getattr(model, "loss", None))):
        held = list(vars(owner).values()) if hasattr(owner, "__dict__") else []
        nested = [one for value in held if isinstance(value, (list, tuple)) for one in keras.tree.flatten(value)]
        # TensorFlow's own are no variables of Keras.
        found |= {id(one): one for one in (*held, *nested) if hasattr(one, "assign") and hasattr(one, "trainable")}
    return [variable for variable in found.values() if hasattr(variable, "shape")]


def _has_changed(variable: keras.Variable, value: np.ndarray) -> bool:
    return not np.array_equal(np.asarray(ops.convert_to_numpy(variable)), value)


def _moving_moments(layer: keras.layers.BatchNormalization) -> Callable[..., Any]:
    def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
        return ops.cast(layer.moving_mean, inputs.dtype), ops.cast(layer.moving_variance, inputs.dtype)

    return moments


def try_rows(model: keras.Model, x: Any, reset: Callable[[], None], tolerance: float) -> RowTrial | None:
    """Calls a model on some rows, each beside others; returns None where calls cannot be compared.

    Args:
        x: The model's input, two rows at least.
        reset: Of `undisturbed`, within which this is called.
        tolerance: Relative.
    """
    weights = [(variable, np.array(ops.convert_to_numpy(variable))) for variable in model.trainable_variables]
    for training, shaken in ((True, True), (True, False), (False, False)):
        _shake(weights, _SHAKEN if shaken else 0.0)
        try:
            found = _RowCalls(model, x, reset, tolerance, training).found()
        except Exception as error:
            logger.info("the model was not tried out: %s: %s", type(error).__name__, error)
            found = None
        if found is not None:
            return found
    return None


def _shake(weights: Sequence[tuple[keras.Variable, np.ndarray]], size: float) -> None:
    """Gives weights that are all alike values of their own."""
    generator = np.random.default_rng(0)
    for variable, value in weights:
        if value.size and np.all(value == value.flat[0]):
            variable.assign(value + (size * generator.normal(size=value.shape)).astype("float32"))


class _RowCalls:
    """Calls of a model on rows of one batch."""

    def __init__(self, model: keras.Model, x: Any, reset: Callable[[], None], tolerance: float, training: bool) -> None:
        self._model = model
        self._x = x
        self._reset = reset
        self._tolerance = tolerance
        self._training = training
        self._num_rows = int(keras.tree.flatten(x)[0].shape[0])

    def call(self, rows: np.ndarray, draw: int = 0) -> _Call:
        """Calls the model as the first time, or with draws of its own."""
        if draw == 0:
            self._reset()
        with seeded(draw):
            x = keras.tree.map_structure(as_tensor, take_rows(self._x, rows))
            outputs = self._model(x, training=self._training)
        losses = [loss for layer in flat_layers(self._model) for loss in added_losses(layer)]
        return _Call(outputs, np.array([np.sum(_numbers(loss)) for loss in losses]))

    def found(self) -> RowTrial | None:
        there = np.arange(self._num_rows)
        others, is_first = np.roll(there, -(self._num_rows // 2)), there < self._num_rows // 2
        plain_call, again = self.call(there), self.call(there)
        outputs = [_numbers(output) for output in keras.tree.flatten(plain_call.outputs)]
        if not all(map(_are_equal, outputs, map(_numbers, keras.tree.flatten(again.outputs)))):
            return None
        if not all(np.isfinite(output).any() for output in outputs) or not np.isfinite(plain_call.losses).all():
            return None
        first_call, second_call = (self.call(np.where(is_first == kept, there, others)) for kept in (True, False))
        moved, can_be_cut = [], True
        for output, *mixed in zip(
            outputs, *(map(_numbers, keras.tree.flatten(one.outputs)) for one in (first_call, second_call)), strict=True
        ):
            has_rows = output.ndim > 0 and len(output) == self._num_rows
            kept = (is_first, ~is_first) if has_rows else ((), ())
            difference = self._difference(output, mixed, kept)
            moved.append(difference if has_rows else None)
            can_be_cut = can_be_cut and (has_rows or difference is None)
        return RowTrial(plain_call.outputs, moved, can_be_cut, self._added(plain_call, first_call, second_call, others))

    def _difference(
        self, output: np.ndarray, mixed: Sequence[np.ndarray], kept: Sequence[Any]
    ) -> tuple[float, float] | None:
        """Returns by how much what was kept has changed, and how large it is."""
        size = float(np.abs(output[np.isfinite(output)]).max(initial=0))
        differences = [0.0]
        for other, rows in zip(mixed, kept, strict=True):
            if other.shape != output.shape:
                return math.inf, size
            one, two = (output, other) if isinstance(rows, tuple) else (output[rows], other[rows])
            changed = ~((one == two) | (np.isnan(one) & np.isnan(two)))
            differences.append(float(np.nan_to_num(np.abs(one[changed] - two[changed]), nan=math.inf).max(initial=0)))
        return (max(differences), size) if max(differences) > self._tolerance * size else None

    def _added(self, plain_call: _Call, first_call: _Call, second_call: _Call, others: np.ndarray) -> AddedLoss | None:
        """Returns the losses that layers add, where they are no means over rows.

        What is a sum of parts of rows and of their draws is the same over two batches that have swapped some rows.
        """
        if not plain_call.losses.any():
            return None
        there, half = np.arange(self._num_rows), self._num_rows // 2
        exchanged = self.call(others)
        # Halves may be alike by chance in what a loss is about: others are not, too.
        is_kept = (there % max(half, 1) % 2 == 0) == (there < half)
        third, fourth = (self.call(np.where(is_kept == kept, there, others)) for kept in (True, False))
        before = plain_call.losses + exchanged.losses
        sizes = np.abs([plain_call.losses, exchanged.losses]).max(axis=0)
        for after in (first_call.losses + second_call.losses, third.losses + fourth.losses):
            if np.any(np.abs(before - after) > 2 * self._tolerance * np.maximum(sizes, np.abs(after) / 2) + 1e-7):
                return AddedLoss(float(np.sum(before)) / 2, float(np.sum(after)) / 2)
        return self._sum(plain_call)

    def _sum(self, plain_call: _Call) -> AddedLoss | None:
        """Returns the losses that layers add, where they grow with the number of rows."""
        few = max(self._num_rows // 4, 1)
        times = self._num_rows // few
        rows = np.arange(few)
        try:
            draws = not np.array_equal(self.call(np.arange(self._num_rows), draw=1).losses, plain_call.losses)
            calls = [self._averaged(chosen, draws) for chosen in (rows, np.tile(rows, times))]
        except Exception as error:
            logger.info("the model was not called on fewer rows: %s: %s", type(error).__name__, error)
            return None
        one, many = calls
        apart = np.abs(many - one) > self._tolerance * np.maximum(np.abs(one), np.abs(many)) + 1e-7
        if draws:
            apart &= np.abs(many) > math.sqrt(times) * np.abs(one)
        return AddedLoss(float(many.sum()), float(one.sum())) if apart.any() else None

    def _averaged(self, rows: np.ndarray, draws: bool) -> np.ndarray:
        calls = [self.call(rows, draw).losses for draw in range(_CALLS if draws else 1)]
        return np.asarray(np.mean(calls, axis=0))


def take_rows(structure: Any, rows: np.ndarray) -> Any:
    """Returns rows of arrays and tensors, with the masks that Keras has given to these; None stays."""
    return keras.tree.map_structure(lambda array: None if array is None else _taken(array, rows), structure)


def _taken(array: Any, rows: np.ndarray) -> Any:
    if isinstance(array, np.ndarray):
        return array[rows] if array.ndim else array
    # No backend takes rows of a sparse tensor.
    taken, mask = ops.take(ops.convert_to_tensor(array, sparse=False), rows, axis=0), mask_of(array)
    if mask is not None:
        give_mask(taken, ops.take(mask, rows, axis=0))
    return taken


def as_tensor(array: Any) -> Any:
    """Returns a tensor in place of an array, as a step gets it; strings and sparse tensors are tensors already."""
    return ops.convert_to_tensor(array) if isinstance(array, np.ndarray) else array


def _numbers(tensor: Any) -> np.ndarray:
    return np.array(ops.convert_to_numpy(tensor), np.float64)


def _are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=True)
