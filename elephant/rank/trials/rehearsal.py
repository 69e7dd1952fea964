"""Rehearsal of a training step that is the user's own: are its gradients means over the rows of a batch, or sums?

Gradients are averaged with each rank's part of the rows, which is right where they are means. Those of a loss that is
not reduced are sums, which are to be added. So one rank takes the gradients of some rows together, and of two parts of
them as ranks would have them, before any step. No optimizer applies them, and all variables and generators are
afterwards as before.

Random draws of Keras' are the same for all rows meanwhile, and batch normalization takes its moving statistics, which
ranks do not share either. A step that draws in another way is told by the length of its gradients alone: rows that are
repeated sixteen times leave that of a mean as it is, or shorten it fourfold at most, and lengthen that of a sum.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from elephant.backends import current
from elephant.backends.gradient_averager import GradientAverager, Name
from elephant.backends.gradient_kinds import (
    MEAN,
    NEITHER,
    SUM,
    GradientInfo,
    Notes,
    aligned,
    kinds,
    length_of,
    places_of,
)
from elephant.backends.keras_private import replaced_draws, replaced_normalization
from elephant.collective.communicator import LocalCommunicator
from elephant.compression import Codec
from elephant.modeling.model_info import has_own_step
from elephant.modeling.variables import optimizers_of, shared_generator, state_variables
from elephant.rank.trials.loss_trial import refuse

logger = logging.getLogger(__name__)

_TOLERANCE = 3e-4
# The error of computing in half precision.
_COARSE = 3e-2
_REPEATS, _DRAWS = 16, 4
# So much longer is the gradient of repeated rows: that of a mean at most, that of a sum at least.
_LONGEST_MEAN, _SHORTEST_SUM = 1.4, 2.8

_Batch = tuple[Any, Any, Any]


def is_needed(model: keras.Model) -> bool:
    """Returns whether a model's step has to be rehearsed: what it is of rows, or of lookups, nothing else tells."""
    return has_own_step(model) or (current().gives_slices and bool(model.run_eagerly))


def gradient_names(model: keras.Model) -> list[Name]:
    """Returns the names of all gradients that a step may have, in the same order in all processes."""
    return [(id(optimizer), id(weight)) for optimizer in optimizers_of(model) for weight in model.weights]


def rehearse(model: keras.Model, averager: GradientAverager, batch: _Batch, *, allowed: bool = False) -> GradientInfo:
    """Takes a step's gradients of some rows, together and in parts, and tells what they are.

    Args:
        model: One whose optimizers average by the averager.
        batch: ``x``, ``y`` and ``sample_weight``, None for what there is not; tensors or numpy arrays (rows, ...).
        allowed: Warns where it would raise.

    Raises:
        UnsupportedError: The gradients are neither means over the rows of a batch nor sums.
    """
    batch = keras.tree.map_structure(_as_tensor, batch)
    while _num_rows(batch) < 2 * current().stand_in_rows:
        batch = _repeated(batch, 2)
    with _unchanged(model), current().without_graphs():
        stage = _Stage(model, averager)
        try:
            found, unlike = stage.tried(batch)
        except Exception as error:
            logger.warning("the step of %r was not rehearsed: %s: %s", model.name, type(error).__name__, error)
            return GradientInfo()
    if not has_own_step(model):
        # Its losses are weighted by themselves.
        return GradientInfo(places=found.places)
    if unlike:
        refuse([_advice(unlike)], allowed=allowed)
    return found


def _advice(unlike: Sequence[str]) -> str:
    return (
        "train_step: expected gradients that are means over the rows of a batch, or sums over them, without which N "
        f"workers do not give what one process does. Received: others, of {', '.join(unlike[:3])}. Take a loss of each "
        "row, and let the step apply gradients of its mean or its sum as they are: no clipping before the optimizer "
        "(it has clipnorm and global_clipnorm), no loss over pairs of rows, no sum beside a mean. "
    )


