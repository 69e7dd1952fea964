"""What a notebook shows of a fit, in a kernel of its own, and what an editor completes."""

import os
import re
import sys
import textwrap
from pathlib import Path

import jedi
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
CELLS = [
    """
    from elephant import KerasEstimator
    from elephant.cluster.local import ensure_java

    import keras
    import numpy as np
    from pyspark.sql import SparkSession

    ensure_java()
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(64, 3))
    rows = [(row.tolist(), float(row.sum())) for row in x]
    rows = spark.createDataFrame(rows, "features array<double>, label double")
    """,
    "fitted = KerasEstimator(model, numWorkers=2, epochs=2, batchSize=8).fit(rows)",
    "fitted",
    """
    def look(batch):
        raise ValueError("no such column: sepal")

    looking = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: look(batch))
    KerasEstimator(model, numWorkers=2, callbacks=[looking]).fit(rows)
    """,
    "spark.stop()",
]


@pytest.mark.slow("a kernel with a Spark session, and two fits in it, each on two training processes")
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_notebook_when_fits_run_in_it_then_shows_a_live_line_a_table_and_a_short_error(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in CELLS])
    NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True).execute()
    _, trained, shown, failed, _ = (cell.outputs for cell in notebook.cells)
    assert {output.name for output in trained} == {"stdout"}
    line = "".join(output.text for output in trained)
    # A line that the next one overwrites, until the table's row is there.
    assert re.search(r"\repoch 1/2  step 1/4  .*loss ~\d", line) and re.search(r"\n +2/2 +\d+\.\d ", line)
    assert [output.output_type for output in shown] == ["execute_result"]
    page = shown[0].data["text/html"]
    assert page.startswith("<b>KerasModel</b><table>") and "2 epochs" in page and "<polyline" in page
    (error,) = [output for output in failed if output.output_type == "error"]
    assert error.ename == "WorkerFailure"
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))
    # Of the cell the line that fits, and of the worker those that failed; nothing of elephant's own, or of Spark's.
    assert "callbacks=[looking]).fit(rows)" in text and "in look" in text
    assert re.search(r"WorkerFailure: rank \d on .+ failed in step 1: ValueError: no such column: sepal", text)
    assert str(ROOT / "elephant") not in text and "pyspark" not in text and len(text.splitlines()) <= 25
    assert {output.name for output in failed if output.output_type == "stream"} == {"stdout"}


def test_completion_when_a_model_was_fitted_then_has_its_methods():
    code = "from elephant import KerasEstimator\nfitted = KerasEstimator(model, epochs=2).fit(df)\nfitted."
    script = jedi.Script(code, project=jedi.Project(ROOT), environment=jedi.InterpreterEnvironment())
    names = {completion.name for completion in script.complete()}
    assert names >= {"transform", "predict", "evaluate", "save", "export", "plot", "history", "summary"}
