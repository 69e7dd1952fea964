"""The columns that folders' names hold: ``day=2026-01-01/part-0.parquet``."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from elephant.errors import DataError

_NULL = "__HIVE_DEFAULT_PARTITION__"
_FLOAT = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")


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
