"""Train a two-tower retrieval model on generated clicks, on two Spark executors of this machine.

One tower makes a vector of a user and of the items clicked last, the other of an item; their dot product says how well
they fit. The tables of users and items are divided over the workers. Each row of the training data is a click, and
items drawn at random, most of which were not clicked. A row's loss does not depend on the other rows of the batch, as
that of negatives out of the batch does: any number of workers trains the same model::

    python examples/two_tower.py --workers 2 --epochs 5
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# TensorFlow is quiet here as it is on the workers; it announces its oneDNN setting unless it is told one.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from elephant import KerasEstimator, ShardedEmbedding
from elephant.cluster.local import local_session
from elephant.errors import ElephantError

USERS, ITEMS, GENRES = 1000, 600, 12
CLICKS, LAST, NEGATIVES = 24, 5, 8
WIDTH = 16
# Of the recall of the most clicked items.
REQUIRED_GAIN = 2.0


def generated_clicks(seed: int = 7) -> np.ndarray:
    """Returns each user's clicks in their order, items of shape (users, clicks), none of which is there twice.

    An item is of one genre, and a user likes few of them. Of a genre some items are clicked far more often than others.
    """
    random = np.random.default_rng(seed)
    genres = random.integers(0, GENRES, ITEMS)
    popularity = random.permutation(1.0 / np.arange(1, ITEMS + 1) ** 0.6)
    tastes = random.dirichlet(np.full(GENRES, 0.1), USERS)
    # The largest of such values are a draw without repetition, in its order (Gumbel).
    values = np.log(tastes[:, genres] * popularity + 1e-12) + random.gumbel(size=(USERS, ITEMS))
    return random.permuted(np.argsort(-values, axis=1)[:, :CLICKS], axis=1)


def training_rows(clicks: np.ndarray, seed: int = 7) -> dict[str, np.ndarray]:
    """Returns a row for each click but a user's first, with the clicks before it, and items drawn at random."""
    random = np.random.default_rng(seed)
    columns: dict[str, list[np.ndarray]] = {"user": [], "history": [], "items": []}
    for place in range(1, clicks.shape[1]):
        before = clicks[:, max(place - LAST, 0) : place]
        columns["user"].append(np.arange(USERS))
        columns["history"].append(np.pad(before, [(0, 0), (0, LAST - before.shape[1])], constant_values=-1))
        columns["items"].append(np.column_stack([clicks[:, place], random.integers(0, ITEMS, (USERS, NEGATIVES))]))
    rows = {name: np.concatenate(parts) for name, parts in columns.items()}
    return {**rows, "clicked": np.tile([1.0] + [0.0] * NEGATIVES, (len(rows["user"]), 1))}


def frame_of(session: SparkSession, rows: dict[str, np.ndarray]) -> DataFrame:
    """Returns a DataFrame with a column for each array; those of several values are arrays."""
    columns = {name: pa.array(list(values) if values.ndim > 1 else values) for name, values in rows.items()}
    return session.createDataFrame(pa.table(columns).to_pandas())


def two_towers() -> keras.Model:
    """Returns the compiled model: logits of shape (rows, items)."""
    user, history = keras.Input((), dtype="int64", name="user"), keras.Input((LAST,), dtype="int64", name="history")
    items = keras.Input((1 + NEGATIVES,), dtype="int64", name="items")
    options = {
        "optimizer": "lazy_adam",
        "learning_rate": 0.02,
        "embeddings_initializer": keras.initializers.RandomNormal(0.0, 0.1),
    }
    of_user = ShardedEmbedding(USERS, WIDTH, seed=1, name="user_table", **options)
    # Both towers look items up; -1 stands for none.
    of_item = ShardedEmbedding(ITEMS, WIDTH, seed=2, name="item", combiner="mean", mask_value=-1, **options)
    joined = keras.layers.Concatenate()([of_user(user), of_item(history)])
    query = keras.layers.Dense(WIDTH, name="query")(joined)
    candidates = of_item(keras.ops.expand_dims(items, -1))
    logits = keras.layers.Dot(axes=(2, 1))([candidates, query])
    model = keras.Model([user, history, items], logits)
    model.compile(keras.optimizers.Adam(0.005), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def recall_at(count: int, scores: np.ndarray, seen: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the share of users of whom the wanted item is among the best so many that they have not seen."""
    scores = scores.copy()
    np.put_along_axis(scores, seen, -np.inf, axis=1)
    best = np.argsort(-scores, axis=1)[:, :count]
    return float(np.mean((best == wanted[:, None]).any(axis=1)))


def main() -> int:
    """Runs the example and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="Spark executors and training workers (default: 2)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the clicks (default: 5)")
    parser.add_argument("--vectors", default="item-vectors", help="folder where to write the items' vectors")
    options = parser.parse_args()

    keras.utils.set_random_seed(7)
    clicks = generated_clicks()
    # The last click of each user is for the test.
    seen, wanted = clicks[:, :-1], clicks[:, -1]
    session = local_session(options.workers)
    try:
        estimator = KerasEstimator(
            two_towers(),
            featuresCol={"user": "user", "history": "history", "items": "items"},
            labelCol="clicked",
            numWorkers=options.workers,
            epochs=options.epochs,
            batchSize=128,
        )
        fitted = estimator.fit(frame_of(session, training_rows(seen)))
        folder = Path(options.vectors).absolute()
        vectors = fitted.table("item").toDF()
        vectors.write.mode("overwrite").parquet(folder.as_uri())
        print(f"\nvectors of {vectors.count()} items, for a search by nearest neighbors: {folder}")
    finally:
        session.stop()

    model = fitted.model
    queries = keras.Model(model.inputs[:2], model.get_layer("query").output)
    found = queries.predict([np.arange(USERS), seen[:, -LAST:]], verbose=0)
    recall = recall_at(10, found @ fitted.table("item").numpy().T, seen, wanted)
    popular = np.tile(np.bincount(seen.ravel(), minlength=ITEMS).astype("float32"), (USERS, 1))
    baseline = recall_at(10, popular, seen, wanted)
    print(f"recall@10 {recall:.3f} on the last click of {USERS} users; the most clicked items have {baseline:.3f}")
    if recall < REQUIRED_GAIN * baseline:
        print(f"expected at least {REQUIRED_GAIN} times the recall of the most clicked items.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ElephantError as error:
        sys.exit(f"two_tower.py: {error}")
