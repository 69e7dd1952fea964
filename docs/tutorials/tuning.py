# %% [markdown]
# # Tuning
#
# At the end you have the learning rate that is best for a model, found in two ways: by Spark's `CrossValidator`, and
# by Optuna, which ends a trial that does badly before it has cost all its epochs.
#
# It takes one to two minutes on two cores. [What you need](index.md#what-you-need), and `pip install optuna` for
# the second half.
#
# ## Start Spark
#
# `local[2]` gives this session two task slots, so a fit may have two workers. Two partitions are enough for a small
# table. On a cluster, remove `.master("local[2]")`: [`spark-submit`](spark_submit.md) names the master.

# %%
import os
import sys

from elephant import KerasEstimator  # first, and TensorFlow starts without lines of its own

# Spark's workers run the same Python as this one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import keras
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## The rows and the model
#
# 1,797 images of handwritten digits, 64 grey values each, which scikit-learn brings.

# %%
digits = load_digits()
rows = [(row.tolist(), int(label)) for row, label in zip(digits.data / 16.0, digits.target, strict=True)]
frame = spark.createDataFrame(rows, "features array<double>, label int")
train, test = (part.cache() for part in frame.randomSplit([0.8, 0.2], seed=7))


def build(units=32):
    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = keras.Sequential([keras.Input((64,)), layers.Dense(units, "relu"), layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


# %% [markdown]
# ## Cross-validation
#
# Params of the estimator are params of Spark ML, so `ParamGridBuilder` takes any of them. Two rates and two folds are
# four fits, and a fifth one trains on all rows with the better rate. With one worker per fit and `parallelism=2`, two
# fits run at the same time on the two slots.

# %%
estimator = KerasEstimator(model=build(), numWorkers=1, epochs=4, verbose=0)
grid = ParamGridBuilder().addGrid(estimator.learningRate, [0.0001, 0.01]).build()
evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
validator = CrossValidator(
    estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, parallelism=2, seed=7
)
tuned = validator.fit(train)
for params, mean in zip(grid, tuned.avgMetrics, strict=True):
    print(f"learningRate {params[estimator.learningRate]}: accuracy {mean:.3f} over the folds")
chosen = evaluator.evaluate(tuned.transform(test))
print(f"the best, trained on all rows: {chosen:.3f}")
# learningRate 0.0001: accuracy 0.121 over the folds
# learningRate 0.01: accuracy 0.935 over the folds
# the best, trained on all rows: 0.960

# %% [markdown]
# ## Optuna
#
# An objective builds and fits a model, and returns a number. What Optuna suggests goes into the model, or into params
# of the estimator.
#
# `Pruning` reports every epoch. It has no batch methods. Such a callback runs on the driver, and not as a copy on the
# workers.
# What it raises ends the fit on all workers and comes out of `fit` as it was raised. Optuna takes `TrialPruned` for a
# trial that was given up. (`optuna_integration.KerasPruningCallback` does the same.)

# %%
try:
    import optuna
except ImportError:
    optuna = None


class Pruning(keras.callbacks.Callback):
    def __init__(self, trial):
        super().__init__()
        self.trial = trial

    def on_epoch_end(self, epoch, logs=None):
        self.trial.report(logs["val_accuracy"], epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def objective(trial):
    rate = trial.suggest_float("rate", 1e-5, 0.1, log=True)
    fitted = KerasEstimator(
        model=build(trial.suggest_categorical("units", [16, 64])),
        numWorkers=2,
        epochs=6,
        validationFraction=0.2,
        callbacks=[Pruning(trial)],
        verbose=0,
    ).fit(train, learningRate=rate)
    return fitted.history["val_accuracy"][-1]


# %% [markdown]
# The three trials are given here, so that this page says the same every time; Optuna draws those that are not given.
# The third has far too small a rate: after its second epoch it is worse than the median of the others, and is given up.

# %%
if optuna:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
    study = optuna.create_study(direction="maximize", pruner=pruner, sampler=optuna.samplers.TPESampler(seed=7))
    for rate, units in ((0.01, 64), (0.003, 64), (1e-5, 16)):
        study.enqueue_trial({"rate": rate, "units": units})
    study.optimize(objective, n_trials=3)
    for trial in study.trials:
        epochs = len(trial.intermediate_values)
        print(f"{trial.state.name:8} {epochs} epochs, {trial.params}, {max(trial.intermediate_values.values()):.3f}")
# COMPLETE 6 epochs, {'rate': 0.01, 'units': 64}, 0.958
# COMPLETE 6 epochs, {'rate': 0.003, 'units': 64}, 0.923
# PRUNED   2 epochs, {'rate': 1e-05, 'units': 16}, 0.172

# %% [markdown]
# ## What was promised

# %%
assert chosen > 0.9, chosen
if optuna:
    assert study.best_value > 0.9, study.best_value
    assert study.trials[2].state == optuna.trial.TrialState.PRUNED

# %% [markdown]
# ## Where to go next
#
# - [Callbacks](../callbacks.md): which callback runs where, and what it may do
# - [In Spark's pages](../run.md#in-sparks-pages): each job says which params it tries
# - [Tracking with MLflow](mlflow_tracking.py)
