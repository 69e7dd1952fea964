"""Predictions and evaluation on the records of an RDD."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from pyspark import RDD

from elephant.data.nested import pack
from elephant.data.ragged import Values, Variable
from elephant.data.records import RecordPlan
from elephant.spark.prediction import Prediction, predict_chunks


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


def predict(rdd: RDD[Any], prediction: Prediction, plan: RecordPlan) -> Predictions:
    """Returns the model's predictions; lazy, as all of Spark.

    Args:
        rdd: Records, each of which is the model's input.
        prediction: What to predict with.
        plan: Where in a record the inputs are.
    """
    return Predictions(rdd.mapPartitions(functools.partial(predict_records, prediction, plan)))


def predict_records(prediction: Prediction, plan: RecordPlan, records: Iterable[Any]) -> Iterator[Any]:
    """Yields the predictions for one partition; the function that ``mapPartitions`` runs."""
    chunks = (batch.columns for batch in plan.batches(records))
    for batches in prediction.model.compute(functools.partial(predict_chunks, prediction), chunks):
        for outputs in batches:
            for row in zip(*map(_rows, outputs), strict=True):
                yield pack(prediction.outputs, row)


def _rows(values: Values) -> Iterable[np.ndarray]:
    """Yields what an output has for each row; sequences are of different lengths."""
    if not isinstance(values, Variable):
        return values
    starts, elements = values.offsets, values.buffers[0]
    return (elements[start:stop] for start, stop in zip(starts[:-1], starts[1:], strict=True))


def split_inputs(data: Any, widths: Sequence[int]) -> Any:
    """Returns the columns of a matrix as one array per input, when there are several; other data as it is.

    >>> [part.tolist() for part in split_inputs(np.array([[1, 2, 3], [4, 5, 6]]), (1, 2))]
    [[[1], [4]], [[2, 3], [5, 6]]]
    """
    if len(widths) < 2 or not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != sum(widths):
        return data
    return np.split(data, np.cumsum(widths)[:-1], axis=1)
