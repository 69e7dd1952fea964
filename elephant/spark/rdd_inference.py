"""Predictions and evaluation on the records of an RDD."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import keras
import numpy as np
from pyspark import RDD

from elephant.data.columns import to_values
from elephant.data.records import RecordPlan
from elephant.data.schema import TEXT, Field
from elephant.data.shard import Shard
from elephant.data.values import Values, Variable
from elephant.errors import DataError
from elephant.modeling.source import ModelSource
from elephant.modeling.variables import assign_flat, flatten, metric_variables
from elephant.training.job import as_numbers
from elephant.training.tensors import Tensors, blank_batch


class Predictions(RDD[Any]):
    """An RDD of one prediction per record, in the records' order and partitions.

    It may be used as a list too, as Elephas' users know it: to iterate over it, to take its
    length or to index it collects all predictions on the driver, once.

    Args:
        predicted: The RDD.
    """

    def __init__(self, predicted: RDD[Any]) -> None:
        super().__init__(predicted._jrdd, predicted.ctx, predicted._jrdd_deserializer)
        self._rows: list[Any] | None = None

    def _collected(self) -> list[Any]:
        if self._rows is None:
            self._rows = self.collect()
        return self._rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._collected())

    def __len__(self) -> int:
        return len(self._collected())

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._collected()[index]


def predict(rdd: RDD[Any], source: ModelSource, plan: RecordPlan, *, batch_size: int) -> Predictions:
    """Returns the model's predictions; lazy, as all of Spark.

    Args:
        rdd: Records, each of which is the model's input.
        source: The model.
        plan: Where in a record the inputs are.
        batch_size: Records that go through the model at a time.
    """
    return Predictions(rdd.mapPartitions(functools.partial(predict_records, source, plan, batch_size)))


def evaluate(
    rdd: RDD[Any], source: ModelSource, model: keras.Model, plan: RecordPlan, *, batch_size: int
) -> dict[str, Any]:
    """Returns the loss and the metrics over all records, by name.

    Metrics keep sums; those of all partitions are added up, and give what one process would get.

    Args:
        rdd: Records with inputs and labels.
        source: The model.
        model: A model of the same source, whose metrics are used.
        plan: Where in a record its parts are.
        batch_size: Records that go through the model at a time.
    """
    sums = rdd.mapPartitions(functools.partial(sum_metrics_of_records, source, plan, batch_size)).collect()
    if not sums:
        raise DataError("evaluate: expected records. Received: an RDD without any.")
    # Metrics make their variables when they meet the first batch.
    model.test_on_batch(*blank_batch(plan.schema, plan.row_shapes))
    variables = metric_variables(model)
    assign_flat(variables, np.sum(sums, axis=0))
    results = as_numbers(model.get_metrics_result())
    model.reset_metrics()
    return results


def predict_records(source: ModelSource, plan: RecordPlan, batch_size: int, records: Iterable[Any]) -> Iterator[Any]:
    """Yields the predictions for one partition; the function that ``mapPartitions`` runs."""
    model = None
    for (x, *_), num_rows in _batches(plan, batch_size, records):
        model = model or built(source)
        outputs = model.predict_on_batch(x)
        if isinstance(outputs, np.ndarray):
            yield from outputs
        else:
            yield from (keras.tree.map_structure(lambda part, row=row: part[row], outputs) for row in range(num_rows))


def sum_metrics_of_records(
    source: ModelSource, plan: RecordPlan, batch_size: int, records: Iterable[Any]
) -> Iterator[np.ndarray]:
    """Yields what the metrics hold after one partition, if it has records; ``mapPartitions`` runs it."""
    model = None
    for batch, _ in _batches(plan, batch_size, records):
        if model is None:
            model = built(source)
            model.reset_metrics()
        model.test_on_batch(*batch)
    if model is not None:
        yield flatten(metric_variables(model))


_models: dict[str, keras.Model] = {}


def built(source: ModelSource) -> keras.Model:
    """Returns the model, built once in each Python worker that Spark reuses; only the last one is kept."""
    if source.source_id not in _models:
        _models.clear()
        _models[source.source_id] = source.build()
    return _models[source.source_id]


def _batches(plan: RecordPlan, batch_size: int, records: Iterable[Any]) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yields what Keras takes, and how many rows it is of."""
    shard = Shard(None, plan.schema, plan.row_shapes)
    tensors, fields = Tensors(shard), plan.schema.batch_fields
    first_row = 0
    for batch in plan.batches(records):
        values = [
            to_values(batch.column(field.role), field, first_row=first_row, row_shape=plan.row_shapes.get(field.role))[
                0
            ]
            for field in fields
        ]
        first_row += batch.num_rows
        for start in range(0, batch.num_rows, batch_size):
            rows = np.arange(start, min(start + batch_size, batch.num_rows))
            taken = [_taken(part, rows, field, shard) for part, field in zip(values, fields, strict=True)]
            yield tensors.of(taken), len(rows)


def _taken(values: Values, rows: np.ndarray, field: Field, shard: Shard) -> Values:
    shape = shard.row_shape(field)
    if not isinstance(values, Variable):
        return values[rows[0] : rows[-1] + 1].reshape(len(rows), *shape)
    count = int(np.prod(shape, dtype=np.int64)) if field.kind == TEXT else 1
    return values.take((rows[:, np.newaxis] * count + np.arange(count)).ravel())


def split_inputs(data: Any, widths: Sequence[int]) -> Any:
    """Returns the columns of a matrix as one array per input, when there are several; other data as it is.

    >>> [part.tolist() for part in split_inputs(np.array([[1, 2, 3], [4, 5, 6]]), (1, 2))]
    [[[1], [4]], [[2, 3], [5, 6]]]
    """
    if len(widths) < 2 or not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != sum(widths):
        return data
    return np.split(data, np.cumsum(widths)[:-1], axis=1)
