"""What a notebook shows of an estimator and a fit, in a kernel and a browser, and what an editor completes."""

import copy
import os
import re
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import jedi
import nbformat
import pytest
from browser import Frame, look_at, needs_browser
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

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
    """
    estimator = KerasEstimator(model, numWorkers=2, epochs=2, batchSize=8)
    estimator
    """,
    "fitted = estimator.fit(rows)",
    "fitted",
    """
    def look(batch):
        raise ValueError("no such column: sepal")

    looking = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: look(batch))
    KerasEstimator(model, numWorkers=2, callbacks=[looking]).fit(rows)
    """,
    "spark.stop()",
]


SVG = "{http://www.w3.org/2000/svg}"
WHY_SLOW = "a kernel with a Spark session, and two fits in it, each on two training processes"


@pytest.fixture(scope="module")
def notebook():
    """The notebook of the cells, with what they have shown."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in CELLS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        NotebookClient(made, timeout=120, kernel_name="python3", allow_errors=True).execute()
    return made


@pytest.mark.slow(WHY_SLOW)
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_notebook_when_fits_run_in_it_then_shows_a_live_line_cards_and_a_short_error(notebook):
    _, described, trained, shown, failed, _ = (cell.outputs for cell in notebook.cells)
    assert {output.name for output in trained} == {"stdout"}
    line = "".join(output.text for output in trained)
    # A line that the next one overwrites, until the table's row is there.
    assert re.search(r"\repoch 1/2  step 1/4  .*loss ~\d", line) and re.search(r"\n +2/2 +\d+\.\d ", line)
    card, texts = card_of(described)
    assert {"KerasEstimator", "numWorkers", "batchSize", "dense", "Dense", "(None, 1)"} <= texts
    card, texts = card_of(shown)
    assert {"KerasModel", "epochs", "ranks", "CPU"} <= texts and len(list(card.iter(f"{SVG}polyline"))) == 1
    assert "KerasModel(<Sequential 'sequential', 1 layer, 4 parameters>, 2 epochs" in shown[0].data["text/plain"]
    (error,) = [output for output in failed if output.output_type == "error"]
    assert error.ename == "WorkerFailure"
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))
    # Of the cell the line that fits, and of the worker those that failed; nothing of elephant's own, or of Spark's.
    assert "callbacks=[looking]).fit(rows)" in text and "in look" in text
    assert re.search(r"WorkerFailure: rank \d on .+ failed in step 1: ValueError: no such column: sepal", text)
    assert str(ROOT / "elephant") not in text and "pyspark" not in text and len(text.splitlines()) <= 25
    assert {output.name for output in failed if output.output_type == "stream"} == {"stdout"}


def card_of(outputs):
    """Returns the card that a cell shows, and its texts; raises where it is not well formed."""
    (output,) = outputs
    card = ElementTree.fromstring(output.data["text/html"])
    return card, {part.text for part in card.iter()}


@needs_browser
@pytest.mark.slow(WHY_SLOW)
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_notebook_when_opened_in_a_browser_then_can_be_read_during_a_fit_and_after_it_in_light_and_dark(notebook):
    during = copy.deepcopy(notebook)
    del during.cells[3:]
    written = "".join(output.text for output in during.cells[2].outputs)
    # As far as it was with its last live line.
    until = max(live.end() for live in re.finditer(r"\repoch \d/2  step [^\r\n]*", written))
    during.cells[2].outputs = [nbformat.v4.new_output("stream", name="stdout", text=written[:until])]
    pages = {
        (name, theme): converted(cells, theme)
        for name, cells in (("during", during), ("after", notebook))
        for theme in ("light", "dark")
    }
    for name, height in (("during", 1000), ("after", 2800)):
        frames = [Frame(pages[name, theme], theme, 900, height) for theme in ("light", "dark")]
        seen = look_at(f"notebook-{name}", *frames)
        assert [one.background > 0.9 for one in seen] == [True, False] and seen[1].background < 0.2
        for one in seen:
            assert one.measures["needed"] <= 900 and one.measures["cut"] == [] and one.measures["contrast"] >= 4.5
            assert 0.01 < one.drawn < 0.5, one.measures


def converted(notebook, theme):
    """Returns a notebook as the page that JupyterLab would show; nothing of it is loaded from elsewhere."""
    urls = dict.fromkeys(("mathjax_url", "require_js_url", "mermaid_js_url", "jquery_url"), "")
    exporter = HTMLExporter(template_name="lab", theme=theme, **urls)
    # A line that the next one overwrites is not there any more.
    exporter.register_preprocessor(CoalesceStreamsPreprocessor, enabled=True)
    return exporter.from_notebook_node(notebook)[0]


def test_completion_when_a_model_was_fitted_then_has_its_methods():
    code = "from elephant import KerasEstimator\nfitted = KerasEstimator(model, epochs=2).fit(df)\nfitted."
    script = jedi.Script(code, project=jedi.Project(ROOT), environment=jedi.InterpreterEnvironment())
    names = {completion.name for completion in script.complete()}
    assert names >= {"transform", "predict", "evaluate", "save", "export", "plot", "history", "summary"}
