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
from pyspark.sql.functions import spark_partition_id

import elephant
from elephant import KerasEstimator
from elephant.checkpoint.retention import Objective
from elephant.errors import ConfigurationError, DataError, SchemaError
from elephant.spark.tuning.folds import with_fold_numbers
from elephant.spark.tuning.pruning import Pruning

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


@pytest.mark.slow(
    "four fits; folds equal one process with rows read once, and the trial that fails has another beside it"
)
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


def numbers_of_folds(frame, folds, seed=0):
    """Returns the fold of each row, by partition."""
    numbered, column = with_fold_numbers(frame, folds, seed)
    numbers = [[] for _ in range(frame.rdd.getNumPartitions())]
    for place, fold in numbered.select(spark_partition_id(), column).collect():
        numbers[place].append(fold)
    return numbers


def test_folds_when_numbered_then_those_of_a_partition_are_alike_in_size_and_the_seed_decides(spark):
    # Every row in one fold: the one number that it has. No fold much larger than others, whatever the partitions are.
    frame = spark.range(0, 103, 1, 4).withColumnRenamed("id", "Fold")
    numbers = numbers_of_folds(frame, 5)
    assert with_fold_numbers(frame, 5, 0)[1] == "fold_"
    for part in numbers:
        sizes = np.bincount(part, minlength=5)
        assert len(sizes) == 5 and sizes.max() - sizes.min() <= 1
    assert numbers == numbers_of_folds(frame, 5) and numbers != numbers_of_folds(frame, 5, seed=1)
    assert len({tuple(part[:25]) for part in numbers}) == 4
    # Rows that are dealt out to other workers keep their folds.
    numbered, column = with_fold_numbers(frame, 5, 0)
    dealt = {row["Fold"]: row[column] for row in numbered.repartition(3).collect()}
    assert [dealt[row] for row in range(103)] == sum(numbers, [])


def val_loss_of(parts, rate, epochs):
    """Returns the validation loss of plain Keras; each part is that of a worker, as (training rows, others)."""
    training, validation = zip(*parts, strict=True)
    model = regression_model(keras.optimizers.SGD(rate))
    weights, _ = fit_one_process(model, list(global_batches(training, 4, epochs)), epochs)
    model.set_weights(weights)
    x, y = (np.concatenate([part[name] for part in validation]) for name in ("features", "label"))
    return float(np.mean((model.predict(x, verbose=0)[:, 0] - y) ** 2))


def test_search_when_there_are_folds_then_each_equals_one_process_and_rows_were_read_once(spark, source):
    # The objective is the mean over folds, the pruner hears running means, and the best params are fitted on all rows.
    found = elephant.search(
        estimator_of(numWorkers=2, epochs=2), source.frame, {"learningRate": [0.03]}, trials=1, folds=2, seed=3
    )
    assert source.reads == [1, 1]
    numbers = [np.array(part) for part in numbers_of_folds(source.frame, 2, seed=3)]
    expected = []
    for fold in range(2):
        parts = [
            tuple({name: values[chosen] for name, values in part.items()} for chosen in (of != fold, of == fold))
            for part, of in zip(source.parts, numbers, strict=True)
        ]
        expected.append([val_loss_of(parts, 0.03, epochs) for epochs in (1, 2)])
    (first, second), (third, fourth) = expected
    [trial] = found.study.trials
    assert trial.user_attrs["folds"] == pytest.approx([second, fourth], rel=1e-4)
    assert found.best_value == pytest.approx((second + fourth) / 2, rel=1e-4)
    assert trial.intermediate_values == pytest.approx(
        {0: first, 1: second, 2: (second + third) / 2, 3: (second + fourth) / 2}, rel=1e-4
    )
    model = regression_model(keras.optimizers.SGD(0.03))
    wanted, _ = fit_one_process(model, list(global_batches(source.parts, 4, 2)), 2)
    for value, weights in zip(found.best.model.get_weights(), wanted, strict=True):
        np.testing.assert_allclose(value, weights, atol=1e-5)
    assert set(found.best.history) == {"loss"}


def test_pruning_when_a_fold_is_not_the_first_then_reports_running_means_and_ends_the_trial():
    # Steps go on over the folds of a trial, and metrics of which more is better keep their sign.
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=0.5))
    trial, objective = study.ask(), Objective.of("val_accuracy")
    pruning = Pruning(trial, objective, optuna.TrialPruned, lambda: False, [0.9, 0.6], fold=2, epochs=10)
    pruning.on_epoch_end(0, {"loss": 1.0, "val_accuracy": 0.3})
    pruning.on_epoch_end(1, {"loss": 1.0, "val_accuracy": float("nan")})
    with pytest.raises(optuna.TrialPruned, match="after epoch 23"):
        pruning.on_epoch_end(2, {"loss": 1.0, "val_accuracy": -0.6})
    values = study.trials[0].intermediate_values
    assert values == pytest.approx({20: 0.6, 22: 0.3})
    with pytest.raises(DataError, match=r"folds: expected rows in each fold\. Received: none in fold 2"):
        pruning.on_epoch_end(3, {"loss": 1.0})


