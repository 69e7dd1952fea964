"""Files that callbacks write to mounts which take files only from their first byte to their last.

Keras writes archives and HDF5 files by seeking in them, and logs by appending to them.
For paths of such mounts (`elephant.storage.filesystem`) callbacks write to a local folder instead, and
what is new in it is copied after each event at which one of them may have written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from elephant.data.scratch import scratch_folder
from elephant.storage.filesystem import copy_in_order, is_mounted, local_form

# Where Keras' callbacks keep the paths that they write to.
_ATTRIBUTES = ("filepath", "filename", "log_dir")


class MountedFiles(keras.callbacks.Callback):
    """Copies what other callbacks write to the mounts that it is meant for. It comes after them.

    Args:
        callbacks: Those that may write; their paths are others for as long as training lasts.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        super().__init__()
        self._given = [
            (callback, name, os.fspath(path))
            for callback in callbacks
            for name in _ATTRIBUTES
            if isinstance(path := getattr(callback, name, None), (str, os.PathLike)) and is_mounted(os.fspath(path))
        ]
        self._every_batch = any(getattr(callback, "save_freq", "epoch") != "epoch" for callback, _, _ in self._given)
        self._folder: Path | None = None
        self._copied: dict[Path, tuple[int, int]] = {}
        if self._given:
            # Before training begins: some open their files at its first event, before this one hears of it.
            self._redirect()

    @property
    def is_needed(self) -> bool:
        """Whether any of the callbacks writes to a mount."""
        return bool(self._given)

    def _redirect(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="elephant-files-", dir=scratch_folder()))
        for callback, name, path in self._given:
            target = Path(local_form(path))
            local = self._folder / target.relative_to("/")
            local.parent.mkdir(parents=True, exist_ok=True)
            if target.is_file():
                # A log that is there is gone on with.
                copy_in_order(target, local)
                self._copied[local] = _stamp(local)
            setattr(callback, name, str(local))

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
                copy_in_order(path, Path("/") / path.relative_to(self._folder))

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
