"""The RDD that a user hands in: is it one, what is its first record, and which records are for validation."""

from __future__ import annotations

import functools
from typing import Any

from pyspark import RDD

from elephant.config import FitConfig
from elephant.errors import ConfigurationError, DataError
from elephant.spark.conversions import to_simple_rdd


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

    Args:
        rdd: The records to train on.
        validation_data: Those for validation, as an RDD or as a tuple of arrays.
        config: The options of the fit.

    Raises:
        ConfigurationError: The options ask for a split besides.
    """
    if config.validation_fraction:
        raise ConfigurationError(
            "validation_split: expected 0 because validation_data already gives the records for validation. "
            f"Received: {config.validation_fraction}."
        )
    kept = validation_data if isinstance(validation_data, RDD) else to_simple_rdd(rdd.context, *validation_data)
    return rdd.map(functools.partial(_with_mark, False)).union(kept.map(functools.partial(_with_mark, True)))


def _with_mark(mark: bool, record: Any) -> tuple[Any, bool]:
    return record, mark
