"""Additions as docs/development.md describes them, made to a copy of the project: they take so many edits, and work."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist", "site"
)


@dataclass(frozen=True)
class Edit:
    """One place that is edited: a new file, text at a file's end, or text behind a line that it has once."""

    file: str
    text: str
    behind: str = ""

    def make(self, root):
        path = root / self.file
        if not self.behind:
            path.write_text((path.read_text() + "\n\n" if path.exists() else "") + self.text)
            return
        old = path.read_text()
        assert old.count(self.behind) == 1, f"{self.file}: expected {self.behind!r} once."
        path.write_text(old.replace(self.behind, self.behind + self.text))


@dataclass(frozen=True)
class Addition:
    """What is added, and a program that fails where it does not work."""

    edits: tuple[Edit, ...]
    probe: str


CODEC = '''"""Signs of values, and one magnitude for all of them."""

from __future__ import annotations

import numpy as np

from elephant.compression.codec import Codec, register_codec


class Signs(Codec):
    """One bit for each value, and their mean magnitude."""

    def encoded_bytes(self, count: int) -> int:
        return 4 + (count + 7) // 8

    def encode(self, values: np.ndarray, out: np.ndarray, *, offset: int) -> None:
        out[:4] = np.array([np.abs(values).mean()], np.float32).view(np.uint8)
        out[4:] = np.packbits(values > 0)

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        out[:] = np.where(np.unpackbits(data[4:], count=len(out)), 1, -1) * data[:4].view(np.float32)


register_codec("signs", lambda count: Signs(), ratio=32)
'''

ALGORITHM = '''@register_algorithm("half")
class Half(Algorithm):
    """Half of how far the weights have moved."""

    pushes_gradients = False

    def update(self, local: np.ndarray, center: np.ndarray, steps: int) -> np.ndarray:
        return 0.5 * (local - center)
'''

CHECK = '''@check(Phase.APPLICATION)
def check_event_log(settings: Mapping[str, str]) -> CheckResult:
    """Returns whether Spark keeps a log of this application."""
    logs = is_true(settings, "spark.eventLog.enabled")
    return check_result(
        "event log",
        logs,
        otherwise=WARNING,
        expected="an event log, which shows afterwards what a fit has done",
        received="one" if logs else "none",
        remedy="Set spark.eventLog.enabled=true.",
    )
'''

FORMAT = '''"""Arrow files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from elephant.data.file_sources import Part, PlannedFiles, Share, deal_files
from elephant.storage.filesystem import Found, open_file_system


@dataclass(frozen=True)
class ArrowFiles(PlannedFiles):
    """Arrow files, of each of which a worker reads every so many rows.

    Args:
        url: Their folder.
        found: The files.
    """

    url: str
    found: tuple[Found, ...]

    def columns(self) -> pa.Schema:
        """Returns the columns of the first file."""
        system, _ = open_file_system(self.url)
        return pa.ipc.open_file(system.open_input_file(self.found[0].path)).schema

    def deal(self, num_workers: int, *, seed: int | None) -> list[Part]:
        return list(deal_files([file.size for file in self.found], num_workers))

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        system, _ = open_file_system(self.url)
        for share in part:
            table = pa.ipc.open_file(system.open_input_file(self.found[share.file].path)).read_all()
            yield from self._rows(table, share).select(columns).to_batches()

    def _rows(self, table: pa.Table, share: Share) -> pa.Table:
        return table.take(pa.array(range(share.index, table.num_rows, share.count), pa.int64()))
'''

OPENER = """@file_format("arrow", title="Arrow", names=r"\\.(arrow|feather)$", magic=b"ARROW1")
def _open_arrow(listing: FileListing) -> Opened:
    files = ArrowFiles(listing.url, tuple(listing.found))
    return Opened(spark_schema(files.columns()), files)
"""

EVENT = '''@dataclass(frozen=True, kw_only=True)
class MemoryPeak(Event):
    """The most memory that the rank's process has had so far."""

    line: ClassVar[str] = "worker_memory"
    peak_bytes: int
'''

PEAK = """
    @_takes(MemoryPeak)
    def _add_peak(self, peak: MemoryPeak) -> None:
        self.peaks[peak.rank] = peak.peak_bytes
"""

