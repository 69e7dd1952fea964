"""Prediction and evaluation over an RDD, as the driver plans them; nothing here runs in Spark's Python workers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from pyspark import RDD

from elephant.cluster.row_source import with_marks
from elephant.cluster.spark_private import parts_of_rdd
from elephant.config import FitConfig
from elephant.data.records import RecordPlan
from elephant.errors import ConfigurationError, DataError
from elephant.spark.conversions import to_simple_rdd
from elephant.task.predict_task import Prediction, predict_records


def require_rdd(caller: str, value: Any) -> None:
    """Raises TypeError for what is no RDD."""
    if not isinstance(value, RDD):
        raise TypeError(
            f"{caller}: expected an RDD of (x, y). Received: {type(value).__name__}. Use elephant.KerasEstimator for "
            "DataFrames, which is the only way on Spark Connect, as that has no RDDs; "
            "elephant.spark.conversions.to_simple_rdd(sc, x, y) makes an RDD of arrays."
        )


def first_record(rdd: RDD[Any], caller: str) -> Any:
    """Returns an RDD's first record; raises DataError when it has none."""
    first = rdd.take(1)
    if not first:
        raise DataError(f"{caller}: expected records. Received: an RDD without any.")
    return first[0]


def marked(rdd: RDD[Any], validation_data: Any, config: FitConfig) -> RDD[Any]:
    """Returns pairs of a record and whether it is for validation.

    Raises:
        ConfigurationError: The options ask for a split besides.
    """
    if config.validation_fraction:
        raise ConfigurationError(
            "validation_split: expected 0 because validation_data already gives the records for validation. "
            f"Received: {config.validation_fraction}."
        )
    kept = validation_data if isinstance(validation_data, RDD) else to_simple_rdd(rdd.context, *validation_data)
    return with_marks(rdd, kept)


class Predictions(RDD[Any]):
    """An RDD of one prediction per record, in the records' order and partitions.

    It may be used as a list too, as Elephas' users know it: to iterate over it, to take its
    length or to index it collects all predictions on the driver, once.
    """

    def __init__(self, predicted: RDD[Any]) -> None:
        super().__init__(*parts_of_rdd(predicted))
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
    """Returns the model's predictions; lazy, as all of Spark."""
    return Predictions(rdd.mapPartitions(functools.partial(predict_records, prediction, plan)))


def split_inputs(data: Any, widths: Sequence[int]) -> Any:
    """Returns the columns of a matrix as one array per input, when there are several; other data as it is.

    >>> [part.tolist() for part in split_inputs(np.array([[1, 2, 3], [4, 5, 6]]), (1, 2))]
    [[[1], [4]], [[2, 3], [5, 6]]]
    """
    if len(widths) < 2 or not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != sum(widths):
        return data
    return np.split(data, np.cumsum(widths)[:-1], axis=1)
