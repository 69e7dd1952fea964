"""The estimator among the stages of Spark ML: params, pipelines, tuning, saving."""

import threading
import time
from collections import Counter
from dataclasses import replace

import keras
import numpy as np
import pandas as pd
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit, TrainValidationSplitModel
from screen import assert_brief
from tables import every_case

import elephant
from elephant import Files, KerasEstimator, KerasModel
from elephant.errors import ConfigurationError, DataError, UnsupportedError
from elephant.spark.params import fit_config
from elephant.spark.training_data import dataset_of, require_frame


@keras.saving.register_keras_serializable(package="tests")
class Registered(keras.layers.Layer):
    """A layer that Keras knows by its registration."""

    def call(self, inputs):
        return inputs * 2.0


class Unregistered(keras.layers.Layer):
    """A layer that Keras does not know."""

    def call(self, inputs):
        return inputs + 1.0


def unregistered_loss(y_true, y_pred):
    """A loss that Keras does not know."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


@pytest.fixture(scope="module", autouse=True)
def classes_by_value():
    """Test modules are not on the executors: what they define travels as a notebook's cells do."""
    import sys

    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def blobs(spark, rows=120):
    """Returns two clouds of points with a string name for each."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, rows)
    points = rng.normal(size=(rows, 3)) + 3.5 * labels[:, None]
    table = [(float(a), float(b), float(c), "yes" if y else "no") for (a, b, c), y in zip(points, labels, strict=True)]
    # Always in one order: on some processors, the last bit of a prediction depends on the place in its batch.
    return spark.createDataFrame(table, "a double, b double, c double, name string").coalesce(2)


def classifier(*layers, optimizer=None, units=2):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.layers.Input((3,)), *layers, keras.layers.Dense(units, "softmax")])
    model.compile(optimizer or keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def points_frame(spark):
    return blobs(spark).selectExpr("a", "b", "c", "int(name = 'yes') label")


def estimator_of(model, **options):
    return KerasEstimator(model=model, featuresCol=["a", "b", "c"], verbose=0, **{"batchSize": 16, **options})


# A fit, two predictions and two evaluations took 128 s on a slow machine that was busy.
@pytest.mark.timeout(400)
def test_pipeline_when_fitted_saved_and_loaded_then_predicts_bit_for_bit(spark, tmp_path):
    frame, model = blobs(spark), classifier(Registered(), optimizer=keras.optimizers.Adam(0.3))
    pipeline = Pipeline(
        stages=[
            StringIndexer(inputCol="name", outputCol="label", stringOrderType="alphabetAsc"),
            VectorAssembler(inputCols=["a", "b", "c"], outputCol="features"),
            KerasEstimator(model=model, numWorkers=2, epochs=8, batchSize=16, verbose=0),
        ]
    )
    fitted = pipeline.fit(frame)
    predictions = fitted.transform(frame).cache()
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predictions) > 0.9
    assert BinaryClassificationEvaluator().evaluate(predictions) > 0.95
    estimator, model = pipeline.getStages()[-1], fitted.stages[-1]
    assert model.uid == estimator.uid and model.getPredictionCol() == "prediction"
    assert [param.name for param in model.params if model.isSet(param)] == []
    fitted.write().overwrite().save(str(tmp_path / "pipeline"))
    loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    before = {(row.a, row.b): row.probability.toArray().tobytes() for row in predictions.collect()}
    after = {(row.a, row.b): row.probability.toArray().tobytes() for row in loaded.transform(frame).collect()}
    assert before == after
    assert loaded.stages[-1].history == fitted.stages[-1].history


def assert_described(spark, expected):
    """Waits until Spark has noted that so many jobs, at least, have each description."""
    store, found = spark.sparkContext._jsc.sc().statusStore(), Counter()
    deadline = time.monotonic() + 20
    while not expected.items() <= {name: min(found[name], count) for name, count in expected.items()}.items():
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
        jobs = store.jobsList(None)
        texts = [jobs.apply(place).description() for place in range(jobs.size())]
        found = Counter(text.get() for text in texts if text.isDefined())


@pytest.mark.slow(
    "a fit, and Spark itself; tests/cluster/test_spark_job.py holds descriptions, test_targets.py weights of classes"
)
def test_jobs_when_fitted_and_evaluated_then_spark_s_pages_say_which_behind_the_user_s_words(spark, capsys):
    context, model = spark.sparkContext, classifier(optimizer=keras.optimizers.SGD(0.1))
    estimator = estimator_of(model, classWeight="balanced", numWorkers=2, batchSize=120)
    context.setJobDescription("nightly")
    try:
        fitted = estimator.setVerbose(2).fit(points_frame(spark), {estimator.seed: 7})
        # One of several of a grid, it is told from the others.
        assert capsys.readouterr().out.startswith("elephant fit: 2 workers, 1 epoch, synchronous, seed=7\n")
        fitted.evaluate(points_frame(spark))
        assert elephant.run(elephant.collective.rank, num_workers=2, spark=spark, verbose=0) == [0, 1]
        with pytest.raises(ConfigurationError, match="classWeight"):
            estimator.fit(points_frame(spark), weightCol="a")
        assert context.getLocalProperty("spark.job.description") == "nightly"
        assert context.getLocalProperty("spark.jobGroup.id") is None
    finally:
        context.setJobDescription(None)
    about = "nightly: elephant fit: 2 workers, 1 epoch, synchronous, seed=7"
    descriptions = [about, f"{about}: rows per class", "nightly: elephant evaluate", "nightly: elephant run: 2 workers"]
    assert_described(spark, dict.fromkeys(descriptions, 1))
    # All rows in one step, their classes weighed.
    rows = np.array(points_frame(spark).collect(), "float32")
    weights = dict(enumerate(len(rows) / (2 * np.bincount(rows[:, 3].astype(int)))))
    model.fit(rows[:, :3], rows[:, 3], batch_size=len(rows), class_weight=weights, verbose=0)
    for value, wanted in zip(fitted.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-6)


@pytest.mark.slow("three fits")
def test_tuning_when_it_tries_batch_sizes_and_rates_at_once_then_finds_the_better(spark, tmp_path):
    estimator = estimator_of(classifier(), epochs=4)
    grid = ParamGridBuilder().addGrid(estimator.batchSize, [8, 64]).build()
    # A rate that does not move for the larger batch, so that one of the two must win.
    grid[1][estimator.learningRate] = 1e-7
    evaluator = MulticlassClassificationEvaluator(metricName="logLoss")
    tuning = TrainValidationSplit(
        estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, seed=1, parallelism=2
    )
    fitted = tuning.fit(points_frame(spark).cache())
    about = "elephant fit: 1 worker, 4 epochs, synchronous"
    params = ("batchSize=8", "batchSize=64, learningRate=1e-07")
    # Each once, and the best one once more, on all rows.
    assert_described(spark, {f"{about}, {params[0]}": 2, f"{about}, {params[1]}": 1})
    assert fitted.validationMetrics[0] < 0.5 < fitted.validationMetrics[1]
    assert fitted.bestModel.history["loss"][-1] < 0.5
    fitted.write().overwrite().save(str(tmp_path / "tuned"))
    assert TrainValidationSplitModel.load(str(tmp_path / "tuned")).bestModel.history == fitted.bestModel.history


@pytest.mark.slow("a fit; test_pipeline_when_fitted_saved_and_loaded holds a registered one")
def test_model_when_its_classes_are_not_registered_then_trains_and_loads_without_naming_them(spark, tmp_path):
    model = keras.Sequential([keras.layers.Input((3,)), Unregistered(), keras.layers.Dense(1)])
    model.compile("sgd", unregistered_loss)
    objects = {"Unregistered": Unregistered, "unregistered_loss": unregistered_loss}
    frame = points_frame(spark)
    fitted = estimator_of(model, numWorkers=1).fit(frame)
    fitted.write().overwrite().save(str(tmp_path / "model"))
    # A class of a notebook is in the folder as a program, which runs for those who trust it.
    with pytest.raises(ConfigurationError, match=r"customObjects\.Unregistered \(pickled\)"):
        KerasModel.load(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"), trusted=True)
    assert (tmp_path / "model" / "model.keras").exists()
    rows = loaded.transform(frame).collect()
    x = np.array([(row.a, row.b, row.c) for row in rows], dtype="float32")
    np.testing.assert_array_equal(loaded.model.predict(x, verbose=0), fitted.model.predict(x, verbose=0))
    expected = fitted.model.predict(x, verbose=0)[:, 0]
    np.testing.assert_allclose([row.prediction for row in rows], expected, rtol=1e-5, atol=1e-6)
    assert RegressionEvaluator(metricName="rmse").evaluate(loaded.transform(frame)) >= 0
    # Paths may be those of pathlib.
    file = tmp_path / "digits.keras"
    loaded.save(file)
    of_keras = keras.saving.load_model(file, custom_objects=objects)
    np.testing.assert_array_equal(of_keras.predict(x, verbose=0), fitted.model.predict(x, verbose=0))
    with pytest.raises(FileExistsError, match=r"expected no file at .*digits\.keras"):
        fitted.save(file)
    with pytest.raises(ConfigurationError, match=r"expected a folder .*Received: .*digits\.keras, a file of Keras"):
        KerasModel.load(file)
    with pytest.raises(IsADirectoryError, match=r"expected a file\. Received: .*folder\.keras, which is a folder"):
        (tmp_path / "folder.keras").mkdir()
        fitted.save(tmp_path / "folder.keras")
    loaded.save(tmp_path / "folder")
    assert KerasModel.load(tmp_path / "folder", trusted=True).history == fitted.history
    with pytest.raises(FileNotFoundError, match=r"load: expected a folder .*Received: .*none, where there is none"):
        KerasModel.load(tmp_path / "none")


def test_estimator_when_saved_under_another_backend_then_says_so_when_it_is_loaded(spark, tmp_path):
    estimator, path = estimator_of(classifier(Registered())), str(tmp_path / "estimator")
    source = estimator.getModel().source
    estimator._set(model=replace(source, settings=replace(source.settings, backend="jax")))
    estimator.save(path)
    with pytest.warns(UserWarning, match=r"expected the Keras backend 'jax', .* Received: 'tensorflow'") as told:
        KerasEstimator.load(path)
    assert told[0].filename == __file__


def test_estimator_when_saved_then_loads_with_params_model_and_callbacks(spark, tmp_path):
    estimator = estimator_of(
        classifier(Registered()), epochs=3, callbacks=[keras.callbacks.EarlyStopping(patience=7)], learningRate=0.5
    )
    path = str(tmp_path / "estimator")
    estimator.save(path)
    with pytest.raises(FileExistsError, match=r"Received: /.*/estimator\. .* with write\(\)\.overwrite\(\)\.save\('/"):
        estimator.save(path)
    estimator.write().overwrite().save(path)
    with pytest.raises(ConfigurationError, match=r"which a KerasEstimator has\. KerasEstimator\.load\(path\) opens it"):
        KerasModel.load(path)
    loaded = KerasEstimator.load(path, trusted=True)
    assert loaded.uid == estimator.uid
    assert loaded.getFeaturesCol() == ["a", "b", "c"]
    assert (loaded.getEpochs(), loaded.getBatchSize(), loaded.getLearningRate()) == (3, 16, 0.5)
    assert loaded.getCallbacks()[0].patience == 7
    for value, wanted in zip(
        loaded.getModel().model.get_weights(), estimator.getModel().model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(value, wanted)


def test_params_when_asked_then_explain_copy_and_set(spark):
    estimator = estimator_of(classifier())
    assert "batchSize: rows per worker and step (>= 1)" in estimator.explainParams()
    copy = estimator.copy({estimator.epochs: 9})
    assert (copy.getEpochs(), estimator.getEpochs()) == (9, 1)
    assert estimator.setEpochs(4) is estimator and estimator.getEpochs() == 4
    assert all(param.doc for param in estimator.params)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"epoch": 3},
            TypeError,
            r"no param 'epoch'. Did you mean 'epochs'\?\nSee ",
        ),
        ({"epochs": 0}, ConfigurationError, "epochs: expected an integer of at least 1. Received: 0"),
        ({"batchSize": "many"}, TypeError, "batchSize: expected an integer of at least 1. Received: .many"),
        (
            {"featuresCol": 3},
            TypeError,
            r"expected a column name, a list of column names, or a dictionary .* Received: 3",
        ),
        ({"mode": "both"}, ConfigurationError, "mode: expected one of synchronous, asynchronous, hogwild"),
        ({"callbacks": [3]}, ConfigurationError, "callbacks: expected instances of keras.callbacks.Callback"),
        ({"callbacks": "EarlyStopping"}, ConfigurationError, "callbacks: expected .* Received: 'EarlyStopping'"),
        ({"validationFraction": 0.5, "validationIndicatorCol": "v"}, ConfigurationError, "validationFraction: .* 0.5"),
        ({"model": 3}, ConfigurationError, "model: expected a compiled keras.Model.*Received: builtins.int"),
        ({"model": lambda: 3}, ConfigurationError, "a function that returns a keras.Model. It returned: 3"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_estimator_when_a_param_is_wrong_then_refuses_at_construction(options, error, message):
    with pytest.raises(error, match=message):
        KerasEstimator(**{"model": classifier(), **options})


def test_fit_when_options_are_given_by_name_then_they_hold_for_this_fit_alone(spark, monkeypatch):
    monkeypatch.setattr(KerasEstimator, "_fit", lambda self, dataset: (dataset, fit_config(self)))
    callback = keras.callbacks.EarlyStopping("loss")
    estimator = KerasEstimator(classifier(), mode="async", epochs=2, learningRate=0.5, callbacks=callback)
    assert (estimator.getMode(), estimator.getCallbacks()) == ("asynchronous", [callback])
    files, config = estimator.fit("rows", epochs=3, mode="sync", learningRate=None)
    assert files == Files("rows")
    assert (config.mode, config.epochs, config.learning_rate) == ("synchronous", 3, None)
    several = estimator.fit(files, [{estimator.epochs: 4}, {estimator.batchSize: 5}], epochs=3)
    assert [(config.epochs, config.batch_size, config.mode) for _, config in several] == [
        (4, 32, "asynchronous"),
        (3, 5, "asynchronous"),
    ]
    assert (estimator.getEpochs(), estimator.getMode(), estimator.getLearningRate()) == (2, "asynchronous", 0.5)
    with pytest.raises(TypeError, match=r"fit has no param 'epoch'. Did you mean 'epochs'\?"):
        estimator.fit("rows", epoch=3)
    # Spark would train on with what it had before.
    for name in ("batchSize", "batch_size"):
        with pytest.raises(AttributeError, match=rf"KerasEstimator.{name} = 8. Call setBatchSize\(8\)\."):
            setattr(estimator, name, 8)
    with pytest.raises(AttributeError, match="has no attribute 'transform'. Call fit first: "):
        estimator.transform("rows")
    with pytest.raises(AttributeError, match="has no attribute 'fit'. It is fitted; "):
        estimator.getModel().fit("rows")


@every_case(
    "dataset, text",
    [
        (np.zeros((8, 3)), r"Received: ndarray of shape \(8, 3\). Arrays x and y make one: pandas.DataFrame\(.*"),
        ((np.zeros((8, 3)), np.zeros(8)), "Received: tuple. Arrays x and y make one.*"),
        (None, "Received: NoneType.$"),
        (type("RDD", (), {"mapPartitions": None})(), "Received: RDD. RDDs are elephant.SparkModel's.$"),
        (type("Frame", (), {"to_spark": None})(), r"Received: a Frame of pandas on Spark. Its to_spark\(\) is one.$"),
    ],
)
def test_fit_when_given_something_else_than_rows_then_says_what_it_takes(dataset, text):
    with pytest.raises(TypeError) as failure:
        KerasEstimator(classifier()).fit(dataset)
    cause = "fit: expected a DataFrame of Spark or pandas, the path of files"
    assert_brief(failure.value, cause=cause, remedy=text, topic="params-and-options")


@pytest.mark.parametrize("since_4", [True, False])
def test_frame_when_it_is_of_pandas_then_needs_no_setting_of_spark_and_no_main_thread(spark, since_4, monkeypatch):
    monkeypatch.setattr("elephant.spark.training_data.SINCE_4", since_4)
    arrays = [np.array([1.5, -2.0], "float32"), np.array([0.0, 4.25], "float32")]
    text = pd.Categorical(["a", None])
    frame = pd.DataFrame({"features": arrays, "label": [1, 0], "text": text}, index=[7, 7])
    made = []
    spark.conf.set("spark.sql.execution.arrow.pyspark.enabled", "false")
    try:
        thread = threading.Thread(target=lambda: made.append(dataset_of(frame)))
        thread.start()
        thread.join()
        rows = [tuple(row) for row in made[0].collect()]
    finally:
        spark.conf.unset("spark.sql.execution.arrow.pyspark.enabled")
    assert made[0].schema.simpleString() == "struct<features:array<float>,label:bigint,text:string>"
    assert rows == [([1.5, -2.0], 1, "a"), ([0.0, 4.25], 0, None)]
    with pytest.raises(DataError, match="of one type each. Received: .*for column mixed .* Convert the column"):
        dataset_of(frame.assign(mixed=[1, "a"]))
    with pytest.raises(TypeError, match=r"transform: .*Received: a DataFrame of pandas. spark.createDataFrame\(df\)"):
        require_frame(frame, "transform")


def test_estimator_when_the_model_cannot_train_here_then_says_what_to_do():
    uncompiled = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(ConfigurationError, match=r"expected a compiled model.*Call model.compile\("):
        KerasEstimator(model=uncompiled)
    aimless = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    aimless.compile("sgd")
    with pytest.raises(ConfigurationError, match="expected a compiled model.*without a loss"):
        KerasEstimator(model=aimless)
    by_row = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    by_row.compile("sgd", keras.losses.MeanSquaredError(reduction=None))
    with pytest.raises(UnsupportedError, match="Received: None"):
        KerasEstimator(model=by_row)
