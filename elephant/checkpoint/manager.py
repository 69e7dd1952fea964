"""Checkpoints of a fit: a manifest and arrays for each epoch, written whole and checked, beside the fit that goes on.

::

    folder/epoch-00000003.6f3a0c....state.npz     the arrays of the fit's state after three epochs
    folder/epoch-00000001.b2c41e....frozen.npz    weights that no training changes: once, for all checkpoints
    folder/epoch-00000003.6f3a0c....result.npz    the model at the end, where callbacks have changed it then
    folder/epoch-00000003.6f3a0c....json          the manifest, written last: without it the others are nothing
    folder/epoch-00000003.step-00000120.9d1c2b....json    and that of a state after 120 steps of the fourth epoch

A name is never used twice, so nothing that is valid is ever written over.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import secrets
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, BinaryIO, Protocol

import numpy as np

from elephant.checkpoint.retention import Objective, retained
from elephant.checkpoint.state import (
    CheckpointManifest,
    FitState,
    StoredFile,
    file_name,
    is_manifest,
    is_ours,
    place_in_words,
    place_of,
)
from elephant.errors import CheckpointError
from elephant.net.buffers import equal_bits, portable
from elephant.net.work_queue import WorkQueue
from elephant.storage.folder import DAMAGES, UNFINISHED, DamagedError, Folder, checksum
from elephant.tables.stored import StoredTable

logger = logging.getLogger(__name__)
# Its being there asks for a checkpoint; see `elephant.cli.checkpoint_request`.
_WISH = "checkpoint.wanted"
_WISH_POLL_S = 0.5
_JOIN_S = 5.0


class Summed:
    """A file to write to that counts its bytes, and sums them up, as they go by.

    It cannot seek, so that what was summed up is what lies in the file.

    Attributes:
        num_bytes: Bytes so far.
        crc: Their CRC-32.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = 0
        self.crc = 0

    def write(self, data: Any) -> int:
        """Writes bytes, all of them."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.crc = zlib.crc32(view, self.crc)
        self.num_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Writes what is still held back."""
        self._file.flush()


