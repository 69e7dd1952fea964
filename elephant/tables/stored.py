"""Tables that ranks have written to a folder, each its part: where they lie, and their rows without loading them.

What a state or a model has of such a table is a reference to it, as an array of bytes, so that it goes wherever
arrays go. A part is a file of numpy's format 1.0 (NEP 1), in which row i of N parts is row i // N of part i mod N.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elephant.errors import CheckpointError, ProtocolError
from elephant.net.frames import require, shown
from elephant.storage.filesystem import scratch_folder
from elephant.storage.folder import DAMAGES, folder_at

# A reference begins with it.
_MARK = b"elephant-table:"
_FIELDS = {"url": str, "name": str, "shape": list[int], "parts": int}
# Rows that are copied at a time.
_BLOCK_ROWS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """Rows of a table, or what its rule remembers of them, in files of a folder.

    Args:
        url: The folder, as every process that reads them sees it.
        name: Beginning of the files' names.
        shape: Of all rows: (rows, values of each).
        parts: Number of files.
    """

    url: str
    name: str
    shape: tuple[int, int]
    parts: int

    def to_array(self) -> np.ndarray:
        """Returns the reference, uint8 of shape (bytes,)."""
        return np.frombuffer(_MARK + json.dumps(asdict(self)).encode(), np.uint8)

    @classmethod
    def from_array(cls, array: Any) -> StoredTable | None:
        """Returns the table that an array refers to; None where it is no reference, but values.

        Raises:
            CheckpointError: It begins as a reference, and is none.

        >>> table = StoredTable(url="/tables", name="users", shape=(5, 2), parts=2)
        >>> StoredTable.from_array(table.to_array()) == table, StoredTable.from_array(np.zeros((5, 2)))
        (True, None)
        """
        if getattr(array, "dtype", None) != np.uint8 or np.ndim(array) != 1:
            return None
        content = np.asarray(array).tobytes()
        if not content.startswith(_MARK):
            return None
        try:
            fields = json.loads(content[len(_MARK) :])
            require(fields, _FIELDS, "a table's reference")
            rows, width = fields["shape"]
            if not fields["parts"] or Path(fields["name"]).name != fields["name"]:
                raise ValueError("not the name or the number of files")
        except (ProtocolError, *DAMAGES) as error:
            raise CheckpointError(
                f"expected the folder of a table that is in none of the model's or state's files. Received: "
                f"{shown(content)} ({type(error).__name__}: {error}). Use the state before it, or save the model again."
            ) from error
        return cls(**{**fields, "shape": (rows, width)})

    def write(self, part: int, rows: np.ndarray) -> None:
        """Writes a part.

        Args:
            rows: float32 of shape (rows of the part, values of each).

        Raises:
            CheckpointError: The folder cannot be written to.
        """
        header = {"descr": "<f4", "fortran_order": False, "shape": rows.shape}

        def fill(file: Any) -> None:
            np.lib.format.write_array_header_1_0(file, header)
            for first in range(0, len(rows), _BLOCK_ROWS):
                file.write(np.ascontiguousarray(rows[first : first + _BLOCK_ROWS], "<f4").data)

        with writing_to(self.url):
            folder_at(self.url).replace(self._file(part), fill)

    def missing(self) -> list[str]:
        """Returns the names of its files that are not in the folder; may raise OSError."""
        folder = folder_at(self.url)
        return [name for name in map(self._file, range(self.parts)) if not folder.has(name)]

    def part(self, part: int, parts: int) -> np.ndarray:
        """Returns a copy of the rows of one of so many parts; reads one file where there are as many.

        Raises:
            CheckpointError: They cannot be read.
        """
        return np.array(self.file(part)) if parts == self.parts else self.opened().part(part, parts)

    def opened(self) -> OpenedTable:
        """Returns its rows.

        Raises:
            CheckpointError: A part cannot be read.
        """
        return OpenedTable(self.shape, [self.file(part) for part in range(self.parts)])

    def file(self, part: int) -> np.ndarray:
        """Returns the rows of a part, which are read as they are needed.

        Raises:
            CheckpointError: They cannot be read.
        """
        expected = -(-(self.shape[0] - part) // self.parts), self.shape[1]
        try:
            array = _mapped(self.url, self._file(part))
            if array.shape != expected or array.dtype != np.float32:
                raise ValueError(f"{array.dtype} of shape {array.shape}, not float32 of {expected}")
        except (OSError, *DAMAGES) as error:
            raise CheckpointError(
                f"ShardedEmbedding(path={self.url!r}): expected {self._file(part)}, in which a worker has written its "
                f"part of a table. Received: {type(error).__name__}: {error}. Mount or restore the folder: the rows "
                "are nowhere else."
            ) from error
        return array

    def _file(self, part: int) -> str:
        return f"{self.name}.{part}-of-{self.parts}.npy"


@contextlib.contextmanager
def writing_to(url: str) -> Iterator[None]:
    """Raises CheckpointError for an error of a folder to which a worker writes."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"ShardedEmbedding(path={url!r}): expected a folder that every worker can write its part of the table to. "
            f"Received: {type(error).__name__}: {error}. Make room, mount it on all hosts, or name another one."
        ) from error


