"""Streams: a fit for each batch of rows, and the state between them.

After each micro-batch ``folder`` gets a checkpoint, as `elephant.checkpoint.manager` writes them: with the model, its
optimizer's state, the history and the micro-batch's number.

Spark delivers a micro-batch again when it cannot know that it was taken: after a
stop, or a death, between the end of its training and Spark's own note of it. Every
micro-batch leaves a checkpoint with its number, so one that comes again is known.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pyspark.ml import Estimator
from pyspark.sql import DataFrame, SparkSession

from elephant.checkpoint.manager import CheckpointManager
from elephant.checkpoint.state import FitState, joined, named
from elephant.cluster.session import jvm_context
from elephant.cluster.spark_job import described
from elephant.cluster.spark_private import context_of, copy_params, reset_uid, set_params
from elephant.data.json_types import require_parts, require_type
from elephant.data.schema import RowSpec
from elephant.errors import CheckpointError, ConfigurationError, TrainingError, UnsupportedError
from elephant.modeling.archive_inspection import KnownCode, code_of_file
from elephant.modeling.model_spec import ModelSpec
from elephant.spark.hadoop_files import checkpoint_folder
from elephant.spark.model import KerasModel
from elephant.spark.params import optional
from elephant.spark.saving.trust import is_trusted, require_trust
from elephant.storage.folder import DAMAGES

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)
_QUERY_ID = "sql.streaming.queryId"


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """State of learning from a stream.

    Args:
        stream_id: Spark's id of the stream, which its own checkpoint keeps.
        batch: The last micro-batch that was trained on, or was empty.
        spec: The model.
        history: One number per epoch by metric, of all micro-batches.
    """

    stream_id: str
    batch: int
    spec: ModelSpec
    history: dict[str, list[float]]

    def to_fit_state(self) -> FitState:
        """Returns the form that checkpoints have."""
        rows, archive = self.spec.rows, self.spec.archive
        return FitState(
            epochs=self.batch,
            history=self.history,
            arrays={
                **named("archive", [] if archive is None else [np.frombuffer(archive, np.uint8)]),
                **named("model", self.spec.variables or ()),
            },
            facts={"stream": self.stream_id, "rows": None if rows is None else rows.to_json()},
        )

    @classmethod
    def from_fit_state(cls, state: FitState, spec: ModelSpec) -> StreamState:
        """Reads the form of `to_fit_state`.

        Args:
            state: Of a checkpoint.
            spec: The estimator's model, of which the checkpoint has what was learned.
        """
        archive = next((array.tobytes() for array in state.group("archive")), None)
        if (archive is None) != (spec.archive is None):
            raise ConfigurationError(
                "model: expected the model that the stream was trained with. Received: one that is given "
                f"{'as a model' if spec.archive is not None else 'by a function'}, as that one was not."
            )
        rows, batch = _rows_of(state), state.epochs
        # With an id of its own: Spark's Python workers keep models by it, and this one has other weights.
        trained = replace(
            spec,
            archive=archive,
            variables=tuple(state.group("model")) or None,
            rows=rows or spec.rows,
            source_id=uuid.uuid4().hex,
        )
        return cls(stream_id=state.facts["stream"], batch=batch, spec=trained, history=joined(state.history, {}))


def _rows_of(state: FitState) -> RowSpec | None:
    """Returns the form of one row of a checkpoint's model; raises CheckpointError for a checkpoint of anything else."""
    try:
        require_parts(state.facts, {"stream": str, "rows": dict[str, Any] | None})
        require_type(state.facts["stream"], str, "stream")
        rows = state.facts["rows"]
        return None if rows is None else RowSpec.from_json(rows)
    except DAMAGES as error:
        raise CheckpointError(
            f"checkpointLocation: expected a checkpoint of a stream. Received: one of micro-batch {state.epochs} that "
            f"tells other things: {type(error).__name__}: {error} Restore the folder, or use another "
            "checkpointLocation."
        ) from error


