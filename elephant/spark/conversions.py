"""Between numpy arrays, RDDs of pairs, RDDs of labeled points, DataFrames, and the vectors and matrices of Spark.

The names are Elephas'. Where one has an inverse, it gives back what went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pyspark.ml.linalg import DenseMatrix as NewDenseMatrix
from pyspark.ml.linalg import DenseVector as NewDenseVector
from pyspark.ml.linalg import Matrix as NewMatrix
from pyspark.ml.linalg import Vector as NewVector
from pyspark.ml.linalg import Vectors as NewVectors
from pyspark.mllib.linalg import DenseMatrix, DenseVector, Matrices, Matrix, Vector, Vectors
from pyspark.mllib.regression import LabeledPoint

from elephant.cluster.session import jvm_context
from elephant.data.records import as_array
from elephant.data.schema import nest_of, pack
from elephant.errors import ConfigurationError, DataError, UnsupportedError

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame, Row, SparkSession


def to_simple_rdd(
    sc: SparkContext | SparkSession, features: Any, labels: Any, sample_weight: Sequence[Any] | None = None
) -> RDD[Any]:
    """Returns an RDD of (x, y), or of (x, y, weight).

    Args:
        sc: The Spark context, or a session.
        features: One item per row; or a tuple or a dictionary of such, for models with several inputs.
        labels: The same for the outputs.
        sample_weight: One number per row, or an array in the shape of its loss, such as one number per token; or None.

    Raises:
        DataError: They are not of one length.
    """
    columns = [_rows_of(features), _rows_of(labels), *([] if sample_weight is None else [list(sample_weight)])]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise DataError(f"features, labels and weights: expected as many rows of each. Received: {lengths}.")
    return _context(sc).parallelize(list(zip(*columns, strict=True)))


def to_labeled_point(
    sc: SparkContext | SparkSession, features: Any, labels: Any, categorical: bool = False
) -> RDD[Any]:
    """Returns an RDD of `pyspark.mllib.regression.LabeledPoint`.

    Args:
        sc: The Spark context, or a session.
        features: Numbers of shape (rows, features).
        labels: Numbers of shape (rows,) or (rows, 1); or, if ``categorical``, one-hot vectors of shape (rows, classes).
        categorical: Whether the labels are one-hot vectors, whose class becomes the label.
    """
    points = [
        LabeledPoint(float(np.argmax(label)) if categorical else float(np.asarray(label).item()), to_vector(row))
        for row, label in zip(np.asarray(features), np.asarray(labels), strict=True)
    ]
    return _context(sc).parallelize(points)


def from_labeled_point(
    rdd: RDD[Any], categorical: bool = False, nb_classes: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns all features and labels of labeled points; the inverse of `to_labeled_point`.

    Args:
        rdd: Labeled points.
        categorical: Whether to return the labels as one-hot vectors.
        nb_classes: Their length; None takes the largest label plus one.

    Returns:
        float64 of shape (rows, features), and float64 of shape (rows,) or (rows, classes).
    """
    points = rdd.map(_features_and_label).collect()
    if not points:
        raise DataError("from_labeled_point: expected labeled points. Received: an RDD without any.")
    features, labels = np.stack([row for row, _ in points]), np.array([label for _, label in points])
    if not categorical:
        return features, labels
    return features, np.stack([encode_label(label, nb_classes or int(labels.max()) + 1) for label in labels])


def lp_to_simple_rdd(lp_rdd: RDD[Any], categorical: bool = False, nb_classes: int | None = None) -> RDD[Any]:
    """Returns an RDD of (x, y) of one of labeled points.

    Args:
        lp_rdd: Labeled points.
        categorical: Whether y is to be a one-hot vector.
        nb_classes: Its length; None looks for the largest label, which takes a Spark job.
    """
    pairs = lp_rdd.map(_features_and_label)
    if not categorical:
        return pairs
    classes = nb_classes or int(pairs.values().max()) + 1
    return pairs.mapValues(_Encoded(classes))


def to_data_frame(sc: SparkContext | SparkSession, features: Any, labels: Any, categorical: bool = False) -> DataFrame:
    """Returns a DataFrame with the columns features (ml vectors) and label (doubles).

    The arguments are those of `to_labeled_point`. Elephas' columns are mllib vectors, which Spark's own ml stages
    do not take.
    """
    from pyspark.sql import SparkSession

    session = sc if isinstance(sc, SparkSession) else SparkSession(sc)
    rows = to_labeled_point(sc, features, labels, categorical).map(_ml_row)
    return session.createDataFrame(rows, ["features", "label"])


