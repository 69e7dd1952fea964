# %% [markdown]
# # Streams: learn from rows as they arrive, and score them
#
# Your rows do not lie in a table that is finished: files arrive every hour, or messages all the time. You want a model
# that goes on learning, without training twice on any row, and the predictions for what has just come. Here sensors
# report day by day. On the fourth day they are turned round, and the model follows.
#
# It takes two minutes on two cores. [What you need](index.md#what-you-need).
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
from pathlib import Path

import keras
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## Files that arrive
#
# A day is a Parquet file with 2,000 measurements: four numbers, and what was to be told from them. `rename` lets Spark
# see a file only when it is whole.

# %%
folder = Path(tempfile.mkdtemp(prefix="sensors-"))
(folder / "arriving").mkdir()
rng = np.random.default_rng(7)


def arrive(day, sign=1.0):
    features = rng.normal(size=(2000, 4)).astype("float32")
    truth = sign * features[:, 0] + features[:, 1] * features[:, 2] + rng.normal(0, 0.1, 2000)
    rows = pd.DataFrame({"day": np.full(2000, day, "int32"), "features": list(features), "truth": truth})
    rows.to_parquet(folder / f"day-{day}")
    (folder / f"day-{day}").rename(folder / "arriving" / f"day-{day}.parquet")


for day in (1, 2, 3):
    arrive(day)

# %% [markdown]
# ## The stream
#
# It is Spark's own: any source that Structured Streaming has will do, such as Kafka or a Delta table. A micro-batch
# takes one file at most. Each micro-batch is a fit, which takes seconds to start, so in your own work let it have
# many rows.


# %%
def measurements():
    source = spark.readStream.schema("day int, features array<float>, truth double").option("maxFilesPerTrigger", 1)
    return source.parquet(f"{folder}/arriving")


# %% [markdown]
# ## Train on it
#
# `fit_stream` trains on one micro-batch after the other. Each starts with the weights and the state of the optimizer
# that the one before has left. `availableNow` takes what is there and ends, as a job that a scheduler starts each
# night would. Without a trigger the stream waits for more rows, until you `stop()` it.

# %%
keras.utils.set_random_seed(7)
layers = keras.layers
model = keras.Sequential([keras.Input((4,)), layers.Dense(64, "relu"), layers.Dense(32, "relu"), layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.005), "mse")
estimator = KerasEstimator(model, featuresCol="features", labelCol="truth", numWorkers=2, epochs=3, verbose=0)


def train():
    where = {"checkpointLocation": f"{folder}/training", "trigger": {"availableNow": True}}
    stream = estimator.fit_stream(measurements(), **where)
    stream.awaitTermination()
    return stream


stream = train()
print(f"{stream.lastBatch + 1} micro-batches, loss {stream.history['loss'][-1]:.3f}")

# %% [markdown]
# ## Two more days
#
# On the fourth day somebody has mounted the sensors the other way round. The same call goes on where the last one
# ended: `checkpointLocation` has the model, and Spark's own notes about which files are done. So the days before are
# not trained on again, also when a run was stopped or killed in the middle of a day.

# %%
arrive(4, sign=-1.0)
arrive(5, sign=-1.0)
stream = train()
print(f"{stream.lastBatch + 1} micro-batches, loss {stream.history['loss'][-1]:.3f}")

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(np.arange(1, 16) / 3, stream.history["loss"], marker="o", markersize=3)
axes.axvline(3, color="gray", linestyle=":", label="sensors are turned")
axes.set_xlabel("day")
axes.set_ylabel("loss of an epoch")
axes.grid(alpha=0.3)
axes.legend(loc="upper center")
figure.tight_layout()

# %% [markdown]
# ## Score a stream
#
# `stream.model` is a fitted model like any other, as of the last micro-batch. Its `transform` takes streams as well,
# and the result goes where Spark can write one.

# %%
fitted = stream.model
scores = fitted.transform(measurements()).select("day", "truth", "features", "prediction")
query = (
    scores.writeStream.format("parquet")
    .option("checkpointLocation", f"{folder}/scoring")
    .trigger(availableNow=True)
    .start(f"{folder}/scores")
)
query.awaitTermination()
scored = spark.read.parquet(f"{folder}/scores").cache()
error = sql.avg(sql.abs(sql.col("prediction") - sql.col("truth")))
errors = {row.day: row.error for row in scored.groupBy("day").agg(error.alias("error")).collect()}
for day in sorted(errors):
    print(f"day {day}: mean error {errors[day]:.2f}")

# %% [markdown]
# The model has followed: what it says of the last days is right, and of the first ones, with the sensors as they were,
# wrong.
#
# ## What was promised
#
# Every micro-batch was trained on once, for three epochs. The scores of the stream are those of one process.

# %%
rows = scored.toPandas()
expected = fitted.model.predict(np.stack(rows["features"]), verbose=0)[:, 0]
assert len(stream.history["loss"]) == 15
assert len(rows) == 10_000
assert np.abs(rows["prediction"] - expected).max() < 1e-5
assert errors[5] < 0.3 and errors[5] < errors[1] / 2, errors

# %% [markdown]
# ## Where to go next
#
# - [Streams](../files.md#streams): what a stream that is started again needs, and what differs from `fit`
# - [Inference](../inference.md#where-the-model-runs): the memory of a stream that scores for hours
# - [A million rows](batch_inference.ipynb): predictions for a whole table