def write_arrays(file: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays of numbers or booleans, without a copy of them.

    Args:
        file: With a ``write`` method; it need not seek.
        arrays: By name. bfloat16, which files of numpy do not have, becomes float32, which holds the same numbers.
    """
    # Not numpy.savez, which wants a file that can be read as well.
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, portable(array), allow_pickle=False)


def read_arrays(file: BinaryIO, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Reads the form of `write_arrays`; raises one of `DAMAGES` for anything else.

    Args:
        names: Of the arrays to read, such as those of one stage; the others' bytes are left alone. None reads all.
    """
    with np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in (archive.files if names is None else names)}
    if others := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        # numpy gives the bytes of what is no array.
        raise ValueError(f"expected arrays alone. Received: {others[0]!r}, which is none")
    return arrays


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint as it was read."""

    state: FitState
    finished: bool = False  # whether nothing is left to train
    result: Sequence[np.ndarray] = ()  # the model's variables at the end, where that is so


@dataclass(frozen=True, kw_only=True)
class SurveyedCheckpoint:
    """A checkpoint as it lies in a folder, whether it can be gone on from or not."""

    name: str  # of its manifest
    epochs: int
    step: int = 0  # of the next epoch
    finished: bool = False
    finite: bool = True
    num_bytes: int = 0  # of its arrays
    num_workers: int | None = None
    history: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    error: str | None = None  # what is wrong with its files
    manifest: CheckpointManifest | None = None


class CheckpointManager:
    """Writes and reads the checkpoints of one fit.

    Args:
        keep_best: A metric; see `elephant.kinds.METRIC`. The best epoch by it is kept; None keeps the last ones alone.

    Raises:
        CheckpointError: The folder cannot be listed.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        option: str = "checkpointPath",
        unit: str = "epoch",
        again: str = "fit with resume=True",
        keep_best: str | None = None,
    ) -> None:
        self._folder = folder
        self._objective = None if keep_best is None else Objective.of(keep_best)
        self._title, self._unit, self._again = f"{option}={folder.url}", unit, again
        # What is here from the beginning, and what this store has written: anything else is another fit's.
        self._known = set(self._names())
        # The last checkpoint that this store has read or written.
        self._last: tuple[FitState, CheckpointManifest] | None = None
        self._has_saved = False
        # Of the checkpoint that the fit has gone on from.
        self._epochs_before = 0
        # Manifests of which `latest` has found files damaged.
        self._damaged: set[str] = set()

    @property
    def url(self) -> str:
        """The folder's URL."""
        return self._folder.url

    def manifests(self, note: Callable[[str], None] = logger.warning) -> list[CheckpointManifest]:
        """Returns those of the checkpoints that are here, the newest last.

        Raises:
            CheckpointError: There are some, and none can be read.
        """
        return list(self._readable(note).values())

    def _readable(self, note: Callable[[str], None]) -> dict[str, CheckpointManifest]:
        manifests, damaged = self._surveyed()
        for name, error in damaged.items():
            note(f"the checkpoint {name} in {self.url} cannot be read, and is left out: {error}")
        if damaged and not manifests:
            raise self._all_damaged(damaged)
        return manifests

    def latest(
        self,
        note: Callable[[str], None] = logger.warning,
        *,
        epochs: int | None = None,
        suits: Callable[[CheckpointManifest], bool] = lambda manifest: True,
    ) -> Checkpoint | None:
        """Returns the newest checkpoint whose files are whole, of those that suit; None when there is none of these.

        One whose model is not finite comes after those before it, unless nothing is left to train. So does one that
        lies within an epoch which is not asked for.

        Args:
            epochs: Asked for now; None for as many as the fit was asked for.
            suits: Whether a fit can go on from one.

        Raises:
            CheckpointError: There are checkpoints that suit, and all are damaged; or they cannot be read.
        """
        damaged: dict[str, DamagedError | FileNotFoundError] = {}
        newest_first = [one for one in self._readable(note).items() if suits(one[1])][::-1]
        for name, manifest in sorted(newest_first, key=lambda one: _reluctance(one[1], epochs)):
            try:
                checkpoint = self._read(manifest, finished=manifest.is_done(epochs))
            except (DamagedError, FileNotFoundError) as error:
                damaged[manifest.state.name] = error
                self._damaged.add(name)
                note(
                    f"the checkpoint of {self._words(*manifest.place)} in {self.url} is damaged, and left out: {error}"
                )
                continue
            except OSError as error:
                raise self._unreadable(error) from error
            newest = newest_first[0][1]
            if manifest.place != newest.place and not newest.finite:
                note(
                    f"the model of {self._words(*newest.place)} in {self.url} has NaN or infinite weights: that of "
                    f"{self._words(*manifest.place)} is taken. Lower the learning rate, or clip gradients"
                )
            self._last, self._epochs_before = (checkpoint.state, manifest), manifest.epochs
            return checkpoint
        if damaged:
            raise self._all_damaged(damaged)
        return None

    def require_writable(self) -> None:
        """Writes a file and removes it again, so that nothing is trained whose checkpoint could not be kept.

        Raises:
            CheckpointError: The folder can neither be made nor written to.
        """
        trial = f".epoch-trial.{secrets.token_hex(8)}{UNFINISHED}"
        try:
            self._folder.write(trial, lambda file: file.write(b"1"))
        except OSError as error:
            raise CheckpointError(
                f"{self._title}: expected a folder that can be made, or written to. Received: {type(error).__name__}: "
                f"{str(error).rstrip('.')}. Pass another path, or give this user the right to write there."
            ) from None
        # Some stores let nobody remove what is written.
        with contextlib.suppress(OSError):
            self._folder.remove(trial)

    def wish(self) -> set[str]:
        """Asks the fit that writes here for a checkpoint soon; returns the names of those that are here already.

        Raises:
            CheckpointError: The folder cannot be written to.
        """
        names = self.names_of_manifests()
        try:
            self._folder.replace(_WISH, lambda file: file.write(b"1"))
        except OSError as error:
            raise self._unreadable(error) from error
        return names

    def names_of_manifests(self) -> set[str]:
        """Returns the names of the checkpoints that are here."""
        return set(filter(is_manifest, self._names()))

    def take_wish(self) -> bool:
        """Returns whether somebody has asked for a checkpoint, once for each time."""
        if not self._folder.has(_WISH):
            return False
        self._folder.remove(_WISH)
        return True

    def survey(self) -> list[SurveyedCheckpoint]:
        """Returns the checkpoints that are here, the furthest last, with what is wrong with them; reads all files.

        Raises:
            CheckpointError: The folder or a file cannot be read.
        """
        manifests, damaged = self._surveyed()
        found = [
            SurveyedCheckpoint(name=name, epochs=place_of(name)[0], step=place_of(name)[1], error=str(error))
            for name, error in damaged.items()
        ]
        for name, manifest in manifests.items():
            workers = manifest.facts.get("num_workers")
            found.append(
                SurveyedCheckpoint(
                    name=name,
                    epochs=manifest.epochs,
                    step=manifest.step,
                    finished=manifest.finished,
                    finite=manifest.finite,
                    num_bytes=sum(file.num_bytes for file in manifest.files),
                    num_workers=workers if isinstance(workers, int) else None,
                    history=manifest.history,
                    error=self._damage_of(manifest),
                    manifest=manifest,
                )
            )
        return sorted(found, key=lambda one: (one.epochs, one.step))

    def _damage_of(self, manifest: CheckpointManifest) -> str | None:
        try:
            self._read(manifest, finished=manifest.finished)
        except (DamagedError, FileNotFoundError) as error:
            return str(error)
        except OSError as error:
            raise self._unreadable(error) from error
        return None

    def read(self, surveyed: SurveyedCheckpoint) -> Checkpoint:
        """Returns a checkpoint that `survey` has found whole.

        Raises:
            CheckpointError: It is damaged, or cannot be read.
        """
        try:
            if surveyed.manifest is None:
                raise DamagedError(surveyed.error or surveyed.name)
            return self._read(surveyed.manifest, finished=surveyed.finished)
        except DamagedError as error:
            raise self._all_damaged({surveyed.name: error}) from error
        except OSError as error:
            raise self._unreadable(error) from error

    def save(self, state: FitState, *, finished: bool = False) -> None:
        """Writes a checkpoint, and removes all but the last two, the last of an epoch's end, and the best.

        Raises:
            CheckpointError: It cannot be written, and those before it are as they were; or another fit uses the folder.
        """
        self._write(state, None, finished=finished)

    def finish(self, result: Sequence[np.ndarray], *, trained: bool = True) -> None:
        """Marks the last checkpoint that was saved, or read where nothing was left to train, as that of an ended fit.

        Raises:
            CheckpointError: As for `save`; or nothing was saved.
        """
        if self._last is None or (trained and not self._has_saved):
            raise CheckpointError(f"{self._title}: expected a checkpoint of the last {self._unit}. Received: none.")
        self._write(self._last[0], result, finished=True)

    def _write(self, state: FitState, result: Sequence[np.ndarray] | None, *, finished: bool) -> None:
        writing, place = secrets.token_hex(8), (state.epochs, state.step)
        try:
            self._require_own_files()
            before, damaged = self._surveyed()
            kept = None if self._last is None or self._last[0] is not state else self._last[1].state
            frozen = state.frozen
            own = {name: one for name, one in state.arrays.items() if name not in frozen}
            frozen_file = self._frozen_file(frozen)
            if frozen and frozen_file is None:
                frozen_file = self._stored(file_name(*place, writing, "frozen.npz"), frozen)
            manifest = CheckpointManifest(
                epochs=state.epochs,
                step=state.step,
                number=1 + max((one.number for one in before.values()), default=0),
                state=kept or self._stored(file_name(*place, writing, "state.npz"), own),
                frozen_file=frozen_file,
                finished=finished,
                history=state.history,
                facts=state.facts,
                finite=has_finite_model(state),
            )
            if result is not None and not _are_equal(result, state.variables):
                name = file_name(*place, writing, "result.npz")
                named_result = zip(state.variable_names, result, strict=True)
                arrays = {
                    name: one for name, one in named_result if name not in frozen or not equal_bits(one, frozen[name])
                }
                manifest = replace(manifest, result=self._stored(name, arrays))
            content, name = manifest.to_bytes(), file_name(*place, writing, "json")
            self._add(name, lambda file: file.write(content))
        except OSError as error:
            self._remove_writing(writing)
            raise CheckpointError(
                f"{self._title}: expected to write the checkpoint of {self._words(*place)}. Received: "
                f"{type(error).__name__}: {error}. {self._what_is_left()} Make room or mount the folder again, and "
                f"{self._again}."
            ) from None
        self._last, self._has_saved = (state, manifest), True
        self._prune({**before, name: manifest}, name, unreadable=bool(damaged))

    def _frozen_file(self, frozen: Mapping[str, np.ndarray]) -> StoredFile | None:
        """Returns the file of the last checkpoint where it has these weights; None where there is none such."""
        if self._last is None or not frozen:
            return None
        before, manifest = self._last
        is_there = before.frozen.keys() >= frozen.keys()
        is_there = is_there and all(equal_bits(before.arrays[name], value) for name, value in frozen.items())
        return manifest.frozen_file if is_there else None

    def value_of(self, state: FitState) -> float | None:
        """Returns how good the epoch was at whose end a state is; None within one, or where no best one is kept.

        Raises:
            ConfigurationError: The fit has epochs, and they lack the metric to keep the best of.
        """
        if self._objective is None:
            return None
        if state.epochs > self._epochs_before:
            # Epochs before may have been without it.
            self._objective.require_in(state.history)
        return None if state.step else self._objective.value_of(state.history)

    def _words(self, epochs: int, step: int) -> str:
        return place_in_words(epochs, step, self._unit)

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

    def _read(self, manifest: CheckpointManifest, *, finished: bool) -> Checkpoint:
        frozen = {} if manifest.frozen_file is None else self._arrays(manifest.frozen_file)
        state = FitState(
            epochs=manifest.epochs,
            step=manifest.step,
            history=manifest.history,
            # One that something has assigned to is in both.
            arrays={**frozen, **self._arrays(manifest.state)},
            facts=manifest.facts,
        )
        if lost := {*state.variable_names} - state.arrays.keys():
            raise DamagedError(f"{manifest.state.name} is without {min(lost)}")
        if not finished:
            _require_tables(state.arrays, manifest.state.name)
            return Checkpoint(state=state)
        of_result = {} if manifest.result is None else self._arrays(manifest.result)
        _require_tables({**state.arrays, **of_result}, manifest.state.name)
        result = replace(state, arrays={**state.arrays, **of_result}).variables
        return Checkpoint(state=state, finished=True, result=result)

    def _arrays(self, stored: StoredFile) -> dict[str, np.ndarray]:
        if stored.name not in self._names():
            # Something else may bear the name, such as a folder.
            raise DamagedError(f"the file {stored.name} is missing")
        with self._folder.reading(stored.name) as file:
            if checksum(file) != (stored.num_bytes, stored.crc):
                raise DamagedError(f"{stored.name} is not what was written")
            file.seek(0)
            try:
                return read_arrays(file)
            except DAMAGES as error:
                raise DamagedError(f"{stored.name}: {type(error).__name__}: {error}") from error

    def _surveyed(self) -> tuple[dict[str, CheckpointManifest], dict[str, DamagedError]]:
        """Returns the manifests that are here, the newest last, and why others cannot be read, by their names.

        One that a process was writing when it was killed is among these, where a file system shows half a file.
        """
        manifests: dict[str, CheckpointManifest] = {}
        damaged: dict[str, DamagedError] = {}
        for name in filter(is_manifest, self._names()):
            try:
                with self._folder.reading(name) as file:
                    manifests[name] = CheckpointManifest.from_bytes(file.read())
            except DamagedError as error:
                damaged[name] = error
            except FileNotFoundError:
                # Another process has removed it meanwhile.
                continue
            except OSError as error:
                raise self._unreadable(error) from error
        return dict(sorted(manifests.items(), key=lambda one: one[1].age)), damaged

    def _names(self) -> list[str]:
        try:
            return [name for name in self._folder.names() if is_ours(name)]
        except OSError as error:
            raise self._unreadable(error) from error

    def remove(self) -> None:
        """Removes all checkpoints of a fit that has ended, as far as the file system lets it."""
        try:
            # A state that nothing names is none.
            for name in sorted(self._names(), key=lambda name: (not is_manifest(name), name)):
                self._folder.remove(name)
        except Exception as error:
            logger.warning("Checkpoints in %s could not be removed: %s", self.url, error)

    def _require_own_files(self) -> None:
        """Raises CheckpointError where files of another fit have come, or the last ones of this one are gone."""
        names = set(self._names())
        last = [] if self._last is None else self._last[1].files
        others, gone = names - self._known, {file.name for file in last} - names
        if gone:
            raise CheckpointError(
                f"{self._title}: expected the checkpoint that was there, whose file is {min(gone)}. "
                "Received: a folder without it: somebody has removed it, or the folder's mount is gone. "
                f"Mount it again, and {self._again}."
            )
        if others:
            raise CheckpointError(
                f"{self._title}: expected the checkpoints of one fit. Received: files of another one that "
                f"runs at the same time, such as {min(others)}. Give each fit a folder of its own."
            )

    def _prune(self, manifests: Mapping[str, CheckpointManifest], written: str, *, unreadable: bool) -> None:
        """Removes all but the newest checkpoints, and what belongs to none: as far as the file system lets it."""
        try:
            self._folder.tidy()
            here = {*self._names()}
            whole = {
                name: one
                for name, one in manifests.items()
                if name not in self._damaged and here.issuperset(file.name for file in one.files)
            }
            # Nothing is removed that cannot be read.
            kept = {*retained(whole, written, self._objective), *(manifests.keys() - whole.keys())}
            kept |= {file.name for name in kept for file in manifests[name].files}
            removable = {*manifests, *(file.name for one in manifests.values() for file in one.files)}
            if not unreadable:
                # Otherwise nobody knows whose the other files are.
                removable |= {name for name in self._known if not is_manifest(name)}
            for name in sorted(here & removable - kept, key=lambda name: (not is_manifest(name), name)):
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
            places = [place_of(name) for name in self._names() if is_manifest(name)]
        except CheckpointError:
            return "The folder cannot be read either."
        return f"That of {self._words(*max(places))} is still there." if places else "There is none before it."

    def _all_damaged(self, damaged: Mapping[str, Exception]) -> CheckpointError:
        name, error = next(iter(damaged.items()))
        return CheckpointError(
            f"{self._title}: expected a checkpoint that is whole. Received: {len(damaged)} that are "
            f"damaged, such as {name}: {error}. Restore the folder, or remove it to begin from the first epoch."
        )

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._title}: expected a folder that can be read. Received: {type(error).__name__}: {error}."
        )


