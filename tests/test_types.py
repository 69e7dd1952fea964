"""What type checkers find in a user's script: each mistake, and nothing in one without."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RIGHT = """
import elephant
import keras
from pyspark.sql import DataFrame


def work(train: DataFrame, model: keras.Model) -> None:
    estimator = elephant.KerasEstimator(model, numWorkers=(2, 8), epochs=3, featuresCol={"a": ["x", "y"]}, verbose=2)
    estimator.setParams(batchSize=64, checkpointPath=None, mode="async", algorithm="aeasgd:0.3")
    fitted = estimator.setFrequency("epoch").setLabelCol(None).fit(train, epochs=4, compression="topk:0.01")
    several = estimator.fit(train, [{estimator.epochs: 3}])
    scores: dict[str, object] = several[0].evaluate("/data/rows")
    columns: list[str] = fitted.setPredictionCol("p").transform(train).columns
    rate: float = fitted.history["loss"][-1]
    handle = estimator.submit(train, epochs=2)
    outputs = handle.result(3).predict(train)
    print(outputs.argmax(axis=1), outputs["class"], estimator.getEpochs() + 1, scores, columns, rate)
    print(elephant.run(sum, args=([1, 2],), num_workers=2))
"""
MISTAKES = [
    "elephant.KerasEstimator(model, epoch=3)",
    'elephant.KerasEstimator(model, mode="synchronus")',
    'elephant.KerasEstimator(model, epochs="3")',
    "estimator.fit(train, epoch=3)",
    'estimator.fit(train, cache="ram")',
    'estimator.setEpochs("3")',
    "estimator.setEpoch(3)",
    "fitted.hystory",
    "fitted.transform(3)",
    "fitted.predict(train).argmx(axis=1)",
    "elephant.run(print, workers=2)",
    "elephant.KerasEstimater",
]
WRONG = "\n".join(
    [
        "import elephant, keras",
        "from pyspark.sql import DataFrame",
        "def work(train: DataFrame, model: keras.Model) -> None:",
        "    estimator = elephant.KerasEstimator(model)",
        "    fitted = estimator.fit(train)",
        *(f"    {mistake}" for mistake in MISTAKES),
    ]
)
FIRST_LINE = 6
DEADLINE_S = 600
CHECKERS = {
    "mypy": ["-m", "mypy", "--ignore-missing-imports", "--no-error-summary", "--follow-imports=silent"],
    "basedpyright": ["-m", "basedpyright", "--level", "error", "--pythonpath", sys.executable],
}


def test_params_when_typed_then_in_the_file_that_the_signature_makes():
    from param_types import FILE, text

    assert FILE.read_text() == text(), "Run python tests/support/param_types.py."


@pytest.mark.slow("Jedi reads the package and PySpark")
def test_completion_of_a_fitted_model_when_the_editor_asks_jedi_then_is_of_a_model_and_not_of_a_list():
    import jedi

    project = jedi.Project(ROOT)

    def completed(words):
        lines = [
            "import elephant, keras",
            "from pyspark.sql import SparkSession",
            "df = SparkSession.builder.getOrCreate().read.parquet('rows')",
            "estimator = elephant.KerasEstimator(keras.Sequential())",
            "fitted = estimator.fit(df)",
        ]
        code = "\n".join([*lines, words])
        return {name.name for name in jedi.Script(code, project=project).complete()}

    names = completed("fitted.")
    assert {"transform", "evaluate", "history", "setFeaturesCol"} <= names and not {"append", "pop"} & names
    assert {"setEpochs", "setMode"} <= completed("estimator.set")
    assert not {"Any", "annotations", "importlib"} & completed("elephant.")


@pytest.mark.slow("a type checker reads the package and PySpark")
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("checker", CHECKERS)
def test_checker_when_it_reads_a_script_then_finds_each_mistake_and_nothing_else(tmp_path, checker):
    assert importlib.util.find_spec(checker), f"{checker} belongs to the tests: pip install 'elephant-spark[test]'"
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    said = subprocess.run(
        [sys.executable, *CHECKERS[checker], "right.py", "wrong.py"],
        cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    found = re.findall(r"(right|wrong)\.py:(\d+)(?::\d+)?:? (?:- )?error", said.stdout)
    lines = {int(line) for name, line in found if name == "wrong"}
    assert [name for name, _ in found if name == "right"] == [], said.stdout
    assert lines == set(range(FIRST_LINE, FIRST_LINE + len(MISTAKES))), said.stdout
