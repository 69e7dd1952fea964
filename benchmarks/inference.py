"""How fast `KerasModel` and `predict_udf` predict and evaluate, against Keras in memory and ``predict_batch_udf``.

::

    python benchmarks/inference.py                  # 200,000 rows of 784 floats, 118k parameters, two executors

Transform reads its rows from a Parquet table, which ``model.predict`` does not have to, and Spark writes what
comes out nowhere (its ``noop`` format). What Spark takes for that with a function that computes nothing is reported
beside it: no function can be faster. The first turn of each, in which the model is loaded and traced, is not counted.
``model.predict`` and ``model.evaluate`` run in a process of its own that uses all cores, with batches of 1024 rows.

All UDFs load the same file with the same function, on the executors, return the same type and get batches of
1024 rows. Spark's calls ``model.predict``, as its documentation has it, and once more ``predict_on_batch``, which is
the fastest that Keras has for one batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pyarrow as pa
from fit import write_parquet
from report import Measurement, median_ratio, report
from team import ANYWHERE, Member, Team
from training import plain_environment
from workloads import PIXELS, build_small_mlp, make_images

_WORKERS = 2
_BATCH_SIZE = 1024
_CHECKED_ROWS = 256


def compute_in_memory(member: Member, rows: int) -> None:
    """A process that predicts or evaluates all rows in each of its turns, and tells how long that took."""
    model, arrays = build_small_mlp(), make_images(rows)
    for turn in member.turns():
        began = time.monotonic()
        if turn == "predict":
            model.predict(arrays["x_train"], batch_size=_BATCH_SIZE, verbose=0)
        else:
            model.evaluate(arrays["x_train"], arrays["y_train"], batch_size=_BATCH_SIZE, verbose=0)
        member.reply(time.monotonic() - began)


def seconds_of(frame: Any) -> float:
    """Returns the seconds in which Spark makes all rows, every column of them."""
    began = time.monotonic()
    frame.write.format("noop").mode("overwrite").save()
    return time.monotonic() - began


def seconds_of_evaluation(fitted: Any, frame: Any) -> float:
    """Returns the seconds in which a model evaluates all rows."""
    began = time.monotonic()
    fitted.evaluate(frame)
    return time.monotonic() - began


def with_zeros(frame: Any) -> Any:
    """Returns the frame with a column that a function makes of the features without looking at them."""
    from pyspark.sql import functions

    def zeros(chunks: Iterator[pa.Array]) -> Iterator[pa.Array]:
        for chunk in chunks:
            yield pa.array(np.zeros(len(chunk)))

    return frame.select("*", functions.arrow_udf(zeros, "double")("features").alias("zero"))


def udfs(path: str) -> tuple[Any, Any, Any]:
    """Returns elephant's UDF of the model in a file, Spark's that predicts, and Spark's that predicts on batches."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    import elephant

    def load() -> Any:
        import keras

        return keras.saving.load_model(path)

    kind = ArrayType(FloatType())

    def of_spark(predicting: Callable[[Any], Callable[..., Any]]) -> Any:
        # Spark counts a function's parameters.
        return predict_batch_udf(
            lambda: predicting(load()), return_type=kind, batch_size=_BATCH_SIZE, input_tensor_shapes=[[PIXELS]]
        )

    return (
        elephant.predict_udf(load, returnType=kind, batchSize=_BATCH_SIZE),
        of_spark(lambda model: lambda rows: model.predict(rows, verbose=0)),
        of_spark(lambda model: lambda rows: model.predict_on_batch(rows)),
    )


def require_equal(ours: Any, theirs: Any, frame: Any) -> None:
    """Ends the script unless both UDFs give the same."""
    rows = frame.limit(_CHECKED_ROWS).select(ours("features").alias("ours"), theirs("features").alias("theirs"))
    if not all(np.allclose(row.ours, row.theirs, atol=1e-5) for row in rows.collect()):
        raise SystemExit("predict_udf: expected what predict_batch_udf gives. Received: something else.")


def require_right(fitted: Any, frame: Any, model: Any) -> None:
    """Ends the script unless some rows' predictions are the model's own."""
    rows = fitted.transform(frame.limit(_CHECKED_ROWS)).select("features", "prediction").collect()
    expected = model.predict(np.array([row.features for row in rows], np.float32), verbose=0).argmax(axis=1)
    if [row.prediction for row in rows] != expected.tolist():
        raise SystemExit("transform: expected the predictions of model.predict. Received: others.")


def measure(rows: int, repetitions: int) -> dict[str, list[float]]:
    """Returns the seconds of each counted turn: of elephant, Keras in memory, Spark alone, and the UDFs."""
    from elephant import KerasModel
    from elephant.cluster.local import local_session
    from elephant.modeling.model_spec import model_source

    names = ("transform", "evaluate", "predict", "keras_evaluate", "spark_alone", "predict_udf", "predict_batch_udf")
    names = (*names, "batch_udf_on_batch")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        write_parquet(make_images(rows), Path(name), _WORKERS)
        # A file per executor, and so a partition: else the last of five parts keeps one core waiting for the other.
        session = local_session(_WORKERS, conf={"spark.sql.files.maxPartitionBytes": str(4 << 30)})
        try:
            frame, model = session.read.parquet(name), build_small_mlp()
            fitted = KerasModel(model_source(model))
            fitted.set(fitted.labelCol, "label")
            model.save(Path(name) / "_model.keras")
            all_udfs = udfs(str(Path(name) / "_model.keras"))
            with Team(compute_in_memory, [ANYWHERE], rows, environment=plain_environment()) as team:
                for turn in range(1 + repetitions):
                    ours = [seconds_of(fitted.transform(frame)), seconds_of_evaluation(fitted, frame)]
                    theirs = []
                    for what in ("predict", "evaluate"):
                        team.ask(what)
                        theirs += team.replies()
                    alone = seconds_of(with_zeros(frame))
                    by_udf = [seconds_of(frame.select("*", one("features"))) for one in all_udfs]
                    if turn:
                        turns = (*ours, *theirs, alone, *by_udf)
                        for taken, each in zip(seconds.values(), turns, strict=True):
                            taken.append(each)
            require_right(fitted, frame, model)
            require_equal(*all_udfs[:2], frame)
        finally:
            session.stop()
    return seconds


def main() -> None:
    """Measures both sides, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="to predict (200000)")
    parser.add_argument("--repetitions", type=int, default=5, help="of both sides (5)")
    options = parser.parse_args()
    seconds = measure(options.rows, options.repetitions)
    comparisons = (
        ("transform_against_predict", "predict", "transform", 0.5),
        ("transform_against_spark_alone", "spark_alone", "transform", None),
        ("evaluate_against_transform", "transform", "evaluate", 1.0),
        ("evaluate_against_keras", "keras_evaluate", "evaluate", None),
        ("predict_udf_against_predict_batch_udf", "predict_batch_udf", "predict_udf", 2.0),
        ("predict_udf_against_predict_on_batch", "batch_udf_on_batch", "predict_udf", None),
    )
    for name, theirs, ours, target in comparisons:
        report(
            Measurement(
                measure=name,
                case={"workload": "mlp_118k", "rows": options.rows, "executors": _WORKERS},
                ratio=median_ratio(seconds[theirs], seconds[ours]),
                target=target,
                at_least=True,
                medians={f"{each}_rows_per_s": options.rows / statistics.median(s) for each, s in seconds.items()},
                repetitions=options.repetitions,
            )
        )


if __name__ == "__main__":
    main()
