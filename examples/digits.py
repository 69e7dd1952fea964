"""Train a small classifier on 1,797 real images of handwritten digits, on two Spark executors of this machine.

The images are UCI's, as scikit-learn carries them. Run it with ``make demo``, or::

    python examples/digits.py --workers 2 --epochs 30
    python examples/digits.py --mode asynchronous
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from pathlib import Path

# TensorFlow is quiet here as it is on the workers; it announces its oneDNN setting unless it is told one.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits

from elephant import KerasEstimator
from elephant.cluster.local import local_session
from elephant.errors import ElephantError
from elephant.monitor.progress import save_curves

REQUIRED_ACCURACY = 0.95


def digits_frame(session: SparkSession) -> DataFrame:
    """Returns the images as rows: ``features`` array<double> of 64 values in [0, 1], ``label`` from 0 to 9."""
    digits = load_digits()
    rows = [(row.tolist(), int(label)) for row, label in zip(digits.data / 16.0, digits.target, strict=True)]
    return session.createDataFrame(rows, "features array<double>, label int")


def main() -> int:
    """Runs the example and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="Spark executors and training workers (default: 2)")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (default: 30)")
    parser.add_argument("--mode", default="synchronous", help="synchronous, asynchronous or hogwild")
    parser.add_argument("--curves", default="digits-curves.png", help="where to draw loss and accuracy")
    options = parser.parse_args()

    keras.utils.set_random_seed(7)
    session = local_session(options.workers)
    try:
        frame = digits_frame(session)
        fitted, accuracy = train_and_test(frame, options.mode, options.workers, options.epochs)
        print(f"\ntest accuracy {accuracy:.4f} (transform, then Spark's MulticlassClassificationEvaluator)")
        print(f"loss and accuracy curves: {save_curves(fitted.history, Path(options.curves))}")
        print("\nThe lines that did it:\n")
        print(inspect.getsource(train_and_test).split('"""', 2)[2].strip("\n"))
    finally:
        session.stop()
    if accuracy < REQUIRED_ACCURACY:
        print(f"expected a test accuracy of at least {REQUIRED_ACCURACY}. Received: {accuracy:.4f}.", file=sys.stderr)
        return 1
    return 0


def train_and_test(frame, mode, workers, epochs):
    """Returns the fitted model and its accuracy on a fifth of the rows, which it has not seen."""
    train, test = frame.randomSplit([0.8, 0.2], seed=7)
    layers = keras.layers
    model = keras.Sequential([layers.Input((64,)), layers.Dense(128, "relu"), layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])
    estimator = KerasEstimator(
        model=model,
        featuresCol="features",
        labelCol="label",
        mode=mode,
        numWorkers=workers,
        epochs=epochs,
        validationFraction=0.1,
    )
    fitted = estimator.fit(train)
    predictions = fitted.transform(test)
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predictions)
    return fitted, accuracy


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ElephantError as error:
        sys.exit(f"digits.py: {error}")
