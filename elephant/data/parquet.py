"""Parquet files: row groups, partition values, and columns."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from elephant.data.file_sources import Part, Piece, PlannedFiles, deal_rows
from elephant.errors import DataError
from elephant.storage.filesystem import Found, open_file_system, refuse_other_file

_NULL = "__HIVE_DEFAULT_PARTITION__"
_FLOAT = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")

_BATCH_BYTES = 8 << 20
_MOST_ROWS = 1 << 16
_FOOTERS_AT_A_TIME = 8
_SPARK_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"


def partition_texts(path: str) -> dict[str, str | None]:
    """Returns the columns in the folders of a path below the root.

    >>> partition_texts("/day=2026-01-01/name=a%2Fb/part-0.parquet")
    {'day': '2026-01-01', 'name': 'a/b'}
    """
    folders = [folder.split("=", 1) for folder in path.strip("/").split("/")[:-1] if "=" in folder]
    return {unquote(name): None if value == _NULL else unquote(value) for name, value in folders}


def typed_partitions(texts: Sequence[dict[str, str | None]]) -> tuple[dict[str, pa.DataType], list[dict[str, Any]]]:
    """Returns the type of each column, as Spark infers it, and every file's values.

    Integers, else numbers, else dates, else strings: whatever all values of a column can be.

    Args:
        texts: `partition_texts` of each file.

    Raises:
        DataError: Files lie below folders of different columns.

    >>> typed_partitions([{"k": "1"}, {"k": "2.5"}])
    ({'k': DataType(double)}, [{'k': 1.0}, {'k': 2.5}])
    """
    names = list(texts[0]) if texts else []
    for text in texts:
        if list(text) != names:
            raise DataError(
                f"path: expected folders of the same partition columns. Received: {names} and {list(text)}."
            )
    types: dict[str, pa.DataType] = {}
    values: list[dict[str, Any]] = [{} for _ in texts]
    for name in names:
        types[name], column = _typed([text[name] for text in texts])
        for value, row in zip(column, values, strict=True):
            row[name] = value
    return types, values


def _typed(texts: list[str | None]) -> tuple[pa.DataType, list[Any]]:
    known = [text for text in texts if text is not None]
    if known and all(re.fullmatch(r"[+-]?\d{1,18}", text) for text in known):
        numbers = [None if text is None else int(text) for text in texts]
        wide = any(abs(number) >= 2**31 for number in numbers if number is not None)
        return (pa.int64() if wide else pa.int32()), numbers
    if known and all(_FLOAT.match(text) for text in known):
        return pa.float64(), [None if text is None else float(text) for text in texts]
    dates = [_as_date(text) for text in known]
    if known and None not in dates:
        return pa.date32(), [None if text is None else _as_date(text) for text in texts]
    return pa.string(), list(texts)


def _as_date(text: str) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(text) if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text) else None
    except ValueError:
        return None


@dataclass(frozen=True)
class ParquetSchema:
    """The columns of a file or a table.

    Args:
        columns: As Arrow reads them.
        spark: Spark's own description in JSON where Spark wrote the file, or None.
    """

    columns: pa.Schema
    spark: dict[str, Any] | None


@dataclass(frozen=True)
class ParquetFile:
    """One file as the driver has seen it.

    Args:
        found: Where it is, and its size and time.
        group_rows: Rows of each row group.
        constants: Columns that its rows do not have, but its place or its table.
    """

    found: Found
    group_rows: tuple[int, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParquetFiles(PlannedFiles):
    """Parquet files of one data set.

    Args:
        url: Where they are; tells their file system.
        files: The files.
        constant_types: Type of each column that is constant in a file.
    """

    url: str
    files: tuple[ParquetFile, ...]
    constant_types: Mapping[str, pa.DataType] = field(default_factory=dict)

    def deal(self, num_workers: int, *, seed: int | None) -> list[Part]:
        """Returns the row groups, or parts of them, of each worker: equally many rows, within one."""
        return list(deal_rows([file.group_rows for file in self.files], num_workers, seed=seed))

    def in_order(self, number: int) -> list[Part]:
        """Returns the row groups, or parts of them, with equally many rows, within one."""
        return self.deal(number, seed=None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.found.size for file in self.files)

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a part in the order of the files."""
        system, _ = open_file_system(self.url)
        pieces: dict[int, list[Piece]] = {}
        for piece in part:
            pieces.setdefault(piece.file, []).append(piece)
        for number, of_file in pieces.items():
            file = self.files[number]
            refuse_other_file(system, file.found)
            try:
                yield from self._rows(system, file, of_file, columns)
            except (pa.ArrowException, OSError) as error:
                raise DataError(
                    f"{file.found.path}: expected a Parquet file that can be read. Received: {error}"
                ) from error

    def _rows(
        self, system: Any, file: ParquetFile, pieces: list[Piece], columns: list[str]
    ) -> Iterator[pa.RecordBatch]:
        with _opened(system, file.found) as opened:
            wanted = [name for name in columns if name not in file.constants]
            places = _names_in(opened.schema_arrow, wanted, file.found)
            instants = _instants(opened)
            for piece in pieces:
                for batch in _read_piece(opened, piece, [".".join(place) for place in places.values()]):
                    arrays = [
                        _constant(file.constants[name], self.constant_types[name], batch.num_rows)
                        if name in file.constants
                        else _in_utc(_at(batch, places[name]), places[name][0] in instants)
                        for name in columns
                    ]
                    yield pa.RecordBatch.from_arrays(arrays, columns)


