"""A driver on a host of its own: each line of its standard input is a fit to do, each ``ANSWER`` line says how it went.

It stands apart from the tests because it lives in another network namespace, and for all
tests of a folder because its JVM and its import of Keras take seconds.
"""

import json
import sys
import traceback

import keras
from counting_model import counting_data, counting_model
from keras_reference import classifier_data, regression_model
from pyspark.sql import SparkSession
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator
from elephant.errors import WorkerFailure

SCHEMA = "features array<double>, label double"


def step_marker(folder, pause_s):
    """Returns a callback that makes steps last, and writes a letter for each to a file named after its address.

    While there is a file ``hold-ADDRESS``, no more steps than it says are made there.
    """

    class Marker(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            import os
            import time
            from pathlib import Path

            address = os.environ.get("SPARK_EXECUTOR_POD_IP") or os.environ["SPARK_LOCAL_IP"]
            with open(os.path.join(folder, address), "a") as file:
                file.write("x")
            time.sleep(pause_s)
            made, hold = Path(folder, address), Path(folder, f"hold-{address}")
            while hold.exists() and made.stat().st_size >= int(hold.read_text()):
                time.sleep(0.02)

    return Marker()


def fit(session, *, data, rows, marker, pause_s, timeouts, **options):
    """Fits on two workers, half of the rows each, unless told otherwise; returns what there is to tell of it."""
    columns, model = (
        (counting_data(rows), counting_model())
        if data == "counting"
        else (classifier_data(rows), regression_model("sgd"))
    )
    frame = partitioned_frame(session, split_rows(columns, (rows // 2, rows // 2)), SCHEMA)
    callbacks = [step_marker(marker, pause_s)]
    options = {"numWorkers": 2, "verbose": 2, **options}
    estimator = KerasEstimator(model, timeouts=timeouts, callbacks=callbacks, **options)
    try:
        fitted = estimator.fit(frame)
    except WorkerFailure as error:
        return {"error": str(error), "rank": error.rank, "host": error.host}
    except (Exception, KeyboardInterrupt):
        return {"error": traceback.format_exc()}
    return {"weights": [weight.tolist() for weight in fitted.model.get_weights()]}


def main():
    """Serves until its standard input ends."""
    session = SparkSession.builder.getOrCreate()
    # Executors and their Python start now, and not in the time of whichever test comes first.
    session.sparkContext.parallelize(range(2), 2).map(str).collect()
    answer({"ready": True})
    for line in sys.stdin:
        answer(fit(session, **json.loads(line)))
    session.stop()


def answer(value):
    """Writes one line for the test."""
    sys.stdout.write(f"\nANSWER {json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