ADDITIONS = {
    "codec": Addition(
        (
            Edit("elephant/compression/signs.py", CODEC),
            Edit("elephant/compression/__init__.py", "from elephant.compression.signs import Signs as Signs\n",
                 "from elephant.compression.power_sgd import PowerSGD\n"),
        ),
        """
import numpy as np
from elephant.compression import CODECS
from elephant.options import OPTION
OPTION["compression"].value_of("signs")
codec = CODECS["signs"].make(3)
data, out = np.empty(codec.encoded_bytes(3), np.uint8), np.empty(3, np.float32)
codec.encode(np.array([1.0, -2.0, 3.0], np.float32), data, offset=0)
codec.decode(data, out)
assert out.tolist() == [2.0, -2.0, 2.0], out
""",
    ),
    "algorithm": Addition(
        (Edit("elephant/algorithms.py", ALGORITHM),),
        """
import numpy as np
from elephant.algorithms import ALGORITHMS
from elephant.options import OPTION
OPTION["algorithm"].value_of("half")
assert "half" in OPTION["algorithm"].help
assert ALGORITHMS["half"](2).update(np.array([3.0]), np.array([1.0]), 1).tolist() == [1.0]
""",
    ),
    "option": Addition(
        (
            Edit("elephant/options.py",
                 '    Option("grace_steps", integer(0), 2, FIT,\n'
                 '           help="steps before anything is measured (>= 0)"),\n',
                 '           help="passes over the training rows (>= 1)"),\n'),
            Edit("elephant/spark/estimator.py", "        graceSteps: int = 2,\n", "        epochs: int = 1,\n"),
            Edit("elephant/spark/estimator.py", "        graceSteps: Steps before anything is measured.\n",
                 "        epochs: Passes over the training rows.\n"),
            Edit("docs/params.md", "| `graceSteps` | steps before anything is measured (>= 0) | `2` |\n",
                 "| `epochs` | passes over the training rows (>= 1) | `1` |\n"),
        ),
        """
import numpy as np
from elephant.config import FitConfig
from elephant.jobs.settings import TRAIN, settings_of
from elephant.jobs.submission import read_settings
assert (FitConfig().grace_steps, FitConfig(grace_steps=np.int64(3)).grace_steps) == (2, 3)
assert read_settings("train.py", "", settings_of(TRAIN), ["--grace-steps", "4"]) == {"graceSteps": 4}
""",
    ),
    "check": Addition(
        (Edit("elephant/cluster/checks/session_checks.py", CHECK),),
        """
from elephant.cluster.checks import session_checks
from elephant.cluster.checks.registry import CHECKS, Phase
# With the facts that doctor gives to all checks of the phase.
one = CHECKS[Phase.APPLICATION]["elephant.cluster.checks.session_checks.check_event_log"]
results = [one.run(**{name: {"settings": {}}[name] for name in one.needs})]
assert "event log" in [result.name for result in results], results
""",
    ),
    "file format": Addition(
        (
            Edit("elephant/data/arrow.py", FORMAT),
            Edit("elephant/spark/file_formats.py", OPENER),
            Edit("elephant/spark/file_formats.py", "from elephant.data.arrow import ArrowFiles\n",
                 "from elephant.cluster.spark_private import parsed_type\n"),
        ),
        """
import pathlib, tempfile
import pyarrow as pa, pyarrow.feather
from elephant.spark.file_formats import Files, open_files
with tempfile.TemporaryDirectory() as folder:
    for name, values in (("one.arrow", [1, 2, 3]), ("two.arrow", [4, 5])):
        pa.feather.write_feather(pa.table({"x": values}), f"{folder}/{name}", compression="uncompressed")
    opened = open_files(Files(folder), None, None)
    assert opened.schema.simpleString() == "struct<x:bigint>", opened.schema
    parts = opened.files.deal(2, seed=None)
    rows = [row for part in parts for batch in opened.files.read(part, ["x"]) for row in batch["x"].to_pylist()]
    assert len(parts) == 2 and sorted(rows) == [1, 2, 3, 4, 5], rows
""",
    ),
    "callback": Addition(
        (
            Edit(
                "elephant/rank/callbacks/callback_rules.py",
                '    CallbackRule("sacred", Duty.LOGS, "logs to the run that the user has opened on the driver"),\n',
                "_ROWS = (\n",
            ),
        ),
        """
import keras
from elephant.rank.callbacks.callback_rules import Place, place_of
batches = {"__module__": "sacred.keras", "on_train_batch_end": lambda self, batch, logs=None: None}
assert place_of(type("Observer", (keras.callbacks.Callback,), batches)()) is Place.DRIVER
assert place_of(type("Own", (keras.callbacks.Callback,), {**batches, "__module__": "mine"})()) is Place.ALL_RANKS
""",
    ),
    "event": Addition(
        (
            Edit("elephant/monitor/events.py", EVENT),
            Edit("elephant/monitor/record.py", "        self.peaks: dict[int, int] = {}\n",
                 "        self.files: dict[int, FilesLeft] = {}\n"),
            Edit("elephant/monitor/record.py", PEAK, "        self.notes.append(note.text)\n"),
            Edit("elephant/monitor/record.py", "    MemoryPeak,\n", "    Finished,\n"),
        ),
        """
from elephant.monitor.events import MemoryPeak, from_message, to_message
from elephant.monitor.record import FitRecord
sent = to_message(MemoryPeak(rank=1, peak_bytes=7))
record = FitRecord()
record.add(from_message(sent))
assert record.peaks == {1: 7}
from elephant.monitor.event_log import EventLog
from elephant.monitor.events import unpacked
log = EventLog()
log.show(from_message(sent))
assert unpacked(log.to_bytes()) == [MemoryPeak(rank=1, peak_bytes=7)]
""",
    ),
}  # fmt: skip
# Of each addition, the places that the page names.
EDITS = {"codec": 2, "algorithm": 1, "option": 4, "check": 1, "file format": 3, "callback": 1, "event": 4}


