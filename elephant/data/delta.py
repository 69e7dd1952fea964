"""Delta tables: the files of the present version, as the table's log has them, and what their rows do not say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from elephant.data.parquet import ParquetFile, ParquetFiles, ParquetSchema, read_footers
from elephant.errors import ConfigurationError, DataError, UnsupportedError, first_line
from elephant.storage.filesystem import Found, find_file, open_file_system, url_root

_PARTITION = "partition."


@dataclass(frozen=True)
class DeltaFiles:
    """Files of one version of a table.

    Args:
        found: Its files.
        constants: The partition columns' values of each file.
        schema: The table's columns, which a file need not have: it has no rows from after they were added.
    """

    found: tuple[Found, ...]
    constants: tuple[dict[str, Any], ...]
    schema: ParquetSchema

    def planned(self, url: str) -> ParquetFiles:
        """Returns the files with their row groups; columns that a file does not have are null in its rows.

        Raises:
            DataError: One of them is no Parquet file.
        """
        types = {column.name: column.type for column in self.schema.columns}
        files = []
        for found, values, (own, rows) in zip(self.found, self.constants, read_footers(url, self.found), strict=True):
            written = {name.lower() for name in own.columns.names}
            files.append(ParquetFile(found, rows, {**{n: None for n in types if n.lower() not in written}, **values}))
        return ParquetFiles(url, tuple(files), types)


def delta_files(url: str) -> DeltaFiles:
    """Returns the files of a table's present version, without those that were removed from it.

    Raises:
        ConfigurationError: The package is not installed, or there is no table.
        UnsupportedError: The table hides rows, or names columns, in a way that its files do not show; or the package
            does not read it.
    """
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError
    except ImportError as error:
        raise ConfigurationError(
            f"path: expected the package deltalake, which reads the log of the Delta table {url!r}. Received: {error}. "
            "Install it on the driver: pip install 'elephant-spark[delta]'. Or pass a DataFrame."
        ) from error
    try:
        return _files_of(DeltaTable(url), url)
    except TableNotFoundError as error:
        raise ConfigurationError(f"path: expected a Delta table. Received: {url!r}: {error}") from error
    except DeltaError as error:
        # Its first line: the others are addresses in its library.
        raise UnsupportedError(
            f"path: expected a Delta table that the package deltalake reads. Received: {first_line(error)} "
            "Pass a DataFrame of the table instead."
        ) from error


def _files_of(table: Any, url: str) -> DeltaFiles:
    _refuse_column_mapping(table)
    _refuse_deletion_vectors(table, url)
    actions = pa.table(table.get_add_actions(flatten=True))
    partitions = [name for name in actions.column_names if name.startswith(_PARTITION)]
    system, root = open_file_system(url)
    rows = sorted(actions.select(["path", *partitions]).to_pylist(), key=lambda row: str(row["path"]))
    return DeltaFiles(
        found=tuple(_found(system, root, str(row["path"])) for row in rows),
        constants=tuple({name.removeprefix(_PARTITION): row[name] for name in partitions} for row in rows),
        schema=ParquetSchema(pa.schema(table.schema().to_arrow()), json.loads(table.schema().to_json())),
    )


def _refuse_column_mapping(table: Any) -> None:
    mode = (table.metadata().configuration or {}).get("delta.columnMapping.mode", "none")
    if mode not in (None, "none"):
        raise UnsupportedError(
            f"path: expected a Delta table whose files name columns as the table does. Received: column mapping by "
            f"{mode}. Pass a DataFrame of the table instead."
        )


def _refuse_deletion_vectors(table: Any, url: str) -> None:
    features = table.protocol().reader_features or []
    if "deletionVectors" in features and any(batch.num_rows for batch in table.deletion_vectors()):
        raise UnsupportedError(
            "path: expected a Delta table whose deleted rows have been removed from its files. Received: one with "
            f"deletion vectors. Purge it in a Spark session with Delta's extension (REORG TABLE delta.`{url}` APPLY "
            "(PURGE)), or pass a DataFrame of the table instead."
        )


def _found(system: Any, root: str, path: str) -> Found:
    if url_root(path):
        raise UnsupportedError(
            f"path: expected a Delta table whose files lie in its folder. Received: {path!r}, as in a shallow clone. "
            "Pass a DataFrame of the table instead."
        )
    found = find_file(system, f"{root.rstrip('/')}/{unquote(path)}")
    if found is None:
        raise DataError(f"{path}: expected a file that the Delta table's log names. Received: no such file.")
    return found
