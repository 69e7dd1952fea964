# %% [markdown]
# # A forecast of time series
#
# You have many series, such as the sales of shops, and want one model that forecasts the next value of each. Here it
# learns from windows that Spark cuts out of the series, and its error is less than half of that of the simple rule
# "as at this hour yesterday".
#
# It takes one to two minutes on two cores. [What you need](index.md#what-you-need).
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
import numpy as np
from matplotlib import pyplot as plt
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as sql

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## The series
#
# Four weeks of hourly sales of ten shops are made here. A day has its rhythm and a shop its size, and both drift. In
# your own work this cell is `spark.table(...)`.

# %%
rng = np.random.default_rng(7)
SHOPS, HOURS, DAY = 10, 24 * 28, 24
hours = np.arange(HOURS)
rows = []
for shop in range(SHOPS):
    rhythm = 20 * np.sin(2 * np.pi * hours / DAY) + 8 * np.sin(4 * np.pi * hours / DAY)
    drift = np.cumsum(rng.normal(0, 1.5, HOURS))
    sales = rng.uniform(150, 200) + rhythm + drift + rng.normal(0, 1, HOURS)
    rows += [(shop, hour, float(amount)) for hour, amount in enumerate(sales)]
series = spark.createDataFrame(rows, "shop int, hour int, sales double")

# %% [markdown]
# ## Windows
#
# A row to train on has the 24 hours before as features, and the hour itself as the label. Spark's window functions make
# such rows: within a shop, in the order of the hours, and never with an hour of the future. The first day of each shop
# has no full window, so it is left out.

# %%
before = Window.partitionBy("shop").orderBy("hour").rowsBetween(-DAY, -1)
windows = series.withColumn("window", sql.collect_list("sales").over(before)).where(sql.size("window") == DAY)

# %% [markdown]
# ## What is trained on, and what is not
#
# Rows are divided by time. Neighboring windows share 23 of 24 hours, so rows drawn at random would be known from the
# training. The last week is for the test, and the week before for validation: `validationIndicatorCol` names the column
# that marks its rows.

# %%
WEEK = 7 * DAY
windows = windows.withColumn("validation", sql.col("hour") >= HOURS - 2 * WEEK).cache()
train, test = windows.where(f"hour < {HOURS - WEEK}"), windows.where(f"hour >= {HOURS - WEEK}")

# %% [markdown]
# ## The model
#
# It computes how much the next hour differs from the last one, and adds that. So a shop's size need not be learned:
# `window - last` brings all windows to the same scale.

# %%
keras.utils.set_random_seed(7)
layers = keras.layers
window = keras.Input((DAY,), name="window")
last = window[:, -1:]
change = layers.Dense(1)(layers.Dense(32, "relu")((window - last) / 20.0))
model = keras.Model(window, last + 20.0 * change)
model.compile(keras.optimizers.Adam(0.003), "mae")

# %% [markdown]
# ## Train
#
# `EarlyStopping` is Keras' own. It ends the training when the validation has not become better for three epochs, and
# brings the best weights back. It runs on the workers, which all see the same numbers and so decide alike.

# %%
estimator = KerasEstimator(
    model=model,
    featuresCol="window",
    labelCol="sales",
    validationIndicatorCol="validation",
    numWorkers=2,
    batchSize=64,
    epochs=12,
    callbacks=[keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True)],
)
fitted = estimator.fit(train)

# %%
fitted  # its layers, its curves, and where the time of its fit went

# %% [markdown]
# ## Compare
#
# A forecast is worth as much as it is better than something simple. The first hour of a window is the same hour of the
# day before.

# %%
forecasts = fitted.transform(test).withColumn("yesterday", sql.col("window")[0])
evaluator = RegressionEvaluator(labelCol="sales", metricName="mae")
error = evaluator.evaluate(forecasts)
rule = evaluator.evaluate(forecasts, {evaluator.predictionCol: "yesterday"})
print(f"mean error {error:.2f}, of the rule {rule:.2f}")

shop = forecasts.where("shop = 0").orderBy("hour").toPandas().tail(3 * DAY)
figure, axes = plt.subplots(figsize=(8, 3))
axes.plot(shop["hour"], shop["sales"], label="sales")
axes.plot(shop["hour"], shop["prediction"], label="forecast, an hour before")
axes.plot(shop["hour"], shop["yesterday"], label="as yesterday", linestyle=":")
axes.set_xlabel("hour")
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## The hour that has not come yet
#
# The last 24 hours of each shop are a window whose label nobody knows yet. `transform` needs none.

# %%
latest = (
    series.where(f"hour >= {HOURS - DAY}")
    .groupBy("shop")
    .agg(sql.array_sort(sql.collect_list(sql.struct("hour", "sales"))).alias("day"))
)
fitted.transform(latest.select("shop", sql.col("day.sales").alias("window"))).select("shop", "prediction").orderBy(
    "shop"
).show(3)

# %% [markdown]
# ## What was promised

# %%
assert error < 0.5 * rule, (error, rule)

# %% [markdown]
# ## Where to go next
#
# - [Data](../data.md): sequences of different lengths, and batches of sequences of like length
# - [Callbacks](../callbacks.md): which runs where
# - [Files and streams](../files.md#streams): `fit_stream` trains on as new hours come
