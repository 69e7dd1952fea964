"""How fast `KerasModel` and `predict_udf` predict and evaluate, against Keras in memory and ``predict_batch_udf``.

::

    python benchmarks/inference.py                     # 200,000 images, 2,000,000 rows of ten columns, 1,000,000 texts
    python benchmarks/inference.py --only ten_columns

Images are 784 floats, texts the ids of 80 tokens. Transform reads its rows from a Parquet table, which
``model.predict`` does not have to, and Spark writes what comes out nowhere (its ``noop`` format). What Spark takes for
that with a function that computes nothing is reported beside it: no function can be faster. Transform and evaluate are
given the path of the table, too: tasks read its files then, and Spark gets labels and predictions alone. The first turn
of each, in which the model is loaded and traced, is not counted.
``model.predict`` and ``model.evaluate`` run in a process of its own that uses all cores, with batches of 1024 or 8192
rows, whichever is quicker.

UDFs take their turns when all others have had theirs: ``predict_batch_udf`` imports Keras into Spark's Python worker,
where elephant then computes too, instead of in a process beside it. All UDFs load the same file with the same function,
on the executors, return the same type and get batches of 1024 rows. Spark's calls ``model.predict``, as its
documentation has it, and once more ``predict_on_batch``, which is the fastest that Keras has for one batch.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from report import Measurement, median_ratio, report
from team import ANYWHERE, Member, Team
from training import plain_environment
from workloads import CLASSES, PIXELS, TOKENS, VOCABULARY, build_small_mlp, make_images

_WORKERS = 2
_BATCH_SIZE = 1024
_SIZES_IN_MEMORY = (1024, 8192)
_CHECKED_ROWS = 256
_COLUMNS = tuple(f"c{place}" for place in range(10))
Arrays = dict[str, np.ndarray]


def make_columns(rows: int) -> Arrays:
    """Returns rows of ten numbers, and whether their sum is positive, in the form of `make_images`."""
    values = np.random.default_rng(1).normal(size=(rows, len(_COLUMNS))).astype(np.float32)
    return {"x_train": values, "y_train": (values.sum(axis=1) > 0).astype(np.int32)}


def write_columns(arrays: Arrays, folder: Path, files: int) -> None:
    """Writes the rows as so many Parquet files, a column for each number."""
    for number, rows in enumerate(np.array_split(np.arange(len(arrays["y_train"])), files)):
        columns = dict(zip(_COLUMNS, arrays["x_train"][rows].T, strict=True))
        pq.write_table(pa.table({**columns, "label": arrays["y_train"][rows]}), folder / f"part-{number}.parquet")


def build_for_columns() -> Any:
    """Returns a model of ten numbers: 4,929 parameters."""
    import keras

    layers = keras.layers
    layers = [layers.Input((len(_COLUMNS),)), *(layers.Dense(64, "relu") for _ in range(2)), layers.Dense(2, "softmax")]
    model = keras.Sequential(layers)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def make_texts(rows: int) -> Arrays:
    """Returns rows of the ids of 80 tokens, and a class for each, in the form of `make_images`."""
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (rows, TOKENS), np.int32)
    return {"x_train": ids, "y_train": ids.sum(axis=1, dtype=np.int32) % CLASSES}


def write_lists(arrays: Arrays, folder: Path, files: int) -> None:
    """Writes the rows as so many Parquet files, a list for each row."""
    for number, rows in enumerate(np.array_split(np.arange(len(arrays["y_train"])), files)):
        values = arrays["x_train"][rows]
        offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
        features = pa.ListArray.from_arrays(offsets, values.ravel())
        pq.write_table(
            pa.table({"features": features, "label": arrays["y_train"][rows]}), folder / f"part-{number}.parquet"
        )


def build_for_texts() -> Any:
    """Returns a classifier of bags of words: 64,650 parameters."""
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((TOKENS,), dtype="int32"),
            layers.Embedding(VOCABULARY, 32),
            layers.GlobalAveragePooling1D(),
            layers.Dense(CLASSES, "softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@dataclass(frozen=True)
class Case:
    """A model and its rows.

    Args:
        build: Returns the compiled model.
        make: Returns so many rows.
        write: Writes rows as so many Parquet files.
        features: The columns that the model takes.
        target: Rows per second of transform on a path, over those of ``model.predict``.
    """

    build: Callable[[], Any]
    make: Callable[[int], Arrays]
    write: Callable[[Arrays, Path, int], None]
    features: tuple[str, ...]
    target: float


_CASES: Mapping[str, Case] = {
    "mlp_118k": Case(build_small_mlp, make_images, write_lists, ("features",), 0.8),
    "ten_columns": Case(build_for_columns, make_columns, write_columns, _COLUMNS, 0.9),
    "texts": Case(build_for_texts, make_texts, write_lists, ("features",), 0.8),
}


def compute_in_memory(member: Member, name: str, rows: int) -> None:
    """A process that predicts or evaluates all rows in each of its turns, and tells how long that took.

    In its first turn of each kind it tries the sizes of batches, and stays with the quickest.
    """
    model, arrays = _CASES[name].build(), _CASES[name].make(rows)
    sizes: dict[str, int] = {}

    def seconds(turn: str, size: int) -> float:
        began = time.monotonic()
        if turn == "predict":
            model.predict(arrays["x_train"], batch_size=size, verbose=0)
        else:
            model.evaluate(arrays["x_train"], arrays["y_train"], batch_size=size, verbose=0)
        return time.monotonic() - began

    for turn in member.turns():
        if turn not in sizes:
            # Twice, as the first time of each is traced.
            took = {size: min(seconds(turn, size) for _ in range(2)) for size in _SIZES_IN_MEMORY}
            sizes[turn] = min(took, key=took.__getitem__)
        member.reply(seconds(turn, sizes[turn]))


def seconds_of(frame: Any) -> float:
    """Returns the seconds in which Spark makes all rows, every column of them."""
    began = time.monotonic()
    frame.write.format("noop").mode("overwrite").save()
    return time.monotonic() - began


def seconds_of_evaluation(fitted: Any, dataset: Any) -> float:
    """Returns the seconds in which a model evaluates all rows."""
    began = time.monotonic()
    fitted.evaluate(dataset)
    return time.monotonic() - began


def with_zeros(frame: Any, features: tuple[str, ...]) -> Any:
    """Returns the frame with a column that a function makes of the features without looking at them."""
    from pyspark.sql import functions

    def zeros(chunks: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        for chunk in chunks:
            yield pa.array(np.zeros(len(chunk[0])))

    # One column more than the features: Spark hands a single one on alone.
    made = functions.arrow_udf(zeros, "double")(*features, functions.lit(0))
    return frame.select("*", made.alias("zero"))


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


def require_right(fitted: Any, frame: Any, model: Any, features: tuple[str, ...]) -> None:
    """Ends the script unless some rows' predictions are the model's own."""
    rows = fitted.transform(frame.limit(_CHECKED_ROWS)).select(*features, "prediction").collect()
    inputs = [row[0] if len(features) == 1 else row[: len(features)] for row in rows]
    expected = model.predict(np.array(inputs, np.float32), verbose=0).argmax(axis=1)
    if [row.prediction for row in rows] != expected.tolist():
        raise SystemExit("transform: expected the predictions of model.predict. Received: others.")


def measure(name: str, rows: int, repetitions: int) -> dict[str, list[float]]:
    """Returns the seconds of each counted turn: of elephant, Keras in memory, Spark alone, and of images the UDFs."""
    from elephant import KerasModel
    from elephant.cluster.local import local_session
    from elephant.modeling.model_spec import model_source

    case = _CASES[name]
    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as folder:
        case.write(case.make(rows), Path(folder), _WORKERS)
        # A file per executor, and so a partition: else the last of five parts keeps one core waiting for the other.
        session = local_session(_WORKERS, conf={"spark.sql.files.maxPartitionBytes": str(4 << 30)})
        try:
            frame, model = session.read.parquet(folder), case.build()
            fitted = KerasModel(model_source(model))
            fitted.setLabelCol("label").setFeaturesCol(list(case.features))
            with Team(compute_in_memory, [ANYWHERE], name, rows, environment=plain_environment()) as team:

                def seconds_in_memory(what: str) -> float:
                    team.ask(what)
                    return float(team.replies()[0])

                seconds = _turns(
                    {
                        "transform": lambda: seconds_of(fitted.transform(frame)),
                        "transform_path": lambda: seconds_of(fitted.transform(folder, columns=["label"])),
                        "evaluate": lambda: seconds_of_evaluation(fitted, frame),
                        "evaluate_path": lambda: seconds_of_evaluation(fitted, folder),
                        "predict": lambda: seconds_in_memory("predict"),
                        "keras_evaluate": lambda: seconds_in_memory("evaluate"),
                        "spark_alone": lambda: seconds_of(with_zeros(frame, case.features)),
                    },
                    repetitions,
                )
            require_right(fitted, frame, model, case.features)
            if name == "mlp_118k":
                model.save(Path(folder) / "_model.keras")
                ours, *theirs = udfs(str(Path(folder) / "_model.keras"))
                names = ("predict_udf", "predict_batch_udf", "batch_udf_on_batch")
                frames = [frame.select("*", one("features")) for one in (ours, *theirs)]
                turns = {each: functools.partial(seconds_of, made) for each, made in zip(names, frames, strict=True)}
                seconds |= _turns(turns, repetitions)
                require_equal(ours, theirs[0], frame)
        finally:
            session.stop()
    return seconds


def _turns(contenders: Mapping[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Returns what each contender took in its turns, without the first."""
    turns = [{name: take() for name, take in contenders.items()} for _ in range(1 + repetitions)]
    return {name: [turn[name] for turn in turns[1:]] for name in contenders}


