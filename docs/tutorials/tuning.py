# %% [markdown]
# # Tuning
#
# You have a model, and want the learning rate and the size that are best for it, without training each candidate to its
# end. Here they are found in two ways: by Spark's `CrossValidator`, which tries all of a grid, and by `elephant.search`
# over Optuna, which ends a trial that does badly before it has cost all its epochs.
#
# It takes one to two minutes on two cores. [What you need](index.md#what-you-need), and
# `pip install 'elephant-spark[tune]'` for the second half.
#
# ## Start Spark
#
# `local[2]` gives this session two task slots, so a fit may have two workers. Two partitions are enough for a small
# table. On a cluster, remove `.master("local[2]")`: [`spark-submit`](spark_submit.md) names the master.

# %%
import os
import sys

import elephant  # first, and TensorFlow starts without lines of its own
from elephant import KerasEstimator

# Spark's workers run the same Python as this one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import keras
from matplotlib import pyplot as plt
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
# four fits, and a fifth one trains on all rows with the better rate. Each fit has one worker, so with `parallelism=2`
# two of them run at the same time on the two slots.

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

# %% [markdown]
# ## Optuna
#
# `elephant.search` asks Optuna what to try. Here a function builds the model and names the learning rate; a
# dictionary of values or distributions does where params alone change. Two trials run at the same time, and the
# rows are read once.
#
# The driver tells Optuna the metric of every epoch. The third trial has far too small a rate: after its second epoch
# it is worse than the median of the others, and is given up. All three are given here, so that this page says the
# same every time. Optuna draws those that are not given.

# %%
try:
    import optuna
except ImportError:
    optuna = None


def space(trial):
    rate = trial.suggest_float("rate", 1e-5, 0.1, log=True)
    return {"model": build(trial.suggest_categorical("units", [16, 64])), "learningRate": rate}


if optuna:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
    study = optuna.create_study(direction="maximize", pruner=pruner, sampler=optuna.samplers.TPESampler(seed=7))
    for rate, units in ((0.01, 64), (0.003, 64), (1e-5, 16)):
        study.enqueue_trial({"rate": rate, "units": units})
    trials = KerasEstimator(model=build(), numWorkers=1, epochs=6, validationFraction=0.2, verbose=0)
    found = elephant.search(trials, train, space, metric="val_accuracy", trials=3, parallelism=2, study=study)
    for trial in study.trials:
        epochs = len(trial.intermediate_values)
        print(f"{trial.state.name:8} {epochs} epochs, {trial.params}, {max(trial.intermediate_values.values()):.3f}")
    print(
        f"the best: {found.best_params}, on rows it has not seen {evaluator.evaluate(found.best.transform(test)):.3f}"
    )
    figure, axes = plt.subplots(figsize=(6, 3.2))
    for trial in study.trials:
        values = trial.intermediate_values
        label = f"{trial.params['units']} units, rate {trial.params['rate']:g}"
        axes.plot([epoch + 1 for epoch in values], values.values(), marker="o", markersize=3, label=label)
    axes.set_xlabel("epoch")
    axes.set_ylabel("validation accuracy")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()

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
# - [Tuning](../tuning.md): what a trial may change, how trials share the cluster, and how a search goes on
# - [Callbacks](../callbacks.md): which callback runs where, and what it may do
# - [In Spark's pages](../run.md#in-sparks-pages): each job says which params it tries
# - [Tracking with MLflow](mlflow_tracking.ipynb)
