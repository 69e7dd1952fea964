"""Teach a text classifier of KerasHub with LoRA, on two Spark executors of this machine: its base stays frozen.

A preset is a folder with a backbone, its tokenizer and their settings. A real one is downloaded by its name, such as
``bert_tiny_en_uncased``; here a tiny one is made, without a download and without anything that it has learned::

    pip install keras-hub
    python examples/lora_classifier.py
    python examples/lora_classifier.py --preset bert_tiny_en_uncased
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile

# TensorFlow is quiet here as it is on the workers; it announces its oneDNN setting unless it is told one.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import keras_hub
from pyspark.ml.evaluation import MulticlassClassificationEvaluator

from elephant import KerasEstimator
from elephant.cluster.local import local_session
from elephant.errors import ElephantError

REQUIRED_ACCURACY = 0.95
RANK = 4
THINGS = ["room", "breakfast", "staff", "view", "pool", "bed", "bar", "lift"]
PRAISE = ["good", "clean", "friendly", "lovely", "great", "quiet"]
BLAME = ["bad", "dirty", "rude", "awful", "noisy", "cold"]


def save_tiny_preset(folder):
    """Writes a preset of a BERT of two layers that knows the words of this example."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, "the", "was", "not", ".", *THINGS, *PRAISE, *BLAME]
    keras.utils.set_random_seed(7)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(words), num_layers=2, num_heads=2, hidden_dim=64, intermediate_dim=128,
        max_sequence_length=16, dropout=0.0,
    )  # fmt: skip
    tokenizer = keras_hub.models.BertTokenizer(words, lowercase=True)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=12)
    keras_hub.models.BertTextClassifier(backbone, 2, preprocessor, dropout=0.0).save_to_preset(folder)


def reviews(count):
    """Yields sentences and whether they praise; half of them have a "not", so that single words do not tell."""
    pick = random.Random(7)
    for _ in range(count):
        praises, is_negated = pick.random() < 0.5, pick.random() < 0.5
        word = pick.choice(PRAISE if praises else BLAME)
        yield f"The {pick.choice(THINGS)} was {'not ' if is_negated else ''}{word}.", int(praises != is_negated)


def adapted(preset):
    """Returns the preset's classifier, compiled: of its backbone the adapters of the attention are trained alone."""
    model = keras_hub.models.TextClassifier.from_preset(preset, num_classes=2, preprocessor=None)
    model.backbone.enable_lora(RANK)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def train_and_test(frame, preset, workers, epochs):
    """Returns the fitted model and its accuracy on a fifth of the rows, which it has not seen."""
    train, test = frame.randomSplit([0.8, 0.2], seed=7)
    preprocessor = []

    def tokens(batch):
        if not preprocessor:
            # Read once in each training process.
            preprocessor.append(keras_hub.models.TextClassifierPreprocessor.from_preset(preset))
        return preprocessor[0](batch["review"].tolist())

    estimator = KerasEstimator(
        model=lambda: adapted(preset),
        featuresCol=["review"],
        labelCol="label",
        preprocessing=tokens,
        numWorkers=workers,
        epochs=epochs,
        validationFraction=0.1,
    )
    fitted = estimator.fit(train)
    predictions = fitted.transform(test)
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predictions)
    return fitted, accuracy


def main() -> int:
    """Runs the example and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", help="a name that KerasHub knows, or a folder (default: a tiny one is made)")
    parser.add_argument("--workers", type=int, default=2, help="Spark executors and training workers (default: 2)")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training rows (default: 12)")
    options = parser.parse_args()

    session = local_session(options.workers)
    try:
        preset = options.preset or f"{tempfile.mkdtemp()}/tiny"
        if options.preset is None:
            save_tiny_preset(preset)
        frame = session.createDataFrame(reviews(1600), "review string, label int")
        fitted, accuracy = train_and_test(frame, preset, options.workers, options.epochs)
        trained = sum(math.prod(variable.shape) for variable in fitted.model.trainable_variables)
        print(f"\ntest accuracy {accuracy:.4f}, with {trained:,} of {fitted.model.count_params():,} weights trained")
        sent = max(part["bytes_sent"] for part in fitted.summary.ranks if part["epoch"] == options.epochs - 1)
        print(f"bytes that a worker has sent in the last epoch: {sent:,}")
    finally:
        session.stop()
    if accuracy < REQUIRED_ACCURACY:
        print(f"expected a test accuracy of at least {REQUIRED_ACCURACY}. Received: {accuracy:.4f}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ElephantError as error:
        sys.exit(f"lora_classifier.py: {error}")