def main() -> None:
    """Measures all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="of 784 floats (200000)")
    parser.add_argument("--repetitions", type=int, default=5, help="of both sides (5)")
    parser.add_argument("--columns-rows", type=int, default=2_000_000, help="of ten columns (2000000)")
    parser.add_argument("--text-rows", type=int, default=1_000_000, help="of text (1000000)")
    parser.add_argument("--only", choices=_CASES, help="one of the cases")
    options = parser.parse_args()
    counts = {"mlp_118k": options.rows, "ten_columns": options.columns_rows, "texts": options.text_rows}
    for name, rows in counts.items():
        if options.only in (None, name):
            report_case(name, rows, measure(name, rows, options.repetitions))


def report_case(name: str, rows: int, seconds: Mapping[str, list[float]]) -> None:
    """Prints the comparisons of one case."""
    comparisons = (
        ("transform_against_predict", "predict", "transform", 0.5),
        ("transform_against_spark_alone", "spark_alone", "transform", None),
        ("evaluate_against_transform", "transform", "evaluate", 1.0),
        ("evaluate_against_keras", "keras_evaluate", "evaluate", None),
        ("transform_path_against_predict", "predict", "transform_path", _CASES[name].target),
        ("evaluate_path_against_keras", "keras_evaluate", "evaluate_path", 0.9),
        ("predict_udf_against_predict_batch_udf", "predict_batch_udf", "predict_udf", 2.0),
        ("predict_udf_against_predict_on_batch", "batch_udf_on_batch", "predict_udf", None),
    )
    for measured, theirs, ours, target in comparisons:
        if ours not in seconds:
            continue
        report(
            Measurement(
                measure=measured,
                case={"workload": name, "rows": rows, "executors": _WORKERS},
                ratio=median_ratio(seconds[theirs], seconds[ours]),
                target=target,
                at_least=True,
                medians={f"{each}_rows_per_s": rows / statistics.median(s) for each, s in seconds.items()},
                repetitions=len(seconds[ours]),
            )
        )


if __name__ == "__main__":
    main()
