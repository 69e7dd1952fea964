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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops

from elephant.backends import current
from elephant.backends.gradient_averager import BY_BATCH, GradientAverager, Name, Places
from elephant.collective.communicator import LocalCommunicator
from elephant.compression import Codec
from elephant.errors import UnsupportedError
from elephant.modeling.model_info import has_own_step
from elephant.modeling.variables import optimizers_of, state_variables

logger = logging.getLogger(__name__)

# What a gradient is of its rows.
MEAN, SUM, NEITHER = "mean", "sum", "neither"

_TOLERANCE = 3e-4
# Of computing in half precision.
_COARSE = 3e-2
# Of the largest gradient of a step: smaller ones are rounding.
_ROUNDING = 1e-6
_REPEATS, _DRAWS = 16, 4
# Of repeated rows the gradient is so much longer: of a mean at most, of a sum at least.
_LONGEST_MEAN, _SHORTEST_SUM = 1.4, 2.8
# Functions of Keras' backends that draw an array of the shape that is their first argument.
_DRAWS_OF_SHAPE = ("normal", "uniform", "truncated_normal", "randint", "gamma", "binomial", "beta")

# A dense gradient, or indices and values of slices.
_Gradient = np.ndarray | tuple[np.ndarray, np.ndarray]
_Batch = tuple[Any, Any, Any]


