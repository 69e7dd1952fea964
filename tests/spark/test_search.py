"""``elephant.search`` on executors: what it finds, how often it reads the rows, and how it ends."""

import _thread
import importlib
import time

import keras
import numpy as np
import optuna
import pytest
from counted_source import CountedSource, keeps_nothing
from keras_reference import fit_one_process, global_batches, regression_model
from mlflow_state import own_mlflow

import elephant
from elephant import KerasEstimator
from elephant.errors import ConfigurationError, SchemaError

pytestmark = pytest.mark.usefixtures("empty_cache")

optuna.logging.set_verbosity(optuna.logging.WARNING)
COMPLETE, PRUNED, FAIL = (getattr(optuna.trial.TrialState, name) for name in ("COMPLETE", "PRUNED", "FAIL"))


def estimator_of(**options):
    model = regression_model(keras.optimizers.SGD(0.01))
    fixed = {"numWorkers": 1, "epochs": 3, "batchSize": 4, "shuffle": False, "verbose": 0}
    return KerasEstimator(model=model, **{**fixed, **options})


def grid(**values):
    return optuna.create_study(direction="minimize", sampler=optuna.samplers.GridSampler(values, seed=0))


def states(study):
    return [trial.state for trial in study.trials]


@pytest.fixture
def source(spark, tmp_path):
    (tmp_path / "marks").mkdir()
    yield CountedSource(spark, tmp_path / "marks")
    assert keeps_nothing(spark)


def test_search_when_trials_run_at_once_then_the_best_equals_one_process_and_rows_were_read_once(spark, source):
    rates = [1e-6, 0.01, 0.05]
    study = grid(learningRate=rates)
    found = elephant.search(
        estimator_of(numWorkers=2, epochs=1),
        source.frame,
        {"learningRate": rates},
        trials=3,
        parallelism=2,
        metric="loss",
        study=study,
    )
    assert source.reads == [1, 1]
    expected = {}
    for rate in rates:
        model = regression_model(keras.optimizers.SGD(rate))
        expected[rate] = fit_one_process(model, list(global_batches(source.parts, 4, 1)), 1)
    best = min(rates, key=lambda rate: expected[rate][1]["loss"][-1])
    assert found.is_whole and found.best_params == {"learningRate": best}
    for value, wanted in zip(found.best.model.get_weights(), expected[best][0], strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5)
    assert {trial.params["learningRate"]: trial.value for trial in study.trials} == pytest.approx(
        {rate: losses["loss"][-1] for rate, (_, losses) in expected.items()}, rel=1e-4
    )


def test_search_when_a_trial_is_pruned_then_its_fit_ends_and_the_space_may_build_models(spark, source):
    def space(trial):
        units = trial.suggest_categorical("units", [4, 8])
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return {"model": model, "learningRate": {4: 1e-9, 8: 0.05}[units]}

    study = grid(units=[4, 8])
    # What is as bad after its first epoch as before is given up.
    study.pruner = optuna.pruners.ThresholdPruner(upper=2.0)
    found = elephant.search(
        estimator_of(validationFraction=0.2), source.frame, space, trials=2, study=study, refit=True
    )
    by_units = {trial.params["units"]: trial for trial in study.trials}
    assert (by_units[4].state, len(by_units[4].intermediate_values)) == (PRUNED, 1)
    assert (by_units[8].state, len(by_units[8].intermediate_values)) == (COMPLETE, 3)
    assert found.best_params == {"units": 8} and found.best.model.layers[0].units == 8
    # Fitted again, on the rows for validation too.
    assert set(found.best.history) == {"loss"}
    # Without and with those rows, they are the same columns.
    assert source.reads == [1, 1]


class Interrupting(keras.callbacks.Callback):
    """Interrupts the main thread once, after so many epochs of all trials."""

    left = 0

    def on_epoch_end(self, epoch, logs=None):
        type(self).left -= 1
        if self.left == 0:
            _thread.interrupt_main()
            # As long as an epoch may take.
            time.sleep(5)


@pytest.mark.slow("three searches; that of two trials at once ends others")
def test_search_when_interrupted_then_keeps_what_is_done_and_goes_on_later(spark, source, monkeypatch):
    monkeypatch.setattr(Interrupting, "left", 5)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    estimator = estimator_of(driverCallbacks=[Interrupting()], epochs=3)
    space = {"learningRate": optuna.distributions.FloatDistribution(1e-3, 0.05, log=True)}
    options = {"metric": "loss", "trials": 3, "study": study}
    found = elephant.search(estimator, source.frame, space, **options)
    assert not found.is_whole and states(study) == [COMPLETE, FAIL]
    assert found.best_value == study.trials[0].value and found.best is not None
    assert keeps_nothing(spark)
    again = elephant.search(estimator, source.frame, space, **options)
    assert again.is_whole and states(study) == [COMPLETE, FAIL, COMPLETE, COMPLETE]
    monkeypatch.setattr(Interrupting, "left", 1)
    with pytest.raises(KeyboardInterrupt):
        elephant.search(estimator, source.frame, space, metric="loss", trials=1)


