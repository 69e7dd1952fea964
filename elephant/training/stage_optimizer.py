"""Optimizer of a stage: it applies gradients that are added up over replicas, and clipped by the norm of all stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.gradient_kinds import Gradient, on_host
from elephant.collective.communicator import Communicator
from elephant.collective.fusion import FusedBuffer
from elephant.errors import UnsupportedError
from elephant.modeling.stages import OPTION, ModelStage

_ABSENT, _SLICES, _TABLE = range(3)


class StageOptimizer:
    """A copy of a model's optimizer for the weights of one stage.

    Args:
        given: The model's, which is not built here.
        stage: With the weights.
        number: Of the stage, for errors.
        stages: The ranks of this replica, one of each stage.
        replicas: The ranks of this stage.

    Attributes:
        optimizer: The copy.

    Raises:
        UnsupportedError: The loss is scaled, and the stage has no weights.
    """

    def __init__(
        self,
        given: keras.optimizers.Optimizer,
        stage: ModelStage,
        number: int,
        stages: Communicator,
        replicas: Communicator,
    ) -> None:
        self._weights, self._stages, self._replicas = stage.trainable_variables, stages, replicas
        self.optimizer = type(given).from_config(given.get_config())
        self._scales = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        if self._scales and not self._weights:
            raise UnsupportedError(
                f"{OPTION}: expected weights that are trained in each stage, where the loss is scaled. Received: none "
                f"in stage {number}. Cut elsewhere, or compile the model with auto_scale_loss=False."
            )
        # One stage alone does not know the norm of all gradients.
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        self._global_norm, inner.global_clipnorm = inner.global_clipnorm, None
        self.optimizer.build(self._weights)
        self._update = current().update_function(self.optimizer, self._weights)
        self._kinds: list[int] | None = None

    @property
    def scale(self) -> float:
        """Factor of the loss before the backward pass."""
        return float(keras.ops.convert_to_numpy(self.optimizer.scale_loss(1.0)))

    def apply(self, gradients: Sequence[Any] | None, scale: float) -> None:
        """Applies the gradients of the whole step; all ranks of the stage call it.

        Args:
            gradients: This replica's, one for each weight or None; None of a replica without rows.
            scale: What they were multiplied by.
        """
        if not self._weights:
            return
        is_alone = self._replicas.world_size == 1 and self._global_norm is None and not self._scales
        if is_alone and gradients is not None:
            self._update(gradients)
            return
        found = self._added([None] * len(self._weights) if gradients is None else gradients)
        if self._global_norm is not None or self._scales:
            self._clip(found, scale)
        self._update([_tensor(one, weight) for one, weight in zip(found, self._weights, strict=True)])

    def _added(self, gradients: Sequence[Any]) -> list[Gradient | None]:
        """Returns sums over the replicas; those of lookups stay slices, as they are in one process."""
        own = [None if one is None else on_host(one) for one in gradients]
        if self._kinds is None:
            self._kinds = self._agreed_kinds(own)
        added: list[Gradient | None] = list(self._added_tables(own))
        for place, kind in enumerate(self._kinds):
            if kind == _SLICES:
                added[place] = self._gathered(own[place], self._weights[place])
        return added

    def _agreed_kinds(self, gradients: Sequence[Gradient | None]) -> list[int]:
        """Returns whether each gradient is slices or a table, which a replica without rows does not know."""
        own = [_ABSENT if one is None else _SLICES if isinstance(one, tuple) else _TABLE for one in gradients]
        kinds: list[int] = self._replicas.allreduce(np.array(own, np.int64), "max").tolist()
        self._tables = [place for place, kind in enumerate(kinds) if kind != _SLICES]
        specs = [(tuple(self._weights[place].shape), _dtype_of(self._weights[place])) for place in self._tables]
        # The last array counts on how many ranks a weight has a gradient.
        self._buffer = FusedBuffer([*specs, ((len(specs),), "float64")])
        return kinds

    def _added_tables(self, gradients: Sequence[Gradient | None]) -> list[np.ndarray | None]:
        tables = [gradients[place] for place in self._tables]
        dtypes = [one.dtype for one in self._buffer.unpack()]
        shapes = [view.shape for view in self._buffer.views]
        present = np.array([one is not None for one in tables], float)
        packed = [
            np.zeros(shape, dtype) if one is None else np.asarray(one).astype(dtype, copy=False)
            for one, shape, dtype in zip([*tables, present], shapes, dtypes, strict=True)
        ]
        self._buffer.pack(packed)
        self._buffer.allreduce(self._replicas)
        *totals, counts = self._buffer.unpack()
        added: list[np.ndarray | None] = [None] * len(gradients)
        for place, total, count in zip(self._tables, totals, counts, strict=True):
            added[place] = np.array(total) if count else None
        return added

    def _gathered(self, gradient: Gradient | None, weight: Any) -> Gradient:
        width, dtype = tuple(weight.shape)[1:], np.dtype(_dtype_of(weight))
        indices, values = (np.zeros(0), np.zeros((0, *width))) if gradient is None else gradient
        # One dtype on all ranks, those without rows included.
        named = self._replicas.allgather(np.asarray(indices, np.int64))
        sent = self._replicas.allgather(np.ascontiguousarray(values, dtype))
        return np.concatenate(named), np.concatenate(sent)

    def _clip(self, gradients: list[Gradient | None], scale: float) -> None:
        """Divides gradients by their norm over all stages where it is too large; one that is not finite is of all."""
        own = [np.asarray(_values(one), np.float64) / scale for one in gradients if one is not None]
        with np.errstate(over="ignore", invalid="ignore"):
            squares = self._stages.allreduce(np.array([sum(float(np.sum(np.square(one))) for one in own)]))[0]
        if self._scales and not np.isfinite(squares):
            factor = np.nan
        elif self._global_norm is not None:
            factor = self._global_norm / max(float(np.sqrt(squares)), self._global_norm)
        else:
            return
        for place, one in enumerate(gradients):
            if one is not None:
                scaled = _values(one) * _values(one).dtype.type(factor)
                gradients[place] = (one[0], scaled) if isinstance(one, tuple) else scaled


def _dtype_of(weight: Any) -> str:
    return keras.backend.standardize_dtype(weight.dtype)


def _values(gradient: Gradient) -> np.ndarray:
    return gradient[1] if isinstance(gradient, tuple) else gradient


def _tensor(gradient: Gradient | None, weight: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tuple):
        return current().lookup_gradient(*gradient, tuple(weight.shape))
    return keras.ops.convert_to_tensor(gradient)
