"""Shard: the rows of one rank in flat files on its disk, and their order by content.

A column whose rows all take the same space is one file of them, one after the
other: a row is found by arithmetic, and rows in any order are taken as fast as of
an array in memory. Other columns have a file of offsets beside those of their
elements. An epoch costs Spark nothing.

Each row gets a 64-bit hash of its bytes, block by block, and rows are ordered by
it. Equal rows have equal hashes, and it does not matter which comes first.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from elephant.data.ragged import RaggedArray, Values, take_rows
from elephant.data.schema import RAGGED, SPARSE, TEXT, DataSchema, Field, ShardSummary
from elephant.data.shuffling import RowRanges, ShuffleBuffer, read_pieces
from elephant.data.to_numpy import refuse_bad_weights, refuse_unknown_classes, to_values
from elephant.storage.filesystem import disk_full, is_full

_OFFSETS = "offsets"

# A byte of text is hashed as a word of eight, and numpy holds a few of these at a time.
_BLOCK_BYTES = 4 << 20
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NO_PLACE = np.uint64(0)


class ShardWriter:
    """Writes record batches to a folder of files, and refuses rows that cannot be trained on.

    Left by an exception, the ``with`` block removes what was written.

    Args:
        schema: What the batches' columns must hold.
    """

    def __init__(self, folder: Path, schema: DataSchema) -> None:
        self._folder = folder
        self._schema = schema
        self._files: dict[str, BinaryIO] = {}
        self._ends: dict[str, int] = {}
        self._num_rows = self._num_bytes = 0
        self._num_validation = 0
        self._row_shapes: dict[str, tuple[int, ...]] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends one batch.

        Raises:
            DataError: One of its rows is unusable.
            ClusterError: The disk is full. What was written is removed.
        """
        if batch.num_rows == 0:
            return
        columns = [(field, self._checked(batch.column(field.role), field)) for field in self._schema]
        for field, values in columns:
            self._append(field, values)
        self._num_rows += batch.num_rows

    def write_values(self, values: Mapping[str, Values], num_rows: int) -> None:
        """Appends rows that need no check, by role; raises ClusterError when the disk is full."""
        for field in self._schema:
            self._append(field, values[field.role])
        self._num_rows += num_rows

    def _checked(self, column: pa.Array, field: Field) -> Values:
        known = self._row_shapes.get(field.role)
        values, shape = to_values(column, field, first_row=self._num_rows, row_shape=known)
        if field.is_array and shape is not None:
            self._row_shapes[field.role] = shape
        refuse_unknown_classes(values, field, self._num_rows)
        if field in self._schema.weights:
            refuse_bad_weights(values, field.title, self._num_rows)
        if isinstance(values, np.ndarray) and field is self._schema.validation:
            self._num_validation += int(np.count_nonzero(values))
        return values

    def _append(self, field: Field, values: Values) -> None:
        if isinstance(values, RaggedArray):
            end = self._ends.get(field.role, 0)
            offsets = values.offsets + end
            self._write(f"{field.role}.{_OFFSETS}", offsets if end == 0 and self._num_rows == 0 else offsets[1:])
            self._ends[field.role] = int(offsets[-1])
            for number, buffer in enumerate(values.buffers):
                self._write(f"{field.role}.{number}", buffer)
        else:
            self._write(f"{field.role}.0", values)

    def _write(self, name: str, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        try:
            if name not in self._files:
                self._folder.mkdir(exist_ok=True)
                self._files[name] = (self._folder / name).open("wb", buffering=0)
            while data:
                written = self._files[name].write(data)
                self._num_bytes += written
                data = data[written:]
        except OSError as error:
            if not is_full(error):
                raise
            self._discard()
            raise disk_full(self._folder, written=self._num_bytes, wanted=len(data)) from error

    def finish(self) -> ShardSummary:
        """Completes the files (none are made for no rows) and tells what they hold."""
        self._close()
        return ShardSummary(self._num_rows, self._num_validation, dict(self._row_shapes))

    def _close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def _discard(self) -> None:
        self._close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._close()
        else:
            self._discard()


class _Mapped(NamedTuple):
    """A file that is mapped into memory, and the bytes of one item of it."""

    file: FileIO
    memory: mmap.mmap
    item_bytes: int


class Shard:
    """Random access to the rows of a folder of files, without reading them into memory.

    Args:
        folder: What `ShardWriter` has written, or None for a rank without rows.
        row_shapes: Natural shape of a row of each array column, by role, as all ranks agreed on them.
        in_memory: Whether to read the rows into memory after all.

    Attributes:
        in_memory: Whether the rows were read into memory.
    """

    def __init__(
        self,
        folder: Path | None,
        schema: DataSchema,
        row_shapes: Mapping[str, Sequence[int]],
        *,
        in_memory: bool = False,
    ) -> None:
        self._folder = folder
        self.in_memory = in_memory
        self._maps: dict[str, _Mapped] = {}
        self.schema = schema
        self.row_shapes = {role: tuple(shape) for role, shape in row_shapes.items()}
        self._columns = {field.role: self._opened(field) for field in schema}
        first = next(iter(schema))
        self._num_rows = self._length(first)

    @property
    def num_rows(self) -> int:
        """Rows in the shard."""
        return self._num_rows

    @property
    def folder(self) -> Path | None:
        """Folder of the files, also after `unlink`; None without rows."""
        return self._folder

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(bytes_of(values) for values in self._columns.values())

    def row_shape(self, field: Field) -> tuple[int, ...]:
        """Returns the shape that one row of a column, or one element of a ragged row, has for the model."""
        natural = self.row_shapes.get(field.role, (field.width or 0,) if field.kind not in (RAGGED, TEXT) else ())
        return field.row_shape(natural)

    def validation_rows(self) -> np.ndarray:
        """Returns the positions of the rows that the validation indicator column marks."""
        if self.schema.validation is None or self.num_rows == 0:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(np.asarray(self._columns[self.schema.validation.role]))

    def pieces(self) -> np.ndarray:
        """Returns the virtual shard of each row; none where no column tells it."""
        if self.schema.piece is None:
            return np.empty(0, np.int32)
        return np.array(self._columns[self.schema.piece.role])

    def take(self, rows: np.ndarray) -> tuple[Values, ...]:
        """Returns copies of the rows at the given positions, in that order: one value per column of a batch."""
        return tuple(
            take_rows(self._columns[field.role], rows, self.items_per_row(field)) for field in self.schema.batch_fields
        )

    def column(self, field: Field, rows: np.ndarray) -> Values:
        """Returns copies of the rows of one column at the given positions."""
        return take_rows(self._columns[field.role], rows, self.items_per_row(field))

    def columns(self, start: int, stop: int) -> dict[str, Values]:
        """Returns copies of the rows from ``start`` up to, but without, ``stop``, in the form of `write_values`."""
        rows = np.arange(start, stop)
        return {field.role: self.column(field, rows) for field in self.schema}

    def zeros(self, num_rows: int) -> tuple[Values, ...]:
        """Returns rows of zeros in the shard's shapes: what a rank without rows puts through its model."""
        return tuple(self._zeros(field, num_rows) for field in self.schema.batch_fields)

    def zeros_of(self, field: Field, num_rows: int = 0) -> Values:
        """Returns rows of zeros of a column."""
        return self._zeros(field, num_rows)

    def _zeros(self, field: Field, num_rows: int) -> Values:
        shape = self.row_shape(field)
        if field.is_fixed:
            return np.zeros((num_rows, *shape), field.dtype)
        # A sequence without elements is more than some layers bear.
        length = {RAGGED: 1, SPARSE: 0, TEXT: 0}[field.kind]
        items = num_rows * self.items_per_row(field)
        inner = shape if field.kind == RAGGED else ()
        buffers = tuple(np.zeros((items * length, *inner), dtype) for dtype in _buffer_types(field))
        return RaggedArray(np.arange(items + 1, dtype=np.int64) * length, buffers)

    def items_per_row(self, field: Field) -> int:
        """Returns how many items of a `RaggedArray` make a row: the strings of a row of text, and otherwise one."""
        return math.prod(self.row_shape(field)) if field.kind == TEXT else 1

    def _length(self, field: Field) -> int:
        length = len(self._columns[field.role])
        return length // self.items_per_row(field)

    def _opened(self, field: Field) -> Values:
        if self._folder is None:
            return self._zeros(field, 0)
        shape = self.row_shape(field)
        if field.is_fixed:
            return self._array(f"{field.role}.0", field.dtype, shape)
        inner = shape if field.kind == RAGGED else ()
        buffers = (self._array(f"{field.role}.{n}", dtype, inner) for n, dtype in enumerate(_buffer_types(field)))
        return RaggedArray(self._array(f"{field.role}.{_OFFSETS}", "int64", ()), tuple(buffers))

    def _array(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        if self._folder is None:
            raise ValueError(f"{name}: expected a shard with rows.")
        path = self._folder / name
        if self.in_memory or path.stat().st_size == 0:
            flat = np.fromfile(path, dtype)
        else:
            file = path.open("rb", buffering=0)
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[name] = _Mapped(file, memory, np.dtype(dtype).itemsize * math.prod(shape))
            flat = np.frombuffer(memory, dtype)
        return flat.reshape(-1, *shape) if shape else flat

    def hold(self, rows: np.ndarray, instead_of: ShuffleBuffer | None = None) -> ShuffleBuffer:
        """Reads rows into memory, from the files and not through their mappings.

        A mapping brings in whole parts of the file cache around what is read, as large as the kernel likes.
        """
        ranges = RowRanges.of(rows)
        spare = [None] * len(self.schema.batch_fields) if instead_of is None else instead_of.columns
        fields = zip(self.schema.batch_fields, spare, strict=True)
        columns = [self._held(field, ranges, unused) for field, unused in fields]
        return ShuffleBuffer(ranges, columns, [self.items_per_row(field) for field in self.schema.batch_fields])

    def _held(self, field: Field, ranges: RowRanges, spare: Values | None) -> Values:
        column = self._columns[field.role]
        if isinstance(column, RaggedArray):
            ends = ranges.times(self.items_per_row(field)).ends()
            offsets = [column.offsets[first : last + 1] for first, last in ends]
            lengths = np.concatenate([np.empty(0, np.int64), *map(np.diff, offsets)])
            pieces = [(int(places[0]), int(places[-1])) for places in offsets]
            buffers = (self._read(f"{field.role}.{n}", buffer, pieces) for n, buffer in enumerate(column.buffers))
            return RaggedArray(np.concatenate([[0], np.cumsum(lengths)]), tuple(buffers))
        return self._read(f"{field.role}.0", column, ranges.ends(), spare if isinstance(spare, np.ndarray) else None)

    def _read(
        self, name: str, array: np.ndarray, pieces: Sequence[tuple[int, int]], spare: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns copies of pieces of a file's array, one after the other."""
        if name not in self._maps:
            return np.concatenate([array[:0], *(array[first:last] for first, last in pieces)])
        total = sum(last - first for first, last in pieces)
        if spare is None or len(spare) < total:
            spare = np.empty((total, *array.shape[1:]), array.dtype)
        read_pieces(self._maps[name].file, pieces, self._maps[name].item_bytes, spare)
        return spare

    def forget(self) -> None:
        """Gives the memory of what was read back to the system, which reads it again when it is needed again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps.values():
                mapped.memory.madvise(mmap.MADV_DONTNEED)

    def expect(self, start: int, stop: int) -> None:
        """Has the system read the rows from ``start`` up to, but without, ``stop``: they are going to be needed."""
        for field in self.schema.batch_fields:
            values, first, last = self._columns[field.role], start, stop
            if isinstance(values, RaggedArray):
                items = self.items_per_row(field)
                first, last = int(values.offsets[start * items]), int(values.offsets[stop * items])
            for number in range(len(values.buffers) if isinstance(values, RaggedArray) else 1):
                self._expect(f"{field.role}.{number}", first, last)

    def _expect(self, name: str, first: int, last: int) -> None:
        if name in self._maps and hasattr(os, "posix_fadvise") and last > first:
            file, item_bytes = self._maps[name].file, self._maps[name].item_bytes
            os.posix_fadvise(file.fileno(), first * item_bytes, (last - first) * item_bytes, os.POSIX_FADV_WILLNEED)

    def unlink(self) -> None:
        """Removes the files: the mappings keep the rows, and nothing can be left behind, however this process ends."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Gives the mappings back, and closes the files."""
        self._columns = {}
        maps, self._maps = self._maps, {}
        for mapped in maps.values():
            mapped.file.close()


def _buffer_types(field: Field) -> tuple[str, ...]:
    """Returns the element types of what a column's rows of different lengths are made of."""
    return {RAGGED: (field.dtype,), SPARSE: ("int32", field.dtype), TEXT: ("uint8",)}[field.kind]


def bytes_of(values: Values) -> int:
    """Returns the bytes of a column's values."""
    if isinstance(values, RaggedArray):
        return int(values.offsets.nbytes + sum(buffer.nbytes for buffer in values.buffers))
    return int(values.nbytes)


def content_order(shard: Shard) -> np.ndarray:
    """Returns the positions of a shard's rows, ordered by a hash of what they hold."""
    return np.argsort(content_hashes(shard), kind="stable")


def content_hashes(shard: Shard) -> np.ndarray:
    """Returns `row_hashes` of a shard's rows, in their order.

    Args:
        shard: The rows. They are read once, some megabytes at a time.
    """
    if shard.num_rows == 0:
        return np.empty(0, np.uint64)
    length = max(_BLOCK_BYTES * shard.num_rows // max(shard.num_bytes, 1), 1)
    hashes = np.empty(shard.num_rows, np.uint64)
    for start in range(0, shard.num_rows, length):
        stop = min(start + length, shard.num_rows)
        hashes[start:stop] = row_hashes(list(shard.take(np.arange(start, stop))), stop - start)
        shard.forget()
    return hashes


def row_hashes(columns: list[Values], num_rows: int) -> np.ndarray:
    """Returns one uint64 per row.

    Each row is read as 64-bit words; every word is mixed with its place by the finalizer of SplitMix64
    (Steele, Lea & Flood 2014, section 4), which maps no two words to one, and the words are added up.

    Args:
        columns: Arrays of any dtype, of shape (rows, ...), with equally many rows; or rows of different lengths.

    >>> hashes = row_hashes([np.array([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])], 3)
    >>> bool(hashes[0] == hashes[2]), bool(hashes[0] == hashes[1])
    (True, False)
    """
    fixed = [_words(column) for column in columns if isinstance(column, np.ndarray)]
    sums = np.zeros(num_rows, np.uint64)
    if fixed:
        sums = _mixed_sums(np.concatenate(fixed, axis=1))
    variable = [column for column in columns if isinstance(column, RaggedArray)]
    for number, column in enumerate(variable):
        items = _sums_of_items(column, number).reshape(num_rows, -1)
        # Odd factors: rows of the same strings in another order differ.
        sums += (items * (2 * np.arange(items.shape[1], dtype=np.uint64) + np.uint64(1))).sum(axis=1)
    return sums


def _sums_of_items(items: RaggedArray, column: int) -> np.ndarray:
    """Returns one sum per item, in which its length counts too.

    Every word has a place of its own, by column, buffer, element and word, so that none can stand for another.
    """
    lengths = np.diff(items.offsets)
    sums = _mixed_sums(lengths.astype(np.uint64)[:, np.newaxis], _first_place(column, 0))
    elements = (np.arange(items.offsets[-1]) - np.repeat(items.offsets[:-1], lengths)).astype(np.uint64)
    for number, buffer in enumerate(items.buffers):
        if not len(buffer):
            continue
        words = _words(buffer.reshape(len(buffer), -1))
        places = elements * np.uint64(words.shape[1]) + _first_place(column, number + 1)
        mixed = _mixed_sums(words, places[:, np.newaxis])
        totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        sums += totals[items.offsets[1:]] - totals[items.offsets[:-1]]
    return sums


def _first_place(column: int, part: int) -> np.uint64:
    # Room for 2 ** 40 words in each of up to four parts of 2 ** 21 columns; fixed columns have the places before.
    return np.uint64(((column + 1) * 4 + part) << 40)


def _mixed_sums(words: np.ndarray, places: np.ndarray | np.uint64 = _NO_PLACE) -> np.ndarray:
    """Returns for each row the sum of its words, each mixed with its place; a row's places follow ``places``."""
    words = words + (places + np.arange(1, words.shape[1] + 1, dtype=np.uint64)) * _GOLDEN
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words.sum(axis=1, dtype=np.uint64)


def _words(column: np.ndarray) -> np.ndarray:
    """Returns a matrix's rows as uint64 words, the last one filled up with zeros."""
    flat = np.ascontiguousarray(column.reshape(len(column), -1))
    data = flat.view(np.uint8).reshape(len(flat), -1)
    width = -(-data.shape[1] // 8) * 8
    padded = np.zeros((len(data), width), np.uint8)
    padded[:, : data.shape[1]] = data
    return padded.view(np.uint64)
