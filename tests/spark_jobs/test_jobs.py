"""The jobs, submitted with the real `spark-submit` to a standalone cluster: train, evaluate, predict; exit codes."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from spark_submit import ONE, ROWS, complaint, last_line, submit

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1500)]

EPOCHS = 4


@pytest.fixture(scope="module")
def code(inputs):
    """Options that ship the user's code."""
    return ("--py-files", str(inputs / "net_of_user.py"))


@pytest.fixture(scope="module")
def job_file(inputs):
    path = inputs / "job.yaml"
    lines = [
        f"data: {inputs / 'data.parquet'}",
        f"output: {inputs / 'fitted'}",
        f"checkpoint-path: {inputs / 'checkpoints'}",
        "model: net_of_user:build",
        "num-workers: 2",
        "epochs: 30",
        "batch-size: 16",
        "validation-fraction: 0.1",
        "seed: 3",
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def trained(cluster, inputs, job_file, code):
    """A job that was submitted with a job file, one line of which the command line overrules."""
    return submit(cluster, "train", "--config", job_file, "--epochs", EPOCHS, options=code)


@pytest.fixture(scope="module")
def probabilities(inputs, trained):
    """What the trained model gives for every row, in numpy: it doubles its inputs, and has one dense layer."""
    last_line(trained)
    with np.load(inputs / "fitted" / "variables.npz") as archive:
        arrays = [archive[name] for name in archive.files]
    kernel = next(array for array in arrays if array.shape == (5, 2))
    bias = next(array for array in arrays if array.shape == (2,))
    features = np.stack(pq.read_table(inputs / "data.parquet")["features"].to_numpy())
    logits = 2.0 * features @ kernel + bias
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def test_train_when_submitted_with_a_file_and_shipped_code_then_prints_the_history_and_leaves_a_whole_model(
    trained, inputs
):
    history = last_line(trained)
    lengths = {name: len(values) for name, values in history.items()}
    assert lengths == dict.fromkeys(["loss", "accuracy", "val_loss", "val_accuracy"], EPOCHS)
    assert history["loss"][-1] < history["loss"][0]
    assert (inputs / "fitted" / "_SUCCESS").exists()
    assert list(inputs.glob(".fitted.*")) == []


def test_train_when_submitted_again_then_ignore_keeps_the_model_and_prints_its_history(
    cluster, inputs, job_file, trained, code
):
    history = last_line(trained)
    before = (inputs / "fitted" / "variables.npz").stat().st_mtime_ns
    again = submit(cluster, "train", "--config", job_file, "--save-mode", "ignore", options=(*ONE, *code))
    assert last_line(again) == history
    assert (inputs / "fitted" / "variables.npz").stat().st_mtime_ns == before
    refused = submit(cluster, "train", "--config", job_file, options=(*ONE, *code))
    assert refused.returncode == 1
    said = f"train.py: output: expected a path where there is nothing. Received: {inputs / 'fitted'}, which is whole."
    assert complaint(refused, "train").startswith(said)


def test_evaluate_when_submitted_then_prints_and_writes_what_numpy_computes(
    cluster, inputs, probabilities, code, tmp_path
):
    output = tmp_path / "metrics.json"
    words = ["--data", inputs / "data.parquet", "--model", inputs / "fitted", "--output", output]
    metrics = last_line(submit(cluster, "evaluate", *words, options=code))
    labels = pq.read_table(inputs / "data.parquet")["label"].to_numpy()
    assert metrics["accuracy"] == pytest.approx(np.mean(probabilities.argmax(axis=1) == labels))
    assert metrics["loss"] == pytest.approx(-np.log(probabilities[np.arange(ROWS), labels]).mean(), rel=1e-5)
    assert json.loads(output.read_text()) == metrics


def test_predict_when_submitted_then_writes_the_rows_asked_for_and_again_leaves_them(
    cluster, inputs, probabilities, code, tmp_path
):
    output = tmp_path / "predictions"
    words = ["--data", inputs / "data.parquet", "--model", inputs / "fitted", "--output", output]
    words += ["--where", "id >= 100", "--select", "id", "--select", "prediction AS class"]
    said = last_line(submit(cluster, "predict", *words, options=code))
    assert said == {"rows": ROWS - 100, "path": str(output), "written": True}
    table = pq.read_table(output).to_pydict()
    assert sorted(table) == ["class", "id"]
    classes = dict(zip(table["id"], table["class"], strict=True))
    assert classes == {row: float(probabilities[row].argmax()) for row in range(100, ROWS)}
    assert (output / "_SUCCESS").exists()
    again = submit(cluster, "predict", *words, "--save-mode", "ignore", options=(*ONE, *code))
    assert last_line(again) == {**said, "written": False}


def test_resume_when_a_worker_was_killed_then_goes_on_and_ends_as_if_nothing_had_happened(
    cluster, inputs, job_file, trained, code, tmp_path
):
    marker, checkpoints, output = tmp_path / "killed", tmp_path / "checkpoints", tmp_path / "fitted"
    words = ["--config", job_file, "--epochs", EPOCHS, "--output", output, "--checkpoint-path", checkpoints]
    words += ["--callbacks", "net_of_user:killed_once"]
    variables = {"MARKER_OF_THE_KILLED": str(marker)}
    killed = submit(cluster, "train", *words, options=code, variables=variables)
    assert killed.returncode == 3, killed.stdout
    assert marker.exists()
    assert "signal 9" in complaint(killed, "train")
    assert not output.exists()
    assert list(tmp_path.glob(".fitted.*")) == []
    kept = json.loads((checkpoints / "job.json").read_text())
    assert (kept["epochs"], kept["data"]) == (EPOCHS, str(inputs / "data.parquet"))
    resumed = submit(cluster, "resume", "--checkpoint-path", checkpoints, options=code, variables=variables)
    assert "going on after epoch" in resumed.stdout
    expected = last_line(trained)
    history = last_line(resumed)
    assert list(history) == list(expected)
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, abs=1e-5)
    with np.load(output / "variables.npz") as after, np.load(inputs / "fitted" / "variables.npz") as before:
        for name in before.files:
            np.testing.assert_allclose(after[name], before[name], atol=1e-5)
    again = submit(cluster, "resume", "--checkpoint-path", checkpoints, options=(*ONE, *code), variables=variables)
    assert last_line(again) == history
    anew = submit(cluster, "train", *words[:-2], "--output", tmp_path / "other", options=(*ONE, *code))
    assert anew.returncode == 2
    assert complaint(anew, "train").startswith("train.py: checkpointPath: expected a folder without checkpoints.")
    assert json.loads((checkpoints / "job.json").read_text())["output"] == str(output)