def from_data_frame(
    df: DataFrame, categorical: bool = False, nb_classes: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns all features and labels of a DataFrame of `to_data_frame`; the arguments are `from_labeled_point`'s."""
    return from_labeled_point(df.rdd.map(_Labeled("features", "label")), categorical, nb_classes)


def df_to_simple_rdd(
    df: DataFrame,
    categorical: bool = False,
    nb_classes: int | None = None,
    features_col: str = "features",
    label_col: str = "label",
) -> RDD[Any]:
    """Returns an RDD of (x, y) of a DataFrame.

    `elephant.KerasEstimator` trains on the DataFrame as it is, several times faster.

    Args:
        df: The DataFrame.
        categorical: Whether y is to be a one-hot vector.
        nb_classes: Its length; None looks for the largest label.
        features_col: A column of ml or mllib vectors, or of arrays.
        label_col: A column of numbers.
    """
    points = df.select(features_col, label_col).rdd.map(_Labeled(features_col, label_col))
    return lp_to_simple_rdd(points, categorical, nb_classes)


def encode_label(label: Any, nb_classes: int) -> np.ndarray:
    """Returns a one-hot vector of a class.

    Raises:
        DataError: The label is none of the classes.

    Examples:
        >>> encode_label(2.0, 4)
        array([0., 0., 1., 0.])
    """
    place = int(label)
    if place != label or not 0 <= place < nb_classes:
        raise DataError(f"label: expected a whole number from 0 to {nb_classes - 1}. Received: {label!r}.")
    encoded = np.zeros(nb_classes)
    encoded[place] = 1.0
    return encoded


def to_matrix(np_array: np.ndarray) -> DenseMatrix:
    """Returns an mllib matrix of a two-dimensional array."""
    array = np.asarray(np_array)
    if array.ndim != 2:
        raise ConfigurationError(f"to_matrix: expected an array of two dimensions. Received: {array.ndim}.")
    # Spark's matrices go down their columns.
    return Matrices.dense(array.shape[0], array.shape[1], array.ravel(order="F").tolist())


def from_matrix(matrix: Matrix | NewMatrix) -> np.ndarray:
    """Returns the array of an ml or mllib matrix."""
    return np.asarray(matrix.toArray())


def to_vector(np_array: np.ndarray) -> DenseVector:
    """Returns an mllib vector of a one-dimensional array."""
    array = np.asarray(np_array)
    if array.ndim != 1:
        raise ConfigurationError(f"to_vector: expected an array of one dimension. Received: {array.ndim}.")
    return Vectors.dense(array)


def to_ml_vector(np_array: np.ndarray) -> NewDenseVector:
    """Returns an ml vector of a one-dimensional array."""
    return NewDenseVector(np_array)


def from_vector(vector: Vector | NewVector) -> np.ndarray:
    """Returns the array of an ml or mllib vector."""
    return np.asarray(vector.toArray())


def features_of(row: Vector | NewVector | LabeledPoint) -> np.ndarray:
    """Returns the array of a vector, or of a labeled point's features."""
    return from_vector(row.features if isinstance(row, LabeledPoint) else row)


def to_ml_matrix(array: np.ndarray) -> NewDenseMatrix:
    """Returns an ml matrix of a two-dimensional array."""
    return NewDenseMatrix(array.shape[0], array.shape[1], array.ravel(order="F").tolist())


class _Encoded:
    """The one-hot vectors of labels, as a function that travels."""

    def __init__(self, nb_classes: int) -> None:
        self._nb_classes = nb_classes

    def __call__(self, label: float) -> np.ndarray:
        return encode_label(label, self._nb_classes)


class _Labeled:
    """Labeled points of rows, as a function that travels."""

    def __init__(self, features: str, label: str) -> None:
        self._columns = (features, label)

    def __call__(self, row: Row) -> LabeledPoint:
        features, label = (row[name] for name in self._columns)
        return LabeledPoint(float(label), to_vector(as_array(features)))


def _features_and_label(point: LabeledPoint) -> tuple[np.ndarray, float]:
    return from_vector(point.features), float(point.label)


def _ml_row(point: LabeledPoint) -> tuple[Any, float]:
    return NewVectors.dense(point.features.toArray()), float(point.label)


def _rows_of(columns: Any) -> list[Any]:
    """Returns one item per row, of several arrays nested as those are."""
    if not isinstance(columns, (dict, tuple)):
        return list(columns)
    nest, leaves = nest_of(columns)
    return [pack(nest, row) for row in zip(*leaves, strict=True)]


def _context(sc: SparkContext | SparkSession) -> SparkContext:
    from pyspark import SparkContext

    if isinstance(sc, SparkContext):
        return sc
    context = jvm_context(sc)
    if context is None:
        raise UnsupportedError(
            "sc: expected a SparkContext, or a session that has one: RDDs are made by it. Received: a session without "
            "a JVM at hand, such as of Spark Connect. Make a DataFrame, and use elephant.KerasEstimator."
        )
    return cast("SparkContext", context)
