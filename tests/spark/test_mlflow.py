"""MLflow around real fits: its own hooks and callback, runs of folds, its registry, and workers that open no runs."""

import keras
import numpy as np
import pytest
from mlflow_state import own_mlflow
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.linalg import Vectors
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

import elephant
from elephant import KerasEstimator
from elephant.cli.event_file import find_events
from elephant.errors import JobCancelledError
from elephant.spark.tuning.trial_runs import GridRuns, TrialRuns


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    with own_mlflow() as mlflow:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        # Inherited by whatever process: a worker that logged would log here.
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/runs")
        mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
        yield mlflow


def estimator(**params):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return KerasEstimator(model, numWorkers=2, epochs=3, batchSize=8, verbose=0, **params)


def rows(spark):
    x = np.random.default_rng(0).normal(size=(32, 3))
    return spark.createDataFrame([(Vectors.dense(row), float(row.sum())) for row in x], ["features", "label"])


def history_of(mlflow, run):
    mlflow.flush_async_logging()
    return mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")


def losses(mlflow, run):
    return {one.step: one.value for one in history_of(mlflow, run)}


@pytest.mark.slow("MLflow imports what it logs by itself, and a fit on Spark")
def test_mlflow_when_autolog_is_called_then_a_fit_has_one_run_with_its_params_epochs_and_model(spark, mlflow):
    try:
        # Without MLflow's hook for what Spark reads, which shuts down the server by which the JVM calls streams.
        mlflow.autolog(silent=True, exclude_flavors=["spark"])
        fitted = estimator().fit(rows(spark))
    finally:
        mlflow.autolog(disable=True, silent=True)
    # Of the driver, and none of a worker.
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert (run.info.status, run.data.params["epochs"], run.data.params["numWorkers"]) == ("FINISHED", "3", "2")
    assert losses(mlflow, run) == pytest.approx(dict(enumerate(fitted.history["loss"])))
    (model,) = mlflow.search_logged_models(output_format="list")
    assert model.source_run_id == run.info.run_id
    assert mlflow.active_run() is None


def test_mlflow_when_its_callback_is_among_the_callbacks_then_logs_to_the_users_run_alone_and_no_number_twice(
    spark, mlflow, tmp_path
):
    with mlflow.start_run() as active:
        callbacks, events = [mlflow.keras.MlflowCallback()], str(tmp_path / "fits")
        fitted = estimator(callbacks=callbacks, eventsPath=events).fit(rows(spark))
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.info.run_id == active.info.run_id
    assert run.data.params["optimizer_learning_rate"].startswith("0.0") and run.data.params["epochs"] == "3"
    assert "Dense" in mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/model_summary.txt")
    assert losses(mlflow, run) == pytest.approx(dict(enumerate(fitted.history["loss"])))
    # Without its scheme, a path is on Spark's default file system, which another machine does not know.
    assert run.data.tags["elephant.events"] == f"file:{find_events(events).path}"
    # MLflow's file store has those of the model's step, the last one, once more.
    assert [one.step for one in history_of(mlflow, run) if one.step < 2] == [0, 1]


@pytest.mark.slow("a fit on Spark, and Keras in Spark's Python workers")
def test_mlflow_when_the_model_of_a_fit_is_registered_then_its_signature_and_its_function_in_spark_are_those_of_keras(
    spark, mlflow
):
    with mlflow.start_run() as run:
        fitted = estimator().fit(rows(spark))
        registered = mlflow.register_model(f"runs:/{run.info.run_id}/model", "sums")
        x = np.arange(12, dtype="float32").reshape(4, 3)
        # As the page has it, for an example beside the signature; without requirements MLflow looks for them.
        signature = mlflow.models.infer_signature(x, fitted.model.predict(x, verbose=0))
        about = {"signature": signature, "input_example": x, "pip_requirements": ["keras"]}
        mlflow.tensorflow.log_model(fitted.model, name="with_example", registered_model_name="sums", **about)
    kernel, bias = fitted.model.get_weights()
    wanted = x @ kernel + bias
    frame = spark.createDataFrame([(row.tolist(),) for row in x], "features array<float>").coalesce(1)
    for version in ("1", "2"):
        loaded = mlflow.pyfunc.load_model(f"models:/sums/{version}")
        (given,) = loaded.metadata.signature.inputs.inputs
        (made,) = loaded.metadata.signature.outputs.inputs
        assert (given.type, given.shape, made.type, made.shape) == ("float32", (-1, 3), "float32", (-1, 1))
        np.testing.assert_allclose(loaded.predict(x), wanted, rtol=1e-5)
    np.testing.assert_array_equal(loaded.input_example, x)
    score = mlflow.pyfunc.spark_udf(
        spark, f"models:/sums/{registered.version}", result_type="array<float>", env_manager="local"
    )
    scores = [row[0] for row in frame.select(score("features")).collect()]
    np.testing.assert_allclose(scores, wanted, rtol=1e-5)


