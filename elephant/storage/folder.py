"""Folders and files: of this machine, or of any file system that pyarrow or fsspec reaches.

Nothing more is asked of a file system than to list, write, read and remove whole files.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import struct
import tempfile
import tokenize
import uuid
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from elephant.storage.filesystem import absolute, copy_in_order, find_file, mounted_here, open_file_system

UNFINISHED = ".unfinished"
# What reading JSON, an archive or arrays may raise where they are not what they seem, though a checksum is right.
DAMAGES = (
    AssertionError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
_BLOCK_BYTES = 1 << 20


class DamagedError(ValueError):
    """A file is not what was written."""


def sealed(body: Mapping[str, Any]) -> bytes:
    """Returns the content of a manifest: JSON values with their checksum."""
    text = json.dumps(body, indent=1)
    return json.dumps({"crc": zlib.crc32(text.encode()), "body": text}).encode()


def unsealed(content: bytes) -> dict[str, Any]:
    """Reads the form of `sealed`; raises one of `DAMAGES` for anything else."""
    outer = json.loads(content)
    if zlib.crc32(outer["body"].encode()) != outer["crc"]:
        raise DamagedError("a manifest whose checksum does not hold")
    body: dict[str, Any] = json.loads(outer["body"])
    return body


def checksum(file: BinaryIO) -> tuple[int, int]:
    """Returns the bytes from here to the end of a file, and their CRC-32."""
    crc = num_bytes = 0
    while block := file.read(_BLOCK_BYTES):
        crc, num_bytes = zlib.crc32(block, crc), num_bytes + len(block)
    return num_bytes, crc


def write_whole(path: Path, fill: Callable[[BinaryIO], object], *, durable: bool = True) -> None:
    """Writes a file beside its place, and moves it there."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}{UNFINISHED}")
    try:
        with open(unfinished, "wb") as file:
            fill(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    if durable:
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    # Not every file system that can be mounted does this for folders.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Folder(ABC):
    """A folder of files that are written once. Every method may raise OSError.

    Attributes:
        url: What the user calls it.
    """

    url: str

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of the files in it, sorted; none when there is no such folder."""

    def has(self, name: str) -> bool:
        """Returns whether there is a file of a name."""
        return name in self.names()

    @abstractmethod
    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        """Writes a new file; when this returns, it is there, and stays whatever becomes of this process."""

    def replace(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        """Writes a file as `write` does, in the place of one that may be there."""
        self.write(name, fill)

    @abstractmethod
    def reading(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Opens a file for reading; it can seek. Raises FileNotFoundError where there is none."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file; does nothing when it is not there."""

    def tidy(self) -> None:
        """Removes what processes were writing when they were killed, where that is no file yet."""
        return


@dataclass(frozen=True)
class File:
    """One file of a folder. Every method may raise OSError."""

    folder: Folder
    name: str

    def read(self) -> bytes | None:
        """Returns the content, or None where there is no file."""
        try:
            with self.folder.reading(self.name) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, content: bytes, *, overwrite: bool = False) -> None:
        """Writes the whole file; raises FileExistsError where there is one that is not to be replaced."""
        if not overwrite and self.folder.has(self.name):
            url = f"{self.folder.url.rstrip('/')}/{self.name}"
            raise FileExistsError(
                f"expected no file at {url}. Received: a path where one is. Remove it, or pass another path."
            )
        write = self.folder.replace if overwrite else self.folder.write
        write(self.name, lambda file: file.write(content))


class LocalFolder(Folder):
    """A folder of this machine. Files appear whole, and are on the disk then.

    Mounts of Databricks take files from their first byte to their last, and nothing else: these get copies.
    """

    def __init__(self, path: str | os.PathLike[str], url: str | None = None) -> None:
        self._path = Path(path)
        self._in_order = mounted_here(os.fspath(path)) is not None
        self.url = os.fspath(path) if url is None else url
        self._mounted_at = self._mount()

    def names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self._path) if entry.is_file())
        except FileNotFoundError:
            return []

    def has(self, name: str) -> bool:
        return (self._path / name).is_file()

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        self.require_disk()
        self._path.mkdir(parents=True, exist_ok=True)
        if (self._path / name).is_dir():
            raise IsADirectoryError(f"expected a file. Received: {self._path / name}, which is a folder.")
        if not self._in_order:
            write_whole(self._path / name, fill)
            return
        with local_copy() as local:
            with open(local, "wb") as file:
                fill(file)
            self.require_disk()
            copy_in_order(local, self._path / name)

    def require_disk(self) -> None:
        """Raises OSError where the folder is on another disk than at first: its mount has come or gone meanwhile."""
        if self._mount() != self._mounted_at:
            raise OSError(errno.ESTALE, "expected the file system that was mounted here when the fit began", self.url)

    def _mount(self) -> Path | None:
        """Returns the mount point of the file system that the folder is, or would be, on."""
        path = Path(os.path.realpath(self._path))
        return next((place for place in (path, *path.parents) if os.path.ismount(place)), None)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        with open(self._path / name, "rb") as file:
            yield file

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def tidy(self) -> None:
        for path in self._path.glob(f".epoch-*{UNFINISHED}"):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def local_copy() -> Iterator[Path]:
    """Gives the path of a file of this machine, which goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="elephant-file-") as folder:
        yield Path(folder) / "content"


class ArrowFolder(Folder):
    """A folder of any file system that pyarrow knows, or that fsspec makes known to it."""

    def __init__(self, system: Any, path: str, url: str) -> None:
        self._system = system
        self._path = path.rstrip("/")
        self.url = url

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def names(self) -> list[str]:
        from pyarrow import fs as arrow_fs

        selector = arrow_fs.FileSelector(self._path, allow_not_found=True)
        return sorted(
            info.base_name for info in self._system.get_file_info(selector) if info.type == arrow_fs.FileType.File
        )

    def has(self, name: str) -> bool:
        return find_file(self._system, self._at(name)) is not None

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        self._system.create_dir(self._path, recursive=True)
        try:
            with self._system.open_output_stream(self._at(name)) as file:
                fill(file)
        except BaseException:
            with contextlib.suppress(OSError):
                self._system.delete_file(self._at(name))
            raise

    def replace(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        buffer = io.BytesIO()
        fill(buffer)
        self._system.create_dir(self._path, recursive=True)
        # Where this fails, stores of objects keep what is there: it is not to go.
        with self._system.open_output_stream(self._at(name)) as file:
            file.write(buffer.getvalue())

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        with self._system.open_input_file(self._at(name)) as file:
            yield file

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.delete_file(self._at(name))


def folder_at(url: str) -> Folder:
    """Returns the folder of a path or URL, as this process sees it.

    Args:
        url: A path of this machine, ``file:/...``, ``dbfs:/...`` where that is mounted, or a URL that pyarrow or
            fsspec opens.

    Raises:
        ConfigurationError: Neither knows the URL.

    >>> folder_at("/checkpoints").url, type(folder_at("/checkpoints")).__name__
    ('/checkpoints', 'LocalFolder')
    """
    system, path = open_file_system(absolute(url))
    return _folder_of(system, path, url)


def file_at(url: str) -> File:
    """Returns the file of a path or URL, as this process sees it; the same for a file as `folder_at`."""
    system, path = open_file_system(absolute(url))
    folder, _, name = path.rpartition("/")
    return File(_folder_of(system, folder or "/", url.rpartition("/")[0]), name)


def _folder_of(system: Any, path: str, url: str) -> Folder:
    from pyarrow import fs as arrow_fs

    return LocalFolder(path, url) if isinstance(system, arrow_fs.LocalFileSystem) else ArrowFolder(system, path, url)
