# %% [markdown]
# # Scores for a million rows
#
# You have a trained model, and a table that is too large for one process. Here a million payments get a chance of
# fraud, in three ways: by `transform`, which reads the table's files itself, in SQL, and as an array. All of them are
# what
# `model.predict` of one process gives, to 1e-5, and you know the command that makes them as a job.
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

from elephant import KerasEstimator, KerasModel, predict_udf  # first, and TensorFlow starts without lines of its own

# Spark's workers run the same Python as this one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import tempfile
import time

import keras
import numpy as np
from matplotlib import pyplot as plt
from pyspark.ml.functions import vector_to_array
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()
folder = tempfile.mkdtemp(prefix="inference-")
ROWS = int(os.environ.get("ROWS", 1_000_000))

# %% [markdown]
# ## A table
#
# Spark draws it: the amount of a payment, its distance from home, the age of the account and the hour, on a common
# scale already. `chance` is how likely a fraud is in truth, which only a table that is made up can tell.

# %%
COLUMNS = ["amount", "distance", "age", "hour"]


def payments(rows, seed):
    drawn = [sql.randn(seed + place).cast("float").alias(name) for place, name in enumerate(COLUMNS)]
    logit = sql.expr("1.5 * amount * greatest(distance, 0) - 0.8 * age + 0.6 * sin(3 * hour) - 1.5")
    return (
        spark.range(rows, numPartitions=4)
        .select("id", *drawn)
        .withColumn("chance", 1 / (1 + sql.exp(-logit)))
        .withColumn("fraud", (sql.rand(seed + 10) < sql.col("chance")).cast("int"))
    )


payments(ROWS, seed=1).drop("fraud").write.parquet(f"{folder}/payments")

# %% [markdown]
# ## A trained model
#
# It learns from 30,000 other payments whose outcome is known, and is saved as a folder, with all that a prediction
# needs.

# %%
keras.utils.set_random_seed(7)
layers = keras.layers
model = keras.Sequential(
    [keras.Input((4,)), layers.Dense(64, "relu"), layers.Dense(32, "relu"), layers.Dense(1, "sigmoid")]
)
model.compile(keras.optimizers.Adam(0.003), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
estimator = KerasEstimator(model, featuresCol=COLUMNS, labelCol="fraud", numWorkers=2, batchSize=64, epochs=5)
trained = estimator.fit(payments(30_000, seed=100))
trained.write().overwrite().save(f"{folder}/model")

# %% [markdown]
# ## From files to files
#
# Give `transform` the path of the table, and the tasks read its files themselves: no row that is scored goes through
# Spark's JVM. `columns` names what to keep beside the predictions. Nothing is computed before the result is written.

# %%
fitted = KerasModel.load(f"{folder}/model")
began = time.monotonic()
scored = fitted.transform(f"{folder}/payments", columns=["id", "chance"])
scored.withColumn("score", vector_to_array("probability")[1]).drop("rawPrediction", "probability").write.parquet(
    f"{folder}/scores"
)
seconds = time.monotonic() - began
scores = spark.read.parquet(f"{folder}/scores")
print(f"{scores.count():,} rows, {ROWS / seconds:,.0f} a second, with the start of what predicts")
scores.orderBy("id").show(3)

# %% [markdown]
# `transform` takes DataFrames as well, such as what a join or a filter leaves.

# %%
large = spark.read.parquet(f"{folder}/payments").where("amount > 2")
alarms = fitted.transform(large).where("prediction = 1").count()
print(f"{alarms / large.count():.2f} of the largest payments look like fraud")

# %% [markdown]
# ## In SQL
#
# `predict_udf` makes a function of Spark's. It takes columns and gives the model's output as it is: here one number.
# Filter before it where you can, because rows that a filter leaves out cost nothing.

# %%
spark.udf.register("score", predict_udf(f"{folder}/model"))
spark.read.parquet(f"{folder}/payments").createOrReplaceTempView("payments")
hours = spark.sql(
    """SELECT round(hour) AS hour, avg(score(amount, distance, age, hour)) AS mean_chance
    FROM payments WHERE id % 10 = 0 AND abs(hour) < 2.5 GROUP BY 1 ORDER BY 1"""
)
hours.show()

# %% [markdown]
# ## Back as an array
#
# `predict` is what `model.predict` is in Keras: all outputs as one numpy array, in the order of the rows. The executors
# compute, and the result has to fit into the driver's memory.

# %%
some = spark.read.parquet(f"{folder}/payments").where("id < 2000").orderBy("id")
array = fitted.predict(some)
print(array.shape)

# %% [markdown]
# ## As a job
#
# The same without a script of yours, for a scheduler. [The lesson about spark-submit](spark_submit.md) runs it.
#
# ```sh
# spark-submit spark_jobs/predict.py --data FOLDER/payments --model FOLDER/model --output FOLDER/job
# ```
#
# ## Compare
#
# With one process of Keras, which has these rows in memory, and with the truth.

# %%
rows = some.toPandas()
expected = fitted.model.predict(rows[COLUMNS].to_numpy("float32"), verbose=0)[:, 0]
by_transform = scores.where("id < 2000").orderBy("id").toPandas()["score"].to_numpy()
by_sql = spark.sql(
    "SELECT score(amount, distance, age, hour) AS s FROM payments WHERE id < 2000 ORDER BY id"
).toPandas()
differences = [np.abs(one - expected).max() for one in (by_transform, by_sql["s"].to_numpy(), array[:, 0])]
print(f"largest differences: {max(differences):.1e}")

figure, axes = plt.subplots(figsize=(4, 3.6))
axes.plot([0, 1], [0, 1], color="gray", linewidth=1)
axes.scatter(rows["chance"], by_transform, s=3, alpha=0.4)
axes.set_xlabel("chance of fraud in truth")
axes.set_ylabel("chance by the model")
figure.tight_layout()

# %% [markdown]
# ## What was promised

# %%
assert scores.count() == ROWS
assert max(differences) < 1e-5, differences
assert np.abs(rows["chance"] - by_transform).mean() < 0.05

# %% [markdown]
# ## Where to go next
#
# - [Inference](../inference.md): types, several outputs, models that executors load themselves, where the model is
# - [Streams](streaming.ipynb): scores for rows as they arrive
# - [Serving](../serving.md): a model outside of Spark
