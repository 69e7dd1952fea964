"""The numbers of an epoch of an asynchronous fit, put together on the driver from what its workers have summed up."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elephant.data.schema import DataSchema
from elephant.modeling.variables import assign_flat, metric_variables
from elephant.monitor.events import EpochPart
from elephant.training.agreement import updated_results
from elephant.training.job import as_numbers
from elephant.training.tensors import blank_batch

logger = logging.getLogger(__name__)

RowShapes = Mapping[str, Sequence[int]]


class EpochSummaries:
    """Adds up what the metrics of all workers have summed up, so that an epoch has one number for each metric.

    A worker that is run again may report an epoch once more: the report that is of
    more steps stays, and of two equal ones the later. An epoch that is complete does not change any more.

    Args:
        model: A compiled model whose metrics may be used, such as the driver's copy.
        schema: What the workers' rows hold.
        num_workers: Workers that report every epoch; those without rows report empty ones.
        first_epoch: The epoch that the fit begins with, from zero.
    """

    def __init__(self, model: keras.Model, schema: DataSchema, num_workers: int, first_epoch: int = 0) -> None:
        self._model = model
        self._schema = schema
        self._num_workers = num_workers
        self._parts: dict[int, dict[int, EpochPart]] = {}
        self._complete = set(range(first_epoch))

    @property
    def pending(self) -> list[EpochPart]:
        """Reports of epochs that other workers have not ended yet."""
        return [part for parts in self._parts.values() for part in parts.values()]

    def add(self, part: EpochPart) -> dict[str, Any] | None:
        """Keeps a worker's report; returns the logs of its epoch when it was the last that was missing.

        Returns:
            One number, or list of numbers, by name; those of validation begin with ``val_``.
        """
        if part.epoch in self._complete:
            return None
        parts = self._parts.setdefault(part.epoch, {})
        if part.rank not in parts or part.steps >= parts[part.rank].steps:
            parts[part.rank] = part
        if len(parts) < self._num_workers:
            return None
        self._complete.add(part.epoch)
        return self._logs(list(self._parts.pop(part.epoch).values()))

    def _logs(self, parts: Sequence[EpochPart]) -> dict[str, Any]:
        trained = [part for part in parts if part.rows]
        row_shapes = next((part.row_shapes for part in parts if part.steps), None)
        results = self._results(trained, 0, row_shapes)
        logs: dict[str, Any] = {}
        for name in dict.fromkeys(name for part in trained for name in part.logs):
            value = results[name] if name in results else _average(trained, name)
            if value is not None:
                logs[name] = value
        if self._results([part for part in parts if part.val_rows], 1, row_shapes):
            logs |= {f"val_{name}": value for name, value in as_numbers(self._model.get_metrics_result()).items()}
        return logs

    def _results(self, parts: Sequence[EpochPart], which: int, row_shapes: RowShapes | None) -> dict[str, Any]:
        """Returns what the model's metrics make of the workers' sums: nothing where they have other metrics."""
        sums = [np.asarray(part.arrays[which], np.float64) for part in parts]
        if not sums or len({len(values) for values in sums}) > 1 or not self._have_metrics(len(sums[0]), row_shapes):
            return {}
        assign_flat(metric_variables(self._model), np.sum(sums, axis=0))
        return updated_results(self._model)

    def _have_metrics(self, num_values: int, row_shapes: RowShapes | None) -> bool:
        """Returns whether the model's metrics hold so many values, after a first batch if they wait for one."""
        if self._num_values() != num_values and row_shapes is not None:
            try:
                self._model.test_on_batch(*blank_batch(self._schema, row_shapes))
            except Exception as error:
                # A model with steps of its own need not be able to test; its workers' logs are then averaged.
                logger.info("the driver's copy of the model cannot take a batch: %s", error)
        return self._num_values() == num_values

    def _num_values(self) -> int:
        return sum(int(np.prod(variable.shape)) for variable in metric_variables(self._model))


def _average(parts: Sequence[EpochPart], name: str) -> float | None:
    """Returns the average of what a train_step of the model's own logged in each worker's last step."""
    known = [(part.rows, part.logs[name]) for part in parts if np.ndim(part.logs.get(name, [])) == 0]
    total = sum(rows for rows, _ in known)
    return float(sum(rows / total * value for rows, value in known)) if total else None
