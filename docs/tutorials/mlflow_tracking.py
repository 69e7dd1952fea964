# %% [markdown]
# # MLflow, from tracking to the registry to `spark_udf`
#
# You want to know later which fit gave which model, choose the best one, and let other jobs score with it by its name.
# Here two fits log themselves to MLflow, the better model becomes the champion of a registered model, and a job that
# knows nothing but that name scores a table with it.
#
# It takes two minutes on two cores. [What you need](index.md#what-you-need), and `pip install 'mlflow>=3'`.
#
# ## Start Spark
#
# `local[2]` gives this session two task slots, so a fit may have two workers. Two partitions are enough for a small
# table. On a cluster, remove `.master("local[2]")`: [`spark-submit`](spark_submit.md) names the master.

# %%
import os
import sys

from elephant import KerasEstimator, predict_udf  # first, and TensorFlow starts without lines of its own

# Spark's workers run the same Python as this one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import tempfile

import keras
import mlflow
import numpy as np
from matplotlib import pyplot as plt
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## Where MLflow writes
#
# `MLFLOW_TRACKING_URI` names your server, where you have one. Here it is a database in a new folder, which needs no
# server, and has room for runs and registered models. The models' files go beside it.

# %%
folder = tempfile.mkdtemp(prefix="tracking-")
mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db"))
experiment = mlflow.set_experiment(
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
train, test = spark.createDataFrame(rows, "features array<float>, label int").randomSplit([0.8, 0.2], seed=7)


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
# `mlflow ui --backend-store-uri sqlite:///...` shows runs and curves in a browser. A notebook asks for them.

# %%
runs = mlflow.search_runs(order_by=["metrics.test_accuracy DESC"])
print(runs[["tags.mlflow.runName", "params.numWorkers", "metrics.loss", "metrics.test_accuracy"]].to_string())
client = mlflow.MlflowClient()
figure, axes = plt.subplots(figsize=(6, 3))
for _, run in runs.iterrows():
    curve = client.get_metric_history(run["run_id"], "val_loss")
    name = run["tags.mlflow.runName"]
    axes.plot([point.step + 1 for point in curve], [point.value for point in curve], label=name)
axes.set_xlabel("epoch")
axes.set_ylabel("validation loss")
axes.grid(alpha=0.3)
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## Register the better model
#
# A registered model has a name and versions. An alias such as `champion` points to one of them, and moves to another
# one when you say so. Jobs that score name the alias, and need no change then.

# %%
best = runs.iloc[0]
version = mlflow.register_model(f"runs:/{best.run_id}/model", "inside-circle")
client.set_registered_model_alias("inside-circle", "champion", version.version)
print(f"inside-circle, version {version.version}: accuracy {best['metrics.test_accuracy']:.3f}")

# %% [markdown]
# ## Score by the name
#
# MLflow's `spark_udf` makes a function of Spark's from a registered model. It takes the column of features, as the
# model's signature says, and loads the model in Spark's own Python workers. `env_manager="local"` lets them use the
# packages that they have: MLflow can also make the environment that the model was logged with, which needs a package
# registry.

# %%
score = mlflow.pyfunc.spark_udf(spark, "models:/inside-circle@champion", result_type="double", env_manager="local")
scored = test.withColumn("chance", score("features")).cache()
scored.orderBy(sql.desc("chance")).show(3)
right = scored.where((sql.col("chance") > 0.5).cast("int") == sql.col("label")).count() / scored.count()
print(f"right in {right:.3f} of the rows")

# %% [markdown]
# elephant's own `predict_udf` takes the same model. It [predicts in a process that is
# kept](../inference.md#where-the-model-runs) beside each of Spark's Python workers, and takes whatever columns a
# model may have, such as ml vectors, strings and several inputs.

# %%
champion = mlflow.keras.load_model("models:/inside-circle@champion")
both = scored.withColumn("same", predict_udf(champion)("features"))
difference = both.select(sql.max(sql.abs(sql.col("chance") - sql.col("same")))).first()[0]
print(f"largest difference of the two ways {difference:.1e}")

# %% [markdown]
# ## What was promised
#
# The champion is the model of the better fit, to the bit.

# %%
pairs = zip(champion.get_weights(), fits[best.run_id].model.get_weights(), strict=True)
assert best["metrics.test_accuracy"] > 0.9
assert all(np.array_equal(loaded, fitted) for loaded, fitted in pairs)
assert abs(right - best["metrics.test_accuracy"]) < 0.01, right
assert difference < 1e-5, difference

# %% [markdown]
# ## Where to go next
#
# - [MLflow](../callbacks.md#mlflow): autologging, several fits in a run, folds of a `CrossValidator`
# - [Tuning](tuning.ipynb): a search, each trial of which is a run
# - [Listeners](../callbacks.md#listeners): a tracker of your own