class _Stage:
    """A model whose step is taken without an update."""

    def __init__(self, model: keras.Model, averager: GradientAverager) -> None:
        self._model = model
        self._averager = averager
        is_coarse = model.compute_dtype not in ("float32", "float64")
        self._tolerance = _COARSE if is_coarse else _TOLERANCE
        self._paths = {id(weight): str(weight.path) for weight in model.weights}

    def tried(self, batch: _Batch) -> tuple[GradientInfo, list[str]]:
        """Returns facts about the gradients, and the paths of variables of which they are neither means nor sums."""
        rows = _num_rows(batch)
        last = max(rows // 3, current().stand_in_rows)
        parts, shares = [(0, rows - last), (rows - last, rows)], [(rows - last) / rows, last / rows]
        with _same_for_all_rows():
            whole_notes, again = self._taken(batch), self._taken(batch)
            given = [_rows_between(batch, *ends) for ends in parts]
            notes = [self._taken(part, share, whole_notes)[0] for part, share in zip(given, shares, strict=True)]
            self._warn_of_nothing(whole_notes[0])
            same = kinds(whole_notes[0], [again[0]], [1.0], self._tolerance)
            if all(kind == MEAN for kind in same.values()):
                found = kinds(whole_notes[0], notes, shares, self._tolerance)
            else:
                found = self._by_length(_rows_between(batch, 0, 2))
        places = places_of(whole_notes[0], notes, [rows - last, last]) if self._model.run_eagerly else {}
        sums = frozenset(name for name, kind in found.items() if kind == SUM)
        unlike = [name for name, kind in found.items() if kind == NEITHER or (kind == SUM and not self._knows(name))]
        return GradientInfo(sums, places), [self._paths.get(name[1], "a variable of no layer") for name in unlike]

    def _warn_of_nothing(self, whole_notes: Notes) -> None:
        if not any(np.any(one) for call in whole_notes.calls for given in call.values() for one in aligned([given])):
            logger.warning(
                "the step of %r has no gradients in a rehearsal: they are averaged as means over rows", self._model.name
            )

    def _knows(self, name: Name) -> bool:
        return name[1] in self._paths

    def _by_length(self, few: _Batch) -> dict[Name, str]:
        """Returns the kinds of gradients of random steps: those of one call are told together."""
        many = _repeated(few, _REPEATS)
        drawn = [(self._taken(few, 1 / _REPEATS)[0], self._taken(many)[0]) for _ in range(_DRAWS)]
        found: dict[Name, str] = {}
        for calls in zip(*(notes.calls for pair in drawn for notes in pair), strict=True):
            short, long = (length_of(calls[first::2]) for first in (0, 1))
            ratio = long / short if short else 1.0
            kind = MEAN if ratio <= _LONGEST_MEAN else SUM if ratio >= _SHORTEST_SUM else NEITHER
            for name in calls[0]:
                found[name] = kind if found.get(name, kind) == kind else NEITHER
        return found

    def _taken(
        self, batch: _Batch, share: float = 1.0, whole_notes: tuple[Notes, _Totals] | None = None
    ) -> tuple[Notes, _Totals]:
        """Returns a step's gradients of a batch, or of a rank's part of a whole with this share."""
        averager, notes, totals = self._averager, Notes(), _Totals(whole_notes and whole_notes[1])
        before = averager.communicator, averager.share, averager.stop
        averager.bind(totals, lambda: share, averager.stop)
        averager.note = notes.take
        try:
            current().take_step(self._model, keras.utils.pack_x_y_sample_weight(*batch))
        finally:
            averager.bind(*before)
            averager.note = None
        return notes, totals


class _Totals(LocalCommunicator):
    """Sums over all ranks that a step asks for: in a rehearsal those of the whole, which its parts are then told."""

    def __init__(self, whole: _Totals | None) -> None:
        super().__init__()
        self._whole = whole
        self._asked: list[np.ndarray] = []

    def allreduce_(self, array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> None:
        """Leaves what the whole asks for, and answers its parts."""
        self._asked.append(array.copy())
        if self._whole is not None:
            array[...] = self._whole._asked[len(self._asked) - 1]


@contextlib.contextmanager
def _unchanged(model: keras.Model) -> Iterator[None]:
    """Puts back what a step changes: variables, generators, numbers that the model counts, gradients of PyTorch's."""
    optimizers = [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
    known = {id(one): one for one in (*state_variables(model), *model.variables, *model.metrics_variables, *optimizers)}
    known |= {id(one): one for one in (shared_generator(),) if one is not None}
    values = [(variable, ops.convert_to_numpy(variable).copy()) for variable in known.values()]
    counted = {name: value for name, value in vars(model).items() if isinstance(value, (bool, int, float))}
    drawn = random.getstate(), np.random.get_state()
    for optimizer in optimizers_of(model):
        # Gradients of half precision may be too long for it, as they are until the scale has found its place.
        if getattr(optimizer, "dynamic_scale", None) is not None:
            optimizer.dynamic_scale.assign(1.0)
    try:
        with current().random_state():
            yield
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        for variable, value in values:
            variable.assign(value)
        for name, value in counted.items():
            if vars(model).get(name) != value:
                setattr(model, name, value)
        for variable in model.trainable_variables:
            if getattr(variable.value, "grad", None) is not None:
                variable.value.grad = None


@contextlib.contextmanager
def _same_for_all_rows() -> Iterator[None]:
    """Has Keras draw the same for all rows, drop nothing, and normalize by moving statistics."""
    with replaced_normalization(_by_moving_statistics), replaced_draws(_of_one_row, lambda inputs, *_, **__: inputs):
        yield


def _by_moving_statistics(normalize: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return normalize(self, inputs, training=False, mask=mask)

    return call


def _of_one_row(draw: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(shape: Any, *args: Any, **options: Any) -> Any:
        lengths = [int(length) for length in shape]
        one = draw((1, *lengths[1:]) if lengths else (), *args, **{**options, "seed": 7})
        return ops.broadcast_to(one, lengths)

    return drawn


def _as_tensor(array: Any) -> Any:
    return ops.convert_to_tensor(array) if isinstance(array, np.ndarray) else array


def _num_rows(batch: _Batch) -> int:
    return int(keras.tree.flatten(batch[0])[0].shape[0])


def _rows_between(batch: _Batch, first: int, last: int) -> _Batch:
    rows: _Batch = keras.tree.map_structure(lambda array: None if array is None else array[first:last], batch)
    return rows


def _repeated(batch: _Batch, times: int) -> _Batch:
    rows: _Batch = keras.tree.map_structure(
        lambda array: None if array is None else ops.concatenate([array] * times), batch
    )
    return rows
