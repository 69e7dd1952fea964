# %% [markdown]
# # Text
#
# You have a column of sentences, and want a model that takes them as they are. Here it learns to say whether they
# praise or complain. Its vocabulary is a part of it: one file has all that a prediction needs.
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

from elephant import KerasEstimator, KerasModel, adapt  # first, and TensorFlow starts without lines of its own

# Spark's workers run the same Python as this one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import random
import tempfile

import keras
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## The sentences
#
# They are made here, 1,600 of them. Half of them have a `not`, which turns their meaning round: "not bad" is praise. So
# single words do not tell. In your own work this cell is `spark.table(...)`.

# %%
pick = random.Random(7)
THINGS = ["room", "breakfast", "staff", "view", "pool", "bed", "bar", "lift"]
PRAISE = ["good", "clean", "friendly", "lovely", "great", "quiet"]
BLAME = ["bad", "dirty", "rude", "awful", "noisy", "cold"]
FILLERS = ["", "I must say ", "in July ", "for us ", "all week ", "honestly "]


def sentence():
    praises, is_negated = pick.random() < 0.5, pick.random() < 0.5
    word = pick.choice(PRAISE if praises else BLAME)
    text = f"{pick.choice(FILLERS)}the {pick.choice(THINGS)} was {'not ' if is_negated else ''}{word}."
    return text.capitalize(), int(praises != is_negated)


reviews = spark.createDataFrame([sentence() for _ in range(1600)], "review string, label int")
train, test = reviews.randomSplit([0.8, 0.2], seed=7)
train = train.cache()
train.show(4, truncate=False)

# %% [markdown]
# ## From sentences to numbers
#
# Keras' `TextVectorization` makes the text lower case, takes the punctuation away, and cuts it at spaces. With
# `ngrams=2` it counts single words and pairs of neighbors, "not bad" among them.
#
# `adapt` finds its vocabulary in the whole DataFrame: the executors cut and count, and the 400 most frequent come here.

# %%
words = keras.layers.TextVectorization(max_tokens=400, ngrams=2, output_mode="multi_hot")
adapt(words, train, "review")
print([str(word) for word in words.get_vocabulary()[:5]])

# %% [markdown]
# ## The model
#
# The layer is its first one, so the model's input is a string.

# %%
keras.utils.set_random_seed(7)
layers = keras.layers
model = keras.Sequential([keras.Input((), dtype="string"), words, layers.Dense(1, "sigmoid")])
model.compile(keras.optimizers.Adam(0.03), "binary_crossentropy", metrics=["accuracy"])

# %% [markdown]
# ## Train

# %%
estimator = KerasEstimator(
    model=model, featuresCol="review", labelCol="label", numWorkers=2, epochs=8, validationFraction=0.1
)
fitted = estimator.fit(train)
accuracy = fitted.evaluate(test)["accuracy"]
print(f"accuracy {accuracy:.3f}")

# %%
panels = fitted.plot()

# %% [markdown]
# ## Save it, load it, ask it
#
# Nothing besides the folder is needed to read sentences: 0 complains, and 1 praises. Words that the vocabulary does not
# have, such as "sauna", are passed over.

# %%
folder = f"{tempfile.mkdtemp()}/reviews"
fitted.write().overwrite().save(folder)
loaded = KerasModel.load(folder)
asked = ["The sauna was not good.", "The sauna was not bad!", "In winter the garden was lovely."]
answers = loaded.transform(spark.createDataFrame([(text,) for text in asked], "review string"))
answers.select("review", "prediction").show(truncate=False)

# %% [markdown]
# ## What was promised

# %%
assert accuracy > 0.95, accuracy
assert {row.review: row.prediction for row in answers.collect()} == dict(zip(asked, [0.0, 1.0, 1.0], strict=True))

# %% [markdown]
# ## Where to go next
#
# - [Layers that learn from data](../preprocessing.md#layers-that-learn-from-data): `tf_idf`, and what equals one
#   process
# - [A pretrained text classifier](lora.ipynb): a transformer in the place of counted words
# - [Data](../data.md): sequences of different lengths, for models that read words in their order
# - [Serving](../serving.md): the model on a server
