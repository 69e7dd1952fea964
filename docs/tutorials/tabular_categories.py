# %% [markdown]
# # A table with categories
#
# You have a table whose columns are texts, whole numbers and fractions, and want a model that takes them as they are.
# Here it says which customers leave. It holds everything that it needs to read them, the vocabularies of the texts and
# the scale of the numbers, so that nobody who scores with it has to prepare a row.
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

from elephant import KerasEstimator, adapt  # first, and TensorFlow starts without lines of its own

# Spark's workers run the same Python as this one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import keras
import numpy as np
from matplotlib import pyplot as plt
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import StringIndexer
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## The table
#
# It is made here: 2,000 customers with a plan, a country, the months since they came, and the calls to the help desk.
# Customers on the monthly plan leave more often, and so do new ones and those who call often. In your own work this
# cell is `spark.read.parquet(...)` or `spark.table(...)`.

# %%
rng = np.random.default_rng(7)
rows = 2000
plan = rng.choice(["monthly", "yearly", "family"], rows, p=[0.5, 0.3, 0.2])
country = rng.choice(["AT", "CH", "DE", "FR", "IT"], rows)
months = rng.integers(1, 60, rows)
calls = rng.gamma(2.0, 1.0, rows)
score = 3.0 * (plan == "monthly") + 1.5 * (country == "FR") - 0.1 * months + 1.2 * calls - 1.5
leaves = np.where(score + rng.normal(0, 0.7, rows) > 0, "yes", "no")

columns = [plan.tolist(), country.tolist(), months.tolist(), calls.tolist(), leaves.tolist()]
schema = "plan string, country string, months int, calls double, leaves string"
customers = spark.createDataFrame(list(zip(*columns, strict=True)), schema)
customers.show(3)

# %% [markdown]
# ## The label
#
# Keras compares numbers, so the label has to be one. `StringIndexer` gives `no` the number 0 and `yes` the number 1.

# %%
indexer = StringIndexer(inputCol="leaves", outputCol="label", stringOrderType="alphabetAsc").fit(customers)
train, test = indexer.transform(customers).randomSplit([0.8, 0.2], seed=7)
train = train.cache()

# %% [markdown]
# ## The model
#
# Each text has an input of its own. `StringLookup` turns it into the number of its category, and `Embedding` turns
# that into four numbers that are learned. A category that the training has not seen gets number 0. `Normalization`
# brings months and calls to the same scale.

# %%
layers = keras.layers
keras.utils.set_random_seed(7)


def category(name):
    column = keras.Input((), dtype="string", name=name)
    return column, layers.Embedding(10, 4)(layers.StringLookup()(column))


plans, plan_vector = category("plan")
countries, country_vector = category("country")
numbers = keras.Input((2,), name="numbers")
joined = layers.Concatenate()([plan_vector, country_vector, layers.Normalization()(numbers)])
chance = layers.Dense(1, "sigmoid")(layers.Dense(16, "relu")(joined))
model = keras.Model([plans, countries, numbers], chance)

# %% [markdown]
# `adapt` fills the vocabularies and the scale from the whole DataFrame. The executors count, and no rows come here. The
# dictionary says which columns go into which input. Below are the sizes of the two vocabularies: three plans and five
# countries, and in each one place for what is not known.

# %%
inputs = {"plan": "plan", "country": "country", "numbers": ["months", "calls"]}
adapt(model, train, inputs)
print([layer.vocabulary_size() for layer in model.layers if isinstance(layer, layers.StringLookup)])

# %% [markdown]
# ## Train
#
# Each of the two workers takes 32 rows at every step. Both workers then apply the average of their gradients, so that
# they train as one process would on batches of 64 rows.

# %%
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
estimator = KerasEstimator(model=model, featuresCol=inputs, numWorkers=2, epochs=6, validationFraction=0.1)
fitted = estimator.fit(train)

# %%
fitted  # its layers, its curves, and where the time of its fit went

# %% [markdown]
# ## Evaluate
#
# `transform` adds `rawPrediction`, `probability` and `prediction` (0 or 1) to every row, as any classifier of Spark ML
# does. So the evaluators of Spark ML take its result as it is. Keras' own numbers come from `evaluate`.

# %%
predictions = fitted.transform(test)
area = BinaryClassificationEvaluator().evaluate(predictions)
print(f"area under the curve {area:.3f}, {fitted.evaluate(test)}")

figure, axes = plt.subplots(figsize=(6, 3))
for label, name in ((0, "stayed"), (1, "left")):
    chances = [row.probability[1] for row in predictions.where(f"label = {label}").collect()]
    axes.hist(chances, bins=25, range=(0, 1), alpha=0.6, label=name)
axes.set_xlabel("predicted chance to leave")
axes.set_ylabel("customers")
axes.legend()
figure.tight_layout()

# %% [markdown]
# A country that was not in the table is no error.

# %%
stranger = spark.createDataFrame([("monthly", "PT", 3, 4.0)], "plan string, country string, months int, calls double")
fitted.transform(stranger).select("country", "prediction", "probability").show(truncate=False)

# %% [markdown]
# ## What was promised
#
# 0.5 would be guessing, and 1.0 a model that puts every customer who leaves above every one who stays.

# %%
assert area > 0.9, area

# %% [markdown]
# ## Where to go next
#
# - [Layers that learn from data](../preprocessing.md#layers-that-learn-from-data): what else `elephant.adapt` fills
# - [Models](../models.md): several inputs and outputs, class weights, what each type of column becomes
# - [Tuning](tuning.ipynb): the learning rate and the batch size, chosen by cross-validation
