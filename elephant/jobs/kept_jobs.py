"""The job beside the checkpoints of its fit, by which another one goes on with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elephant.errors import CheckpointError, ConfigurationError, DataError, UnsupportedError
from elephant.jobs.job_file import kept, read_kept
from elephant.jobs.settings import TRAIN, settings_of
from elephant.spark.checkpoint_folder import checkpoint_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.checkpoint.folder import Folder

NAME = "job.json"


@contextlib.contextmanager
def keeping_job(session: SparkSession, settings: Mapping[str, Any]) -> Iterator[None]:
    """Writes what a job is beside its checkpoints; what was there comes back when the fit, in the block, is refused.

    Args:
        session: The Spark session.
        settings: All of them, with ``checkpointPath``.

    Raises:
        CheckpointError: It cannot be written.
    """
    folder, content = checkpoint_folder(session, settings["checkpointPath"]), kept(settings)
    before = _replace(folder, content)
    try:
        yield
    except (ConfigurationError, DataError, UnsupportedError):
        # Settings that cannot work would be those of every job that goes on from here.
        if before is not None:
            _replace(folder, before)
        raise


def _replace(folder: Folder, content: bytes) -> bytes | None:
    """Writes the job, and returns what was there before."""
    try:
        before = _read(folder)
        if before != content:
            folder.remove(NAME)
            folder.write(NAME, lambda file: file.write(content))
    except OSError as error:
        raise CheckpointError(
            f"checkpointPath={folder.url}: expected to write {NAME}. Received: {type(error).__name__}: {error}."
        ) from error
    return before


def kept_job(session: SparkSession, path: str) -> dict[str, Any]:
    """Returns the settings of the job that has left its checkpoints in a folder.

    Raises:
        ConfigurationError: There is no job, or none that this version knows.
        CheckpointError: The folder cannot be read.
    """
    folder = checkpoint_folder(session, path)
    try:
        content = _read(folder)
    except OSError as error:
        raise CheckpointError(
            f"checkpointPath={folder.url}: expected to read {NAME}. Received: {type(error).__name__}: {error}."
        ) from error
    if content is None:
        raise ConfigurationError(
            f"checkpoint-path: expected the checkpoints of a job that train.py began, with {NAME}. "
            f"Received: {path!r}, where there is none."
        )
    return read_kept(content, settings_of(TRAIN), f"{path}/{NAME}")


def _read(folder: Folder) -> bytes | None:
    if NAME not in folder.names():
        return None
    with folder.reading(NAME) as file:
        return file.read()
