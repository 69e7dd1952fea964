"""Commands on the pages: each names programs, options, targets and files that there are, and some run as they stand."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from python_start import python_path

from elephant.cluster import local

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in ROOT.rglob("*.md") if path.relative_to(ROOT).parts[0][0] != ".")
# Run by test_tutorials.py, but for the doctor.
LESSON = "docs/tutorials/spark_submit.md"
FOLDERS = ("benchmarks/", "docs/", "examples/", "spark_jobs/", "tests/")

# Blocks that do not run here, by page and place, and why. All the others run in a test below.
_NOT_RUN = {
    ("CONTRIBUTING.md", 0): "make's targets run these tests",
    ("benchmarks/README.md", 0): "measures for hours on a quiet machine, some as root",
    ("benchmarks/README.md", 1): "measures for a quarter of an hour; tests/test_benchmark_results.py runs its program",
    ("docs/checkpoints.md", 0): "needs checkpoints of a fit; tests/cli/test_checkpoints.py runs the program on some",
    (
        "docs/checkpoints.md",
        1,
    ): "needs a fit that runs; tests/cli/test_checkpoint_request.py runs the program beside one",
    ("docs/clusters.md", 0): "needs YARN; tests/yarn submits the job to a YARN of its own",
    ("docs/clusters.md", 1): "needs Kubernetes; tests/kubernetes submits the job to pods of its own",
    ("docs/dataproc.md", 0): "needs a bucket of Google's",
    ("docs/dataproc.md", 1): "needs Dataproc, which nobody has tried",
    ("docs/dataproc.md", 2): "needs Dataproc, which nobody has tried",
    ("docs/development.md", 0): "make's targets run these tests",
    ("docs/development.md", 2): "takes half an hour; tests/fuzz is what it runs",
    ("docs/development.md", 3): "takes half an hour; tests/mutations holds its parts",
    ("docs/doctor.md", 0): "needs clusters; tests/cli/test_doctor.py runs the program on this machine",
    ("docs/exactness.md", 0): "takes minutes; tests/spark/test_programs.py runs the program on a model and rows",
    ("docs/install.md", 0): "pip needs a registry",
    ("docs/install.md", 1): "pip needs a registry",
    ("docs/kubernetes.md", 0): "needs a container engine; tests/spark_jobs/test_conf.py reads and lints the file",
    ("docs/kubernetes.md", 1): "needs Kubernetes; tests/kubernetes submits the job to pods of its own",
    ("docs/laptop.md", 0): "pip needs a registry",
    ("docs/performance.md", 0): "needs clusters; tests/spark/test_programs.py runs the program on this machine",
    ("docs/progress.md", 0): "needs a fit that runs; tests/cli/test_attach.py watches one",
    ("docs/run.md", 0): "needs clusters; tests/spark/test_run_session.py runs the program on this machine",
    ("docs/scheduled_jobs.md", 0): "needs YARN and HDFS; tests/yarn submits the job to a YARN of its own",
    ("docs/serving.md", 0): "needs an image from a registry; test_pages.py calls the model that is served",
    ("docs/tutorials/index.md", 0): "pip needs a registry",
    ("docs/yarn.md", 0): "pip needs a registry",
    ("docs/yarn.md", 1): "needs YARN and S3; tests/yarn submits the job to a YARN of its own",
    ("docs/yarn.md", 2): "needs YARN, S3 and Delta's jars; tests/yarn submits the job to a YARN of its own",
    ("spark_jobs/README.md", 0): "needs HDFS; tests/spark_jobs submits these jobs to a cluster of its own",
    ("spark_jobs/README.md", 1): "stands for the block above; tests/spark_jobs submits a job with a job file",
    ("spark_jobs/README.md", 2): "needs HDFS; tests/spark_jobs submits the job to a cluster of its own",
    ("spark_jobs/README.md", 3): "pip needs a registry",
    ("spark_jobs/README.md", 4): "needs an environment's archive; tests/spark_jobs/test_conf.py submits its settings",
    ("spark_jobs/README.md", 5): "needs a container engine; tests/spark_jobs/test_conf.py reads and lints the file",
}
# Where the image for Kubernetes has the jobs.
_IN_IMAGE = "local:///opt/elephant/"
# Programs of others, whose options are not looked at.
_OTHERS = {"pip", "docker", "curl", "venv-pack", "aws", "gcloud", "git"}

# Reads the words of programs with their own parsers, and stops where they would begin to work. Each line of standard
# input is a list of words: a file or a module behind -m, and its arguments.
_READER = """
import argparse, json, runpy, sys
from unittest import mock

# Their imports take seconds, and no parser needs them.
sys.modules.update(keras=mock.MagicMock(), tensorflow=mock.MagicMock())

class Read(BaseException):
    pass

known = argparse.ArgumentParser.parse_known_args

def read(parser, *words, **more):
    raise Read(known(parser, *words, **more)[1])

argparse.ArgumentParser.parse_known_args = read
for line in sys.stdin:
    words = json.loads(line)
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__")
        else:
            sys.argv, sys.path[0] = words, words[0].rpartition("/")[0]
            runpy.run_path(words[0], run_name="__main__")
        said = "read no arguments"
    except Read as end:
        said = f"unknown: {end}" if end.args[0] else ""
    except (Exception, SystemExit) as error:
        said = repr(error)
    print(json.dumps([words, said]))
"""


def blocks_of(page):
    return re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


BLOCKS = {
    (name, place): block
    for page in PAGES
    if (name := page.relative_to(ROOT).as_posix()) != LESSON
    for place, block in enumerate(blocks_of(page))
}


def commands_of(block):
    """Returns the commands of a block as lists of words, without comments, `sudo` and where their output goes."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(re.sub(r"(^|\s)#.*", "", line))
        words = words[: words.index(">")] if ">" in words else words
        words = words[1:] if words[:1] == ["sudo"] else words
        if words:
            found.append(words)
    return found


