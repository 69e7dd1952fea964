"""Arrays by name in one file that numpy reads too: an ``.npz`` archive without pickle."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

_BLOCK_BYTES = 1 << 20


class Summed:
    """A file to write to that counts its bytes, and sums them up, as they go by.

    It cannot seek, so that what was summed up is what lies in the file.

    Args:
        file: Where the bytes go.

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
                np.lib.format.write_array(member, np.asanyarray(_portable(array)), allow_pickle=False)


def read_arrays(file: BinaryIO) -> dict[str, np.ndarray]:
    """Returns what `write_arrays` wrote; raises ValueError, or `zipfile.BadZipFile`, for anything else."""
    with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def checksum(file: BinaryIO) -> tuple[int, int]:
    """Returns the bytes from here to the end of a file, and their CRC-32."""
    crc = num_bytes = 0
    while block := file.read(_BLOCK_BYTES):
        crc, num_bytes = zlib.crc32(block, crc), num_bytes + len(block)
    return num_bytes, crc


def _portable(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