def test_resume_when_there_is_no_job_then_says_so(cluster, tmp_path):
    done = submit(cluster, "resume", "--checkpoint-path", tmp_path, options=ONE)
    assert done.returncode == 2
    assert complaint(done, "resume").startswith("resume.py: checkpoint-path: expected the checkpoints of a job")


WRONG = [
    # What is asked of the job; its exit code; how its complaint begins.
    (["--epochz", "3"], 2, "train.py: --epochz: expected the name of a setting. Received: an unknown one"),
    (["--frequency", "never"], 2, "train.py: frequency: expected 'batch', 'epoch' or an integer of at least 1."),
    (["--features-col", "pixels"], 1, "train.py: featuresCol: expected one of the columns id, features, label."),
    (["--num-workers", "3"], 3, "train.py: numWorkers=3: "),
]


@pytest.mark.parametrize(("words", "code", "line"), WRONG, ids=["argument", "value", "column", "slots"])
def test_train_when_it_cannot_work_then_the_exit_code_tells_whose_fault_it_is(
    cluster, inputs, tmp_path, words, code, line
):
    given = ["--data", inputs / "data.parquet", "--model", inputs / "model.keras", "--output", tmp_path / "fitted"]
    done = submit(cluster, "train", *given, *words, options=ONE)
    assert done.returncode == code, done.stdout
    assert complaint(done, "train").startswith(line)
    assert list(tmp_path.iterdir()) == []
