# %% [markdown]
# # Tracking with MLflow
#
# At the end you have two fits in MLflow, with their params, the metrics of every epoch, and their models. You load the
# better model back, and it predicts what the fitted one does.
#
# It takes one to two minutes on two cores. [What you need](index.md#what-you-need), and `pip install 'mlflow>=3'`.
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

import tempfile

import keras
import mlflow
import numpy as np
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## Where MLflow writes
#
# `MLFLOW_TRACKING_URI` names your server, where you have one. Here it is a database in a new folder, which needs no
# server. Models go beside it.

# %%
folder = tempfile.mkdtemp(prefix="tracking-")
mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db"))
mlflow.set_experiment(
    experiment_id=mlflow.create_experiment(f"tutorial {folder}", artifact_location=f"file://{folder}/models")
)

# %% [markdown]
# ## Rows and a model
#
# The label is 1 where two of the four numbers lie inside of a circle, which a line cannot tell.

# %%
rng = np.random.default_rng(7)
points = rng.normal(size=(3000, 4))
inside = (points[:, 0] ** 2 + points[:, 1] ** 2 < 1.4).astype(int)
rows = list(zip(points.tolist(), inside.tolist(), strict=True))
train, test = spark.createDataFrame(rows, "features array<double>, label int").randomSplit([0.8, 0.2], seed=7)


def build(units):
    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = keras.Sequential([keras.Input((4,)), layers.Dense(units, "relu"), layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
    return model


# %% [markdown]
# ## Train in a run
#
# A fit logs to the run that is active here, on the driver. The workers open none. Nothing else has to be said: params
# are logged once, metrics at every epoch while it trains, and the Keras model in the end. What the estimator does not
# know, such as `units`, you log yourself.

# %%
fits = {}
for units in (4, 32):
    with mlflow.start_run(run_name=f"{units} units") as run:
        mlflow.log_param("units", units)
        estimator = KerasEstimator(model=build(units), numWorkers=2, epochs=8, validationFraction=0.1, verbose=0)
        fits[run.info.run_id] = estimator.fit(train)
        mlflow.log_metric("test_accuracy", fits[run.info.run_id].evaluate(test)["accuracy"])

# %% [markdown]
# ## Look
#
# `mlflow ui --backend-store-uri sqlite:///...` shows the same in a browser, with curves.

# %%
runs = mlflow.search_runs(order_by=["metrics.test_accuracy DESC"])
print(runs[["tags.mlflow.runName", "params.numWorkers", "params.epochs", "metrics.loss", "metrics.test_accuracy"]])
best = runs.iloc[0]
curve = mlflow.MlflowClient().get_metric_history(best.run_id, "val_loss")
values = {point.step: round(point.value, 3) for point in curve}
print([*values.values()])
#   tags.mlflow.runName params.numWorkers  ... metrics.loss  metrics.test_accuracy
# 0            32 units                 2  ...     0.087420               0.963576
# 1             4 units                 2  ...     0.473109               0.771523
# [0.35, 0.163, 0.119, 0.104, 0.097, 0.092, 0.093, 0.085]

# %% [markdown]
# ## Load the better model
#
# It is a Keras model with the flavor `keras` and a signature, so whatever takes MLflow's models takes it.

# %%
loaded = mlflow.keras.load_model(f"runs:/{best.run_id}/model")
some = points[:100].astype("float32")
difference = np.abs(loaded.predict(some, verbose=0) - fits[best.run_id].model.predict(some, verbose=0)).max()
print(f"accuracy {best['metrics.test_accuracy']:.3f}, largest difference of the loaded model {difference}")
# accuracy 0.964, largest difference of the loaded model 0.0

# %% [markdown]
# ## What was promised

# %%
assert len(values) == 8
assert best["metrics.test_accuracy"] > 0.9
assert difference == 0

# %% [markdown]
# ## Where to go next
#
# - [MLflow](../callbacks.md#mlflow): autologging, several fits in a run, folds of a `CrossValidator`
# - [Listeners](../callbacks.md#listeners): a tracker of your own
# - [Serving](../serving.md): other forms of a model