class StreamFolder:
    """The folder of a stream's checkpoints, on any file system that Spark reaches.

    Args:
        session: The Spark session.
        path: The folder.
    """

    def __init__(self, session: SparkSession, path: str) -> None:
        if jvm_context(session) is None:
            raise UnsupportedError(
                "fit_stream: expected a classic Spark session. Received: one without a JVM, such as of Spark "
                "Connect, which runs the function of foreachBatch on the server, away from here. Use a classic session."
            )
        self._folder = checkpoint_folder(session, path)
        self._manager = CheckpointManager(
            self._folder, option="checkpointLocation", unit="micro-batch", again="start the stream again"
        )
        self._is_trusted = is_trusted(None, session)

    def write(self, state: StreamState) -> None:
        """Writes what has been learned; removes what is older than the one before it."""
        # A state of NaN is no reason to go back to the one before: Spark does not deliver its rows again.
        self._manager.save(state.to_fit_state(), finished=True)

    def latest(self, spec: ModelSpec) -> StreamState | None:
        """Returns the newest state that is whole; None when there is none.

        Raises:
            ConfigurationError: It holds code, which runs only where the session's setting trusts what is saved.
            CheckpointError: There are some, and all are damaged.
        """
        checkpoint = self._manager.latest()
        if checkpoint is None:
            return None
        state = StreamState.from_fit_state(checkpoint.state, spec)
        if self._is_trusted:
            return state
        title = f"fit_stream: {self._folder.url}, micro-batch {state.batch}"
        known = KnownCode(given=spec.custom_objects)
        require_trust(title, code_of_file(state.spec.archive or b"", ".keras", known))
        return replace(state, spec=replace(state.spec, safe_mode=True))


class TrainingStream:
    """A running `KerasEstimator.fit_stream`: what it has learned so far, and how to wait for it or end it."""

    def __init__(self, trainer: StreamTrainer, query: StreamingQuery) -> None:
        self._trainer = trainer
        self._query = query
        self._is_stopped = False
        self._failure_before: Exception | None = None

    @property
    def model(self) -> KerasModel | None:
        """The model after the last micro-batch that was trained on; None before the first one."""
        return self._trainer.model

    @property
    def history(self) -> dict[str, list[float]]:
        """One number per epoch for the loss and every metric, of all micro-batches since the stream was begun."""
        return self._trainer.history

    @property
    def lastBatch(self) -> int | None:
        """Spark's number of the last micro-batch that was trained on or was empty; None before the first one."""
        return self._trainer.last_batch

    @property
    def isActive(self) -> bool:
        """True if the stream still runs."""
        return bool(self._query.isActive)

    @property
    def query(self) -> StreamingQuery:
        """Spark's own handle, with its progress reports."""
        return self._query

    @property
    def exception(self) -> Exception | None:
        """Error that ended the stream, if it failed: that of the fit, or Spark's own."""
        # Spark may take the end of the micro-batch that `stop` ends for a failure of the query.
        return self._trainer.failure or (self._failure_before if self._is_stopped else self._query.exception())

    def awaitTermination(self, timeout: float | None = None) -> bool:
        """Waits until the stream has ended.

        Args:
            timeout: Seconds; None waits for ever.

        Returns:
            Whether it has ended.

        Raises:
            ElephantError: What the fit of a micro-batch failed with; or Spark's own error.
        """
        try:
            # Spark takes fractions of a second too, though its annotation says otherwise.
            ended = self._query.awaitTermination(cast("int | None", timeout))
        except Exception as error:
            raise (self._trainer.failure or error) from None
        return ended is None or bool(ended)

    def stop(self) -> None:
        """Ends the stream; the micro-batch that is being trained on is ended too, and trained on anew when resumed.

        What the micro-batches before it have taught is kept. Returns when the stream has ended.
        """
        if not self._is_stopped:
            self._is_stopped, self._failure_before = True, self._query.exception()
        self._trainer.stop()
        self._query.stop()


