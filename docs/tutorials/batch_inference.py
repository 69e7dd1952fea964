# %% [markdown]
# # Predictions for a whole table
#
# At the end you have predictions for a whole table, made in three ways: by `transform`, in SQL, and as an array. All of
# them are what `model.predict` of one process gives, to 1e-5. You know the command that makes them as a job, too.
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

from elephant import KerasEstimator, KerasModel, predict_udf  # first, and TensorFlow starts without lines of its own

# Spark's workers run the same Python as this one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import tempfile

import keras
import numpy as np
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()
folder = tempfile.mkdtemp(prefix="inference-")

# %% [markdown]
# ## A trained model
#
# A small one, for 1,797 images of handwritten digits that scikit-learn brings. It is saved as a folder, with all that
# a prediction needs.

# %%
digits = load_digits()
pixels = digits.data / 16.0
rows = [(number, row.tolist(), int(digits.target[number])) for number, row in enumerate(pixels)]
table = spark.createDataFrame(rows, "id int, features array<double>, label int")
table.write.mode("overwrite").parquet(f"{folder}/digits")

keras.utils.set_random_seed(7)
layers = keras.layers
model = keras.Sequential([keras.Input((64,)), layers.Dense(64, "relu"), layers.Dense(10, "softmax")])
model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
trained = KerasEstimator(model=model, numWorkers=2, epochs=4, verbose=0).fit(table)
trained.write().overwrite().save(f"{folder}/model")

# %% [markdown]
# ## A DataFrame in, a DataFrame out
#
# `transform` adds `prediction`, the class, and `probability`, one number for each class. It is lazy: nothing is
# computed before the table is written. Rows keep their other columns, and need no label.

# %%
fitted = KerasModel.load(f"{folder}/model")
digits_table = spark.read.parquet(f"{folder}/digits")
predictions = fitted.transform(digits_table.drop("label"))
predictions.select("id", "prediction", "probability").write.mode("overwrite").parquet(f"{folder}/predictions")
written = spark.read.parquet(f"{folder}/predictions")
print(f"{written.count()} rows, {written.columns}")
# 1797 rows, ['id', 'prediction', 'probability']

# %% [markdown]
# ## In SQL
#
# `predict_udf` makes a function of Spark's. It takes columns and gives the model's output as it is: here an array of
# ten numbers. Filter before it where you can, because rows that a filter leaves out cost nothing.

# %%
spark.udf.register("score", predict_udf(f"{folder}/model"))
digits_table.createOrReplaceTempView("digits")
sure = spark.sql(
    "SELECT label, count(*) AS rows, avg(array_max(score(features))) AS sureness FROM digits GROUP BY label"
)
sure.orderBy("label").show(3)

# %% [markdown]
# ## Back as an array
#
# `predict` is what `model.predict` is in Keras: all outputs as one numpy array, in the order of the rows. The
# executors compute, and the result has to fit into the driver's memory.

# %%
array = fitted.predict(digits_table.where("id < 100").orderBy("id"))
print(array.shape)

# %% [markdown]
# ## As a job
#
# The same without a script of yours, for a scheduler. [The lesson about spark-submit](spark_submit.md) runs it.
#
# ```sh
# spark-submit spark_jobs/predict.py --data FOLDER/digits --model FOLDER/model --output FOLDER/job
# ```
#
# ## Compare
#
# With one process of Keras, which has all rows in memory.

# %%
expected = fitted.model.predict(pixels.astype("float32"), verbose=0)
by_transform = np.array([row.probability.toArray() for row in written.orderBy("id").collect()])
by_sql = np.array(
    [row.scores for row in spark.sql("SELECT score(features) AS scores FROM digits ORDER BY id").collect()]
)
differences = [
    np.abs(by_transform - expected).max(),
    np.abs(by_sql - expected).max(),
    np.abs(array - expected[:100]).max(),
]
print(f"largest differences: {max(differences):.1e}")
# largest differences: 0.0e+00

# %% [markdown]
# ## What was promised

# %%
assert written.count() == len(pixels)
assert max(differences) < 1e-5, differences

# %% [markdown]
# ## Where to go next
#
# - [Inference](../inference.md): types, several outputs, models that executors load themselves, where the model is
# - [Serving](../serving.md): a model outside of Spark
# - [Several hosts](../clusters.md)
