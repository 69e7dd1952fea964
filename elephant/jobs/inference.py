"""The jobs that use a trained model: predict writes a table, evaluate measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elephant.errors import DataError, first_line
from elephant.jobs.inputs import DEFAULT_FORMAT, fitted_model, read_frame
from elephant.jobs.output import Output
from elephant.jobs.settings import EVALUATE, PREDICT
from elephant.jobs.submission import JobKind, json_line, require_one

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

DEFAULT_SAVE_MODE = "errorifexists"


def check_prediction(settings: Mapping[str, Any]) -> None:
    """Raises ConfigurationError unless the settings say what to predict from what, and where to write it."""
    require_one(settings, "data", "table")
    require_one(settings, "model")
    require_one(settings, "output", "outputTable")


def check_evaluation(settings: Mapping[str, Any]) -> None:
    """Raises ConfigurationError unless the settings say what to evaluate on what."""
    require_one(settings, "data", "table")
    require_one(settings, "model")


def predict(session: SparkSession, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the rows with their predictions; returns how many there are and where, and whether they are new."""
    if "outputTable" in settings:
        return _predict_table(session, settings)
    output = Output(session, settings["output"], settings.get("saveMode", DEFAULT_SAVE_MODE))
    output.refuse_inside(settings)
    if output.is_saved():
        return {"rows": _counted(session, settings, output.path, None), "path": output.path, "written": False}
    predictions = _predictions(session, settings)
    output.require_writable()
    with output.staged() as path:
        _writer(predictions, settings).save(path)
        rows = _counted(session, settings, path, predictions)
    return {"rows": rows, "path": output.path, "written": True}


def evaluate(session: SparkSession, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the loss and the metrics, and writes them as a file of JSON where an output is named."""
    import json

    from elephant.spark.hadoop_files import read_file, write_file

    if "output" not in settings:
        return _measured(session, settings)
    save_mode = settings.get("saveMode", DEFAULT_SAVE_MODE)
    output = Output(session, settings["output"], save_mode, is_folder=False)
    output.refuse_inside(settings)
    if output.is_saved():
        return dict(json.loads(read_file(session, output.path) or b"{}"))
    output.require_writable()
    measured = _measured(session, settings)
    with output.staged() as path:
        write_file(session, path, (json_line(measured) + "\n").encode())
    return measured


def _measured(session: SparkSession, settings: Mapping[str, Any]) -> dict[str, Any]:
    frame = read_frame(session, settings)
    return fitted_model(settings).evaluate(frame)


def _predictions(session: SparkSession, settings: Mapping[str, Any]) -> DataFrame:
    frame = read_frame(session, settings)
    predictions = fitted_model(settings).transform(frame)
    if "select" not in settings:
        return predictions
    from pyspark.errors import PySparkException

    try:
        return predictions.selectExpr(*settings["select"])
    except PySparkException as error:
        raise DataError(
            f"select: expected columns of the predictions, or SQL on them. Received: {settings['select']}: "
            f"{first_line(error)}"
        ) from error


def _predict_table(session: SparkSession, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Writes to a table of the catalog, which commits by itself."""
    name, save_mode = settings["outputTable"], settings.get("saveMode", DEFAULT_SAVE_MODE)
    there = session.catalog.tableExists(name) and save_mode != "overwrite"
    if there and save_mode == "errorifexists":
        raise FileExistsError(
            f"output-table: expected a table that is not there yet. Received: {name}. Name another one, or pass "
            "--save-mode overwrite or ignore."
        )
    if not there:
        _writer(_predictions(session, settings), settings).mode(save_mode).saveAsTable(name)
    return {"rows": session.table(name).count(), "table": name, "written": not there}


def _writer(predictions: DataFrame, settings: Mapping[str, Any]) -> DataFrameWriter:
    writer = predictions.write.format(settings.get("outputFormat", DEFAULT_FORMAT))
    writer = writer.options(**settings.get("writeOption", {}))
    return writer.partitionBy(*settings["partitionBy"]) if "partitionBy" in settings else writer


def _counted(session: SparkSession, settings: Mapping[str, Any], path: str, written: DataFrame | None) -> int:
    """Returns the rows that are at the path, which a Parquet table's footers tell."""
    reader = session.read.format(settings.get("outputFormat", DEFAULT_FORMAT))
    reader = reader.options(**settings.get("writeOption", {}))
    # Some formats tell no schema when there are no rows.
    return (reader if written is None else reader.schema(written.schema)).load(path).count()


PREDICTION = JobKind(
    PREDICT, "Predicts with a trained model, and writes the rows as a table.", check_prediction, predict
)
EVALUATION = JobKind(
    EVALUATE, "Evaluates a trained model: its loss and metrics over all rows.", check_evaluation, evaluate
)
