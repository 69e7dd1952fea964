"""The rows that a job is about: a DataFrame, or files that the executors read by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elephant.errors import ConfigurationError, DataError, first_line
from elephant.jobs.settings import key_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from elephant.spark.training_data import Files

DEFAULT_FORMAT = "parquet"
# What a job can do with a DataFrame, and not with files that executors read.
_OF_FRAMES = ("table", "readOption", "where", "sample", "sampleSeed")


def read_rows(session: SparkSession, settings: Mapping[str, Any]) -> DataFrame | Files:
    """Returns what to train on.

    Args:
        settings: ``data`` or ``table``, and what there is to say of them.

    Raises:
        ConfigurationError: Settings exclude each other.
        DataError: Spark cannot read it.
    """
    if not settings.get("direct", False):
        return read_frame(session, settings)
    given = [name for name in _OF_FRAMES if name in settings]
    if given:
        raise ConfigurationError(
            f"direct: expected only data, format and schema beside it: executors read whole files. "
            f"Received: {', '.join(key_of(name) for name in given)}."
        )
    from elephant.spark.training_data import Files

    return Files(settings["data"], format=settings.get("format"), schema=settings.get("schema"))


def read_frame(session: SparkSession, settings: Mapping[str, Any]) -> DataFrame:
    """Returns a table or the files at a path as a DataFrame, filtered and sampled.

    Raises:
        DataError: Spark cannot read it, or does not understand the condition.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    place = "table" if "table" in settings else "data"
    try:
        frame = session.table(settings["table"]) if place == "table" else _loaded(session, settings)
        if "where" in settings:
            place = "where"
            frame = frame.where(settings["where"])
        # Asked for here, where it is known what for: with Spark Connect, only this resolves names.
        if not frame.columns:
            raise DataError(f"{place}: expected rows with columns. Received: {settings[place]!r}, without any.")
    except (PySparkException, Py4JError) as error:
        received = (
            f"{settings[place]!r} as {settings.get('format', DEFAULT_FORMAT)}"
            if place == "data"
            else repr(settings[place])
        )
        raise DataError(f"{place}: expected what Spark reads. Received: {received}: {first_line(error)}") from error
    return _sampled(frame, settings)


def _loaded(session: SparkSession, settings: Mapping[str, Any]) -> DataFrame:
    reader = session.read.format(settings.get("format", DEFAULT_FORMAT)).options(**settings.get("readOption", {}))
    if "schema" in settings:
        reader = reader.schema(settings["schema"])
    return reader.load(settings["data"])


def _sampled(frame: DataFrame, settings: Mapping[str, Any]) -> DataFrame:
    if "sample" not in settings:
        return frame
    share = settings["sample"]
    if not 0 < share <= 1:
        raise ConfigurationError(f"sample: expected a share in (0, 1]. Received: {share}.")
    return frame.sample(withReplacement=False, fraction=share, seed=settings.get("sampleSeed", 0))
