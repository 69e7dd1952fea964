"""Snapshots on disk: a file of raw vectors, and a small JSON manifest that makes it valid.

The manifest is written last and moved into place, so that a folder holds a whole snapshot or
the one before it, whenever the process or the machine ends.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from elephant.errors import DataError
from elephant.net.buffers import aligned_vector
from elephant.net.frames import raw_view
from elephant.parameter_server.layout import ServerSpec
from elephant.parameter_server.store import Contribution
from elephant.storage.folder import UNFINISHED, checksum, sealed, unsealed, write_whole

INITIAL = "initial"
LATEST = "latest"
_FORMAT = 1
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class SnapshotImage:
    """Everything that a server needs to go on from where another one was.

    Args:
        values: The weights, float32 of shape (num_values,).
        slots: The rule's vectors, of the same shape; none means that they begin as the rule has them.
        state: The averaged state, float64 of shape (num_state_values,).
        iterations: Updates that the optimizer has made, in this fit and before it.
        updates: ... in this fit.
        entries: The fields of the ledger's entries by partition.
        contributions: Weight and state that each partition sent last.
        rate: The learning rate that was set; None leaves it to the rule.
        stopped: Whether the fit is to end.
        counts: What `elephant.parameter_server.server.Counters` has counted.
        staleness: How many pushes had which staleness.
    """

    values: np.ndarray
    slots: Sequence[np.ndarray] = ()
    state: np.ndarray
    iterations: int = 0
    updates: int = 0
    entries: dict[int, dict[str, int]] = field(default_factory=dict)
    contributions: dict[int, Contribution] = field(default_factory=dict)
    rate: float | None = None
    stopped: bool = False
    counts: dict[str, float] = field(default_factory=dict)
    staleness: dict[str, int] = field(default_factory=dict)

    @property
    def sections(self) -> list[np.ndarray]:
        """The arrays, in the order in which they lie in the file."""
        states = [self.contributions[partition][1] for partition in sorted(self.contributions)]
        return [self.values, *self.slots, self.state, *states]

    def facts(self) -> dict[str, Any]:
        """Returns everything that is no array, as JSON values."""
        return {
            "num_slots": len(self.slots),
            "iterations": self.iterations,
            "updates": self.updates,
            "entries": {str(partition): entry for partition, entry in self.entries.items()},
            "weights": [[partition, self.contributions[partition][0]] for partition in sorted(self.contributions)],
            "rate": self.rate,
            "stopped": self.stopped,
            "counts": self.counts,
            "staleness": self.staleness,
        }


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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"Expected a whole snapshot in {folder / name}.json. Received: {error!r}.") from error


def tidy(folder: Path) -> None:
    """Removes files that no manifest names: what a process was writing when it ended."""
    kept = {_named_in(folder / f"{name}.json") for name in (INITIAL, LATEST)}
    for path in folder.iterdir():
        if path.suffix in (".arrays", UNFINISHED) and path.name not in kept:
            path.unlink(missing_ok=True)


def _read_arrays(path: Path, body: dict[str, Any], spec: ServerSpec) -> SnapshotImage:
    vectors = [aligned_vector(spec.num_values) for _ in range(1 + body["num_slots"])]
    states = [np.empty(spec.num_state_values) for _ in range(1 + len(body["weights"]))]
    crc = 0
    with open(path, "rb", buffering=0) as file:
        for array in (*vectors, *states):
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
