"""The files of a Delta table's present version, by its log, which the `deltalake` package reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from elephant.data.file_system import Found, find_file, open_file_system
from elephant.errors import ConfigurationError, DataError, UnsupportedError

_PARTITION = "partition."


@dataclass(frozen=True)
class DeltaFiles:
    """What a version of a table consists of.

    Args:
        found: Its files.
        constants: The partition columns' values of each file.
        constant_types: Their types.
    """

    found: tuple[Found, ...]
    constants: tuple[dict[str, Any], ...]
    constant_types: dict[str, pa.DataType]


def delta_files(url: str) -> DeltaFiles:
    """Returns the files of a table's present version, without those that were removed from it.

    Args:
        url: The table's folder, as an absolute path or URL.

    Raises:
        ConfigurationError: The package is not installed, or there is no table.
        UnsupportedError: The table hides rows, or names columns, in a way that its files do not show.
    """
    table = _opened(url)
    _refuse_column_mapping(table)
    _refuse_deletion_vectors(table)
    actions = pa.table(table.get_add_actions(flatten=True))
    partitions = [name for name in actions.column_names if name.startswith(_PARTITION)]
    system, root = open_file_system(url)
    rows = sorted(actions.select(["path", *partitions]).to_pylist(), key=lambda row: str(row["path"]))
    return DeltaFiles(
        found=tuple(_found(system, root, str(row["path"])) for row in rows),
        constants=tuple({name.removeprefix(_PARTITION): row[name] for name in partitions} for row in rows),
        constant_types={name.removeprefix(_PARTITION): actions.schema.field(name).type for name in partitions},
    )


def _opened(url: str) -> Any:
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError
    except ImportError as error:
        raise ConfigurationError(
            f"path: expected the package deltalake, which reads the log of the Delta table {url!r}. Received: {error}. "
            "Install it on the driver: pip install 'elephant-spark[delta]'. Or pass a DataFrame."
        ) from error
    try:
        return DeltaTable(url)
    except TableNotFoundError as error:
        raise ConfigurationError(f"path: expected a Delta table. Received: {url!r}: {error}") from error


def _refuse_column_mapping(table: Any) -> None:
    mode = (table.metadata().configuration or {}).get("delta.columnMapping.mode", "none")
    if mode not in (None, "none"):
        raise UnsupportedError(
            f"path: expected a Delta table whose files name columns as the table does. Received: column mapping by "
            f"{mode}. Pass a DataFrame of the table instead."
        )


def _refuse_deletion_vectors(table: Any) -> None:
    features = table.protocol().reader_features or []
    if "deletionVectors" in features and any(batch.num_rows for batch in table.deletion_vectors()):
        raise UnsupportedError(
            "path: expected a Delta table whose deleted rows have been removed from its files. Received: one with "
            "deletion vectors. Purge it (REORG TABLE ... APPLY (PURGE)), or pass a DataFrame of the table instead."
        )


def _found(system: Any, root: str, path: str) -> Found:
    if "://" in path:
        raise UnsupportedError(
            f"path: expected a Delta table whose files lie in its folder. Received: {path!r}, as in a shallow clone. "
            "Pass a DataFrame of the table instead."
        )
    found = find_file(system, f"{root.rstrip('/')}/{unquote(path)}")
    if found is None:
        raise DataError(f"{path}: expected a file that the Delta table's log names. Received: no such file.")
    return found