def _require_tables(arrays: Mapping[str, np.ndarray], name: str) -> None:
    """Raises DamagedError where a table that arrays refer to is not there any more."""
    for stored in filter(None, map(StoredTable.from_array, arrays.values())):
        if lost_files := stored.missing():
            raise DamagedError(f"{name} is without {lost_files[0]} of a table in {stored.url}")


def _reluctance(manifest: CheckpointManifest, epochs: int | None) -> tuple[bool, bool]:
    """Returns why a fit of so many epochs goes on from another checkpoint rather than from this one; more is worse."""
    is_beyond = manifest.step > 0 and epochs is not None and manifest.epochs >= epochs
    return not (manifest.finite or manifest.is_done(epochs)), is_beyond


def has_finite_model(state: FitState) -> bool:
    """Returns whether the model of a state has neither NaN nor infinity, nor the tables that ranks have written."""
    return all(map(is_finite, state.variables)) and bool(state.facts.get("tables", {}).get("finite", True))


def is_finite(array: np.ndarray) -> bool:
    """Returns whether an array has neither NaN nor infinity."""
    # numpy takes bfloat16 for no number.
    values = portable(array)
    return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())


def _are_equal(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return len(values) == len(others) and all(map(equal_bits, values, others))


class CheckpointSink(Protocol):
    """Receiver of the states that a fit could go on from.

    Attributes:
        is_wanted: Whether somebody has asked for a state since this was read last.
    """

    @property
    def is_wanted(self) -> bool: ...

    def keep(self, state: FitState) -> bool:
        """Takes a state; returns at once, with whether it is a checkpoint that users hear of."""

    def check(self) -> None:
        """Raises CheckpointError when one that was taken could not be kept."""


class CheckpointWriter:
    """Writes what it is given in a thread of its own; where states come faster than the disk, the newest one counts.

    Written too are the best one of those that wait, and that of an epoch's end which others within the next one follow.
    Leaving its ``with`` block waits for what is being written.
    """

    def __init__(self, checkpoints: CheckpointManager) -> None:
        self._checkpoints = checkpoints
        self._lock = threading.Lock()
        # That of an epoch's end that waits, and one within the next epoch.
        self._end_state: FitState | None = None
        self._newest_state: FitState | None = None
        self._best_state: FitState | None = None
        self._best_value = -math.inf
        self._written_state: FitState | None = None
        self._error: CheckpointError | None = None
        self._queue = WorkQueue("elephant-checkpoints")
        self._wishes, self._closing = threading.Event(), threading.Event()
        self._listener = threading.Thread(target=self._listen, name="elephant-checkpoint-wishes", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        while not self._closing.wait(_WISH_POLL_S):
            # A file system that fails here says so where checkpoints are written.
            with contextlib.suppress(Exception):
                if self._checkpoints.take_wish():
                    self._wishes.set()

    @property
    def is_wanted(self) -> bool:
        """True once after somebody has asked for a state; see `CheckpointManager.wish`."""
        if not self._wishes.is_set():
            return False
        self._wishes.clear()
        return True

    @property
    def held(self) -> list[FitState]:
        """States that wait, and the one that is being written."""
        with self._lock:
            held = (self._written_state, self._best_state, self._end_state, self._newest_state)
            return [state for state in held if state is not None]

    def keep(self, state: FitState) -> bool:
        """Has a state written; returns at once, with whether it is.

        Raises:
            ConfigurationError: It lacks the metric to keep the best of.
        """
        value = self._checkpoints.value_of(state)
        with self._lock:
            if value is not None and value > self._best_value:
                self._best_state, self._best_value = state, value
            if state.step:
                self._newest_state = state
            else:
                self._end_state, self._newest_state = state, None
            self._queue.submit(self._save_waiting)
        return True

    def check(self) -> None:
        """Raises CheckpointError once when a state could not be written."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self, result: Sequence[np.ndarray], *, trained: bool = True) -> None:
        """Waits until all is written, and marks the fit as ended.

        Raises:
            CheckpointError: Something could not be written.
        """
        self._queue.wait()
        self.check()
        error = self._failure_of(lambda: self._checkpoints.finish(result, trained=trained))
        if error is not None:
            raise error

    def _save_waiting(self) -> None:
        while (state := self._next_state()) is not None:
            error = self._failure_of(functools.partial(self._checkpoints.save, state))
            with self._lock:
                self._written_state = None
                self._error = error or self._error

    def _next_state(self) -> FitState | None:
        """Returns the state to write now, in the order in which they came; None where none waits."""
        with self._lock:
            self._written_state = self._first_state()
            return self._written_state

    def _first_state(self) -> FitState | None:
        best, self._best_state = self._best_state, None
        if best is not None and best is not self._end_state:
            return best
        end, self._end_state = self._end_state, None
        if end is not None:
            return end
        newest, self._newest_state = self._newest_state, None
        return newest

    def _failure_of(self, write: Callable[[], None]) -> CheckpointError | None:
        """Returns why something could not be written; file systems of others have errors of their own kinds."""
        try:
            write()
        except CheckpointError as error:
            return error
        except Exception as error:
            failure = CheckpointError(f"checkpointPath={self._checkpoints.url}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
        return None

    def close(self) -> None:
        """Waits for what is being written, and ends the threads."""
        self._closing.set()
        self._queue.wait()
        self._queue.close()
        # Where a file system hangs, it is left to itself.
        self._listener.join(_JOIN_S)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
