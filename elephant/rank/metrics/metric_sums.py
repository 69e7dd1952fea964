"""State of a model's metrics over rows of which several processes have seen a part each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from elephant.backends.keras_private import compiled_metrics, function_of_metric, given_metrics
from elephant.collective.communicator import Communicator
from elephant.data.schema import DataSchema
from elephant.modeling.variables import assign_flat, flatten, metric_variables
from elephant.rank.input.tensors import blank_batch
from elephant.rank.job import as_numbers
from elephant.rank.metrics.batch_means import count_rows

# Sums in float32 differ in their last digits, by the order of what was added.
_TOLERANCE = 1e-3
# After which the metrics' own sums, in single precision, begin anew.
_MOST_BATCHES = 32

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class MetricPart:
    """State of the metrics of one process, after the rows that it has seen.

    Args:
        sums: All metrics' variables one after the other, float64.
        num_rows: Rows that were seen.
        names: What the model's ``test_step`` returned, by name.
        others: What it returned that no metric keeps, by name: the sum over batches of value times rows.
        not_sums: Names of metrics that were found not to add up.
    """

    sums: np.ndarray
    num_rows: int
    names: tuple[str, ...]
    others: Mapping[str, float]
    not_sums: tuple[str, ...]


class MetricSums:
    """Adds up, in double precision, what the metrics hold after some batches each.

    A metric keeps sums and counts; added up over batches and processes they are what one
    process would hold. An average of results would be something else.

    Args:
        model: The model.
        test_function: Adds a batch to what its metrics hold; None has each of them begin anew with the batch.
    """

    def __init__(self, model: keras.Model, test_function: Callable[[Batch], Any] | None = None) -> None:
        count_rows(model)
        self._model = model
        self._test_function = test_function
        # What the metrics hold that is not in the sums yet.
        self._num_batches = 0
        self._sums = np.empty(0)
        self._others: dict[str, float] = {}
        self._names: tuple[str, ...] = ()
        self._num_rows = 0
        self._not_sums: list[str] = []

    @property
    def part(self) -> MetricPart:
        """Sum of the parts that were added."""
        self._take_sums()
        return MetricPart(self._sums, self._num_rows, self._names, dict(self._others), tuple(self._not_sums))

    def add(self, batch: Batch, num_rows: int) -> None:
        """Takes one batch: ``x``, ``y`` and ``sample_weight``, None for what there is not."""
        # Metrics are made when the first batch comes, and names are known then.
        if self._test_function is None or not self._names:
            self._take_sums()
            # Keras 3.12 goes on from the state of the batch before; later ones begin anew.
            self._model.reset_metrics()
            logs = self._model.test_on_batch(*batch, return_dict=True)
        else:
            logs = self._test_function(batch)
        self._num_batches += 1
        self._num_rows += num_rows
        if not self._names:
            self._names = tuple(logs)
            kept = as_numbers(self._model.get_metrics_result())
            self._others = {name: 0.0 for name in logs if name not in kept and np.ndim(logs[name]) == 0}
        for name in self._others.keys() & logs.keys():
            self._others[name] += as_numbers({name: logs[name]})[name] * num_rows
        if self._num_batches >= _MOST_BATCHES:
            self._take_sums()

    def _take_sums(self) -> None:
        if self._num_batches:
            sums = flatten(metric_variables(self._model))
            self._sums = self._sums + sums if len(self._sums) else sums
            self._model.reset_metrics()
            self._num_batches = 0

    def try_out(self, whole: Batch, parts: Sequence[Batch]) -> None:
        """Finds out which of the metrics do not add up over the parts of a batch.

        Args:
            parts: The same rows, in two batches of different sizes.
        """
        # Metrics of a compiled model are made when the first batch comes.
        self._model.test_on_batch(*whole)
        self._not_sums = metrics_that_do_not_add_up(self._model, whole, parts, self._model.test_on_batch)


def may_not_add_up(model: keras.Model) -> bool:
    """Returns whether a model has metrics other than those of Keras' that keep sums over rows."""
    given = list(given_metrics(compiled_metrics(model)))
    return any(_may_not_add_up(metric) for metric in keras.tree.flatten(given) if metric is not None)