@pytest.mark.slow("two searches with folds; without folds, another test goes on with a study")
def test_search_when_interrupted_in_folds_then_keeps_whole_trials_and_refits_the_best_of_the_study(
    spark, source, monkeypatch
):
    # In the second epoch of the second fold of the second trial.
    monkeypatch.setattr(Interrupting, "left", 8)
    study = optuna.create_study()
    for rate in (0.05, 1e-8):
        study.enqueue_trial({"learningRate": rate})
    space = {"learningRate": optuna.distributions.FloatDistribution(1e-8, 0.05, log=True)}
    options = {"trials": 2, "study": study, "folds": 2}
    estimator = estimator_of(driverCallbacks=[Interrupting()], epochs=2)
    found = elephant.search(estimator, source.frame, space, **options)
    assert not found.is_whole and found.best is None and states(study) == [COMPLETE, FAIL]
    assert [len(trial.user_attrs["folds"]) for trial in study.trials] == [2, 1]
    assert keeps_nothing(spark) and source.reads == [1, 1]
    study.enqueue_trial({"learningRate": 1e-8})
    again = elephant.search(estimator, source.frame, space, **options)
    assert again.is_whole and states(study) == [COMPLETE, FAIL, COMPLETE]
    assert again.best_params == {"learningRate": 0.05} and source.reads == [2, 2]
    # Not those of the one trial of this call.
    start = estimator.getModel().model.get_weights()
    assert max(np.abs(a - b).max() for a, b in zip(again.best.model.get_weights(), start, strict=True)) > 0.01
    # The last fit may be interrupted too.
    monkeypatch.setattr(Interrupting, "left", 1)
    trained = elephant.search(estimator, source.frame, space, **options)
    assert not trained.is_whole and trained.best is None and trained.best_params == {"learningRate": 0.05}


@pytest.mark.slow("MLflow, and five fits on Spark")
def test_search_when_mlflow_logs_folds_then_each_is_a_run_within_its_trial_which_has_mean_and_spread(
    spark, source, tmp_path, monkeypatch
):
    with own_mlflow() as mlflow:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
        with mlflow.start_run() as parent:
            found = elephant.search(
                estimator_of(), source.frame, {"batchSize": [4, 8]}, trials=2, parallelism=2, folds=2, refit=False
            )
        mlflow.flush_async_logging()
        runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
        assert found.best is None and source.reads == [1, 1]
        trials = {run.info.run_id: run for run in runs if "trial" in run.data.tags}
        folds = [run for run in runs if "fold" in run.data.tags]
        assert (len(runs), len(trials), len(folds)) == (7, 2, 4)
        assert {run.info.status for run in runs} == {"FINISHED"}
        for run_id, run in trials.items():
            assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
            trial = found.study.trials[int(run.data.tags["trial"])]
            assert run.data.metrics == pytest.approx(
                {"objective": trial.value, "objective_std": np.std(trial.user_attrs["folds"])}
            )
            own = sorted(
                (fold for fold in folds if fold.data.tags["mlflow.parentRunId"] == run_id),
                key=lambda fold: fold.data.tags["fold"],
            )
            assert [fold.data.tags["fold"] for fold in own] == ["0", "1"]
            assert [fold.data.metrics["val_loss"] for fold in own] == pytest.approx(trial.user_attrs["folds"])
            assert {fold.data.params["batchSize"] for fold in own} == {str(trial.params["batchSize"])}


@pytest.mark.parametrize(
    ("params", "options", "expected"),
    [
        ({}, {"folds": 1}, r"folds: expected a whole number, 2 or more, or None\. Received: 1"),
        ({}, {"folds": True}, r"folds: expected a whole number"),
        (
            {"validationFraction": 0.2},
            {"folds": 3},
            r"no validationFraction, .*Received: validationFraction=0\.2\. Leave out validationFraction, or folds",
        ),
        ({"validationIndicatorCol": "v"}, {"folds": 3}, r"no validationIndicatorCol, .*Received: .*='v'"),
        ({}, {"folds": 3, "space": {"validationFraction": [0.1]}}, r"Received: validationFraction in the space"),
        ({"checkpointPath": "/c"}, {"folds": 3}, r"folds: expected no checkpointPath, .*Received: '/c'"),
        ({}, {"folds": 3}, r"folds: expected a DataFrame\. Received: files"),
    ],
)
def test_search_when_something_excludes_folds_then_says_so_before_it_reads_rows(params, options, expected):
    # Two ways to choose rows for validation, and folders that folds would share.
    with pytest.raises(ConfigurationError, match=expected):
        elephant.search(estimator_of(**params), "/files", **{"space": {}, **options})


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