@dataclass
class Notes:
    """Gradients of one step, in the order of the calls of optimizers; each by its variable's name."""

    calls: list[dict[Name, _Gradient]] = field(default_factory=list)

    def take(self, owner: int, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Takes the gradients of a call in the place of an update."""
        given = zip(gradients, variables, strict=True)
        self.calls.append({(owner, id(variable)): _on_host(one) for one, variable in given if one is not None})

    def __getitem__(self, name: Name) -> list[_Gradient]:
        return [call[name] for call in self.calls if name in call]


@dataclass(frozen=True)
class Findings:
    """What a rehearsal has told of a step's gradients.

    Args:
        sums: Names of those that are sums.
        places: Of those that are slices, what lookups they are of; empty where the step is a graph, which tells.
    """

    sums: frozenset[Name] = frozenset()
    places: Mapping[Name, Places] = field(default_factory=dict)

    def to_rows(self, names: Sequence[Name]) -> np.ndarray:
        """Returns them in a form for other processes, whose ids are others.

        Args:
            names: Of all gradients, in an order that processes share.
        """
        rows = []
        for number, name in enumerate(names):
            numbers, count = self.places.get(name, Places(()))
            if name in self.sums or numbers:
                rows.append([number, name in self.sums, count, len(numbers), *numbers, *(0,) * (2 - len(numbers))])
        return np.array(rows, np.int64).reshape(-1, 6)

    @classmethod
    def from_rows(cls, rows: np.ndarray, names: Sequence[Name]) -> Findings:
        """Reads the form of `to_rows`."""
        sums, places = set(), {}
        for number, is_sum, count, lookups, *numbers in rows.reshape(-1, 6).tolist():
            if is_sum:
                sums.add(names[number])
            if lookups:
                places[names[number]] = Places(tuple(numbers[:lookups]), count)
        return cls(frozenset(sums), places)


def is_needed(model: keras.Model) -> bool:
    """Returns whether a model's step has to be rehearsed: what it is of rows, or of lookups, nothing else tells."""
    return has_own_step(model) or (current().name == "tensorflow" and bool(model.run_eagerly))


def gradient_names(model: keras.Model) -> list[Name]:
    """Returns the names of all gradients that a step may have, in the same order in all processes."""
    return [(id(optimizer), id(weight)) for optimizer in optimizers_of(model) for weight in model.weights]


def rehearse(model: keras.Model, averager: GradientAverager, batch: _Batch, *, allowed: bool = False) -> Findings:
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
    with _unchanged(model), current().eagerly():
        stage = _Stage(model, averager)
        try:
            findings, unlike = stage.findings(batch)
        except Exception as error:
            logger.warning("the step of %r was not rehearsed: %s: %s", model.name, type(error).__name__, error)
            return Findings()
    if not has_own_step(model):
        # Its losses are weighted by themselves.
        return Findings(places=findings.places)
    if unlike:
        _refuse(unlike, allowed)
    return findings


def _refuse(unlike: Sequence[str], allowed: bool) -> None:
    text = (
        "train_step: expected gradients that are means over the rows of a batch, or sums over them, without which N "
        f"workers do not give what one process does. Received: others, of {', '.join(unlike[:3])}. Take a loss of each "
        "row, and let the step apply gradients of its mean or its sum as they are: no clipping before the optimizer "
        "(it has clipnorm and global_clipnorm), no loss over pairs of rows, no sum beside a mean. "
    )
    if not allowed:
        raise UnsupportedError(
            text + "Or pass allowBatchCoupledLoss=True: each worker then computes it on the rows of its own batch."
        )
    warnings.warn(text + "allowBatchCoupledLoss=True lets it be so.", stacklevel=3)


class _Stage:
    """A model whose step is taken without an update."""

    def __init__(self, model: keras.Model, averager: GradientAverager) -> None:
        self._model = model
        self._averager = averager
        is_coarse = model.compute_dtype not in ("float32", "float64")
        self._tolerance = _COARSE if is_coarse else _TOLERANCE
        self._paths = {id(weight): str(weight.path) for weight in model.weights}

    def findings(self, batch: _Batch) -> tuple[Findings, list[str]]:
        """Returns what gradients are, and the paths of variables of which they are neither means nor sums."""
        rows = _num_rows(batch)
        last = max(rows // 3, current().stand_in_rows)
        parts, shares = [(0, rows - last), (rows - last, rows)], [(rows - last) / rows, last / rows]
        with _same_for_all_rows():
            whole, again = self._taken(batch), self._taken(batch)
            given = [_rows_between(batch, *ends) for ends in parts]
            notes = [self._taken(part, share, whole)[0] for part, share in zip(given, shares, strict=True)]
            self._warn_of_nothing(whole[0])
            same = kinds(whole[0], [again[0]], [1.0], self._tolerance)
            if all(kind == MEAN for kind in same.values()):
                found = kinds(whole[0], notes, shares, self._tolerance)
            else:
                found = self._by_length(_rows_between(batch, 0, 2))
        places = places_of(whole[0], notes, [rows - last, last]) if self._model.run_eagerly else {}
        sums = frozenset(name for name, kind in found.items() if kind == SUM)
        unlike = [name for name, kind in found.items() if kind == NEITHER or (kind == SUM and not self._knows(name))]
        return Findings(sums, places), [self._paths.get(name[1], "a variable of no layer") for name in unlike]

    def _warn_of_nothing(self, whole: Notes) -> None:
        if not any(np.any(one) for call in whole.calls for given in call.values() for one in _aligned([given])):
            logger.warning(
                "the step of %r has no gradients in a rehearsal: they are averaged as means over rows", self._model.name
            )

    def _knows(self, name: Name) -> bool:
        return name[1] in self._paths

    def _by_length(self, few: _Batch) -> dict[Name, str]:
        """Returns what gradients of random steps are: those of one call are told together."""
        many = _repeated(few, _REPEATS)
        drawn = [(self._taken(few, 1 / _REPEATS)[0], self._taken(many)[0]) for _ in range(_DRAWS)]
        found: dict[Name, str] = {}
        for calls in zip(*(notes.calls for pair in drawn for notes in pair), strict=True):
            short, long = (_length(calls[first::2]) for first in (0, 1))
            ratio = long / short if short else 1.0
            kind = MEAN if ratio <= _LONGEST_MEAN else SUM if ratio >= _SHORTEST_SUM else NEITHER
            for name in calls[0]:
                found[name] = kind if found.get(name, kind) == kind else NEITHER
        return found

    def _taken(
        self, batch: _Batch, share: float = 1.0, whole: tuple[Notes, _Totals] | None = None
    ) -> tuple[Notes, _Totals]:
        """Returns a step's gradients of a batch, or of a rank's part of a whole with this share."""
        averager, notes, totals = self._averager, Notes(), _Totals(whole and whole[1])
        before = averager.collective, averager.share, averager.stop
        averager.bind(totals, lambda: share, averager.stop)
        averager.note = notes.take
        try:
            self._step(keras.utils.pack_x_y_sample_weight(*batch))
        finally:
            averager.bind(*before)
            averager.note = None
        return notes, totals

    def _step(self, data: Any) -> None:
        model = self._model
        if current().name != "jax":
            model.train_step(data)
            return
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        model.train_step(tuple([variable.value for variable in group] for group in groups), data)


class _Totals(LocalCommunicator):
    """Sums over all ranks that a step asks for: in a rehearsal those of the whole, which its parts are then told."""

    def __init__(self, whole: _Totals | None) -> None:
        self._whole = whole
        self._asked: list[np.ndarray] = []

    def allreduce_(self, array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> None:
        """Leaves what the whole asks for, and answers its parts."""
        self._asked.append(array.copy())
        if self._whole is not None:
            array[...] = self._whole._asked[len(self._asked) - 1]


def kinds(whole: Notes, parts: Sequence[Notes], shares: Sequence[float], tolerance: float) -> dict[Name, str]:
    """Returns what each gradient is: `MEAN`, `SUM` or `NEITHER`, by how those of the parts make that of the whole.

    One that is zero but for rounding is what the others of its call are.

    Args:
        shares: Each part's rows over those of the whole.
    """
    found: dict[Name, str] = {}
    for calls in zip(whole.calls, *(part.calls for part in parts), strict=True):
        compared = {name: _aligned([call[name] for call in calls]) for name in calls[0]}
        largest = {name: max(np.abs(one).max(initial=0.0) for one in given) for name, given in compared.items()}
        if not np.isfinite(list(largest.values())).all():
            raise ValueError("its gradients are not finite")
        rounding = _ROUNDING * max(largest.values(), default=0.0)
        told = {
            name: _kind(given, shares, tolerance * largest[name] + rounding)
            for name, given in compared.items()
            if largest[name] > rounding
        }
        others = {*told.values()}
        for name in compared:
            kind = told.get(name, others.copy().pop() if len(others) == 1 else MEAN)
            found[name] = kind if found.get(name, kind) == kind else NEITHER
    return found


def _kind(given: Sequence[np.ndarray], shares: Sequence[float], most: float) -> str:
    whole, *parts = given
    for kind, weights in ((MEAN, shares), (SUM, [1.0] * len(parts))):
        total = sum(weight * part for weight, part in zip(weights, parts, strict=True))
        if np.abs(total - whole).max(initial=0.0) <= most:
            return kind
    return NEITHER


def places_of(whole: Notes, parts: Sequence[Notes], rows: Sequence[int]) -> dict[Name, Places]:
    """Returns of which lookups slices are, by their places in a batch and in its parts; nothing of those unknown.

    Args:
        rows: Of each part.
    """
    found = {}
    for name in {name for call in whole.calls for name in call}:
        given = [one[0] for one in (whole[name][0], *(part[name][0] for part in parts)) if isinstance(one, tuple)]
        places = _places(given[0], given[1:], rows) if given else None
        if places is not None:
            found[name] = places
    return found


def _places(whole: np.ndarray, parts: Sequence[np.ndarray], rows: Sequence[int]) -> Places | None:
    # Of rows without a change: there are as many of them in all parts.
    per_row, left = divmod(len(parts[0]) - len(parts[1]), rows[0] - rows[1]) if rows[0] != rows[1] else (-1, 0)
    if rows[0] == rows[1]:
        per_row, left = divmod(len(whole) - len(parts[0]), rows[1])
    own = len(parts[0]) - per_row * rows[0]
    if left or own < 0 or len(whole) != own + per_row * sum(rows):
        return _of_unique(whole, parts)
    if own == 0:
        return Places((BY_BATCH,))
    if per_row == 0:
        return Places((0,))
    first = [part[:own] for part in (whole, *parts)], [part[own:] for part in (whole, *parts)]
    last = [part[-own:] for part in (whole, *parts)], [part[:-own] for part in (whole, *parts)]
    fits = [_fits(*first), _fits(*last)]
    if sum(fits) != 1:
        logger.warning(
            "lookups: expected a table that an eager step reads at places of its own and at those of the batch, each "
            "once. Received: more. An optimizer that squares gradients may take other steps than in one process. "
            "Leave run_eagerly out."
        )
        return Places((BY_BATCH,))
    return Places((0, BY_BATCH) if fits[0] else (BY_BATCH, 0), own)


def _fits(own: Sequence[np.ndarray], of_batch: Sequence[np.ndarray]) -> bool:
    whole, *parts = of_batch
    same = all(np.array_equal(one, own[0]) for one in own)
    return same and np.array_equal(whole, np.concatenate(parts))


def _of_unique(whole: np.ndarray, parts: Sequence[np.ndarray]) -> Places | None:
    """Returns the one lookup of places that the step has told apart, each of them once."""
    is_told_apart = all(len(np.unique(one)) == len(one) for one in (whole, *parts))
    return Places((0,)) if is_told_apart and {*whole} == {*np.concatenate(parts)} else None


def _length(calls: Sequence[Mapping[Name, _Gradient]]) -> float:
    """Returns the length of the mean of one call's gradients over several draws."""
    squares = 0.0
    for name in calls[0]:
        squares += float(np.sum(np.square(np.mean(_aligned([call[name] for call in calls]), axis=0))))
    if not np.isfinite(squares):
        raise ValueError("its gradients are not finite")
    return float(squares**0.5)


def _aligned(given: Sequence[_Gradient]) -> list[np.ndarray]:
    """Returns gradients of one variable as arrays of one shape: of slices, the rows that any of them names."""
    slices = [one for one in given if isinstance(one, tuple)]
    if not slices:
        return [np.asarray(one, np.float64) for one in given if isinstance(one, np.ndarray)]
    together = np.unique(np.concatenate([indices for indices, _ in slices]))
    aligned = []
    for indices, values in slices:
        sums = np.zeros((len(together), *values.shape[1:]))
        np.add.at(sums, np.searchsorted(together, indices), values)
        aligned.append(sums)
    return aligned


def _on_host(gradient: Any) -> _Gradient:
    # PyTorch's tensors have methods of these names.
    if type(gradient).__name__ == "IndexedSlices":
        return np.array(gradient.indices), np.array(gradient.values)
    return np.array(ops.convert_to_numpy(gradient))


@contextlib.contextmanager
def _unchanged(model: keras.Model) -> Iterator[None]:
    """Puts back what a step changes: variables, generators, numbers that the model counts, gradients of PyTorch's."""
    optimizers = [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
    known = {id(one): one for one in (*state_variables(model), *model.variables, *model.metrics_variables, *optimizers)}
    known |= {id(one): one for one in _global_generator()}
    values = [(variable, ops.convert_to_numpy(variable).copy()) for variable in known.values()]
    counted = {name: value for name, value in vars(model).items() if isinstance(value, (bool, int, float))}
    drawn = random.getstate(), np.random.get_state()
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


def _global_generator() -> list[Any]:
    from keras.src.backend.common import global_state

    generator = global_state.get_global_attribute("global_seed_generator")
    return [] if generator is None else [generator.state]


@contextlib.contextmanager
def _same_for_all_rows() -> Iterator[None]:
    """Has Keras draw the same for all rows, drop nothing, and normalize by moving statistics."""
    from keras.src import backend

    normalization, draws = keras.layers.BatchNormalization, backend.random
    normalize = normalization.call

    def by_moving_statistics(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return normalize(self, inputs, training=False, mask=mask)

    before = {name: getattr(draws, name) for name in (*_DRAWS_OF_SHAPE, "dropout")}
    normalization.call = by_moving_statistics
    for name in _DRAWS_OF_SHAPE:
        setattr(draws, name, _of_one_row(before[name]))
    draws.dropout = lambda inputs, *_, **__: inputs
    try:
        yield
    finally:
        normalization.call = normalize
        for name, function in before.items():
            setattr(draws, name, function)


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
