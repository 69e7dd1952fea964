"""`elephant run`: what a script finds on a rank, and how the program ends. No Spark."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from python_start import python_path
from tables import every_case

import elephant.testing
from elephant.cli.main import main
from elephant.cli.script import run_main

REPOSITORY = Path(__file__).resolve().parent.parent.parent

ON_RANKS = """
import inspect, json, os, pathlib, sys
import numpy as np
from elephant import collective
from beside_the_script import SCALE

def facts():
    return {
        "name": __name__,
        "file": __file__,
        "arguments": sys.argv,
        "working folder": os.getcwd(),
        "sum": int(collective.allreduce(np.array([SCALE * (collective.rank() + 1)]))[0]),
        "source": inspect.getsource(facts).splitlines()[0],
        "same module": sys.modules["__main__"].facts is facts,
    }

if __name__ == "__main__":
    pathlib.Path(f"{sys.argv[1]}-{collective.rank()}").write_text(json.dumps(facts()))
    sys.exit()
"""


def test_script_when_ranks_lack_its_file_then_runs_as_python_would_run_it(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "beside_the_script.py").write_text("SCALE = 10\n")
    arguments = ["facts", "--epochs", "3"]
    results = elephant.testing.run_local(run_main, ("code/script.py", str(tmp_path), ON_RANKS.encode(), arguments))
    assert results == [None, None]
    for rank in range(2):
        assert json.loads((tmp_path / f"facts-{rank}").read_text()) == {
            "name": "__main__",
            "file": str(folder / "script.py"),
            "arguments": ["code/script.py", *arguments],
            "working folder": str(tmp_path),
            "sum": 30,
            "source": "def facts():",
            "same module": True,
        }


@every_case(
    ("last_line", "code", "shown"),
    [
        ("print(sys.argv[1:])", 0, "['--epochs', '3', '--', 'x']"),
        ("sys.exit(5)", 5, ""),
        ("raise ValueError('no rows')", 1, 'script.py", line 2, in <module>'),
    ],
)
def test_script_when_there_is_one_worker_then_ends_as_with_python(last_line, code, shown, tmp_path):
    (tmp_path / "script.py").write_text(f"import sys\n{last_line}\n")
    command = [
        sys.executable,
        "-m",
        "elephant",
        "run",
        "script.py",
        "--num-workers",
        "1",
        "--",
        "--epochs",
        "3",
        "--",
        "x",
    ]
    environment = {"PYTHONPATH": python_path(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert shown in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("content", "options", "code", "text"),
    [
        (None, [], 2, "SCRIPT: expected a Python file. Received: '{}': No such file or directory."),
        ("if True print()", [], 1, "SyntaxError"),
        ("print()", ["--timeouts", "patience_s=3"], 2, "timeouts: expected elephant.config.Timeouts, or seconds by"),
    ],
)
def test_script_when_it_cannot_run_then_is_refused_before_spark_starts(content, options, code, text, tmp_path, capsys):
    script = tmp_path / "script.py"
    if content is not None:
        script.write_text(content)
    assert main(["run", str(script), "--num-workers", "2", "--master", "local[2]", *options]) == code
    error = capsys.readouterr().err
    assert error.startswith("elephant run: ") and text.format(script) in error
