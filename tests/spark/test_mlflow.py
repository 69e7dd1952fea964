"""MLflow around real fits: its own hooks and callback, and workers that open no runs."""

import keras
import numpy as np
import pytest
from mlflow_state import own_mlflow
from pyspark.ml.linalg import Vectors

from elephant import KerasEstimator


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


def losses(mlflow, run):
    mlflow.flush_async_logging()
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    return {one.step: one.value for one in history}


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


def test_mlflow_when_its_callback_is_among_the_callbacks_then_logs_to_the_users_run_alone(spark, mlflow):
    with mlflow.start_run() as active:
        fitted = estimator(callbacks=[mlflow.keras.MlflowCallback()]).fit(rows(spark))
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.info.run_id == active.info.run_id
    assert run.data.params["optimizer_learning_rate"].startswith("0.0") and run.data.params["epochs"] == "3"
    assert "Dense" in mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/model_summary.txt")
    assert losses(mlflow, run) == pytest.approx(dict(enumerate(fitted.history["loss"])))
