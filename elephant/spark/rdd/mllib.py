"""SparkMLlibModel, and loading of saved models over RDDs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from pyspark import RDD
from pyspark.ml.linalg import Matrix as NewMatrix
from pyspark.ml.linalg import Vector as NewVector
from pyspark.mllib.linalg import Matrix, Vector
from pyspark.mllib.regression import LabeledPoint

from elephant.errors import DataError, brief_errors
from elephant.spark.conversions import (
    features_of,
    from_matrix,
    from_vector,
    lp_to_simple_rdd,
    to_matrix,
    to_ml_matrix,
    to_ml_vector,
    to_vector,
)
from elephant.spark.rdd.model import OPTIONS, SparkModel
from elephant.spark.saving.model_files import read_model


class SparkMLlibModel(SparkModel):
    """Trains a Keras model on ``RDD[LabeledPoint]``; the arguments are those of `SparkModel`.

    Examples:
        >>> spark_model = SparkMLlibModel(model, num_workers=2)  # doctest: +SKIP
        >>> spark_model.fit(points, epochs=10, categorical=True, nb_classes=10)  # doctest: +SKIP
        >>> spark_model.predict(Vectors.dense([0.1, 0.2]))  # doctest: +SKIP
    """

    @brief_errors
    def fit(  # type: ignore[override]  # Elephas' order of arguments
        self,
        labeled_points: RDD[Any],
        epochs: int = 10,
        batch_size: int | None = None,
        verbose: int | str = 0,
        validation_split: float = 0.1,
        categorical: bool = False,
        nb_classes: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        **more: Any,
    ) -> keras.callbacks.History:
        """Trains the model; a second call goes on from where the first one ended.

        Args:
            labeled_points: `pyspark.mllib.regression.LabeledPoint`.
            epochs: Passes over them.
            batch_size: Points per worker and step; None takes the constructor's.
            verbose: 0 silent, 1 or ``"auto"`` plan, progress and a table of epochs, 2 without the progress.
            validation_split: Share of the points kept for validation, in [0, 1).
            categorical: Whether labels become one-hot vectors, as ``categorical_crossentropy`` needs them.
            nb_classes: Their length; None takes the largest label plus one.
            callbacks: Keras callbacks.
            more: Any other argument of `SparkModel.fit`.

        Returns:
            Keras' history, and raises, as `SparkModel.fit`.
        """
        return super().fit(
            self._pairs(labeled_points, categorical, nb_classes),
            epochs=epochs,
            batch_size=batch_size,
            verbose=verbose,
            validation_split=validation_split,
            callbacks=callbacks,
            **more,
        )

    def train(self, labeled_points: RDD[Any], *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains the model: the name that Elephas' documentation has for `fit`."""
        return self.fit(labeled_points, *args, **kwargs)

    def predict(self, data: Any, batch_size: int = 1024, verbose: int = 0) -> Any:
        """Returns the model's outputs for one or many rows of features.

        Args:
            data: A vector, which is one row; a matrix of rows; an RDD of vectors or of labeled points; or what
                `SparkModel.predict` takes.
            batch_size: Rows that go through the model at a time.
            verbose: As Keras has it, for matrices.

        Returns:
            A vector, a matrix, or an RDD of vectors, of ml or of mllib as the data; else as `SparkModel.predict`.
        """
        if isinstance(data, (Vector, NewVector)):
            row = self._outputs(from_vector(data)[np.newaxis], batch_size, 0)[0]
            return to_ml_vector(row) if isinstance(data, NewVector) else to_vector(row)
        if isinstance(data, (Matrix, NewMatrix)):
            rows = self._outputs(from_matrix(data), batch_size, verbose)
            return to_ml_matrix(rows) if isinstance(data, NewMatrix) else to_matrix(rows)
        if not isinstance(data, RDD):
            return super().predict(data, batch_size=batch_size, verbose=verbose)
        first = data.take(1)
        if not first or not isinstance(first[0], (Vector, NewVector, LabeledPoint)):
            return super().predict(data, batch_size=batch_size, verbose=verbose)
        predicted = super().predict(data.map(features_of), batch_size=batch_size)
        return predicted.map(to_ml_vector if isinstance(first[0], NewVector) else to_vector)

    def evaluate(
        self, x: Any, y: Any = None, *args: Any, categorical: bool = False, nb_classes: int | None = None, **kwargs: Any
    ) -> Any:
        """Returns the loss and the metrics over labeled points, or over whatever `SparkModel.evaluate` takes.

        Args:
            x: Labeled points, or as in `SparkModel.evaluate`.
            y: As there.
            args: As there.
            categorical: Whether labels of points become one-hot vectors.
            nb_classes: Their length; None takes the largest label plus one.
            kwargs: As in `SparkModel.evaluate`.
        """
        if isinstance(x, RDD) and isinstance(next(iter(x.take(1)), None), LabeledPoint):
            x = lp_to_simple_rdd(x, categorical, nb_classes)
        return super().evaluate(x, y, *args, **kwargs)

    def _pairs(self, points: Any, categorical: bool, nb_classes: int | None) -> RDD[Any]:
        first = points.take(1) if isinstance(points, RDD) else []
        if first and not isinstance(first[0], LabeledPoint):
            raise DataError(
                f"fit: expected an RDD of pyspark.mllib.regression.LabeledPoint. Received: {type(first[0]).__name__}. "
                "SparkModel takes RDDs of (x, y)."
            )
        return lp_to_simple_rdd(points, categorical, nb_classes) if first else points

    def _outputs(self, rows: np.ndarray, batch_size: int, verbose: int) -> np.ndarray:
        outputs = self.model.predict(rows, batch_size=batch_size, verbose=verbose)
        return np.asarray(outputs, np.float64).reshape(len(rows), -1)


@brief_errors
def load_spark_model(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None = None, *, trusted: bool | None = None
) -> SparkModel:
    """Returns the `SparkModel` or `SparkMLlibModel` that was saved, by elephant or by Elephas.

    Args:
        path: As `SparkModel.save` takes it. A file that Keras alone has written becomes a `SparkModel` too.
        custom_objects: Custom layers, losses, metrics and functions by name.
        trusted: Whether code in the file, such as lambdas, may run. None asks the Spark setting
            ``spark.elephant.trustSavedModels``, which is false unless it is set.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigurationError: Keras cannot load it, or it holds code that is not trusted.
    """
    model, saved = read_model(path, custom_objects, trusted=trusted)
    kind = SparkMLlibModel if saved.get("class_name") == "SparkMLlibModel" else SparkModel
    known = ("mode", "frequency", "num_workers", "batch_size", "port", *OPTIONS)
    config = {name: value for name, value in saved.get("config", {}).items() if name in known}
    return kind(model, custom_objects=custom_objects, **config)
