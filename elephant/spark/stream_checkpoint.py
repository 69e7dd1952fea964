"""What a stream's training leaves after every micro-batch: one file, whole or not there at all.

::

    folder/batch-00000000000000000012.zip      a ZIP archive of
        batch.json      the micro-batch, the stream's id, the history, what one row is
        model.keras     the model with its optimizer's state: any Keras opens it
        variables.npz   instead, for a model that a function builds

A file is written under another name and then renamed; one that is cut short all
the same, where renaming is copying, has no valid directory and is passed over.
"""

from __future__ import annotations

import io
import json
import re
import uuid
import zipfile
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from elephant.cluster.sessions import jvm_context
from elephant.data.schema import RowSpec
from elephant.errors import ConfigurationError, TrainingError, UnsupportedError
from elephant.modeling.model_spec import ModelSource
from elephant.spark.trust import code_of_file, is_trusted, require_trust

_NAME = re.compile(r"^batch-(\d{20})\.zip$")
_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """What has been learnt from a stream so far.

    Args:
        stream_id: Spark's id of the stream, which its own checkpoint keeps.
        batch: The last micro-batch that was trained on, or was empty.
        source: The model.
        history: One number per epoch by metric, of all micro-batches.
    """

    stream_id: str
    batch: int
    source: ModelSource
    history: dict[str, list[float]]

    def to_bytes(self) -> bytes:
        """Returns the archive."""
        rows = self.source.rows
        about = {
            "batch": self.batch,
            "stream": self.stream_id,
            "history": self.history,
            "rows": None if rows is None else rows.to_json(),
        }
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("batch.json", json.dumps(about))
            if self.source.archive is not None:
                archive.writestr("model.keras", self.source.archive)
            if self.source.variables is not None:
                arrays = io.BytesIO()
                np.savez(arrays, *self.source.variables)
                archive.writestr("variables.npz", arrays.getvalue())
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, source: ModelSource) -> StreamState:
        """Returns what an archive holds.

        Args:
            content: What `to_bytes` gave.
            source: The estimator's model, of which the archive has what was learnt.

        Raises:
            zipfile.BadZipFile: The archive is cut short or damaged.
        """
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            # Of an archive that is cut short, Python may find the directory of the one in it: Keras' own.
            if "batch.json" not in archive.namelist() or archive.testzip() is not None:
                raise zipfile.BadZipFile("the archive is damaged")
            about = json.loads(archive.read("batch.json"))
            rows = None if about["rows"] is None else RowSpec.from_json(about["rows"])
            names = archive.namelist()
            keras_archive = archive.read("model.keras") if "model.keras" in names else None
            variables = _arrays(archive.read("variables.npz")) if "variables.npz" in names else None
        if (keras_archive is None) != (source.archive is None):
            raise ConfigurationError(
                "model: expected the model that the stream was trained with. Received: one that is given "
                f"{'as a model' if source.archive is not None else 'by a function'}, as that one was not."
            )
        # With an id of its own: Spark's Python workers keep models by it, and this one has other weights.
        trained = replace(
            source,
            archive=keras_archive,
            variables=variables,
            rows=rows or source.rows,
            source_id=uuid.uuid4().hex,
        )
        return cls(stream_id=about["stream"], batch=int(about["batch"]), source=trained, history=about["history"])


def _arrays(content: bytes) -> tuple[np.ndarray, ...]:
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return tuple(archive[f"arr_{index}"] for index in range(len(archive.files)))


class StreamFolder:
    """The folder of a stream's checkpoints, on any file system that Spark reaches.

    Args:
        session: The Spark session.
        path: The folder.
    """

    def __init__(self, session: SparkSession, path: str) -> None:
        context = jvm_context(session)
        if context is None:
            raise UnsupportedError(
                "fit_stream: expected a classic Spark session. Received: one without a JVM, such as of Spark "
                "Connect, which runs the function of foreachBatch on the server, away from here. Use a classic session."
            )
        self._jvm = context._jvm
        self._path = path.rstrip("/")
        self._is_trusted = is_trusted(None, session)
        self._system = self._at("").getFileSystem(context._jsc.hadoopConfiguration())

    def _at(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self._path}/{name}" if name else self._path)

    def write(self, state: StreamState) -> None:
        """Writes what has been learnt; removes what is older than the one before it."""
        name = f"batch-{state.batch:020d}.zip"
        stream = self._system.create(self._at(f".{name}.tmp"), True)
        try:
            stream.write(bytearray(state.to_bytes()))
        finally:
            stream.close()
        self._system.delete(self._at(name), False)
        if not self._system.rename(self._at(f".{name}.tmp"), self._at(name)):
            raise TrainingError(f"fit_stream: expected to rename {self._path}/.{name}.tmp to {name}. It did not work.")
        for old in self._names()[:-_KEPT]:
            self._system.delete(self._at(old), False)

    def latest(self, source: ModelSource) -> StreamState | None:
        """Returns the newest state that is whole; None when there is none.

        Raises:
            ConfigurationError: It holds code, which runs only where the session's setting trusts what is saved.
        """
        for name in reversed(self._names()):
            try:
                state = StreamState.from_bytes(self._read(name), source)
            except zipfile.BadZipFile:
                continue
            if self._is_trusted:
                return state
            require_trust(f"fit_stream: {self._path}/{name}", code_of_file(state.source.archive or b"", ".keras"))
            return replace(state, source=replace(state.source, safe_mode=True))
        return None

    def _read(self, name: str) -> bytes:
        stream = self._system.open(self._at(name))
        try:
            return bytes(stream.readAllBytes())
        finally:
            stream.close()

    def _names(self) -> list[str]:
        if not self._system.exists(self._at("")):
            return []
        names = [str(status.getPath().getName()) for status in self._system.listStatus(self._at(""))]
        return sorted(name for name in names if _NAME.match(name))
