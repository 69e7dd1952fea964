"""Train a classifier of handwritten digits with a training loop of one's own, on one worker or on several.

The images are UCI's, as scikit-learn carries them. The same script runs in one
process, without Spark, and on Spark executors of this machine or of a cluster::

    python examples/custom_loop.py
    python examples/custom_loop.py --workers 2
    spark-submit examples/custom_loop.py --workers 2
"""

from __future__ import annotations

import argparse
import os
import sys

# TensorFlow is quiet here as it is on the workers; it announces its oneDNN setting unless it is told one.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import numpy as np

import elephant
from elephant.errors import ElephantError

REQUIRED_ACCURACY = 0.95
# Rows of a step on all workers together.
GLOBAL_BATCH = 128


def train(epochs):
    """Trains on this worker's part of the rows; returns the losses of the epochs, and the accuracy on unseen rows."""
    import keras
    import tensorflow as tf
    from sklearn.datasets import load_digits

    from elephant import collective

    keras.utils.set_random_seed(7)
    digits = load_digits()
    features, labels = (digits.data / 16.0).astype("float32"), digits.target
    order = np.random.default_rng(7).permutation(len(labels))
    test, training = order[:360], order[360:]

    layers = keras.layers
    model = keras.Sequential([layers.Input((64,)), layers.Dense(128, "relu"), layers.Dense(10)])
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rows = np.arange(0)
    optimizer = elephant.DistributedOptimizer(keras.optimizers.Adam(0.003), num_rows=lambda: len(rows))
    elephant.broadcast_variables(model.variables)
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = []
    for epoch in range(epochs):
        shuffled, total = np.random.default_rng(epoch).permutation(training), np.zeros(2)
        for start in range(0, len(shuffled), GLOBAL_BATCH):
            # Every worker draws the same order and takes its own part of each step's rows.
            parts = np.array_split(shuffled[start : start + GLOBAL_BATCH], collective.world_size())
            rows = parts[collective.rank()]
            total += len(rows) * float(step(features[rows], labels[rows])), len(rows)
        collective.allreduce_(total)
        losses.append(total[0] / total[1])

    mine = np.array_split(test, collective.world_size())[collective.rank()]
    right = np.sum(np.argmax(model.predict(features[mine], verbose=0), axis=-1) == labels[mine])
    right, asked = collective.allreduce(np.array([right, len(mine)]))
    return losses, float(right / asked)


def main() -> int:
    """Runs the example and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="1 runs here, more on Spark executors (default: 1)")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (default: 30)")
    options = parser.parse_args()

    results = elephant.run(train, args=(options.epochs,), num_workers=options.workers)
    for rank, (losses, accuracy) in enumerate(results):
        print(f"rank {rank}: loss {losses[0]:.4f} to {losses[-1]:.4f}, accuracy on unseen rows {accuracy:.4f}")
    return 0 if results[0][1] >= REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ElephantError as error:
        sys.exit(f"custom_loop.py: {error}")
