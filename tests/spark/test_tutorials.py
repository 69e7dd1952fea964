"""Tutorials of docs/tutorials: scripts that keep their promises when they run, and the notebooks made of them."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import nbformat
import notebooks
import pytest
from matplotlib import pyplot
from mlflow_state import own_mlflow
from pyspark.java_gateway import ensure_callback_server_started
from python_start import python_path
from spark_daemons import end_with_children

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
SCRIPTS = {path.stem: path for path in notebooks.SCRIPTS}
# Sizes for the tests, of those that are for more; and packages that an environment may lack.
SMALLER = {"batch_inference": {"ROWS": "40000"}}
NEEDS = {"lora": "keras_hub"}
MOST_BYTES = 150_000
COMMANDS_TIMEOUT_S = 400
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]\d+)?")
# Lines of a table: of epochs with their seconds, of a plan, of rows in an order that partitions decide.
NOT_COMPARED = re.compile(r" *\d+/\d+ | *\d+ +\S+ +\S+ +(cpu|gpu)|[|+]")
OF_ONE_MACHINE = re.compile(r"site-packages|/home/|/root/|/Users/|\b(?!127\.)\d{1,3}(\.\d{1,3}){3}\b|0x[0-9a-f]{8}")


def notebook_of(script):
    return nbformat.read(script.with_suffix(".ipynb"), 4)


def printed_in(notebook):
    """Returns the lines with numbers that a notebook's cells have printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    lines = [line for output in outputs for line in output.text.splitlines()]
    return [line for line in lines if NUMBER.search(line) and not NOT_COMPARED.match(line)]


def without_numbers(line):
    return " ".join(NUMBER.sub("N", line).split())


def compared(shown, printed):
    """Yields lines of a notebook, and what is printed now with the same words, each looked for below the last."""
    lines, place = printed.splitlines(), 0
    for line in shown:
        for number in range(place, len(lines)):
            if without_numbers(lines[number]) == without_numbers(line):
                yield line, lines[number]
                place = number + 1
                break


def is_alike(pair):
    told, seen = ([float(number) for number in NUMBER.findall(text)] for text in pair)
    # Another number of partitions draws other rows.
    return seen == pytest.approx(told, rel=0.5, abs=0.05)


def faults_of(script):
    """Yields what is wrong with the notebook of a script."""
    path = script.with_suffix(".ipynb")
    if not notebooks.is_current(script):
        yield "its cells are not those of the script: make notebooks"
        return
    if path.stat().st_size > MOST_BYTES:
        yield f"has {path.stat().st_size:,} bytes"
    notebook = notebook_of(script)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    yield from (f"ends with {output.ename}" for output in outputs if output.output_type == "error")
    texts = [text for output in outputs for text in notebooks.texts_of(output)]
    yield from (f"names this machine: {found[0]}" for text in texts for found in OF_ONE_MACHINE.finditer(text))
    if not any(
        "image/png" in output.get("data", {}) or "<svg" in output.get("data", {}).get("text/html", "")
        for output in outputs
    ):
        yield "draws nothing"


def names_in(text):
    return re.findall(r"\]\(([\w/]+\.(?:ipynb|md))\)", text)


def test_index_when_it_lists_tutorials_then_all_of_them():
    tutorials = {path.name for path in TUTORIALS.iterdir() if path.suffix in (".ipynb", ".md")} - {"index.md"}
    assert {*names_in((TUTORIALS / "index.md").read_text())} == tutorials


def test_links_of_tutorials_when_followed_then_lead_to_a_file():
    offenders = [
        f"{path.name}: {target}"
        for path in SCRIPTS.values()
        for line in path.read_text().splitlines()
        for target in re.findall(r"\]\(([^)#\s]+)", line)
        if line.startswith("# ") and not (TUTORIALS / target).exists()
    ]
    assert offenders == []


def test_notebooks_when_compared_with_their_scripts_then_have_their_cells_and_outputs_of_no_machine():
    assert {path.stem for path in TUTORIALS.glob("*.ipynb")} == {*SCRIPTS}
    assert [f"{name}: {fault}" for name, script in SCRIPTS.items() for fault in faults_of(script)] == []


@pytest.fixture(scope="module")
def spark_calls_back(spark):
    """PySpark listens to its JVM from the first stream of a session on: begun here, as it stays."""
    ensure_callback_server_started(spark.sparkContext._gateway)


# Several fits, on a machine that may be busy.
@pytest.mark.timeout(400)
@pytest.mark.slow("fits of a tutorial; what it shows has tests of its own")
@pytest.mark.usefixtures("spark_calls_back")
@pytest.mark.parametrize("name", SCRIPTS)
def test_tutorial_when_run_then_keeps_its_promise_and_prints_about_what_its_notebook_shows(
    spark, name, capsys, monkeypatch
):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"the tutorial needs {NEEDS[name]}")
    for variable, value in SMALLER.get(name, {}).items():
        monkeypatch.setenv(variable, value)
    partitions = spark.conf.get("spark.sql.shuffle.partitions")
    try:
        with own_mlflow():
            runpy.run_path(str(SCRIPTS[name]), run_name="__main__")
    finally:
        # A tutorial's builder sets it, in the session that there is.
        spark.conf.set("spark.sql.shuffle.partitions", partitions)
        spark.catalog.clearCache()
        pyplot.close("all")
    pairs = list(compared(printed_in(notebook_of(SCRIPTS[name])), capsys.readouterr().out))
    assert pairs
    assert [f"expected about: {shown}. Received: {line}" for shown, line in pairs if not is_alike((shown, line))] == []


@pytest.mark.timeout(COMMANDS_TIMEOUT_S + 30)
@pytest.mark.spark
@pytest.mark.slow("a cluster and two jobs of their own")
def test_commands_of_the_tutorial_about_spark_submit_when_run_then_keep_its_promise(tmp_path):
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
