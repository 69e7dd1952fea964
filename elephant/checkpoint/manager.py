"""Checkpoints of a fit: a manifest and arrays for each epoch, written whole and checked.

::

    folder/epoch-00000003.6f3a0c....state.npz     the arrays of the fit's state after three epochs
    folder/epoch-00000003.6f3a0c....result.npz    the model at the end, where callbacks have changed it then
    folder/epoch-00000003.6f3a0c....json          the manifest, written last: without it the others are nothing

A name is never used twice, so nothing that is valid is ever written over.
"""

from __future__ import annotations

import logging
import re
import secrets
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, BinaryIO

import numpy as np

from elephant.checkpoint.state import FitState, named
from elephant.errors import CheckpointError
from elephant.net.buffers import portable
from elephant.storage.folder import DamagedError, Folder, checksum, sealed, unsealed

FORMAT = 1
_NAME = re.compile(r"^epoch-(\d{8})\.([0-9a-f]{16})\.(json|state\.npz|result\.npz)$")

logger = logging.getLogger(__name__)
KEPT = 2


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


def read_arrays(file: BinaryIO) -> dict[str, np.ndarray]:
    """Returns what `write_arrays` wrote; raises ValueError, or `zipfile.BadZipFile`, for anything else."""
    with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file that belongs to a checkpoint."""

    name: str
    num_bytes: int
    crc: int

    def __post_init__(self) -> None:
        known = isinstance(self.name, str) and is_ours(self.name) and not is_manifest(self.name)
        _require(known, f"expected the name of a checkpoint's arrays. Received: {self.name!r}")
        _require(_is_count(self.num_bytes) and _is_count(self.crc), f"{self.name}: expected a length and a checksum")


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """What a checkpoint is, and which files belong to it.

    >>> stored = StoredFile(name="epoch-00000001.0123456789abcdef.state.npz", num_bytes=3, crc=5)
    >>> manifest = CheckpointManifest(epochs=1, number=4, state=stored)
    >>> CheckpointManifest.from_bytes(manifest.to_bytes()) == manifest
    True
    """

    epochs: int
    number: int  # counts the checkpoints of a folder: of two of one epoch, the later one has the higher number
    state: StoredFile
    # the model's variables at the end of the fit, where they are others than those of the state
    result: StoredFile | None = None
    finished: bool = False  # whether the fit has ended, and has nothing left to do
    history: Mapping[str, Any] = field(default_factory=dict)  # one number per epoch and metric
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else is no array
    finite: bool = True  # whether the model has neither NaN nor infinity

    def __post_init__(self) -> None:
        _require(_is_count(self.epochs) and _is_count(self.number), "epochs and number: expected counts")
        _require(all(isinstance(one, bool) for one in (self.finished, self.finite)), "expected booleans")
        _require(isinstance(self.facts, Mapping), "facts: expected an object")
        _require(
            isinstance(self.history, Mapping) and all(isinstance(one, (list, tuple)) for one in self.history.values()),
            "history: expected lists",
        )

    @property
    def files(self) -> list[StoredFile]:
        """Those that belong to it."""
        return [self.state] if self.result is None else [self.state, self.result]

    def is_done(self, epochs: int | None = None) -> bool:
        """Returns whether nothing is left to train of so many epochs, or of those that its fit was asked for."""
        enough = epochs is None or self.epochs >= epochs or bool(self.facts.get("stopped"))
        return self.finished and enough

    def to_bytes(self) -> bytes:
        """Returns the file's content."""
        return sealed({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_bytes(cls, content: bytes) -> CheckpointManifest:
        """Returns what `to_bytes` was made of.

        Raises:
            DamagedError: The content is not whole, or of a format that this version does not know.
        """
        try:
            body = unsealed(content)
            if (version := body.pop("format")) != FORMAT:
                raise DamagedError(f"format {version!r}, of a later version of elephant; this one reads {FORMAT}")
            files = {name: None if body[name] is None else StoredFile(**body[name]) for name in ("state", "result")}
            return cls(**{**body, **files})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise error if isinstance(error, DamagedError) else DamagedError(f"no manifest: {error}") from error


def _require(is_so: bool, expected: str) -> None:
    if not is_so:
        raise DamagedError(expected)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def file_name(epochs: int, writing: str, kind: str) -> str:
    """Returns the name of a file of a checkpoint."""
    return f"epoch-{epochs:08d}.{writing}.{kind}"


def is_ours(name: str) -> bool:
    """Whether a name is one of `file_name`.

    >>> is_ours("epoch-00000001.0123456789abcdef.json"), is_ours("notes.json")
    (True, False)
    """
    return _NAME.match(name) is not None


def is_manifest(name: str) -> bool:
    """Whether a name is that of a manifest."""
    return is_ours(name) and name.endswith(".json")


def epochs_of(name: str) -> int:
    """Returns the epochs that a file's name says."""
    match = _NAME.match(name)
    if match is None:
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return int(match[1])


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """What was read."""

    state: FitState
    finished: bool = False  # whether nothing is left to train
    result: Sequence[np.ndarray] = ()  # the model's variables at the end, where that is so


class CheckpointManager:
    """Writes and reads the checkpoints of one fit.

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
    ) -> None:
        self._folder = folder
        self._title, self._unit, self._again = f"{option}={folder.url}", unit, again
        # What is here from the beginning, and what this store has written: anything else is another fit's.
        self._known = set(self._names())
        # The last checkpoint that this store has read or written.
        self._last: tuple[FitState, CheckpointManifest] | None = None
        self._has_saved = False
        # Manifests of which `latest` has found files damaged.
        self._damaged: set[str] = set()

    @property
    def url(self) -> str:
        """Where it is."""
        return self._folder.url

    def manifests(self, note: Callable[[str], None] = logger.warning) -> list[CheckpointManifest]:
        """Returns those of the checkpoints that are here, the newest last.

        Raises:
            CheckpointError: There are some, and none can be read.
        """
        return list(self._readable(note).values())

    def _readable(self, note: Callable[[str], None]) -> dict[str, CheckpointManifest]:
        found, damaged = self._surveyed()
        for name, error in damaged.items():
            note(f"the checkpoint {name} in {self.url} cannot be read, and is left out: {error}")
        if damaged and not found:
            raise self._all_damaged(damaged)
        return found

    def latest(self, note: Callable[[str], None] = logger.warning, *, epochs: int | None = None) -> Checkpoint | None:
        """Returns the newest checkpoint whose files are whole; None when there is none at all.

        One whose model is not finite comes after those before it, unless nothing is left to train.

        Args:
            epochs: Asked for now; None for as many as the fit was asked for.

        Raises:
            CheckpointError: There are checkpoints, and all are damaged; or they cannot be read.
        """
        damaged: dict[str, DamagedError | FileNotFoundError] = {}
        newest_first = list(self._readable(note).items())[::-1]
        for name, manifest in sorted(newest_first, key=lambda one: not (one[1].finite or one[1].is_done(epochs))):
            try:
                checkpoint = self._read(manifest, finished=manifest.is_done(epochs))
            except (DamagedError, FileNotFoundError) as error:
                damaged[manifest.state.name] = error
                self._damaged.add(name)
                note(
                    f"the checkpoint of {self._unit} {manifest.epochs} in {self.url} is damaged, and left out: {error}"
                )
                continue
            except OSError as error:
                raise self._unreadable(error) from error
            newest = newest_first[0][1]
            if manifest.epochs < newest.epochs and not newest.finite:
                note(
                    f"the model of {self._unit} {newest.epochs} in {self.url} has NaN or infinite weights: that of "
                    f"{self._unit} {manifest.epochs} is taken. Lower the learning rate, or clip gradients"
                )
            self._last = (checkpoint.state, manifest)
            return checkpoint
        if damaged:
            raise self._all_damaged(damaged)
        return None

    def save(self, state: FitState, *, finished: bool = False) -> None:
        """Writes a checkpoint, and removes all but the last two.

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
        writing = secrets.token_hex(8)
        try:
            self._require_own_files()
            before, damaged = self._surveyed()
            kept = None if self._last is None or self._last[0] is not state else self._last[1].state
            manifest = CheckpointManifest(
                epochs=state.epochs,
                number=1 + max((one.number for one in before.values()), default=0),
                state=kept or self._stored(file_name(state.epochs, writing, "state.npz"), state.arrays),
                finished=finished,
                history=state.history,
                facts=state.facts,
                finite=all(_is_finite(array) for array in state.group("model")),
            )
            if result is not None and not _are_equal(result, state.group("model")):
                name = file_name(state.epochs, writing, "result.npz")
                manifest = replace(manifest, result=self._stored(name, named("model", result)))
            content, name = manifest.to_bytes(), file_name(state.epochs, writing, "json")
            self._add(name, lambda file: file.write(content))
        except OSError as error:
            self._remove_writing(writing)
            raise CheckpointError(
                f"{self._title}: expected to write the checkpoint of {self._unit} {state.epochs}. Received: "
                f"{type(error).__name__}: {error}. {self._what_is_left()} Make room or mount the folder again, and "
                f"{self._again}."
            ) from error
        self._last, self._has_saved = (state, manifest), True
        self._prune({**before, name: manifest}, name, unreadable=bool(damaged))

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
        state = FitState(
            epochs=manifest.epochs,
            history=manifest.history,
            arrays=self._arrays(manifest.state),
            facts=manifest.facts,
        )
        if not finished:
            return Checkpoint(state=state)
        result = state.group("model")
        if manifest.result is not None:
            result = FitState(epochs=manifest.epochs, arrays=self._arrays(manifest.result)).group("model")
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
            except (ValueError, zipfile.BadZipFile) as error:
                raise DamagedError(f"{stored.name}: {error}") from error

    def _surveyed(self) -> tuple[dict[str, CheckpointManifest], dict[str, DamagedError]]:
        """Returns the manifests that are here, the newest last, and why others cannot be read, by their names.

        One that a process was writing when it was killed is among these, where a file system shows half a file.
        """
        found: dict[str, CheckpointManifest] = {}
        damaged: dict[str, DamagedError] = {}
        for name in filter(is_manifest, self._names()):
            try:
                with self._folder.reading(name) as file:
                    found[name] = CheckpointManifest.from_bytes(file.read())
            except DamagedError as error:
                damaged[name] = error
            except FileNotFoundError:
                # Another process has removed it meanwhile.
                continue
            except OSError as error:
                raise self._unreadable(error) from error
        return dict(sorted(found.items(), key=lambda one: (one[1].epochs, one[1].number))), damaged

    def _names(self) -> list[str]:
        try:
            return [name for name in self._folder.names() if is_ours(name)]
        except OSError as error:
            raise self._unreadable(error) from error

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
        whole = {name: one for name, one in manifests.items() if name not in self._damaged}
        # The later of two that share their state says more.
        by_age = sorted(whole, key=lambda name: (whole[name].epochs, whole[name].number))
        ordered = list({whole[name].state.name: name for name in by_age}.values())
        # The one that was just written among them, though others were before it, which its fit has not gone on from.
        newest = [*(name for name in ordered[-KEPT:] if name != written), written]
        if not any(whole[name].finite for name in newest):
            # There is nothing to go on from in a model of NaN.
            newest += [name for name in ordered if whole[name].finite][-1:]
        # Nothing is removed that cannot be read.
        kept = {*newest, *(manifests.keys() - whole.keys())}
        kept |= {file.name for name in kept for file in manifests[name].files}
        removable = {*manifests, *(file.name for one in manifests.values() for file in one.files)}
        if not unreadable:
            # Otherwise nobody knows whose the other files are.
            removable |= {name for name in self._known if not is_manifest(name)}
        try:
            self._folder.tidy()
            names = {*self._names()} & removable - kept
            for name in sorted(names, key=lambda name: (not is_manifest(name), name)):
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
        return f"That of {self._unit} {max(epochs)} is still there." if epochs else "There is none before it."

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


def _is_finite(array: np.ndarray) -> bool:
    # numpy takes bfloat16 for no number.
    values = portable(array)
    return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())


def _are_equal(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return len(values) == len(others) and all(
        value.shape == other.shape and value.dtype == other.dtype and value.tobytes() == other.tobytes()
        for value, other in zip(values, others, strict=True)
    )
