"""The disk that a process works on: where it keeps what is passing, and what to say when there is no room."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from elephant.errors import ClusterError

# Set for the process of a rank: its own folder, which its Spark task removes, however the process ends.
WORK_FOLDER = "ELEPHANT_WORK_FOLDER"
# No room, a quota that is used up, a file that may not grow.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def local_folder() -> str:
    """Returns where this executor keeps temporary data: Spark's local folder, which Spark cleans, or the system's."""
    for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):
        if folder and os.access(folder, os.W_OK):
            return folder
    return tempfile.gettempdir()


def scratch_folder() -> str | None:
    """Returns where this process is to keep temporary files; None leaves that to the system.

    A rank whose work folder is gone is about to end, and would leave behind what it put elsewhere.
    """
    return os.environ.get(WORK_FOLDER) or None


def is_full(error: OSError) -> bool:
    """Returns whether writing failed because there is no room."""
    return error.errno in _NO_ROOM


def disk_full(folder: Path, *, written: int, wanted: int) -> ClusterError:
    """Returns the error of rows for which a disk has no room.

    Args:
        folder: Where they were to be kept. It need not exist any more.
        written: Bytes of rows that were written before.
        wanted: Bytes that were to follow at once.
    """
    free = shutil.disk_usage(folder.parent).free
    return ClusterError(
        f"{folder.parent}: expected room on the local disk for this worker's rows. Received: a full disk after "
        f"{_megabytes(written)} of rows; the next {_megabytes(wanted)} did not fit ({_megabytes(free)} are free "
        "without them). Let spark.local.dir (or SPARK_LOCAL_DIRS) name a larger disk, free some room there, or use "
        "more workers on more hosts."
    )


def _megabytes(count: int) -> str:
    """Returns a number of bytes for a message.

    >>> _megabytes(1_234_567_890)
    '1,234.6 MB'
    """
    return f"{count / 1e6:,.1f} MB"
