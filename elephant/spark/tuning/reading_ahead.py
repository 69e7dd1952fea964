"""Rows that an estimator trains on, read ahead for all fits of a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elephant.errors import ConfigurationError, brief_errors
from elephant.spark.params import fit_config
from elephant.spark.prepared import PreparedFrame, as_asked, rows_of_dataset
from elephant.spark.training_data import dataset_of, frame_of, is_frame

if TYPE_CHECKING:
    from elephant.spark.estimator import Dataset, KerasEstimator


@brief_errors
def prepared(dataset: Dataset, estimator: KerasEstimator) -> PreparedFrame:
    """Reads the rows that an estimator trains on once, and has the executors keep them for the fits of a block.

    What is read, joined and dealt out to the workers lies on the executors' local disks from then on, in the columns
    that the estimator takes, and beside that what its ``preprocessing`` makes of it, unless that draws random numbers.
    Each fit gives what it would give on the DataFrame itself, to the bit. The part of an executor that is lost is read
    and preprocessed again. Other columns, another function, and another number of workers, are read when a fit first
    asks for them, and kept as well. Where disks are too full, the user is warned, and each fit reads the rows itself.

    Args:
        dataset: A DataFrame of Spark, or of pandas.
        estimator: Its columns, model and workers say what is kept.

    Returns:
        What `elephant.KerasEstimator.fit` takes in place of the DataFrame. It is let go of at the end of its ``with``
        block, by its ``release()``, or with the session.

    Raises:
        ConfigurationError: The dataset is files that the workers read themselves.
        SchemaError: A column is missing or unusable.
        TypeError: It is no dataset.

    Examples:
        >>> with elephant.prepared(train_df, estimator) as rows:  # doctest: +SKIP
        ...     models = [estimator.fit(rows, learningRate=rate) for rate in (0.1, 0.01, 0.001)]
    """
    given = dataset_of(dataset)
    if not is_frame(given):
        raise ConfigurationError(
            "prepared: expected a DataFrame. Received: files, which the workers read themselves in each fit. Pass "
            "spark.read.parquet(path)."
        )
    return read_ahead(PreparedFrame(frame_of(given, "prepared")), estimator)


def read_ahead(frame: PreparedFrame, estimator: KerasEstimator) -> PreparedFrame:
    """Has the executors read what a fit will ask for, and returns the frame; releases it where they cannot."""
    try:
        config = fit_config(estimator)
        if config.elastic is None:
            data = rows_of_dataset(estimator, estimator.getModel().source, frame, config)
            as_asked(data.source, data.schema, config)
    except BaseException:
        frame.release()
        raise
    return frame
