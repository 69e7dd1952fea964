"""TFRecord files, which a process with TensorFlow reads for the worker (`elephant.training.records`)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from elephant.cluster.rank_environment import process_environment
from elephant.data.file_sources import Part, PlannedFiles, deal_files
from elephant.data.scratch import local_folder
from elephant.errors import TrainingError, user_error
from elephant.storage.filesystem import Found


@dataclass(frozen=True)
class RecordFiles(PlannedFiles):
    """TFRecord files of one data set.

    Args:
        url: Where they are; tells their file system.
        files: The files.
        features: What records hold, by name: the kind of feature, and whether each record has one value of it.
    """

    url: str
    files: tuple[Found, ...]
    features: Mapping[str, tuple[str, bool]]

    def deal(self, num_workers: int, *, seed: int | None) -> list[Part]:
        """Returns the files, or every n-th record of them, of each worker; the seed has no part in it."""
        return list(deal_files([file.size for file in self.files], num_workers))

    def first(self, columns: list[str]) -> pa.RecordBatch | None:
        """Returns some rows, which this very process reads: the driver, which has TensorFlow already."""
        from elephant.training.records import read_shares

        features = {name: self.features[name] for name in columns}
        batches = read_shares(self.url, [(file, 0, 1) for file in self.files], features)
        return next((batch for batch in batches if batch.num_rows), None)

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yields the records of a part in the order of the files."""
        if not part:
            return
        asked = {
            "url": self.url,
            "shares": [(astuple(self.files[share.file]), share.index, share.count) for share in part],
            "features": {name: self.features[name] for name in columns},
        }
        with tempfile.TemporaryDirectory(prefix="elephant-", dir=local_folder()) as folder:
            yield from _read_in_process(json.dumps(asked).encode(), Path(folder) / "failure")


def _read_in_process(asked: bytes, failure_file: Path) -> Iterator[pa.RecordBatch]:
    # Copies of remote files go where this task's other files are, and with them.
    environment = process_environment(threads=1, devices=[], backend=None, more={"TMPDIR": str(failure_file.parent)})
    command = [sys.executable, "-m", "elephant.training.records", str(failure_file)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        _send(process.stdin, asked)
        # A stream that is cut short: why, the process has written down.
        with contextlib.suppress(pa.ArrowInvalid, OSError):
            yield from pa.ipc.open_stream(pa.PythonFile(process.stdout, mode="r"))
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if code:
        raise _failure(failure_file, code)


def _send(pipe: Any, asked: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(asked)


def _failure(failure_file: Path, code: int) -> Exception:
    if not failure_file.exists():
        return TrainingError(f"expected the process that reads TFRecord files to end well. Received: exit code {code}.")
    said = json.loads(failure_file.read_text())
    error = user_error(said["kind"], said["message"])
    return error or TrainingError(f"TFRecord files: {said['kind']}: {said['message']}\n{said['traceback']}")
