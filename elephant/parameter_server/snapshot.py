"""Snapshots: the thread that takes them, a file of raw vectors, and a small JSON manifest that makes it valid.

The manifest is written last and moved into place, so that a folder holds a whole snapshot or
the one before it, whenever the process or the machine ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from elephant.errors import DataError
from elephant.net.buffers import aligned_vector
from elephant.net.frames import raw_view
from elephant.parameter_server.layout import ServerSpec
from elephant.parameter_server.server import ParameterServer
from elephant.parameter_server.store import SnapshotImage
from elephant.parameter_server.tables import ServedTables, bytes_of_tables, empty_arrays
from elephant.storage.folder import DAMAGES, UNFINISHED, checksum, sealed, unsealed, write_whole

INITIAL = "initial"
LATEST = "latest"
_FORMAT = 1
_BLOCK_BYTES = 1 << 20

logger = logging.getLogger(__name__)
# A lock cannot wait for any number of seconds, such as infinitely many.
_LONGEST_PAUSE_S = 3600.0


def write_arrays(path: Path, image: SnapshotImage) -> None:
    """Writes the arrays of an image into a new file, without a copy of them.

    Raises:
        OSError: Such as that the disk is full. No file is left then.
    """
    try:
        with open(path, "wb", buffering=0) as file:
            for section in image.sections:
                view = raw_view(section)
                while view:
                    view = view[file.write(view) :]
    except OSError:
        path.unlink(missing_ok=True)
        raise


def seal(folder: Path, name: str, arrays: Path, facts: dict[str, Any], run_id: str) -> None:
    """Makes written arrays the snapshot of that name, in the place of the one before it.

    It is on the disk when this returns. That of the beginning is left to the system's own pace: no server
    waits for the disk before it serves, and who would lose the system loses the driver with it.

    Args:
        name: ``INITIAL`` or ``LATEST``.
        arrays: The file that ``write_arrays`` wrote, in the folder.
        facts: What ``SnapshotImage.facts`` returned when it was written.

    Raises:
        OSError: Such as that the disk is full.
    """
    durable = name != INITIAL
    if durable:
        with open(arrays, "rb", buffering=0) as file:
            os.fsync(file.fileno())
    # From the page cache, after the lock was released: while the vectors are being written nobody may push.
    with open(arrays, "rb", buffering=0) as file:
        _, crc = checksum(file)
    content = sealed({"format": _FORMAT, "run_id": run_id, "arrays": arrays.name, "crc": crc, **facts})
    before = _named_in(folder / f"{name}.json")
    write_whole(folder / f"{name}.json", lambda file: file.write(content), durable=durable)
    # It is valid from here on, whatever becomes of the rest.
    with contextlib.suppress(OSError):
        if before is not None and before != arrays.name:
            (folder / before).unlink()


def exists(folder: Path, name: str) -> bool:
    """Returns whether there is a snapshot of that name, damaged or not."""
    return (folder / f"{name}.json").exists()


def read_image(folder: Path, name: str, spec: ServerSpec) -> SnapshotImage:
    """Returns the snapshot of that name.

    Raises:
        DataError: There is none, or it is damaged, or of another fit.
    """
    try:
        body = unsealed((folder / f"{name}.json").read_bytes())
        if body["format"] != _FORMAT or body["run_id"] != spec.run_id:
            raise DataError(f"Expected a snapshot of {spec.run_id!r}. Received: one of {body['run_id']!r}.")
        return _read_arrays(folder / str(body["arrays"]), body, spec)
    except (OSError, *DAMAGES) as error:
        raise DataError(f"Expected a whole snapshot in {folder / name}.json. Received: {error!r}.") from error


def tidy(folder: Path) -> None:
    """Removes files that no manifest names: what a process was writing when it ended."""
    kept = {_named_in(folder / f"{name}.json") for name in (INITIAL, LATEST)}
    for path in folder.iterdir():
        if path.suffix in (".arrays", UNFINISHED) and path.name not in kept:
            path.unlink(missing_ok=True)


def _read_arrays(path: Path, body: dict[str, Any], spec: ServerSpec) -> SnapshotImage:
    # Before any memory is taken: a number in a damaged manifest may be any.
    expected = 4 * spec.num_values * (1 + body["num_slots"]) + 8 * spec.num_state_values * (1 + len(body["weights"]))
    expected += bytes_of_tables(spec)
    if path.stat().st_size != expected:
        raise ValueError(f"{path.stat().st_size} bytes of arrays, not {expected}")
    vectors = [aligned_vector(spec.num_values) for _ in range(1 + body["num_slots"])]
    states = [np.empty(spec.num_state_values) for _ in range(1 + len(body["weights"]))]
    tables = empty_arrays(spec)
    of_tables = [array for one in tables for array in one.values()]
    crc = 0
    with open(path, "rb", buffering=0) as file:
        for array in (*vectors, *states, *of_tables):
            for block in _blocks_of(raw_view(array)):
                fill(file, block)
                crc = zlib.crc32(block, crc)
        if crc != body["crc"] or file.read(1):
            raise ValueError("arrays whose checksum does not hold")
    return SnapshotImage(
        values=vectors[0],
        slots=tuple(vectors[1:]),
        state=states[0],
        contributions={
            int(key): (weight, each) for (key, weight), each in zip(body["weights"], states[1:], strict=True)
        },
        entries={int(partition): entry for partition, entry in body["entries"].items()},
        tables=ServedTables(spec, tables, are_cut=True) if tables else None,
        **{name: body[name] for name in ("iterations", "updates", "rate", "stopped", "counts", "staleness")},
    )


def fill(file: Any, view: memoryview) -> None:
    """Reads from an unbuffered file until the view is full; raises ValueError where the file ends before."""
    while view:
        count = file.readinto(view)
        if not count:
            raise ValueError("a file that ends too soon")
        view = view[count:]


def _blocks_of(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), _BLOCK_BYTES):
        yield view[start : start + _BLOCK_BYTES]


def _named_in(manifest: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return str(unsealed(manifest.read_bytes())["arrays"])
    return None


class Snapshotter:
    """Takes snapshots by time, by the number of pushes, and on request, as long as the process lives.

    The arrays are written while no push is in the middle; pulls go on. What is slow (the
    checksum, and waiting for the disk) comes after. A snapshot that fails is counted and
    tried again when the next is due, and the fit goes on.
    """

    def __init__(self, server: ParameterServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._number = 0
        self._warned = False
        # Pushes that the last snapshot has, and that there were when one was last tried.
        self._saved, self._tried = 0, 0
        self._due_s = time.monotonic() + server.spec.snapshot_seconds
        self._wanted, self._begun, self._done = 0, 0, 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="elephant-snapshots", daemon=True)
        server.on_update(self._look)

    def start(self, *, initial: bool) -> None:
        """Starts the thread; where ``initial``, once what the server begins with is kept, to which it can go back."""
        if initial:
            self._take(INITIAL)
        self._saved = self._tried = self._server.updates
        self._thread.start()

    def request(self, timeout_s: float) -> bool:
        """Waits for a snapshot that is begun from now on; returns whether there was one in time."""
        with self._changed:
            self._wanted = number = self._begun + 1
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= number, timeout_s)

    def _look(self) -> None:
        if self._is_due():
            with self._changed:
                self._changed.notify_all()

    def _is_due(self) -> bool:
        spec, updates = self._server.spec, self._server.updates
        if updates == self._saved:
            return False
        by_count = spec.snapshot_updates > 0 and updates - self._tried >= spec.snapshot_updates
        return by_count or (spec.snapshot_seconds > 0 and time.monotonic() >= self._due_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._begun >= self._wanted and not self._is_due():
                    self._changed.wait(self._pause_s())
                self._begun += 1
                number = self._begun
            self._take(LATEST)
            with self._changed:
                self._done = number
                self._changed.notify_all()

    def _pause_s(self) -> float | None:
        seconds = self._server.spec.snapshot_seconds
        if seconds <= 0:
            return None
        left = self._due_s - time.monotonic()
        return min(left if left > 0 else seconds, _LONGEST_PAUSE_S)

    def _take(self, name: str) -> None:
        server = self._server
        self._number += 1
        self._tried = server.updates
        arrays = self._folder / f"{name}-{server.incarnation}-{self._number}.arrays"
        try:
            with server.shared_lock.exclusive():
                image = server.image()
                facts, updates = image.facts(), image.updates
                self._tried = updates
                write_arrays(arrays, image)
            seal(self._folder, name, arrays, facts, server.spec.run_id)
        except Exception as error:
            # Whatever it was: the thread has to live, because workers that finish wait for it.
            with contextlib.suppress(OSError):
                arrays.unlink(missing_ok=True)
            self._failed(error)
        else:
            self._saved = updates
            server.counters.add("snapshots")
        self._due_s = time.monotonic() + server.spec.snapshot_seconds

    def _failed(self, error: Exception) -> None:
        self._server.counters.add("snapshot_failures")
        if not self._warned:
            self._warned = True
            logger.warning(
                "A snapshot of the parameter server could not be written to %s: %s. Training goes on; should the "
                "server be lost, it goes back to the snapshot before, or to the beginning.",
                self._folder,
                error,
            )
