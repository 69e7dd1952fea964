"""Files of callbacks elsewhere: on mounts that take no more than whole files, and at URLs.

Keras writes archives and HDF5 files by seeking in them, and logs by appending to them, and most URLs it does not know.
So callbacks write to a local folder instead, and what is new in it is copied after each event at which one of
them may have written.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import keras

from elephant.errors import ConfigurationError
from elephant.rank.callbacks.callback_rules import Duty, rule_of
from elephant.storage.filesystem import is_mounted, local_form, open_file_system, scratch_folder, url_root
from elephant.storage.folder import Folder, folder_at

# Where Keras' callbacks keep the paths that they write to.
_ATTRIBUTES = ("filepath", "filename", "log_dir")
_BLOCK_BYTES = 2**20


class RemoteFiles(keras.callbacks.Callback):
    """Copies what other callbacks write to mounts, and what those of Keras write to URLs. It comes after them.

    Args:
        folder_of: Opens the folder of a URL.

    Raises:
        ConfigurationError: This process does not know the file system of a URL.
    """

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], folder_of: Callable[[str], Folder] = folder_at
    ) -> None:
        super().__init__()
        self._given = [
            (callback, name, os.fspath(path))
            for callback in callbacks
            for name in _ATTRIBUTES
            if isinstance(path := getattr(callback, name, None), (str, os.PathLike))
            # A callback of the user's own may know what to do with a URL.
            and (is_mounted(os.fspath(path)) or (url_root(os.fspath(path)) and rule_of(callback).duty is Duty.WRITES))
        ]
        self._every_batch = any(getattr(callback, "save_freq", "epoch") != "epoch" for callback, _, _ in self._given)
        self._folder_of = folder_of
        self._folder: Path | None = None
        # What the given paths begin with: ``s3://bucket``, or nothing for a mount.
        self._roots: list[str] = []
        self._remote_folder: dict[Path, Folder] = {}
        self._copied: dict[Path, tuple[int, int]] = {}
        if self._given:
            # Before training begins: some open their files at its first event, before this one hears of it.
            try:
                self._redirect(Path(tempfile.mkdtemp(prefix="elephant-files-", dir=scratch_folder())))
            except BaseException:
                self.close()
                raise

    @property
    def is_needed(self) -> bool:
        """True if any of the callbacks writes to a mount or a URL."""
        return bool(self._given)

    def _redirect(self, folder: Path) -> None:
        self._folder = folder
        for number, (callback, name, given) in enumerate(self._given):
            path = local_form(open_file_system(given)[1] if given.lower().startswith("file:") else given)
            root = url_root(path)
            self._roots.append(root)
            if root or is_mounted(path):
                self._require_known(root, given, type(callback).__name__)
                local = folder / str(number) / path[len(root) :].strip("/")
                if local.parent == folder and name != "log_dir":
                    raise ConfigurationError(
                        f"callbacks: expected a file below {root}, for {type(callback).__name__}. Received: {given!r}."
                    )
                local.parent.mkdir(parents=True, exist_ok=True)
                if name == "filename" or not root:
                    self._fetch(local)
                path = str(local)
            setattr(callback, name, path)

    def _require_known(self, root: str, given: str, name: str) -> None:
        try:
            self._opened(f"{root}/")
        except (ConfigurationError, OSError) as error:
            raise ConfigurationError(
                f"callbacks: expected {name} to write to a file system that is known where it runs. Received: "
                f"{given!r}. {error}"
            ) from error

    def _opened(self, url: str) -> Folder:
        return self._folder_of(url) if url_root(url) else folder_at(url)

    def _target(self, local: Path) -> Folder:
        """Returns the folder that a local file is meant for."""
        if local.parent not in self._remote_folder:
            number, *names = local.parent.relative_to(self._folder or "").parts
            self._remote_folder[local.parent] = self._opened("/".join([self._roots[int(number)], *names]))
        return self._remote_folder[local.parent]

    def _fetch(self, local: Path) -> None:
        """Gets a file, such as a log that is gone on with, if it is there."""
        target = self._target(local)
        if target.has(local.name):
            with target.reading(local.name) as source, open(local, "wb") as file:
                shutil.copyfileobj(source, file, _BLOCK_BYTES)
            self._copied[local] = _stamp(local)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._every_batch:
            self._copy()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._copy()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._copy()
        self.close()

    def _copy(self) -> None:
        if self._folder is None:
            return
        for path in sorted(self._folder.rglob("*")):
            if path.is_file() and self._copied.get(path) != _stamp(path):
                self._copied[path] = _stamp(path)
                self._target(path).replace(path.name, functools.partial(_pour, path))

    def close(self) -> None:
        """Gives the callbacks their own paths back, and removes the local folder."""
        for callback, name, path in self._given:
            setattr(callback, name, path)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _stamp(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_mtime_ns, about.st_size


def _pour(path: Path, target: BinaryIO) -> None:
    with open(path, "rb") as source:
        shutil.copyfileobj(source, target, _BLOCK_BYTES)


def require_absolute_paths(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises ConfigurationError for callbacks of workers that write to a folder of an executor, where nobody looks."""
    for callback in callbacks:
        for path in (getattr(callback, name, None) for name in _ATTRIBUTES if rule_of(callback).duty is Duty.WRITES):
            if isinstance(path, (str, os.PathLike)) and not os.path.isabs(path) and not url_root(os.fspath(path)):
                raise ConfigurationError(
                    "callbacks: expected an absolute path, which the driver reaches too, for "
                    f"{type(callback).__name__}, which runs on rank 0 because it looks at batches. Received: "
                    f"{os.fspath(path)!r}, which would lie in a folder of an executor. Give it a URL or a path of "
                    "a shared or mounted file system, or let it look at epochs alone (save_freq='epoch', "
                    "update_freq='epoch'), so that it runs on the driver."
                )