@pytest.mark.slow("MLflow imports what it logs by itself, and five fits on Spark")
def test_mlflow_when_a_cross_validator_runs_then_each_fit_of_a_fold_is_a_run_within_its_own_and_nothing_is_there_twice(
    spark, mlflow
):
    one = estimator().setParams(numWorkers=1, epochs=2)
    grid = ParamGridBuilder().addGrid(one.learningRate, [0.001, 0.1]).build()
    validator = CrossValidator(
        estimator=one, estimatorParamMaps=grid, evaluator=RegressionEvaluator(), numFolds=2, parallelism=2, seed=1,
        collectSubModels=True,
    )  # fmt: skip
    try:
        mlflow.pyspark.ml.autolog(log_models=False, silent=True)
        tuned = validator.fit(rows(spark))
        # MLflow's hook does not know such rows.
        with elephant.prepared(rows(spark), one) as kept:
            one.fit(kept, epochs=1)
    finally:
        mlflow.pyspark.ml.autolog(disable=True, silent=True)
    runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
    later, parent = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert (later.data.params["epochs"], later.info.status) == ("1", "FINISHED")
    runs.remove(later)
    nested = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(nested) == len(runs) - 1 and {run.info.status for run in runs} == {"FINISHED"}
    # MLflow's hook adds a run for the means over folds of each of the params.
    means = sorted(run.data.metrics["avg_rmse"] for run in nested if "fold" not in run.data.tags)
    assert means == pytest.approx(sorted(tuned.avgMetrics))
    folds = {
        (int(run.data.tags["fold"]), int(run.data.tags["params"])): run for run in nested if "fold" in run.data.tags
    }
    assert sorted(folds) == [(0, 0), (0, 1), (1, 0), (1, 1)] and len(nested) == 6
    for (fold, place), run in folds.items():
        assert run.data.params["learningRate"] == str(grid[place][one.learningRate])
        assert losses(mlflow, run) == pytest.approx(dict(enumerate(tuned.subModels[fold][place].history["loss"])))
    # The fit of the best params, on all rows, logs where the user looks first.
    assert losses(mlflow, parent) == pytest.approx(dict(enumerate(tuned.bestModel.history["loss"])))
    assert mlflow.search_logged_models(output_format="list") == [] and mlflow.active_run() is None


def test_runs_when_mlflow_takes_none_then_the_user_is_warned_and_the_fits_go_on(mlflow, monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no such server")

    done = []
    with mlflow.start_run() as run, TrialRuns.opened() as trials:
        for error, status in ((ValueError, "FAILED"), (KeyboardInterrupt, "KILLED"), (JobCancelledError, "KILLED")):
            with pytest.raises(error), GridRuns(fold=None).run_of(0):
                opened = mlflow.active_run().info.run_id
                raise error("ended")
            ended = mlflow.get_run(opened)
            assert (ended.info.status, ended.data.tags["params"], "fold" in ended.data.tags) == (status, "0", False)
        grid = GridRuns(fold=0)
        for name in ("start_run", "log_metrics"):
            with monkeypatch.context() as patch, pytest.warns(UserWarning, match="goes on: ConnectionError: no such"):
                patch.setattr(mlflow, name, refuse)
                with trials.run_of(0, {"epochs": 2}) as trial, grid.run_of(0):
                    trial.end_with([0.5])
                    done.append(name)
    assert done == ["start_run", "log_metrics"] and mlflow.active_run() is None
    # What belongs to a run that was not opened is no one else's.
    assert mlflow.get_run(run.info.run_id).data.metrics == {}
