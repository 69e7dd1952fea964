"""Arrays become RDDs, labeled points, DataFrames, vectors and matrices of Spark, and come back as they went."""

import numpy as np
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.mllib.linalg import Matrices, Vectors

from elephant.cluster.row_source import dealt
from elephant.errors import ConfigurationError, DataError
from elephant.spark.conversions import (
    df_to_simple_rdd,
    encode_label,
    from_data_frame,
    from_labeled_point,
    from_matrix,
    from_vector,
    lp_to_simple_rdd,
    to_data_frame,
    to_labeled_point,
    to_matrix,
    to_simple_rdd,
    to_vector,
)

X = np.random.default_rng(0).normal(size=(7, 3))
CLASSES = np.array([2, 0, 1, 2, 2, 0, 1])
ONE_HOT = np.eye(3)[CLASSES]


def test_rdds_when_made_of_arrays_then_hold_their_rows_in_order(spark):
    sc = spark.sparkContext
    pairs = to_simple_rdd(sc, X, CLASSES).collect()
    np.testing.assert_array_equal([x for x, _ in pairs], X)
    assert [y for _, y in pairs] == CLASSES.tolist()
    nested = to_simple_rdd(spark, {"a": X, "b": (CLASSES, X)}, (X, CLASSES), sample_weight=range(7)).collect()
    x, y, weight = nested[3]
    np.testing.assert_array_equal(x["a"], X[3])
    assert x["b"][0] == y[1] == CLASSES[3] and weight == 3
    with pytest.raises(DataError, match=r"expected as many rows of each. Received: \[7, 6\]"):
        to_simple_rdd(sc, X, CLASSES[:6])


def test_labeled_points_and_frames_when_inverted_then_give_back_what_went_in(spark):
    labels = np.linspace(-1.5, 2, 7)[:, np.newaxis]
    for kept in (
        from_labeled_point(to_labeled_point(spark.sparkContext, X, labels)),
        from_data_frame(to_data_frame(spark.sparkContext, X, labels)),
    ):
        np.testing.assert_array_equal(kept[0], X)
        np.testing.assert_array_equal(kept[1], labels.ravel())


@pytest.mark.slow("seven jobs; those of test_labeled_points_and_frames")
def test_classes_when_one_hot_then_go_there_and_back(spark):
    points = to_labeled_point(spark.sparkContext, X, ONE_HOT, categorical=True)
    assert [point.label for point in points.collect()] == CLASSES.tolist()
    frame = to_data_frame(spark, X, ONE_HOT, categorical=True)
    assert isinstance(frame.schema["features"].dataType, VectorUDT)
    np.testing.assert_array_equal(from_labeled_point(points, True)[1], ONE_HOT)
    np.testing.assert_array_equal(from_data_frame(frame, True, 3)[1], ONE_HOT)
    np.testing.assert_array_equal(lp_to_simple_rdd(points, True).values().collect(), ONE_HOT)
    np.testing.assert_array_equal(df_to_simple_rdd(frame, True, 3).values().collect(), ONE_HOT)
    assert from_labeled_point(points, True, 5)[1].shape == (7, 5)
    renamed = frame.toDF("f", "l")
    np.testing.assert_array_equal(df_to_simple_rdd(renamed, False, None, "f", "l").keys().collect(), X)
    with pytest.raises(DataError, match="expected labeled points"):
        from_labeled_point(spark.sparkContext.emptyRDD())


def test_matrices_and_vectors_when_inverted_then_give_back_what_went_in():
    np.testing.assert_array_equal(from_matrix(to_matrix(X)), X)
    np.testing.assert_array_equal(to_matrix(X).toArray(), X)
    np.testing.assert_array_equal(from_matrix(Matrices.sparse(2, 2, [0, 1, 2], [1, 0], [3, 4])), [[0, 4], [3, 0]])
    np.testing.assert_array_equal(from_vector(to_vector(X[0])), X[0])
    np.testing.assert_array_equal(from_vector(Vectors.sparse(3, [1], [5.0])), [0, 5, 0])
    for convert, array, text in (
        (to_matrix, X[0], "two dimensions. Received: 1"),
        (to_vector, X, "one dimension.*: 2"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            convert(array)


@pytest.mark.parametrize("label", [-1, 3, 0.5])
def test_labels_when_no_class_then_are_refused(label):
    with pytest.raises(DataError, match="label: expected a whole number from 0 to 2"):
        encode_label(label, 3)


def test_records_when_dealt_out_then_all_are_there_and_parts_are_even(spark):
    rdd = spark.sparkContext.parallelize(range(23), 5)
    parts = dealt(rdd, 3).glom().collect()
    assert sorted(sum(parts, [])) == list(range(23))
    assert max(map(len, parts)) - min(map(len, parts)) <= 5
    assert [len(part) for part in dealt(spark.sparkContext.parallelize(range(3), 3), 3).glom().collect()] == [1, 1, 1]