COMMANDS = [(key, words) for key, block in BLOCKS.items() for words in commands_of(block)]


def program_of(words):
    return words[0].rpartition("/")[2]


def python_words(words):
    """Returns what a command gives to Python: a file or a module, and arguments; None where another program runs."""
    program = program_of(words)
    if program == "elephant":
        return ["-m", "elephant", *words[1:]]
    if program == "spark-submit":
        words = [word.removeprefix(_IN_IMAGE) for word in words]
        return words[next(place for place, word in enumerate(words) if re.match(r"spark_jobs/.*\.py$", word)) :]
    if program.startswith("python") and words[1:3] not in (["-m", "pytest"], ["-m", "venv"]):
        return words[1:]
    if words[:2] in (["make", "bench"], ["make", "mutate"]):
        file = {"bench": "benchmarks/results.py", "mutate": "tests/mutations/run.py"}[words[1]]
        given = [shlex.split(word.partition("=")[2]) for word in words[2:]]
        return [file, *(word for part in given for word in part)]
    return None


def test_blocks_when_they_do_not_run_then_a_reason_is_given_for_a_block_that_there_is():
    run = {key for key in BLOCKS if key not in _NOT_RUN}
    assert _NOT_RUN.keys() <= BLOCKS.keys()
    assert run == {REPORT, ("README.md", 0), ("docs/development.md", 1)}


def test_commands_when_they_name_a_program_then_it_is_known_here():
    known = {"elephant", "make", "spark-submit", "python", "python3.11", *_OTHERS}
    assert sorted({program_of(words) for _, words in COMMANDS} - known) == []


def test_commands_when_they_name_files_of_this_tree_then_these_are_there():
    named = {(page, word) for (page, _), words in COMMANDS for word in words if word.startswith(FOLDERS)}
    assert len(named) > 20
    assert sorted((page, word) for page, word in named if not (ROOT / word).exists()) == []


def test_commands_when_they_install_extras_then_these_are_there():
    setup = (ROOT / "setup.py").read_text()
    extras = set(re.findall(r'^        "(\w+)": \[|^        "(\w+)": [A-Z]', setup, re.MULTILINE))
    there = {name for pair in extras for name in pair if name}
    asked = [
        name
        for _, words in COMMANDS
        if program_of(words) == "pip"
        for group in re.findall(r"\[(.*)\]", shlex.join(words))
        for name in group.split(",")
    ]
    assert len(asked) > 5 and set(asked) <= there


def test_commands_when_they_call_make_then_it_has_their_targets_and_reads_their_variables():
    read = set(re.findall(r"\$\(([A-Z_]+)\)", (ROOT / "Makefile").read_text()))
    for _, words in COMMANDS:
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert {word.partition("=")[0] for word in words[1:] if "=" in word} <= read, words
            # Says what it would do, and does nothing.
            done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert targets and done.returncode == 0, (words, done.stderr)


def test_commands_when_they_call_programs_of_ours_then_their_parsers_take_the_arguments(tmp_path):
    given = {json.dumps(found): key for key, words in COMMANDS if (found := python_words(words))}
    assert len(given) > 30
    for folder in FOLDERS:
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "job.yaml").write_text("epochs: 3\n")
    done = subprocess.run(
        [sys.executable, "-c", _READER],
        input="\n".join(given),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(said) == len(given), done.stderr
    assert [(given[json.dumps(words)], words, fault) for words, fault in said if fault] == []


@pytest.fixture
def shell_environment(tmp_path):
    """Environment in which the programs of this Python are found, with Java, and no Spark of a user's."""
    java = local.ensure_java()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    return {
        **kept,
        "JAVA_HOME": str(java.path),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": python_path(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TMPDIR": str(tmp_path),
    }


@pytest.mark.spark
def test_commands_when_they_call_spark_submit_then_it_has_their_options(shell_environment):
    done = subprocess.run(["spark-submit", "--help"], env=shell_environment, capture_output=True, text=True, timeout=60)
    known = set(re.findall(r"^\s+(--[a-z-]+)", done.stdout + done.stderr, re.MULTILINE))
    assert "--master" in known
    for _, words in COMMANDS:
        if words[0] == "spark-submit":
            own = words[1 : len(words) - len(python_words(words))]
            assert {word for word in own if word.startswith("--")} <= known, words


def test_commands_when_they_call_pytest_then_it_finds_tests():
    calls = [words for _, words in COMMANDS if words[1:3] == ["-m", "pytest"]]
    assert len(calls) == 3
    for words in calls:
        wanted = words[words.index("-k") + 1] if "-k" in words else ""
        paths = [ROOT / word for word in words if word.startswith("tests/")]
        assert paths and len(words) == 3 + len(paths) + 2 * ("-k" in words), words
        for path in paths:
            files = [path] if path.is_file() else path.glob("test_*.py")
            names = [name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)]
            assert any(wanted in name for name in names), words


REPORT = ("docs/progress.md", 1)
EVENTS = {"event": "fit_begin", "time": 1.0, "params": {}, "model": "m"}


def test_commands_when_they_make_reports_then_they_end_well(shell_environment, tmp_path):
    (tmp_path / "fits").mkdir()
    (tmp_path / "fits" / "20261124T101530-1a2b3c4d.jsonl").write_text(json.dumps(EVENTS) + "\n")
    # A folder of this machine.
    commands = BLOCKS[REPORT].replace("s3://bucket/", f"{tmp_path}/")
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{commands}"],
        cwd=tmp_path,
        env=shell_environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "20261124T101530-1a2b3c4d.html" in done.stdout
