"""The checkpoints of one fit in a folder: written whole or not at all, read back, and the old ones removed.

::

    folder/epoch-00000003.6f3a0c....state.npz     the arrays of the fit's state after three epochs
    folder/epoch-00000003.6f3a0c....result.npz    the model at the end, where callbacks have changed it then
    folder/epoch-00000003.6f3a0c....json          the manifest, written last: without it the others are nothing

A name is never used twice, so nothing that is valid is ever written over.
"""

from __future__ import annotations

import logging
import secrets
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np

from elephant.checkpoint.arrays import Summed, checksum, read_arrays, write_arrays
from elephant.checkpoint.folder import Folder
from elephant.checkpoint.manifest import DamagedError, Manifest, StoredFile, epochs_of, file_name, is_manifest, is_ours
from elephant.checkpoint.state import FitState, named
from elephant.errors import CheckpointError

logger = logging.getLogger(__name__)

KEPT = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """What was read.

    Args:
        state: Of the fit.
        finished: Whether the fit has nothing left to do.
        result: The model's variables at the end, of a fit that has ended.
    """

    state: FitState
    finished: bool = False
    result: Sequence[np.ndarray] = ()


class CheckpointStore:
    """Writes and reads the checkpoints of one fit.

    Args:
        folder: Where they are.

    Raises:
        CheckpointError: The folder cannot be listed.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        # What is here from the beginning, and what this store has written: anything else is another fit's.
        self._known = set(self._names())
        self._last: tuple[FitState, Manifest] | None = None
        self._found: tuple[FitState, Manifest] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return self._folder.url

    def manifests(self) -> list[Manifest]:
        """Returns those of the checkpoints that are here, the newest last; what was not finished is none."""
        found = [self._manifest(name) for name in self._names() if is_manifest(name)]
        whole = [manifest for manifest in found if manifest is not None]
        return sorted(whole, key=lambda manifest: (manifest.epochs, manifest.number))

    def latest(self, note: Callable[[str], None] = logger.warning) -> Checkpoint | None:
        """Returns the newest checkpoint whose files are whole; None when there is none at all.

        Args:
            note: Told in a sentence of those that are damaged.

        Raises:
            CheckpointError: There are checkpoints, and all are damaged; or they cannot be read.
        """
        manifests = self.manifests()
        for manifest in reversed(manifests):
            try:
                checkpoint = self._read(manifest)
                self._found = (checkpoint.state, manifest)
                return checkpoint
            except (DamagedError, FileNotFoundError) as error:
                note(f"the checkpoint of epoch {manifest.epochs} in {self.url} is damaged, and left out: {error}")
            except OSError as error:
                raise self._unreadable(error) from error
        if manifests:
            raise CheckpointError(
                f"checkpointPath={self.url}: expected a checkpoint that is whole. Received: {len(manifests)} that are "
                "damaged. Restore the folder, or remove it to begin from the first epoch."
            )
        return None

    def save(self, state: FitState) -> None:
        """Writes a checkpoint, and removes all but the last two.

        Raises:
            CheckpointError: It cannot be written, and those before it are as they were; or another fit uses the folder.
        """
        self._write(state, None, finished=False)

    def finish(self, result: Sequence[np.ndarray], *, trained: bool = True) -> None:
        """Marks the last checkpoint that was saved as that of a fit that has ended.

        Args:
            result: The model's variables; kept when they are others than those of the state.
            trained: Whether there were epochs to train; otherwise the last checkpoint is the one that `latest` read.

        Raises:
            CheckpointError: As for `save`; or nothing was saved.
        """
        if not trained:
            self._last = self._last or self._found
        if self._last is None:
            raise CheckpointError(
                f"checkpointPath={self.url}: expected a checkpoint of the last epoch. Received: none."
            )
        self._write(self._last[0], result, finished=True)

    def _write(self, state: FitState, result: Sequence[np.ndarray] | None, *, finished: bool) -> None:
        writing = secrets.token_hex(8)
        try:
            self._refuse_other_writers()
            before = self.manifests()
            kept = None if self._last is None or self._last[0] is not state else self._last[1].state
            manifest = Manifest(
                epochs=state.epochs,
                number=1 + max((one.number for one in before), default=0),
                state=kept or self._stored(file_name(state.epochs, writing, "state.npz"), state.arrays),
                finished=finished,
                history=state.history,
                facts=state.facts,
            )
            if result is not None and not _are_equal(result, state.group("model")):
                name = file_name(state.epochs, writing, "result.npz")
                manifest = replace(manifest, result=self._stored(name, named("model", result)))
            content = manifest.to_bytes()
            self._add(file_name(state.epochs, writing, "json"), lambda file: file.write(content))
        except OSError as error:
            self._remove_writing(writing)
            raise CheckpointError(
                f"checkpointPath={self.url}: expected to write the checkpoint of epoch {state.epochs}. Received: "
                f"{type(error).__name__}: {error}. {self._what_is_left()} Make room or mount the folder again, and "
                "fit with resume=True."
            ) from error
        self._last = (state, manifest)
        self._prune([*before, manifest])

    def _stored(self, name: str, arrays: Mapping[str, np.ndarray]) -> StoredFile:
        sums: list[Summed] = []

        def fill(file: BinaryIO) -> None:
            sums[:] = [Summed(file)]
            write_arrays(sums[0], arrays)

        self._add(name, fill)
        return StoredFile(name=name, num_bytes=sums[0].num_bytes, crc=sums[0].crc)

    def _add(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        self._known.add(name)
        self._folder.write(name, fill)

    def _read(self, manifest: Manifest) -> Checkpoint:
        state = FitState(
            epochs=manifest.epochs,
            history=manifest.history,
            arrays=self._arrays(manifest.state),
            facts=manifest.facts,
        )
        result = state.group("model")
        if manifest.result is not None:
            result = FitState(epochs=manifest.epochs, arrays=self._arrays(manifest.result)).group("model")
        return Checkpoint(state=state, finished=manifest.finished, result=result if manifest.finished else ())

    def _arrays(self, stored: StoredFile) -> dict[str, np.ndarray]:
        with self._folder.reading(stored.name) as file:
            if checksum(file) != (stored.num_bytes, stored.crc):
                raise DamagedError(f"{stored.name} is not what was written")
            file.seek(0)
            try:
                return read_arrays(file)
            except (ValueError, zipfile.BadZipFile) as error:
                raise DamagedError(f"{stored.name}: {error}") from error

    def _manifest(self, name: str) -> Manifest | None:
        try:
            with self._folder.reading(name) as file:
                return Manifest.from_bytes(file.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(error) from error
        except DamagedError as error:
            # What a process was writing when it was killed.
            logger.info("%s in %s is no checkpoint: %s", name, self.url, error)
            return None

    def _names(self) -> list[str]:
        try:
            return [name for name in self._folder.names() if is_ours(name)]
        except OSError as error:
            raise self._unreadable(error) from error

    def _refuse_other_writers(self) -> None:
        others = set(self._names()) - self._known
        if others:
            raise CheckpointError(
                f"checkpointPath={self.url}: expected the checkpoints of one fit. Received: files of another one that "
                f"runs at the same time, such as {min(others)}. Give each fit a folder of its own."
            )

    def _prune(self, manifests: Sequence[Manifest]) -> None:
        """Removes all but the newest checkpoints, and what belongs to none: as far as the file system lets it."""
        # The later of two that share their state says more.
        by_state = {one.state.name: one for one in sorted(manifests, key=lambda one: (one.epochs, one.number))}
        newest = list(by_state.values())[-KEPT:]
        kept = {file.name for manifest in newest for file in manifest.files}
        try:
            self._folder.tidy()
            for name in sorted(self._names(), key=lambda name: (not is_manifest(name), name)):
                if is_manifest(name):
                    manifest = self._manifest(name)
                    if manifest is None or all(manifest.number != one.number for one in newest):
                        self._folder.remove(name)
                elif name not in kept and name in self._known:
                    self._folder.remove(name)
        except Exception as error:
            # What is to be kept is written: whatever this file system raises, no fit ends of it.
            logger.warning("Old checkpoints in %s could not be removed: %s", self.url, error)

    def _remove_writing(self, writing: str) -> None:
        try:
            for name in self._folder.names():
                if f".{writing}." in name:
                    self._folder.remove(name)
        except OSError as error:
            logger.info("What was written of a checkpoint in %s could not be removed: %s", self.url, error)

    def _what_is_left(self) -> str:
        try:
            epochs = [epochs_of(name) for name in self._names() if is_manifest(name)]
        except CheckpointError:
            return "The folder cannot be read either."
        return f"That of epoch {max(epochs)} is still there." if epochs else "There is none before it."

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"checkpointPath={self.url}: expected a folder that can be read. Received: {type(error).__name__}: {error}."
        )


def _are_equal(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return len(values) == len(others) and all(
        value.shape == other.shape and value.dtype == other.dtype and value.tobytes() == other.tobytes()
        for value, other in zip(values, others, strict=True)
    )
