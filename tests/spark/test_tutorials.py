"""Lessons of docs/tutorials, run as they stand: each ends with what it promises."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow_state import own_mlflow
from python_start import python_path
from spark_daemons import end_with_children

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
LESSONS = sorted(path.stem for path in TUTORIALS.glob("*.py"))
COMMANDS_TIMEOUT_S = 400
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]\d+)?")
# Seconds of an epoch, names of files at random, and words about the lines below.
NOT_COMPARED = re.compile(r"\d+/\d+ |.*epoch-\d{8}\.|.*:$")


def shown_in(lesson):
    """Returns the lines with numbers that a lesson says its code prints: comments right below code."""
    shown, below_code = [], False
    for line in lesson.splitlines():
        text = line.removeprefix("# ").strip()
        if not line.startswith("#"):
            below_code = bool(line.strip())
        elif line.startswith("# %%"):
            below_code = False
        elif below_code and NUMBER.search(text) and not NOT_COMPARED.match(text):
            shown.append(text)
    return shown


def without_numbers(line):
    return " ".join(NUMBER.sub("N", line).split())


def differences(shown, printed):
    """Yields the lines of a lesson that are printed nowhere, or with other numbers, each looked for below the last."""
    lines = iter(printed.splitlines())
    for line in shown:
        found = next((other for other in lines if without_numbers(other) == without_numbers(line)), None)
        if found is None:
            yield f"not printed: {line}"
            return
        told, seen = ([float(number) for number in NUMBER.findall(text)] for text in (line, found))
        # Another number of partitions draws other rows.
        if seen != pytest.approx(told, rel=0.5, abs=0.05):
            yield f"expected about: {line}. Received: {found}"


def names_in(text):
    return re.findall(r"\]\(([\w/]+\.(?:py|md))\)", text)


def test_index_when_it_lists_lessons_then_all_of_them():
    lessons = {path.name for path in TUTORIALS.iterdir() if path.suffix in (".py", ".md")} - {"index.md"}
    assert {*names_in((TUTORIALS / "index.md").read_text())} == lessons


def test_links_of_lessons_when_followed_then_lead_to_a_file():
    offenders = [
        f"{path.name}: {target}"
        for path in TUTORIALS.glob("*.py")
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text())
        if not (TUTORIALS / target).exists()
    ]
    assert offenders == []


# Several fits, on a machine that may be busy.
@pytest.mark.timeout(400)
@pytest.mark.slow("fits of a lesson; what it shows has tests of its own")
@pytest.mark.parametrize("name", LESSONS)
def test_lesson_when_run_then_keeps_its_promise_and_prints_about_the_numbers_that_it_shows(spark, name, capsys):
    path = TUTORIALS / f"{name}.py"
    partitions = spark.conf.get("spark.sql.shuffle.partitions")
    try:
        with own_mlflow():
            runpy.run_path(str(path), run_name="__main__")
    finally:
        # A lesson's builder sets it, in the session that there is.
        spark.conf.set("spark.sql.shuffle.partitions", partitions)
        spark.catalog.clearCache()
    shown = shown_in(path.read_text())
    assert shown
    assert list(differences(shown, capsys.readouterr().out)) == []


@pytest.mark.timeout(COMMANDS_TIMEOUT_S + 30)
@pytest.mark.spark
@pytest.mark.slow("a cluster and two jobs of their own")
def test_commands_of_the_lesson_about_spark_submit_when_run_then_keep_its_promise(tmp_path):
    blocks = re.findall(r"^```sh\n(.*?)^```", (TUTORIALS / "spark_submit.md").read_text(), re.DOTALL | re.MULTILINE)
    # Those of docs/doctor.md are run in tests/test_commands.py.
    blocks = [block for block in blocks if not block.startswith("elephant doctor")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    commands = "".join(["set -euo pipefail\n", *blocks]).replace("7077", str(port))
    process = subprocess.Popen(
        ["bash", "-c", commands],
        cwd=tmp_path,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))},
            "ELEPHANT": str(ROOT),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": python_path(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=COMMANDS_TIMEOUT_S)
    finally:
        end_with_children([process])
    assert process.returncode == 0, said[-5000:]