def test_search_when_a_trial_fails_then_the_others_end_and_the_error_is_the_fits(spark, source):
    study = grid(labelCol=["none", "label"])
    study.enqueue_trial({"labelCol": "label"})
    study.enqueue_trial({"labelCol": "none"})
    with pytest.raises(SchemaError, match="labelCol"):
        elephant.search(
            estimator_of(epochs=10_000),
            source.frame,
            {"labelCol": ["none", "label"]},
            metric="loss",
            trials=2,
            parallelism=2,
            study=study,
        )
    assert states(study) == [FAIL, FAIL]


@pytest.mark.slow("MLflow, and two fits on Spark")
def test_search_when_a_run_of_mlflow_is_active_then_each_trial_is_a_run_within_it(spark, source, tmp_path, monkeypatch):
    with own_mlflow() as mlflow:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
        with mlflow.start_run() as parent:
            found = elephant.search(
                estimator_of(epochs=2), source.frame, {"batchSize": [4, 8]}, metric="loss", trials=2, parallelism=2
            )
        mlflow.flush_async_logging()
        runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
        trials = {run.data.tags["trial"]: run for run in runs if run.info.run_id != parent.info.run_id}
        assert sorted(trials) == ["0", "1"]
        for number, run in trials.items():
            trial = found.study.trials[int(number)]
            assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id and run.info.status == "FINISHED"
            assert run.data.params["batchSize"] == str(trial.params["batchSize"])
            assert run.data.metrics["objective"] == pytest.approx(trial.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"trials": 0}, r"trials: expected a whole number, 1 or more\. Received: 0"),
        ({"parallelism": 1.5}, r"parallelism: expected a whole number"),
        ({"metric": "val_gain"}, r"metric: expected the name of a metric"),
        ({"study": optuna.create_study(direction="maximize")}, r"study: expected one that is to minimize val_loss"),
    ],
)
def test_search_when_an_argument_is_wrong_then_says_so_before_it_reads_rows(options, expected):
    with pytest.raises(ConfigurationError, match=expected):
        elephant.search(estimator_of(), None, {}, **options)


def test_search_when_the_fit_has_no_such_metric_then_says_which_it_has(spark, source):
    with pytest.raises(ConfigurationError, match=r"metric: expected a metric of the fit: loss\. Received: 'val_loss'"):
        elephant.search(estimator_of(), source.frame, {"batchSize": [4]}, trials=1)


def test_search_when_optuna_is_missing_then_says_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'optuna'", name=name)

    search, estimator = elephant.search, estimator_of()
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"elephant-spark\[tune\]"):
        search(estimator, None, {})


@pytest.mark.slow("KerasTuner, and four fits on Spark")
def test_keras_tuner_when_its_trials_are_fits_then_finds_the_better_and_rows_were_read_once(spark, source, tmp_path):
    import keras_tuner

    from elephant.spark.tuning.estimator_tuner import EstimatorTuner

    def build(hp):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(hp.Choice("units", [4, 8])), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        return model

    def params(hp):
        return {"learningRate": hp.Choice("rate", [1e-8, 0.05])}

    oracle = keras_tuner.oracles.GridSearchOracle("loss", max_trials=4)
    tuner = EstimatorTuner(
        oracle, build, estimator_of(), params=params, directory=str(tmp_path), project_name="tuned", overwrite=True
    )
    tuner.search(source.frame)
    trials = oracle.get_best_trials(4)
    assert sorted((trial.hyperparameters["units"], trial.hyperparameters["rate"]) for trial in trials) == [
        (4, 1e-8), (4, 0.05), (8, 1e-8), (8, 0.05),
    ]  # fmt: skip
    assert trials[0].hyperparameters["rate"] == 0.05
    [best] = tuner.get_best_models()
    x = np.concatenate([part["features"] for part in source.parts])
    y = np.concatenate([part["label"] for part in source.parts])
    assert best.layers[0].units == trials[0].hyperparameters["units"]
    # Of the last epoch, the loss before its steps.
    assert best.evaluate(x, y, verbose=0) <= trials[0].score
    assert source.reads == [1, 1]
