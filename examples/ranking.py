"""Train a ranking model on generated clicks on advertisements, on two Spark executors of this machine.

Each row is an advertisement that a user saw: who, which, on what page, at what hour, and two numbers; the model says
how likely a click is. Users have ids of 64 bits, which are hashed. The tables are divided over the workers::

    python examples/ranking.py --workers 2 --epochs 3
"""

from __future__ import annotations

import argparse
import os
import sys

# TensorFlow is quiet here as it is on the workers; it announces its oneDNN setting unless it is told one.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import numpy as np
import pandas as pd
from pyspark.ml.evaluation import BinaryClassificationEvaluator

from elephant import KerasEstimator, ShardedEmbedding
from elephant.cluster.local import local_session
from elephant.errors import ElephantError

USERS, ADS, PAGES, HOURS = 200, 100, 40, 24
BUCKETS, WIDTH = 5000, 8
REQUIRED_AUC = 0.75


def generated_views(count: int, seed: int = 7) -> pd.DataFrame:
    """Returns views of advertisements, with whether they were ``clicked``, and how likely that was: ``chance``."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 2**62, USERS)
    user, ad, page, hour = (random.integers(0, many, count) for many in (USERS, ADS, PAGES, HOURS))
    age, price = random.normal(size=count), random.normal(size=count)
    tastes, topics = random.normal(size=(USERS, 2)), random.normal(size=(ADS, 2))
    effects = [random.normal(0, deviation, many) for deviation, many in ((0.8, USERS), (0.8, ADS), (0.5, PAGES))]
    logits = effects[0][user] + effects[1][ad] + effects[2][page] + 0.4 * np.sin(hour / HOURS * 2 * np.pi)
    logits += np.sum(tastes[user] * topics[ad], axis=1) * 0.7 + 0.3 * age - 0.5 * price - 1.0
    chance = 1 / (1 + np.exp(-logits))
    clicked = (random.random(count) < chance).astype("float64")
    columns = {"user": ids[user], "ad": ad, "page": page, "hour": hour, "age": age, "price": price}
    return pd.DataFrame({**columns, "clicked": clicked, "chance": chance})


def ranking_model() -> keras.Model:
    """Returns the compiled model: the chance of a click, of shape (rows, 1)."""
    ids = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "ad", "page", "hour")}
    numbers = keras.Input((2,), name="numbers")
    options = {"optimizer": "lazy_adam", "learning_rate": 0.01}
    rows = [
        ShardedEmbedding(num_hash_buckets=BUCKETS, output_dim=WIDTH, seed=1, name="users", **options)(ids["user"]),
        ShardedEmbedding(ADS, WIDTH, seed=2, name="ads", **options)(ids["ad"]),
        ShardedEmbedding(PAGES, WIDTH, seed=3, name="pages", **options)(ids["page"]),
        ShardedEmbedding(HOURS, WIDTH, seed=4, name="hours", **options)(ids["hour"]),
    ]
    # How well a user and an advertisement go together, beside what each of them does by itself.
    matches = keras.layers.Multiply()(rows[:2])
    hidden = keras.layers.Dense(32, "relu")(keras.layers.Concatenate()([*rows, matches, numbers]))
    model = keras.Model({**ids, "numbers": numbers}, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(keras.optimizers.Adam(0.003), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


def main() -> int:
    """Runs the example and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="Spark executors and training workers (default: 2)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the views (default: 3)")
    options = parser.parse_args()

    keras.utils.set_random_seed(7)
    session = local_session(options.workers)
    try:
        views = session.createDataFrame(generated_views(24_000))
        train, test = views.randomSplit([0.8, 0.2], seed=7)
        estimator = KerasEstimator(
            ranking_model(),
            featuresCol={**{name: name for name in ("user", "ad", "page", "hour")}, "numbers": ["age", "price"]},
            labelCol="clicked",
            numWorkers=options.workers,
            epochs=options.epochs,
            batchSize=128,
        )
        fitted = estimator.fit(train)
        predicted = fitted.transform(test)
        auc, best = (
            BinaryClassificationEvaluator(rawPredictionCol=column, labelCol="clicked").evaluate(predicted)
            for column in ("rawPrediction", "chance")
        )
        print(
            f"\nAUC {auc:.3f} on views that it has not seen; the chances that the clicks were drawn by have {best:.3f}"
        )
        print(f"the first of its tables: {fitted.table('users')}")
    finally:
        session.stop()
    if auc < REQUIRED_AUC:
        print(f"expected an AUC of at least {REQUIRED_AUC}. Received: {auc:.3f}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ElephantError as error:
        sys.exit(f"ranking.py: {error}")