class StreamTrainer:
    """Trains on each micro-batch from where the one before ended.

    Args:
        estimator: What is fitted.
        folder: Where checkpoints are kept.
        min_rows_per_worker: A smaller micro-batch is trained on by fewer workers, so that each has so many rows.
    """

    def __init__(self, estimator: Estimator, folder: StreamFolder, *, min_rows_per_worker: int) -> None:
        self._estimator = estimator
        self._folder = folder
        self._min_rows = min_rows_per_worker
        spec: ModelSpec = estimator.getOrDefault("model").source
        self._state = folder.latest(spec)
        self._first_source = spec
        self._model = None if self._state is None else self._as_model(self._state)
        self._stopping = threading.Event()
        self.failure: Exception | None = None

    @property
    def model(self) -> KerasModel | None:
        """The model after the last micro-batch."""
        return self._model

    @property
    def history(self) -> dict[str, list[float]]:
        """History of all micro-batches."""
        return {} if self._state is None else {name: list(values) for name, values in self._state.history.items()}

    @property
    def last_batch(self) -> int | None:
        """The last micro-batch."""
        return None if self._state is None else self._state.batch

    def stop(self) -> None:
        """Says that an error which comes now is no failure."""
        self._stopping.set()

    def take(self, frame: DataFrame, batch: int) -> None:
        """Trains on one micro-batch, unless it was trained on before; the function of ``foreachBatch``."""
        try:
            stream_id = str(context_of(frame.sparkSession).getLocalProperty(_QUERY_ID))
            if self._is_new(batch, stream_id):
                self._keep(self._trained(frame, batch, stream_id))
        except Exception as error:
            if not self._stopping.is_set():
                self.failure = error
            raise

    def _is_new(self, batch: int, stream_id: str) -> bool:
        """Returns whether a micro-batch is the next one; raises TrainingError when others are missing before it."""
        state = self._state
        if state is not None and state.stream_id != stream_id:
            raise TrainingError(
                f"checkpointLocation: expected the stream {state.stream_id} that the model was trained on. "
                f"Received: the stream {stream_id}. Its parts belong together: use another checkpointLocation."
            )
        expected = 0 if state is None else state.batch + 1
        if batch > expected:
            raise TrainingError(
                f"checkpointLocation: expected micro-batch {expected}. Received: {batch}, as Spark takes those before "
                "to be trained on. Checkpoints of the model are missing: use another checkpointLocation to begin anew."
            )
        if batch < expected:
            logger.info("micro-batch %d has been trained on already", batch)
        return batch == expected

    def _trained(self, frame: DataFrame, batch: int, stream_id: str) -> StreamState:
        spec, history = self._first_source, self.history
        if self._state is not None:
            spec = self._state.spec
        frame = frame.persist()
        try:
            with described(frame.sparkSession, "elephant fit: rows of the micro-batch"):
                rows = frame.count()
            if rows:
                fitted = self._estimator_for(spec, batch, rows).fit(frame)
                spec = fitted.source
                history = joined(history, fitted.history)
        finally:
            frame.unpersist()
        return StreamState(stream_id=stream_id, batch=batch, spec=spec, history=history)

    def _estimator_for(self, spec: ModelSpec, batch: int, rows: int) -> Estimator:
        estimator = self._estimator.copy()
        given, most = estimator.getOrDefault("numWorkers"), max(rows // self._min_rows, 1)
        set_params(
            estimator,
            model=spec,
            numWorkers=tuple(min(one, most) for one in given) if isinstance(given, tuple) else min(given, most),
            # Every micro-batch draws its own order, and its own validation rows.
            seed=(estimator.getOrDefault("seed") + batch) % 2**63,
        )
        if self.history:
            # The model was trained, and has the rate already; a second time would multiply it again.
            estimator.clear(estimator.getParam("learningRate"))
            set_params(estimator, scaleLearningRate=False)
        return estimator

    def _keep(self, state: StreamState) -> None:
        self._folder.write(state)
        self._state = state
        self._model = self._as_model(state)

    def _as_model(self, state: StreamState) -> KerasModel:
        model = KerasModel(state.spec, history=state.history)
        reset_uid(model, self._estimator.uid)
        fitted: KerasModel = copy_params(self._estimator, model)
        return fitted


def start_stream(
    estimator: Estimator,
    frame: DataFrame,
    *,
    checkpoint: str,
    trigger: Mapping[str, Any],
    query_name: str | None,
    min_rows_per_worker: int,
) -> TrainingStream:
    """Starts the query that trains.

    Args:
        estimator: What is fitted.
        frame: A streaming DataFrame.
        checkpoint: A folder of any file system that Spark reaches.
        trigger: Arguments of ``DataStreamWriter.trigger``; none begins a micro-batch when the one before has ended.
        query_name: Spark's name of the query.
        min_rows_per_worker: See `StreamTrainer`.

    Raises:
        ConfigurationError: The frame does not stream, or a value cannot work.
    """
    if not frame.isStreaming:
        raise ConfigurationError(
            "fit_stream: expected a streaming DataFrame, of spark.readStream. Received: one that does not stream. "
            "Use fit."
        )
    if optional(estimator, "checkpointPath") is not None:
        raise ConfigurationError(
            "checkpointPath: expected it not to be set. Received: "
            f"{estimator.getOrDefault('checkpointPath')!r}. fit_stream leaves a checkpoint after every "
            "micro-batch in checkpointLocation, and goes on from there by itself: clear checkpointPath and resume."
        )
    if min_rows_per_worker < 1:
        raise ConfigurationError(f"minRowsPerWorker: expected at least 1. Received: {min_rows_per_worker}.")
    folder = StreamFolder(frame.sparkSession, f"{checkpoint.rstrip('/')}/model")
    trainer = StreamTrainer(estimator, folder, min_rows_per_worker=min_rows_per_worker)
    writer = frame.writeStream.foreachBatch(trainer.take)
    writer = writer.option("checkpointLocation", f"{checkpoint.rstrip('/')}/stream")
    if trigger:
        writer = writer.trigger(**trigger)
    if query_name is not None:
        writer = writer.queryName(query_name)
    return TrainingStream(trainer, writer.start())
