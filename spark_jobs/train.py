"""Train a compiled Keras model on a Parquet table, as a job for ``spark-submit``.

::

    spark-submit spark_jobs/train.py --data table.parquet --model model.keras --output fitted \
        --num-workers 2 --epochs 10

The last line on standard output is the history as JSON. Exit code 0 means that the
fitted model was written, 1 that the job failed (one line on standard error says
why, which ``spark-submit`` passes on in its standard output), 2 that an argument is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

# TensorFlow is quiet here as it is on the workers.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from elephant import KerasEstimator, KerasModel
from elephant.errors import ConfigurationError, DataError, ElephantError


def parse_arguments() -> argparse.Namespace:
    """Returns the job's arguments; wrong ones end the process with exit code 2."""
    parser = argparse.ArgumentParser(description="Train a compiled Keras model on a Parquet table.")
    parser.add_argument("--data", required=True, help="Parquet path with the columns")
    parser.add_argument("--model", required=True, help="compiled .keras file that the driver can open")
    parser.add_argument("--output", required=True, help="path to write the fitted KerasModel to")
    parser.add_argument(
        "--features-col", action="append", help="features column; repeat it for several numeric columns (features)"
    )
    parser.add_argument("--label-col", default="label", help="label column (label)")
    parser.add_argument("--weight-col", help="column of sample weights (none)")
    parser.add_argument("--num-workers", type=int, default=1, help="workers, each one Spark task (1)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the training rows (1)")
    parser.add_argument("--batch-size", type=int, default=32, help="rows per worker and step (32)")
    parser.add_argument("--validation-fraction", type=float, default=0.0, help="share of rows to validate on (0)")
    parser.add_argument("--learning-rate", type=float, help="replaces the one that the model was compiled with")
    parser.add_argument("--mode", default="synchronous", help="synchronous, asynchronous or hogwild (synchronous)")
    parser.add_argument("--frequency", type=steps, default="batch", help="batch, epoch or a number of steps (batch)")
    parser.add_argument("--algorithm", default="downpour", help="what asynchronous workers push (downpour)")
    parser.add_argument("--port", type=int, default=0, help="the parameter server's port; 0 takes a free one (0)")
    parser.add_argument("--seed", type=int, default=0, help="source of the row order and the validation split (0)")
    parser.add_argument("--overwrite", action="store_true", help="replace what is at --output")
    return parser.parse_args()


def steps(text: str) -> str | int:
    """Returns a number where the text is one."""
    return int(text) if text.isdecimal() else text


def load_model(path: str) -> keras.Model:
    """Returns the model; raises ConfigurationError when Keras cannot load it."""
    try:
        return keras.saving.load_model(path)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigurationError(f"--model: expected a compiled .keras file. Received: {path}: {error}") from error


def read_table(session: SparkSession, path: str) -> DataFrame:
    """Returns the table; raises DataError when Spark cannot read it."""
    try:
        return session.read.parquet(path)
    except AnalysisException as error:
        raise DataError(f"--data: expected a Parquet path. Received: {path}: {error}") from error


def refuse_existing(session: SparkSession, path: str) -> None:
    """Raises ConfigurationError when a model is at the path already: before training, not after."""
    try:
        session.read.text(f"{path}/metadata")
    except AnalysisException:
        return
    raise ConfigurationError(
        f"--output: expected a path without a saved model. Received: {path}. Name another one, or pass --overwrite."
    )


def train(session: SparkSession, options: argparse.Namespace) -> KerasModel:
    """Trains as the arguments say, writes the fitted model, and returns it."""
    if not options.overwrite:
        refuse_existing(session, options.output)
    estimator = KerasEstimator(
        model=load_model(options.model),
        featuresCol=options.features_col or "features",
        labelCol=options.label_col,
        weightCol=options.weight_col,
        numWorkers=options.num_workers,
        epochs=options.epochs,
        batchSize=options.batch_size,
        validationFraction=options.validation_fraction,
        learningRate=options.learning_rate,
        mode=options.mode,
        frequency=options.frequency,
        algorithm=options.algorithm,
        port=options.port,
        seed=options.seed,
    )
    fitted = estimator.fit(read_table(session, options.data))
    writer = fitted.write()
    (writer.overwrite() if options.overwrite else writer).save(options.output)
    return fitted


def main() -> int:
    """Runs the job and returns its exit code."""
    options = parse_arguments()
    session = SparkSession.builder.appName("elephant train").getOrCreate()
    try:
        history = train(session, options).history
    except ElephantError as error:
        # The first paragraph, in one line: the rest is a worker's traceback, which the executor's log has too.
        print(f"train.py: {' '.join(str(error).split(chr(10) * 2)[0].split())}", file=sys.stderr)
        return 1
    finally:
        session.stop()
    print(json.dumps(history))
    return 0


if __name__ == "__main__":
    sys.exit(main())
