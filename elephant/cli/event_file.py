"""Event file of a fit: found by its path, by the folder that it lies in, or by the MLflow run that names it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from elephant.errors import ConfigurationError
from elephant.storage.filesystem import Found, absolute, find_file, list_files, open_file_system

_SUFFIX = ".jsonl"
_RUN_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class FoundEvents:
    """File of a fit's events, which grows while the fit runs."""

    name: str  # of the fit
    path: str  # in its file system
    system: Any  # pyarrow's
    run_id: str = ""  # of the MLflow run that names it

    def state(self) -> Found | None:
        """Returns the facts of the file now; None while it is being replaced. Raises OSError where nobody can tell."""
        handler = getattr(self.system, "handler", None)
        if handler is not None:
            # Some of fsspec's file systems remember what was there.
            handler.fs.invalidate_cache()
        return find_file(self.system, self.path)

    def read(self, offset: int = 0) -> bytes:
        """Returns the lines from an offset on as they are now; raises OSError where they cannot be read."""
        with self.system.open_input_file(self.path) as file:
            file.seek(offset)
            content = bytes(file.read())
        # A line without its end is being written; a file without a line is none of events.
        end = content.rfind(b"\n") + 1
        return content[:end] if end or offset else content


def find_events(run: str) -> FoundEvents:
    """Returns the event file of a fit.

    Args:
        run: Its path or URL, with or without its suffix; that of a folder, of which it is the newest file; or the id
            of an MLflow run.

    Raises:
        ConfigurationError: There is none.
    """
    try:
        return _at(run)
    except ConfigurationError:
        if not _RUN_ID.fullmatch(run):
            raise
    return replace(_at(_path_in(run)), run_id=run)


def _at(run: str) -> FoundEvents:
    url = absolute(run)
    try:
        root, found = list_files(url)
    except ConfigurationError as error:
        try:
            # A fit's name, as its files have it.
            root, found = list_files(url := f"{url}{_SUFFIX}")
        except ConfigurationError:
            raise error from None
    files = [file for file in found if file.path == root or file.path.endswith(_SUFFIX)]
    if not files:
        raise ConfigurationError(
            f"expected a folder with files *{_SUFFIX}, which eventsPath leaves. Received: {len(found)} other files. "
            "Name the folder of eventsPath, or a file in it."
        )
    newest = max(files, key=lambda file: (file.modified_ns or 0, file.path))
    name = newest.path.rpartition("/")[2].removesuffix(_SUFFIX)
    return FoundEvents(name, newest.path, open_file_system(url)[0])


def _path_in(run: str) -> str:
    """Returns the path of the events that an MLflow run names."""
    from elephant.monitor.listeners import EVENTS_TAG

    try:
        import mlflow
    except ImportError as error:
        raise ConfigurationError(
            f"expected MLflow to be installed here, to look up a run by its id. Received: {run} and no mlflow. Install "
            "it (pip install mlflow), or name the file of events, or its folder (eventsPath)."
        ) from error
    try:
        tags = mlflow.MlflowClient().get_run(run).data.tags
    except mlflow.MlflowException as error:
        raise ConfigurationError(
            f"expected the id of a run that MLflow knows at {mlflow.get_tracking_uri()}. Received: {run}: {error}. "
            "Set MLFLOW_TRACKING_URI, or name the file of events, or its folder (eventsPath)."
        ) from error
    if EVENTS_TAG not in tags:
        raise ConfigurationError(
            f"expected a run of a fit with eventsPath, whose file of events it names. Received: run {run} without the "
            f"tag {EVENTS_TAG}: MLflow alone has the metrics of epochs that have ended, and no more. Give the fit an "
            "eventsPath; or look at a run that is nested in this one."
        )
    return str(tags[EVENTS_TAG])
