"""`SparkModel` and `SparkMLlibModel` against one process of plain Keras, for records of many forms."""

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, regression_model
from pyspark.ml.linalg import DenseVector
from pyspark.ml.linalg import Vectors as NewVectors
from pyspark.mllib.linalg import Matrices, Vectors

from elephant import SparkMLlibModel, SparkModel
from elephant.errors import DataError
from elephant.spark.conversions import to_labeled_point

TOLERANCE = 1e-6


def parted(spark, parts):
    """Returns an RDD with one partition per list of records."""
    return spark.sparkContext.parallelize(list(enumerate(parts)), len(parts)).flatMap(lambda item: item[1])


def triples(columns, sizes):
    rows = list(zip(columns["features"], columns["label"], columns["weight"], strict=True))
    bounds = np.cumsum([0, *sizes])
    return [rows[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def weighted_data(rows):
    columns = classifier_data(rows)
    columns["weight"] = np.random.default_rng(1).uniform(0.5, 2, rows).astype("float32")
    return columns


def global_batches(parts, batch_size):
    """Yields (x, y, weight) of every step: the next records of each partition."""
    for step in range(-(-max(map(len, parts)) // batch_size)):
        rows = [row for part in parts for row in part[step * batch_size : (step + 1) * batch_size]]
        yield tuple(np.stack(column) for column in zip(*rows, strict=True))


def assert_equal_weights(model, expected):
    for value, wanted in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, atol=TOLERANCE)


@pytest.mark.slow("two fits; test_rdd_modes.py holds one")
def test_fit_when_called_twice_then_the_users_model_equals_one_process_and_stays_compiled(spark):
    def model():
        made = regression_model(keras.optimizers.Adam(0.01), l2=0.01)
        made.compile(made.optimizer, "mse", loss_weights=0.5, metrics=["mae"], weighted_metrics=["mse"])
        return made

    parts = triples(weighted_data(31), (22, 9))
    own, expected = model(), model()
    optimizer = own.optimizer
    trained = SparkModel(own, batch_size=4, shuffle=False)
    # The second time all are one batch, of a union with as many parts as workers, which Spark lets in no barrier stage.
    union = parted(spark, parts[:1]).union(parted(spark, parts[1:])).cache()
    histories = [trained.fit(parted(spark, parts), verbose=0).history]
    histories.append(trained.fit(union, batch_size=40, verbose=0).history)
    alone = []
    for batches in (list(global_batches(parts, 4)), list(global_batches([sum(parts, [])], 31))):
        steps = (batch for batch in batches)
        alone.append(expected.fit(steps, steps_per_epoch=len(batches), epochs=1, verbose=0, shuffle=False).history)
    assert trained.model is own and trained.master_network is own and own.optimizer is optimizer
    assert_equal_weights(own, expected)
    assert int(own.optimizer.iterations) == int(expected.optimizer.iterations)
    assert (
        trained.training_histories == histories
        and [set(history) for history in histories] == [{"loss", "mae", "mse"}] * 2
    )
    for history, wanted in zip(histories, alone, strict=True):
        for name in wanted:
            np.testing.assert_allclose(history[name], wanted[name], rtol=1e-5)
    # On an RDD of other partitions, records of weights included.
    features, labels, weights = (np.stack(column) for column in zip(*sum(parts, []), strict=True))
    measured = trained.evaluate(
        parted(spark, [parts[0][:3], [], parts[1] + parts[0][3:]]), return_dict=True, batch_size=5
    )
    assert measured == pytest.approx(
        expected.evaluate(features, labels, sample_weight=weights, verbose=0, return_dict=True), rel=1e-5
    )
    assert trained.evaluate(features, labels) == pytest.approx(expected.evaluate(features, labels, verbose=0), rel=1e-5)


@pytest.mark.slow("a fit; tests/spark/test_rdd_schema.py holds what records become")
def test_fit_when_one_asynchronous_worker_has_nested_records_then_equals_one_process(spark):
    keras.utils.set_random_seed(0)
    tokens, numbers = (
        keras.layers.Input((None,), dtype="int32", name="tokens"),
        keras.layers.Input((3,), name="numbers"),
    )
    read = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(10, 4)(tokens))
    joined = keras.layers.Concatenate()([read, numbers])
    outputs = {"kind": keras.layers.Dense(3, "softmax")(joined), "size": keras.layers.Dense(1)(joined)}
    own = keras.Model({"tokens": tokens, "numbers": numbers}, outputs)
    own.compile(
        keras.optimizers.SGD(0.1),
        {"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    expected = keras.models.clone_model(own)
    expected.set_weights(own.get_weights())
    expected.compile_from_config(own.get_compile_config())
    rng = np.random.default_rng(0)
    sequences, values = rng.integers(1, 10, (12, 5)), rng.normal(size=(12, 3))
    kinds, sizes = rng.integers(0, 3, 12), rng.normal(size=12)
    records = [
        ({"numbers": values[row].tolist(), "tokens": sequences[row]}, (int(kinds[row]), sizes[row]))
        for row in range(12)
    ]
    trained = SparkModel(own, mode="asynchronous", batch_size=4, shuffle=False)
    trained.fit(parted(spark, [records]), epochs=3, verbose=0)
    x = {"tokens": sequences.astype("int32"), "numbers": values.astype("float32")}
    y = {"kind": kinds, "size": sizes.astype("float32")}
    expected.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    assert trained.training_statistics["updates"] == 9
    assert_equal_weights(own, expected)
    assert trained.evaluate(parted(spark, [records[:5], [], records[5:]])) == pytest.approx(
        expected.evaluate(x, y, verbose=0), rel=1e-5
    )
    # Every record keeps its own prediction, wherever it lies.
    inputs = spark.sparkContext.parallelize([record[0] for record in records], 3)
    predicted = trained.predict(inputs, batch_size=5).cache()
    wanted = expected.predict(x, verbose=0)
    paired = inputs.zip(predicted).collect()
    assert predicted.getNumPartitions() == 3 and len(predicted) == 12
    for row, (record, prediction) in enumerate(paired):
        np.testing.assert_array_equal(record["tokens"], sequences[row])
        for name in ("kind", "size"):
            np.testing.assert_allclose(prediction[name], wanted[name][row], atol=TOLERANCE)
            np.testing.assert_allclose(predicted[row][name], wanted[name][row], atol=TOLERANCE)
    assert [part["size"].shape for part in trained.predict(x)] == [(1,)] * 12


@pytest.mark.slow("a fit; test_rdd_modes.py holds one")
def test_fit_when_other_records_validate_then_all_records_count(spark):
    columns = weighted_data(30)
    (records,) = triples(columns, (30,))
    own, expected = (regression_model(keras.optimizers.SGD(0.1)) for _ in range(2))
    trained = SparkModel(own, num_workers=2, batch_size=40, learning_rate=0.05)
    trained.fit(parted(spark, [records]), verbose=0, validation_data=tuple(columns.values()))
    expected.optimizer.learning_rate = 0.05
    x, y, weight = columns.values()
    expected.fit(x, y, sample_weight=weight, batch_size=40, verbose=0)
    assert_equal_weights(own, expected)
    validated = expected.evaluate(x, y, sample_weight=weight, verbose=0)
    assert trained.training_histories[0]["val_loss"] == pytest.approx([validated], rel=1e-5)


@pytest.mark.slow("two fits")
def test_fit_when_a_function_builds_a_model_without_input_then_training_goes_on_and_one_record_is_enough(spark, capsys):
    def build():
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse")
        return model

    columns = weighted_data(24)
    records = sum(triples(columns, (24,)), [])
    trained = SparkModel(build, mode="asynchronous", seed=1)
    rdd = spark.sparkContext.parallelize(records, 8)
    first = trained.fit(rdd, epochs=8, verbose=2, batch_size=4).history["loss"]
    assert "3 workers for 8 partitions: the cluster has 3 task slots" in capsys.readouterr().out
    steps = int(trained.model.optimizer.iterations)
    with pytest.warns(UserWarning, match="num_workers=5: expected as many task slots.*The fit has 3 workers"):
        again = SparkModel(trained.model, num_workers=5)
        second = again.fit(spark.sparkContext.parallelize(records[:1], 1), verbose=0, validation_split=0.1).history
    assert int(again.model.optimizer.iterations) == steps + 1
    assert second["loss"][0] < first[0] and "val_loss" not in second


@pytest.mark.slow("a fit, and Keras in Python workers; test_rdd_modes.py fits an RDD")
def test_mllib_model_when_labels_become_vectors_then_trains_and_answers_in_kind(spark):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.SGD(0.5), "categorical_crossentropy", metrics=["acc"])
    expected = keras.models.clone_model(model)
    expected.set_weights(model.get_weights())
    expected.compile_from_config(model.get_compile_config())
    x = classifier_data(20)["features"]
    labels = np.argmax(x[:, :3], axis=1)
    points = to_labeled_point(spark, x, labels)
    trained = SparkMLlibModel(model, num_workers=2, batch_size=20)
    trained.train(points, epochs=3, categorical=True, validation_split=0)
    expected.fit(x, np.eye(3)[labels], batch_size=20, epochs=3, verbose=0)
    assert_equal_weights(model, expected)
    wanted = expected.predict(x, verbose=0)
    matrix = trained.predict(Matrices.dense(2, 6, x[:2].ravel(order="F").tolist()))
    np.testing.assert_allclose(matrix.toArray(), wanted[:2], atol=TOLERANCE)
    for vector in (Vectors.dense(x[0]), NewVectors.dense(x[0]), NewVectors.sparse(6, range(6), x[0])):
        answer = trained.predict(vector)
        assert type(answer).__module__ == type(vector).__module__
        np.testing.assert_allclose(answer.toArray(), wanted[0], atol=TOLERANCE)
    np.testing.assert_allclose([row.toArray() for row in trained.predict(points).collect()], wanted, atol=TOLERANCE)
    answer = trained.predict(points.map(lambda point: point.features.asML())).first()
    assert isinstance(answer, DenseVector)
    np.testing.assert_allclose(answer.toArray(), wanted[0], atol=TOLERANCE)
    assert trained.evaluate(points, categorical=True, nb_classes=3) == pytest.approx(
        expected.evaluate(x, np.eye(3)[labels], verbose=0), rel=1e-5
    )


@pytest.mark.slow("four fits that start; tests/spark/test_rdd_schema.py holds what is refused")
def test_fit_when_records_cannot_be_trained_on_then_says_which(spark):
    trained = SparkModel(regression_model("sgd"), num_workers=2)
    good = (np.zeros(6), 1.0)
    with pytest.raises(
        DataError, match=r"column 'x': expected shape \(6,\).* shape \(5,\) in record 1 of the partition"
    ):
        trained.fit(parted(spark, [[good, good], [good, (np.zeros(5), 1.0)]]), verbose=0)
    for empty in (spark.sparkContext.emptyRDD(), parted(spark, [[], []])):
        with pytest.raises(DataError, match="fit: expected records. Received: an RDD without any"):
            trained.fit(empty)
    assert trained.predict(parted(spark, [[], []])).collect() == []
    with pytest.raises(TypeError, match="expected an RDD of .* Received: DataFrame. Use elephant.KerasEstimator"):
        trained.fit(spark.range(3))
