"""Formats of files to train on: how a format is recognized, and how its files are listed and opened.

A format is one function with `file_format`, which says what planned files a folder holds and what columns these have.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    FloatType,
    IntegralType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from elephant.cluster.row_source import RecordFiles
from elephant.cluster.spark_private import parsed_type
from elephant.data.delta import delta_files
from elephant.data.file_sources import PlannedFiles
from elephant.data.parquet import (
    ParquetFile,
    ParquetFiles,
    partition_texts,
    read_footers,
    typed_partitions,
)
from elephant.errors import ConfigurationError, DataError, SchemaError
from elephant.modeling.model_info import ModelInfo
from elephant.spark.columns.column_selection import ColumnSelection
from elephant.spark.columns.spark_types import spark_schema
from elephant.storage.filesystem import Found, absolute, has_folder, list_files, open_file_system


@dataclass(frozen=True)
class Files:
    """Files to train on, where a path alone does not say enough.

    Args:
        path: A file or a folder, as a path that all executors have, or a URL.
        format: ``"parquet"``, ``"delta"``, ``"tfrecord"``, or another of `FORMATS`; None tells by the files' names.
        schema: Of TFRecord files, the columns and their types as Spark writes them, such as
            ``"image binary, words array<bigint>, label bigint"``; None tells by the first records.

    Examples:
        >>> estimator.fit(Files("/data/train", format="tfrecord", schema="x array<float>, y float"))  # doctest: +SKIP
    """

    path: str | os.PathLike[str]
    format: str | None = None
    schema: str | StructType | None = None

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise ConfigurationError(f"format: expected one of {', '.join(FORMATS)}. Received: {self.format!r}.")
        if self.schema is not None and self.format is not None and not FORMATS[self.format].takes_schema:
            raise ConfigurationError(
                f"schema: expected format='tfrecord': other files say what they hold. Received: {self.format!r}."
            )


@dataclass(frozen=True)
class Opened:
    """Files that were listed, and their columns."""

    schema: StructType
    files: PlannedFiles


@dataclass(frozen=True)
class FileListing:
    """Place of files that are to be opened.

    Args:
        url: The file or folder.
        schema: What the user says of its columns; None leaves it to the files.
        info: What the model takes.
        selection: The columns that it is to be given.
    """

    url: str
    schema: str | StructType | None
    info: ModelInfo
    selection: ColumnSelection

    @functools.cached_property
    def root(self) -> str:
        """Path of the folder, as the paths of its files begin."""
        return self._listed[0]

    @property
    def found(self) -> Sequence[Found]:
        """The files; not empty.

        Raises:
            ConfigurationError: There is none.
        """
        if not self._listed[1]:
            raise ConfigurationError(f"path: expected files with rows. Received: {self.url!r}, a folder without any.")
        return self._listed[1]

    @functools.cached_property
    def _listed(self) -> tuple[str, Sequence[Found]]:
        return list_files(self.url)


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """One format, with how it is recognized where nobody names it.

    Args:
        title: For messages.
        names: Pattern that the end of a file's name matches; None for a format that names do not show.
        magic: First bytes of a file whose name says nothing; empty for a format without.
        folder: Name of a folder that only a table of this format has; empty for a format without.
        takes_schema: Whether the user says what the columns are.
        open: Lists the files and finds out their columns.
    """

    title: str
    open: Callable[[FileListing], Opened]
    names: re.Pattern[str] | None = None
    magic: bytes = b""
    folder: str = ""
    takes_schema: bool = False


FORMATS: dict[str, FileFormat] = {}
# Of Spark, by how names of files end that only it reads.
_READERS = {
    "csv": "spark.read.csv(path, header=True, inferSchema=True)",
    "tsv": r"spark.read.csv(path, sep='\t', header=True, inferSchema=True)",
    "json": "spark.read.json(path)",
    "jsonl": "spark.read.json(path)",
    "orc": "spark.read.orc(path)",
    "avro": "spark.read.format('avro').load(path)",
    "txt": "spark.read.text(path)",
}
Opener = Callable[[FileListing], Opened]


def file_format(
    name: str, *, title: str, names: str = "", magic: bytes = b"", folder: str = "", takes_schema: bool = False
) -> Callable[[Opener], Opener]:
    """Returns a decorator that makes a format known by a name, as `Files` has it.

    Args:
        name: Its name.
        title: See `FileFormat`, as the others.
        names: The pattern, in any case of letters.
    """

    def register(opener: Opener) -> Opener:
        pattern = re.compile(names, re.IGNORECASE) if names else None
        FORMATS[name] = FileFormat(
            title=title, open=opener, names=pattern, magic=magic, folder=folder, takes_schema=takes_schema
        )
        return opener

    return register


def open_files(files: Files, info: ModelInfo, selection: ColumnSelection) -> Opened:
    """Lists files, and finds out what columns they have.

    Args:
        files: Where they are.
        info: What the model takes.
        selection: The columns that it is to be given.

    Raises:
        ConfigurationError: There are no files, or of no known format.
        DataError: A file cannot be read.
    """
    listing = FileListing(absolute(os.fspath(files.path)), files.schema, info, selection)
    name = files.format or _format_of(listing)
    if files.schema is not None and not FORMATS[name].takes_schema:
        raise ConfigurationError(f"schema: expected TFRecord files. Received: {name} files, which say what they hold.")
    return FORMATS[name].open(listing)


def _format_of(listing: FileListing) -> str:
    # Asked first: the folder of a Delta table has Parquet files which are not all part of it.
    for name, known in FORMATS.items():
        if known.folder and has_folder(listing.url, known.folder):
            return name
    found = listing.found
    kinds = {_format_of_file(listing.url, file) for file in found}
    kind = kinds.pop()
    if kinds or kind is None:
        titles = " or ".join(known.title for known in FORMATS.values() if known.names)
        remedy = "Say what they are: elephant.Files(path, format='parquet')."
        if kind is None and not kinds and (reader := _reader_of(found[0].path)):
            remedy = f"Pass the DataFrame that Spark reads: {reader}."
        raise ConfigurationError(
            f"path: expected {titles} files, by their names. Received: {listing.url!r} with {found[0].path!r}"
            f"{' and others' if len(found) > 1 else ''}. {remedy}"
        )
    return kind


def _reader_of(name: str) -> str:
    """Returns the call of Spark that reads a file of this name; empty where the name does not tell it."""
    found = re.search(rf"\.({'|'.join(_READERS)})(\.\w+)?$", name, re.IGNORECASE)
    return "" if found is None else _READERS[found[1].lower()]


def _format_of_file(url: str, file: Found) -> str | None:
    for name, known in FORMATS.items():
        if known.names and known.names.search(file.path):
            return name
    system, _ = open_file_system(url)
    with system.open_input_stream(file.path, compression=None) as stream:
        first = stream.read(max(len(known.magic) for known in FORMATS.values()))
    return next((name for name, known in FORMATS.items() if known.magic and first.startswith(known.magic)), None)


@file_format("parquet", title="Parquet", names=r"\.(parquet|parq|pq)$", magic=b"PAR1")
def _open_parquet(listing: FileListing) -> Opened:
    types, constants = typed_partitions([partition_texts(file.path[len(listing.root) :]) for file in listing.found])
    footers = read_footers(listing.url, listing.found)
    first = footers[0][0]
    own = pa.schema([column for column in first.columns if column.name not in types])
    columns = StructType([*spark_schema(own, first.spark).fields, *spark_schema(pa.schema(list(types.items()))).fields])
    files = tuple(
        ParquetFile(file, rows, values)
        for file, (_, rows), values in zip(listing.found, footers, constants, strict=True)
    )
    return Opened(columns, ParquetFiles(listing.url, files, types))


@file_format("delta", title="Delta", folder="_delta_log")
def _open_delta(listing: FileListing) -> Opened:
    table = delta_files(listing.url)
    if not table.found:
        raise DataError(f"path: expected a Delta table with rows. Received: {listing.url!r}, which has no file.")
    return Opened(spark_schema(table.schema.columns, table.schema.spark), table.planned(listing.url))


@file_format("tfrecord", title="TFRecord", names=r"\.tfr(ecords?)?(-\d+-of-\d+)?(\.gz)?$", takes_schema=True)
def _open_records(listing: FileListing) -> Opened:
    schema = listing.schema
    if schema is not None:
        columns = schema if isinstance(schema, StructType) else cast(StructType, parsed_type(schema))
        features = {column.name: _feature_of(column) for column in columns.fields}
    else:
        # Here, because it needs TensorFlow, which other formats do not.
        from elephant.rank.input.tfrecord_reader import describe

        features = describe(listing.url, listing.found)
        strings = _string_columns(listing.info, listing.selection)
        columns = StructType([_column_of(name, *features[name], name in strings) for name in sorted(features)])
    return Opened(columns, RecordFiles(listing.url, tuple(listing.found), features))


def _feature_of(column: StructField) -> tuple[str, bool]:
    kind: DataType = column.dataType
    single = not isinstance(kind, ArrayType)
    element = kind.elementType if isinstance(kind, ArrayType) else kind
    if isinstance(element, (FloatType, DoubleType)):
        return "float_list", single
    if isinstance(element, IntegralType):
        return "int64_list", single
    if isinstance(element, (StringType, BinaryType)):
        return "bytes_list", single
    raise SchemaError(
        "schema: expected float, bigint, string, binary and arrays of them, as TFRecords hold. "
        f"Received: column {column.name!r} of type {kind.simpleString()}."
    )


def _column_of(name: str, kind: str, single: bool, is_string: bool) -> StructField:
    elements: dict[str, DataType] = {
        "float_list": FloatType(),
        "int64_list": LongType(),
        "bytes_list": StringType() if is_string else BinaryType(),
    }
    return StructField(name, elements[kind] if single else ArrayType(elements[kind]))


def _string_columns(info: ModelInfo, selection: ColumnSelection) -> Collection[str]:
    """Returns the columns that are given to inputs of strings; TFRecords know bytes alone."""
    taken = [input_info.dtype == "string" for input_info in info.inputs]
    of_each = selection.of_inputs(info)
    if isinstance(of_each, Mapping):
        by_name = {input_info.name: input_info.dtype == "string" for input_info in info.inputs}
        given = [(columns, by_name.get(name, False)) for name, columns in of_each.items()]
    else:
        in_order: Sequence[Any] = [selection.features] if of_each is None else of_each
        given = list(zip(in_order, taken, strict=False))
    names: set[str] = set()
    for columns, is_string in given:
        if is_string:
            names.update([columns] if isinstance(columns, str) else columns)
    return names
