"""Rows for several fits: read once, and on the executors' disks until the fits are done."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from pyspark.ml import Estimator
from pyspark.ml.param import Param

from elephant.cluster.prepared_rows import Fold, RowsOnDisk
from elephant.config import FitConfig
from elephant.modeling.model_info import ModelInfo
from elephant.spark.file_formats import Files
from elephant.spark.params import TrainingParams, column_selection, optional
from elephant.spark.training_data import TrainingData, rows_of_files, rows_of_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class PreparedFrame:
    """A DataFrame whose rows stay on the executors, for the fits of a ``with`` block; see `elephant.prepared`.

    Args:
        frame: The user's DataFrame, with a column of fold numbers where there are folds.
        fold: The rows for validation of fits on it; None leaves these to the estimator.
        on_disk: What executors keep of it; None begins with nothing.
    """

    def __init__(self, frame: DataFrame, fold: Fold | None = None, on_disk: RowsOnDisk | None = None) -> None:
        self.frame, self.fold = frame, fold
        self.on_disk = RowsOnDisk() if on_disk is None else on_disk

    def with_validation(self, fold: Fold) -> PreparedFrame:
        """Returns the same rows, kept once for all folds, with those of one fold for validation."""
        return PreparedFrame(self.frame, fold, self.on_disk)

    @property
    def sparkSession(self) -> SparkSession:
        """The session of the DataFrame."""
        return self.frame.sparkSession

    def release(self) -> None:
        """Has the executors remove the rows; fits that follow read them from the DataFrame."""
        self.on_disk.release()

    def __enter__(self) -> PreparedFrame:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"prepared({self.frame!r})"


def rows_of_dataset(
    stage: TrainingParams, info: ModelInfo, dataset: DataFrame | PreparedFrame | Files, config: FitConfig
) -> TrainingData:
    """Returns the rows of a dataset as a stage trains on them.

    Args:
        info: What its model takes.
    """
    selection, preprocessed = column_selection(stage), optional(stage, stage.preprocessing) is not None
    if optional(stage, stage.augmentation) is not None:
        # It may give the classes of the rows other numbers.
        info = replace(info, outputs=tuple(replace(output, num_classes=None) for output in info.outputs))
    if isinstance(dataset, Files):
        return rows_of_files(dataset, info, selection, config, preprocessed=preprocessed)
    if not isinstance(dataset, PreparedFrame):
        return rows_of_frame(dataset, info, selection, preprocessed=preprocessed)
    fold = dataset.fold
    if fold is not None:
        selection = replace(selection, validation=None if fold.number is None else fold.column)
    return rows_of_frame(dataset.frame, info, selection, preprocessed=preprocessed, on_disk=dataset.on_disk, fold=fold)


class FitsOfGrid(Iterator[tuple[int, Any]]):
    """Fits of several param maps on the same rows, which are read once; threads may take them one by one.

    Args:
        estimator: It stays as it is.
        rows: Released when all fits are done, or nobody takes any more.
        param_maps: One for each fit.
    """

    def __init__(
        self, estimator: Estimator[Any], rows: PreparedFrame, param_maps: Sequence[dict[Param[Any], Any]]
    ) -> None:
        self._estimator, self._rows, self._param_maps = estimator, rows, list(param_maps)
        self._begun = self._done = 0
        self._counting = threading.Lock()
        weakref.finalize(self, rows.release).atexit = False

    def __next__(self) -> tuple[int, Any]:
        with self._counting:
            place = self._begun
            if place >= len(self._param_maps):
                raise StopIteration
            self._begun += 1
        try:
            return place, self._estimator.fit(cast(Any, self._rows), self._param_maps[place])
        finally:
            with self._counting:
                self._done += 1
                if self._done == len(self._param_maps):
                    self._rows.release()
