# %% [markdown]
# # A recommender
#
# You have clicks, and want to know which items each user may like next. Here a model of two towers learns it: one makes
# a vector of a user and of the items that were clicked last, the other a vector of an item, and the closer the two are,
# the better they fit. At the end its ten best items hold the next click of a user more than twice as often as the ten
# most popular ones, and the vectors of all items are in a table, for a search by nearest neighbors.
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

from elephant import KerasEstimator, ShardedEmbedding  # first, and TensorFlow starts without lines of its own

# Spark's workers run the same Python as this one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import tempfile

import keras
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## Clicks
#
# They are made here: 1,000 users click 24 of 600 items each. An item is of one genre, and a user likes few of them. Of
# a genre some items are clicked far more often than others. The last click of each user is kept for the test.

# %%
USERS, ITEMS, GENRES, CLICKS, LAST, NEGATIVES = 1000, 600, 12, 24, 5, 8
rng = np.random.default_rng(7)
genres = rng.integers(0, GENRES, ITEMS)
popularity = rng.permutation(1.0 / np.arange(1, ITEMS + 1) ** 0.6)
tastes = rng.dirichlet(np.full(GENRES, 0.1), USERS)
# The largest of such values are a draw without repetition.
values = np.log(tastes[:, genres] * popularity + 1e-12) + rng.gumbel(size=(USERS, ITEMS))
clicks = rng.permuted(np.argsort(-values, axis=1)[:, :CLICKS], axis=1)
seen, wanted = clicks[:, :-1], clicks[:, -1]

# %% [markdown]
# ## Rows to train on
#
# A row is a click of a user: the five clicks before it, the item itself, and eight items drawn at random, most of which
# the user does not want. The label says which is which. A history that is shorter is filled up with -1.
#
# The negatives are in the row, and not borrowed from the other rows of the batch, as is often done. So the loss of a
# row does not depend on who else is in its batch, and any number of workers trains the same model.

# %%
parts = []
for place in range(1, CLICKS - 1):
    before = seen[:, max(place - LAST, 0) : place]
    history = np.pad(before, [(0, 0), (0, LAST - before.shape[1])], constant_values=-1)
    items = np.column_stack([seen[:, place], rng.integers(0, ITEMS, (USERS, NEGATIVES))])
    parts.append(pd.DataFrame({"user": np.arange(USERS), "history": list(history), "items": list(items)}))
rows = pd.concat(parts)
rows["clicked"] = [[1.0] + [0.0] * NEGATIVES] * len(rows)
train = spark.createDataFrame(rows)
train.show(3, truncate=False)

# %% [markdown]
# ## The model
#
# `ShardedEmbedding` takes the place of `keras.layers.Embedding` where a table has many rows. Each worker keeps a part
# of it, and a step fetches and updates only the rows that it names. Tables have an optimizer of their own:
# `lazy_adam` leaves rows alone that a step does not name.
#
# Both towers look items up in one table. `combiner="mean"` makes one vector of several ids, and `mask_value=-1` is
# the id that stands for none.

# %%
keras.utils.set_random_seed(7)
WIDTH = 16
options = {
    "optimizer": "lazy_adam",
    "learning_rate": 0.02,
    "embeddings_initializer": keras.initializers.RandomNormal(0.0, 0.1),
}
user = keras.Input((), dtype="int64", name="user")
history = keras.Input((LAST,), dtype="int64", name="history")
items = keras.Input((1 + NEGATIVES,), dtype="int64", name="items")
of_user = ShardedEmbedding(USERS, WIDTH, seed=1, name="user_table", **options)
of_item = ShardedEmbedding(ITEMS, WIDTH, seed=2, name="item", combiner="mean", mask_value=-1, **options)
joined = keras.layers.Concatenate()([of_user(user), of_item(history)])
query = keras.layers.Dense(WIDTH, name="query")(joined)
candidates = of_item(keras.ops.expand_dims(items, -1))
model = keras.Model([user, history, items], keras.layers.Dot(axes=(2, 1))([candidates, query]))
model.compile(keras.optimizers.Adam(0.005), keras.losses.BinaryCrossentropy(from_logits=True))

# %% [markdown]
# ## Train

# %%
estimator = KerasEstimator(
    model,
    featuresCol={"user": "user", "history": "history", "items": "items"},
    labelCol="clicked",
    numWorkers=2,
    epochs=5,
    batchSize=128,
)
fitted = estimator.fit(train)

# %% [markdown]
# ## The vectors
#
# `fitted.table` gives the rows of an embedding layer, as a DataFrame or as an array. What searches for neighbors,
# such as an index of FAISS or a vector database, takes them from the Parquet files.

# %%
vectors = fitted.table("item").toDF()
vectors.write.mode("overwrite").parquet(f"{tempfile.mkdtemp(prefix='items-')}/vectors")
vectors.orderBy("id").show(3)

# %% [markdown]
# ## Recommend
#
# A part of the model, from its inputs to the layer `query`, makes the vectors of the users. Their products with the
# vectors of the items are the scores. Items that a user has clicked already are left out.

# %%
towers = fitted.model
queries = keras.Model(towers.inputs[:2], towers.get_layer("query").output)
users = queries.predict([np.arange(USERS), seen[:, -LAST:]], verbose=0)


def best(scores):
    scores = scores.copy()
    np.put_along_axis(scores, seen, -np.inf, axis=1)
    return np.argsort(-scores, axis=1)


recommended = best(users @ fitted.table("item").numpy().T)
for number in range(3):
    liked = np.bincount(genres[seen[number]], minlength=GENRES).argsort()[::-1][:2].tolist()
    found = np.isin(genres[recommended[number, :10]], liked).sum()
    print(f"user {number} has clicked genres {liked} most: {found} of the ten best items are of these")

# %% [markdown]
# ## Compare
#
# How often is the last click, which the training has not seen, among the first ten? The rule to beat gives everybody
# the items that are clicked most.

# %%
popular = best(np.tile(np.bincount(seen.ravel(), minlength=ITEMS).astype("float32"), (USERS, 1)))


def recall(ranking, count):
    return float(np.mean((ranking[:, :count] == wanted[:, None]).any(axis=1)))


print(f"recall@10 {recall(recommended, 10):.3f}, of the most clicked items {recall(popular, 10):.3f}")
counts = range(1, 51)
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot(counts, [recall(recommended, count) for count in counts], label="two towers")
axes.plot(counts, [recall(popular, count) for count in counts], label="most clicked")
axes.set_xlabel("items shown")
axes.set_ylabel("share of next clicks among them")
axes.grid(alpha=0.3)
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## What was promised

# %%
assert recall(recommended, 10) > 2 * recall(popular, 10)
assert vectors.count() == ITEMS

# %% [markdown]
# ## Where to go next
#
# - [Embedding tables](../embeddings.md): hashed ids, tables that no machine holds, what a table learns
# - [`examples/ranking.py`](../../examples/ranking.py): the model that puts the items which were found in their order
# - [Asynchronous training](../asynchronous.md): tables at parameter servers, workers at their own pace
