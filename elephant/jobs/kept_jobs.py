"""The job beside the checkpoints of its fit, by which another one goes on with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elephant.errors import CheckpointError, ConfigurationError, DataError, UnsupportedError
from elephant.jobs.job_file import kept, read_kept
from elephant.jobs.kinds import REFERENCE, REFERENCES, REFERENCES_BY_NAME, is_reference
from elephant.jobs.settings import TRAIN, key_of, settings_of
from elephant.spark.checkpoint_folder import checkpoint_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.storage.folder import Folder

NAME = "job.json"
# Whoever goes on with a job trusts it, or does not: the folder has no say in that.
_KEPT = tuple(setting for setting in settings_of(TRAIN) if setting.name != "trusted")
_NAMED = {setting.name for setting in _KEPT if setting.kind in (REFERENCE, REFERENCES, REFERENCES_BY_NAME)}


@contextlib.contextmanager
def keeping_job(session: SparkSession, settings: Mapping[str, Any]) -> Iterator[None]:
    """Writes what a job is beside its checkpoints; what was there comes back when the fit, in the block, is refused.

    Args:
        session: The Spark session.
        settings: All of them, with ``checkpointPath``.

    Raises:
        CheckpointError: It cannot be written.
    """
    folder = checkpoint_folder(session, settings["checkpointPath"])
    content = kept({setting.name: settings[setting.name] for setting in _KEPT if setting.name in settings})
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
    return read_kept(content, _KEPT, f"{path}/{NAME}")


def require_trusted_code(session: SparkSession, before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raises ConfigurationError where a job that was kept names code which nobody trusts.

    Args:
        session: The Spark session, whose setting counts where the settings do not say.
        before: The settings that were kept.
        settings: Those of the job that goes on, in which the user may name the code again.
    """
    from elephant.spark.trust import is_trusted, require_trust

    if is_trusted(settings.get("trusted"), session):
        return
    code = [name for name in before if name in _NAMED or (name == "model" and is_reference(before[name]))]
    found = [f"{key_of(name)}={before[name]}" for name in code if name not in settings]
    require_trust(f"{settings['checkpointPath']}/{NAME}", found, "Or give these settings again.")


def _read(folder: Folder) -> bytes | None:
    if NAME not in folder.names():
        return None
    with folder.reading(NAME) as file:
        return file.read()