class OpenedTable:
    """Rows of a table that are read as they are needed.

    Args:
        shape: Of all rows.
        arrays: Those of each part.
    """

    def __init__(self, shape: tuple[int, int], arrays: list[np.ndarray]) -> None:
        self._shape, self._arrays = shape, arrays

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Returns the rows of ids, float32 of shape (ids, values of each)."""
        count = len(self._arrays)
        rows, owners = np.empty((len(ids), self._shape[1]), np.float32), ids % count
        for place, array in enumerate(self._arrays):
            those = owners == place
            rows[those] = array[ids[those] // count]
        return rows

    def part(self, part: int = 0, parts: int = 1) -> np.ndarray:
        """Returns a copy of the rows of one of so many parts, whatever the number of files is."""
        rows = np.empty((-(-(self._shape[0] - part) // parts), self._shape[1]), np.float32)
        for first in range(0, len(rows), _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, len(rows))
            rows[first:last] = self.take(np.arange(first, last) * parts + part)
        return rows


def _mapped(url: str, name: str) -> np.ndarray:
    """Returns the array of a file, of which pages are read as they are needed; one from elsewhere is copied first."""
    with folder_at(url).reading(name) as file:
        path = getattr(file, "name", None)
        if isinstance(path, str):
            return np.lib.format.open_memmap(path, mode="r")
        folder = tempfile.mkdtemp(prefix="elephant-table-", dir=scratch_folder())
        remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
        try:
            copy = Path(folder) / name
            with open(copy, "wb") as local:
                shutil.copyfileobj(file, local, 1 << 20)
            array = np.lib.format.open_memmap(copy, mode="r")
        except BaseException:
            remove()
            raise
    # The pages stay as long as the array does.
    weakref.finalize(array, remove)
    return array


def shape_of(value: Any) -> tuple[int, ...]:
    """Returns the shape of values, or of the table that they refer to."""
    stored = StoredTable.from_array(value)
    return tuple(value.shape) if stored is None else stored.shape


@dataclass(frozen=True, kw_only=True)
class TablePlaces:
    """Places of a fit's tables.

    Args:
        paths: Of each table the folder that it is written to; None sends it to the driver.
        fit_name: Beginning of the names of the fit's files, which no other fit has.

    >>> places = TablePlaces(paths=[None, "/tables"], fit_name="a1")
    >>> places.of("3-0")[1].table("rows", (4, 2), 1).name
    'a1.3-0.1.rows'
    """

    paths: Sequence[str | None]
    fit_name: str

    @property
    def urls(self) -> list[str]:
        """The folders."""
        return sorted({path for path in self.paths if path is not None})

    def name_of(self, state: str) -> str:
        """Returns the beginning of the names of a state's files."""
        return f"{self.fit_name}.{state}"

    def of(self, state: str) -> list[TablePlace | None]:
        """Returns where the tables of a state are written; None for those that are not.

        Args:
            state: A name that no other state of the fit has, without a full stop.
        """
        return [
            None if path is None else TablePlace(url=path, state=f"{self.name_of(state)}.{number}")
            for number, path in enumerate(self.paths)
        ]

    def facts_of(self, state: str, *, are_finite: bool) -> dict[str, Any]:
        """Returns the facts of a state's files for `elephant.checkpoint`; none where there are no files."""
        tables = {"name": self.name_of(state), "urls": self.urls, "finite": are_finite}
        return {"tables": tables} if self.urls else {}


@dataclass(frozen=True, kw_only=True)
class TablePlace:
    """Place of one layer's table in one state of a fit.

    Args:
        url: The folder.
        state: Beginning of the files' names, which no other layer and state has.
    """

    url: str
    state: str

    def table(self, array: str, shape: tuple[int, int], parts: int) -> StoredTable:
        """Returns the place of an array of the table.

        Args:
            array: Its name.
            shape: Of all rows.
        """
        return StoredTable(url=self.url, name=f"{self.state}.{array}", shape=shape, parts=parts)