def run(root, *command, sent=""):
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, input=sent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


# Runs each probe in a fork of its own, with its own copy of the package: Keras, the dear import, is there already.
PROBES = """
import json, os, sys, traceback
import keras
failed = []
for root, probe in json.loads(sys.stdin.read()).items():
    child = os.fork()
    if not child:
        code = 1
        try:
            sys.path.insert(0, root)
            os.chdir(root)
            exec(compile(probe, root, "exec"), {"__name__": "__main__"})
            assert sys.modules["elephant"].__file__.startswith(root), sys.modules["elephant"]
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    if os.waitpid(child, 0)[1]:
        failed.append(root)
sys.exit(f"failed: {failed}" if failed else 0)
"""


def test_additions_when_made_as_the_page_says_then_take_so_many_edits_and_each_works_alone(tmp_path):
    roots = {name: tmp_path / name.replace(" ", "_") for name in ADDITIONS}
    for name, root in roots.items():
        for folder in ("elephant", "docs"):
            shutil.copytree(ROOT / folder, root / folder, ignore=LEFT_OUT)
        for edit in ADDITIONS[name].edits:
            edit.make(root)
    assert {name: len(addition.edits) for name, addition in ADDITIONS.items()} == EDITS
    probes = {str(root): ADDITIONS[name].probe for name, root in roots.items()}
    run(tmp_path, sys.executable, "-c", PROBES, sent=json.dumps(probes))


@pytest.mark.slow("types and imports of a copy of the package; the additions one by one are in the quick tier")
def test_project_when_all_additions_are_made_then_lint_types_and_layers_are_as_make_check_wants_them(tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(ROOT, root, ignore=LEFT_OUT)
    edits = [edit for addition in ADDITIONS.values() for edit in addition.edits]
    for edit in edits:
        edit.make(root)
    edited = sorted({edit.file for edit in edits if edit.file.endswith(".py")})
    run(root, sys.executable, "-m", "ruff", "format", "--check", *edited)
    run(root, sys.executable, "-m", "ruff", "check", *edited)
    # Of all other modules the signatures: `make check` looks into them.
    run(root, sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir=/dev/null", *edited)
    of_the_house = [f"tests/test_{name}.py" for name in ("layers", "names", "private_names")]
    # Without those that import the package in processes of their own.
    run(
        root,
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        *of_the_house,
        "-k",
        "walked or compared or count or read",
    )
