"""Folds of k-fold cross-validation: parts of a DataFrame that take turns at being for validation."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)

from elephant.cluster.prepared_rows import Fold
from elephant.errors import ConfigurationError
from elephant.spark.file_formats import Files
from elephant.spark.params import fit_config, optional
from elephant.spark.prepared import PreparedFrame
from elephant.spark.tuning.reading_ahead import read_ahead

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from elephant.spark.estimator import KerasEstimator

_COLUMN = "fold"
# Spark numbers the rows of each partition from a multiple of this.
_PARTITION_BITS = 33
# Params that say which rows are for validation, as the folds do.
_CHOOSING = ("validationFraction", "validationIndicatorCol")


def folded(
    dataset: DataFrame | PreparedFrame | Files, estimator: KerasEstimator, folds: int, seed: int
) -> PreparedFrame:
    """Reads the rows that an estimator trains on once, for the fits of all folds.

    Args:
        seed: Decides which row is in which fold.

    Returns:
        All rows, for training; `with_validation` of it has a fold for validation. The caller releases it.

    Raises:
        ConfigurationError: The dataset is files that the workers read themselves.
    """
    if isinstance(dataset, Files):
        raise ConfigurationError(
            "folds: expected a DataFrame. Received: files, which the workers read themselves in each fit. Pass "
            "spark.read.parquet(path), or leave folds out."
        )
    # What a user has prepared has no fold numbers.
    frame = dataset.frame if isinstance(dataset, PreparedFrame) else dataset
    numbered, column = with_fold_numbers(frame, folds, seed)
    return read_ahead(PreparedFrame(numbered, Fold(column)), estimator)


def with_fold_numbers(frame: DataFrame, folds: int, seed: int) -> tuple[DataFrame, str]:
    """Returns a frame with one more column, the fold of each row from zero, and the column's name.

    Of so many rows that follow each other in a partition, each is in another fold; the seed draws the fold of the first
    one. The folds of a partition have the same number of rows, or one more, whatever its order.
    """
    names, column = {name.lower() for name in frame.columns}, _COLUMN
    while column in names:
        column += "_"
    number, count = F.monotonically_increasing_id(), F.lit(folds)
    place = number.bitwiseAND(F.lit((1 << _PARTITION_BITS) - 1))
    first = F.pmod(F.xxhash64(F.lit(str(seed)), F.shiftright(number, _PARTITION_BITS), F.floor(place / count)), count)
    return frame.withColumn(column, F.pmod(place + first, count).cast("int")), column


def refuse_conflicts(estimator: KerasEstimator, space: Collection[str] = ()) -> None:
    """Raises ConfigurationError for params that do not go with folds.

    Args:
        space: Names of the params that trials change.
    """
    for name in _CHOOSING:
        value = optional(estimator, name)
        if value or name in space:
            received = f"{name}={value!r}" if value else f"{name} in the space"
            raise ConfigurationError(
                f"folds: expected no {name}, because each fold in turn is for validation. Received: {received}. Leave "
                f"out {name}, or folds."
            )
    path = fit_config(estimator).checkpoint_path
    if path is not None:
        raise ConfigurationError(
            "folds: expected no checkpointPath, because the fits of all folds would go on from the same checkpoints. "
            f"Received: {path!r}. Leave it out, or folds."
        )