def _instants(opened: pq.ParquetFile) -> set[str]:
    """Returns the columns of timestamps in the old form of 96 bits, which have a time zone, but do not say so."""
    columns = (opened.schema.column(place) for place in range(len(opened.schema.names)))
    return {column.path for column in columns if column.physical_type == "INT96"}


def _in_utc(column: pa.Array, is_instant: bool) -> pa.Array:
    return column.cast(pa.timestamp("us", "UTC")) if is_instant else column


def _constant(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), count)


def _opened(system: Any, found: Found) -> pq.ParquetFile:
    # A file of this host is mapped: bytes that need no decoding are not copied before they are written to the shard.
    return pq.ParquetFile(
        found.path, filesystem=system, memory_map=True, pre_buffer=False, coerce_int96_timestamp_unit="us"
    )


def _names_in(schema: pa.Schema, columns: Sequence[str], found: Found) -> dict[str, tuple[str, ...]]:
    """Returns the path of each column in a file: a name, and those of the parts of structs for a name with dots.

    A file's spelling is told without regard to case, as Spark does it.
    """
    places = {name: _place_in({column.name: column.type for column in schema}, name) for name in columns}
    missing = [name for name, place in places.items() if not place]
    if missing:
        raise DataError(
            f"{found.path}: expected the column {missing[0]!r}, which other files have. "
            f"Received: {', '.join(schema.names)}."
        )
    return places


def _place_in(columns: Mapping[str, pa.DataType], name: str) -> tuple[str, ...]:
    by_lower = {known.lower(): known for known in columns}
    spelt = name if name in columns else by_lower.get(name.lower())
    if spelt is not None:
        return (spelt,)
    for place, letter in enumerate(name):
        outer = by_lower.get(name[:place].lower()) if letter == "." else None
        if outer is not None and pa.types.is_struct(columns[outer]):
            inner = _place_in({part.name: part.type for part in columns[outer]}, name[place + 1 :])
            if inner:
                return (outer, *inner)
    return ()


def _at(batch: pa.RecordBatch, place: tuple[str, ...]) -> pa.Array:
    column = batch.column(place[0])
    return pc.struct_field(column, list(place[1:])) if len(place) > 1 else column


def _read_piece(opened: pq.ParquetFile, piece: Piece, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Yields a piece's rows. Rows before it in its row group are decoded too, and dropped."""
    group = opened.metadata.row_group(piece.group)
    wanted = set(names)
    size = sum(
        group.column(place).total_uncompressed_size
        for place in range(group.num_columns)
        if any(f"{group.column(place).path_in_schema}.".startswith(f"{name}.") for name in wanted)
    )
    rows = min(max(_BATCH_BYTES * group.num_rows // max(size, 1), 1), _MOST_ROWS)
    place = 0
    for batch in opened.iter_batches(batch_size=rows, row_groups=[piece.group], columns=names, use_threads=False):
        start, stop = max(piece.start - place, 0), min(piece.stop - place, batch.num_rows)
        if start < stop:
            yield batch if stop - start == batch.num_rows else batch.slice(start, stop - start)
        place += batch.num_rows
        if place >= piece.stop:
            return


def _columns_of(opened: pq.ParquetFile) -> pa.Schema:
    instants = _instants(opened)
    return pa.schema(
        [
            column.with_type(pa.timestamp("us", "UTC")) if column.name in instants else column
            for column in opened.schema_arrow
        ]
    )


def read_footers(url: str, found: Sequence[Found]) -> list[tuple[ParquetSchema, tuple[int, ...]]]:
    """Returns the columns of each file, and the rows of each of its row groups.

    Raises:
        DataError: A file is no Parquet file.
    """
    system, _ = open_file_system(url)

    def footer(file: Found) -> tuple[ParquetSchema, tuple[int, ...]]:
        try:
            with _opened(system, file) as opened:
                about = opened.metadata
                rows = tuple(about.row_group(group).num_rows for group in range(about.num_row_groups))
                spark = (about.metadata or {}).get(_SPARK_SCHEMA)
                return ParquetSchema(_columns_of(opened), json.loads(spark) if spark else None), rows
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file.path}: expected a Parquet file. Received: {error}") from error

    with ThreadPoolExecutor(_FOOTERS_AT_A_TIME, thread_name_prefix="elephant-footers") as pool:
        return list(pool.map(footer, found))