def metrics_that_do_not_add_up(
    model: keras.Model, whole: Batch, parts: Sequence[Batch], update: Callable[..., object]
) -> list[str]:
    """Returns the names of metrics that hold something else after the parts of a batch than after the whole.

    Args:
        whole: A batch: ``x``, ``y`` and ``sample_weight``.
        parts: The same rows, in two batches of different sizes.
    """
    if not may_not_add_up(model):
        return []
    update(*whole)
    metrics = [metric for metric in _metrics_of(model) if _may_not_add_up(metric)]
    states = []
    for batch in (whole, *parts):
        model.reset_metrics()
        update(*batch)
        states.append([flatten(metric.variables) for metric in metrics])
    return [
        metric.name
        for metric, together, *apart in zip(metrics, *states, strict=True)
        if not _is_equal(together, np.sum(apart, axis=0))
        and not _is_equal(_result_of(metric, together), _result_of(metric, np.sum(apart, axis=0)))
    ]


def results_of(
    model: keras.Model, schema: DataSchema, row_shapes: Mapping[str, Sequence[int]], parts: Sequence[MetricPart]
) -> dict[str, Any]:
    """Returns the metrics over all parts, by name.

    Args:
        model: A copy for this alone.
        row_shapes: Natural shape of a row of each array column, by role.
        parts: What each process has seen; one at least.
    """
    # Metrics make their variables when they meet the first batch. To trace a step for one row would take longer.
    model.run_eagerly = True
    model.test_on_batch(*keras.tree.map_structure(_as_tensor, blank_batch(schema, row_shapes)))
    assign_flat(metric_variables(model), np.sum([part.sums for part in parts], axis=0))
    results = as_numbers(model.get_metrics_result())
    num_rows = sum(part.num_rows for part in parts)
    averages = {name: sum(part.others[name] for part in parts) / num_rows for name in parts[0].others}
    return {name: results[name] for name in parts[0].names if name in results} | averages


def _as_tensor(value: Any) -> Any:
    # A layer that runs eagerly takes no arrays beside tensors, which texts are.
    return keras.ops.convert_to_tensor(value) if isinstance(value, np.ndarray) else value


def _metrics_of(model: keras.Model) -> Iterator[keras.metrics.Metric]:
    for metric in model.metrics:
        inner = getattr(metric, "metrics", None)
        yield from inner or [metric]


def _may_not_add_up(metric: Any) -> bool:
    """Returns whether a metric, or the name of one, is the user's own or looks along an axis, maybe of rows."""
    if isinstance(metric, str):
        with contextlib.suppress(ValueError):
            metric = keras.metrics.get(metric)
    code = function_of_metric(metric)
    module = str(getattr(code, "__module__", type(code).__module__))
    return module.split(".")[0] != "keras" or hasattr(metric, "axis")


def _result_of(metric: keras.metrics.Metric, state: np.ndarray) -> np.ndarray:
    assign_flat(metric.variables, state)
    return np.concatenate([np.ravel(value) for value in keras.tree.flatten(as_numbers({"": metric.result()}))])


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return np.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def sum_metrics(model: keras.Model, communicator: Communicator) -> dict[str, Any]:
    """Returns the model's metrics over the rows of all ranks.

    A metric keeps sums and counts; added up over the ranks they are what one process
    would hold. An average of each rank's results would be something else.
    """
    variables = metric_variables(model)
    sums = flatten(variables)
    communicator.allreduce_(sums)
    assign_flat(variables, sums)
    # As Keras orders them.
    return dict(sorted(as_numbers(model.get_metrics_result()).items()))


def global_logs(model: keras.Model, communicator: Communicator, logs: dict[str, Any], share: float) -> dict[str, Any]:
    """Returns an epoch's training logs over all ranks.

    Metrics come from their sums. What a custom ``train_step`` returned besides, such as a
    loss that no metric tracks, is its value in the last step, averaged over the ranks.
    """
    sum_metrics(model, communicator)
    # Summed over all ranks, so that all decide alike which ones were updated.
    results = updated_results(model)
    raw = sorted(name for name, value in as_numbers(logs).items() if name not in results and np.ndim(value) == 0)
    values = np.array([logs[name] for name in raw], dtype=np.float64)
    values = values * share if share else np.zeros_like(values)
    communicator.allreduce_(values)
    results = {name: value for name, value in results.items() if name in logs}
    return {**results, **{name: float(value) for name, value in zip(raw, values, strict=True)}}


def updated_results(model: keras.Model) -> dict[str, Any]:
    """Returns the results of the model's metrics, without those that are still zero: they were never updated.

    One that was updated may have the name of one that was not, as a tracker called "loss" beside Keras' own.
    """
    results: dict[str, Any] = {}
    for metric in model.metrics:
        if any(np.any(keras.ops.convert_to_numpy(variable)) for variable in metric.variables):
            results |= as_numbers({metric.name: metric.result()})
    return results
