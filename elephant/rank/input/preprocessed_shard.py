"""The rows that a worker trains on: its shard, what preprocessing makes of it, and what changes with every batch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from elephant.collective.communicator import Communicator
from elephant.data.ragged import Values
from elephant.data.schema import PIECE, VALIDATION, DataSchema
from elephant.data.shard import Shard, ShardWriter, content_order
from elephant.rank.input.preprocessing import (
    AUGMENT,
    PREPARE,
    VALIDATE,
    Preprocessing,
    augmentation,
    generator,
    require_equal_fields,
    schema_from_text,
    schema_text,
    takes_generator,
)
from elephant.rank.job import TrainingJob

# Rows that are preprocessed at once: a batch of large ones, more of small ones.
_CHUNK_BYTES = 1 << 20
_CHUNK_ROWS = 1024

# Ranks that have preprocessed all of their rows hear of the others so often.
_PIECE_S = 5.0


class BatchChanges:
    """The user's functions on batches that are read from a worker's shard.

    Training batches are read ahead while those of validation are read: each on a thread, and
    both make their batches here. No two calls of the user's functions overlap.

    Args:
        row_shard: A shard without rows, which tells what batches are afterwards.
        preprocessing: From raw rows to what the model takes; None where the shard holds that already.
        augmentation: From training batches to others, or None.

    Attributes:
        error: What a function has raised; what Keras and its backend make of it is no use to anybody.
    """

    def __init__(
        self,
        row_shard: Shard,
        *,
        preprocessing: Preprocessing | None,
        augmentation: Preprocessing | None,
        place: tuple[int, int],
    ) -> None:
        self.row_shard = row_shard
        self.error: Exception | None = None
        self._preprocessing = preprocessing
        self._augmentation = augmentation
        self._place = place
        self._one_at_a_time = threading.Lock()

    @property
    def any(self) -> bool:
        """True if there is any function."""
        return self._preprocessing is not None or self._augmentation is not None

    def training(self, values: Sequence[Values], epoch: int, step: int) -> tuple[Values, ...]:
        """Returns a training batch as the model takes it.

        Args:
            epoch: From zero.
            step: Of the epoch, from zero.
        """
        with self._noticed():
            if self._preprocessing is not None:
                values = self._preprocessing(values, generator(PREPARE, *self._place, epoch, step))
            if self._augmentation is not None:
                values = self._augmentation(values, generator(AUGMENT, *self._place, epoch, step))
        return tuple(values)

    def validation(self, values: Sequence[Values], batch: int) -> tuple[Values, ...]:
        """Returns a batch of validation, which is not augmented."""
        with self._noticed():
            if self._preprocessing is not None:
                values = self._preprocessing(values, generator(VALIDATE, *self._place, batch))
        return tuple(values)

    @contextlib.contextmanager
    def _noticed(self) -> Iterator[None]:
        try:
            with self._one_at_a_time:
                yield
        except Exception as error:
            self.error = self.error or error
            raise

    @contextlib.contextmanager
    def own_errors(self) -> Iterator[None]:
        """Raises what a function has raised, in the place of what became of it on its way through the backend."""
        try:
            yield
        except Exception as error:
            if self.error is None or error is self.error:
                raise
            raise self.error from None


def prepared_rows(job: TrainingJob, shard: Shard, communicator: Communicator, rank: int) -> tuple[Shard, BatchChanges]:
    """Returns the rows that a worker trains on, and what is made of its batches.

    Args:
        communicator: Connects the ranks that have to agree; of one rank where they need not.

    Raises:
        DataError: What the user's function returns does not fit the model, or is not the same on all ranks.
        Exception: What the function raises.
    """
    functions, names = job.preprocessing, [input_info.name for input_info in job.model.info.inputs]
    preprocessing = None
    if functions.preprocess is not None:
        # The user's function may make use of Keras.
        job.model.settings.apply()
        preprocessing = Preprocessing(functions.preprocess, job.schema, job.model_schema, names, shard.row_shapes)
        if not takes_generator(functions.preprocess):
            shard, preprocessing = _cached(job, shard, preprocessing, communicator, rank), None
        else:
            first = np.arange(min(job.config.rank_batch_size, shard.num_rows))
            if len(first):
                preprocessing(shard.take(first), generator(PREPARE, job.config.seed, rank))
            _agree(preprocessing, job.model_schema, communicator, has_rows=bool(len(first)))
    row_shard = shard if preprocessing is None else Shard(None, preprocessing.schema, preprocessing.row_shapes)
    augment = None
    if functions.augment is not None:
        augment = augmentation(functions.augment, row_shard.schema, row_shard.row_shapes, names)
    return shard, BatchChanges(
        row_shard, preprocessing=preprocessing, augmentation=augment, place=(job.config.seed, rank)
    )


def _cached(
    job: TrainingJob, shard: Shard, preprocessing: Preprocessing, communicator: Communicator, rank: int
) -> Shard:
    """Preprocesses a shard into another one; the raw one is closed."""
    # Workers that are run again may be given their rows in another order, and must make the same of them.
    by_content = not job.config.is_synchronous and job.config.shuffle
    order = content_order(shard) if by_content else np.arange(shard.num_rows)
    length = _chunk_rows(shard, job.config.rank_batch_size)

    def chunk(number: int) -> tuple[Values, ...]:
        values = shard.take(order[number * length : (number + 1) * length])
        return preprocessing(values, generator(PREPARE, job.config.seed, rank, number))

    first = chunk(0) if shard.num_rows else ()
    schema = _agree(preprocessing, job.model_schema, communicator, has_rows=shard.num_rows > 0)
    schema = replace(schema, piece=shard.schema.piece)
    folder = None if shard.folder is None else shard.folder.with_name(f"{shard.folder.name}-preprocessed")
    if folder is not None:
        marked = np.zeros(shard.num_rows, bool)
        marked[shard.validation_rows()] = True
        with ShardWriter(folder, schema) as writer:
            parts = -(-shard.num_rows // length)
            beside = {VALIDATION: marked[order], **({PIECE: shard.pieces()[order]} if schema.piece is not None else {})}
            _together(_written(writer, schema, first, chunk, parts, beside, length, shard.forget), communicator)
    else:
        _together(iter(()), communicator)
    shard.close()
    made = Shard(folder, schema, preprocessing.row_shapes, in_memory=job.config.cache == "memory")
    made.unlink()
    return made


def _written(
    writer: ShardWriter,
    schema: DataSchema,
    first: tuple[Values, ...],
    chunk: Callable[[int], tuple[Values, ...]],
    parts: int,
    beside: Mapping[str, np.ndarray],
    length: int,
    forget: Callable[[], None],
) -> Iterator[None]:
    """Writes one chunk after the other, with a pause after each.

    Args:
        beside: Columns that are not of batches, by role, as far as the schema has them.
    """
    for number in range(parts):
        values = chunk(number) if number else first
        forget()
        columns = {field.role: value for field, value in zip(schema.batch_fields, values, strict=True)}
        columns |= {role: column[number * length : (number + 1) * length] for role, column in beside.items()}
        writer.write_values(columns, len(columns[VALIDATION]))
        yield


def _chunk_rows(shard: Shard, batch_size: int) -> int:
    small = _CHUNK_BYTES * max(shard.num_rows, 1) // max(shard.num_bytes, 1)
    return max(min(small, _CHUNK_ROWS), batch_size)


def _agree(
    preprocessing: Preprocessing, target_schema: DataSchema, communicator: Communicator, *, has_rows: bool
) -> DataSchema:
    """Returns the model's schema, on which all ranks agree; a rank without rows gets it from the others."""
    own = schema_text(preprocessing.schema).encode() if has_rows else b""
    told = communicator.allgather(np.frombuffer(own, np.uint8))
    found = [schema_from_text(text.tobytes().decode(), target_schema) for text in told if len(text)]
    for other in found[1:]:
        require_equal_fields(found[0], other)
    preprocessing.settle(found[0])
    return found[0]


def _together(work: Iterator[None], communicator: Communicator) -> None:
    """Does this rank's work, and returns when all ranks have done theirs.

    One that has little to do waits long for one that has much; it asks again and again, so that no single
    wait is long, and a rank that fails is noticed.
    """
    busy = np.ones(1, np.int64)
    while busy[0]:
        until, busy[0] = time.monotonic() + _PIECE_S, 0
        for _ in work:
            if time.monotonic() > until:
                busy[0] = 1
                break
        communicator.allreduce_(busy, op="max")
