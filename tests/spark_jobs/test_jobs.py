"""The jobs, submitted with the real `spark-submit` to a standalone cluster: train, evaluate, predict; exit codes."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from spark_submit import EPOCHS, ONE, ROWS, SUBMIT_TIMEOUT_S, complaint, last_line

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1500)]

DRIVER = Path(__file__).with_name("several_jobs.py")
slow = pytest.mark.slow("more jobs than one; tests/jobs hold the parts")

WRONG = {
    # What is asked of the job; its exit code; how its complaint begins.
    "argument": (["--epochz", "3"], 2, "train.py: --epochz: expected the name of a setting. Received: an unknown one"),
    "value": (
        ["--frequency", "never"],
        2,
        "train.py: frequency: expected batch, epoch or a number of steps. Received: 'never' in the arguments.",
    ),
    "column": (
        ["--features-col", "pixels"],
        1,
        "train.py: --features-col: expected one of the columns id, features, label.",
    ),
    "slots": (["--num-workers", "3"], 3, "train.py: --num-workers=3: "),
}


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


class Ended(dict):
    """Jobs that have ended, by name; see `ended`."""


def in_one_driver(cluster, options, file, jobs, variables=None):
    """Runs jobs in one application; returns a `subprocess.CompletedProcess` for each."""
    file.write_text(json.dumps([[name, [str(word) for word in words]] for name, words in jobs]))
    given = {"options": options, "timeout_s": SUBMIT_TIMEOUT_S, "variables": variables}
    done = cluster.submit(DRIVER, file, "--together", **given)
    return [subprocess.CompletedProcess(name, *end) for (name, _), end in zip(jobs, last_line(done), strict=True)]


@pytest.fixture(scope="module")
def ended(cluster, inputs, job_file, trained, code, tmp_path_factory):
    """Jobs on the trained model that need no cluster, in one driver: submitting is not what their tests are about."""
    last_line(trained)
    folder, fitted = tmp_path_factory.mktemp("jobs"), inputs / "fitted"
    of_model = ["--data", inputs / "data.parquet", "--model", fitted]
    predict = [*of_model, "--output", folder / "predictions", "--where", "id >= 100"]
    predict += ["--select", "id", "--select", "prediction AS class"]
    (folder / "empty").mkdir()
    jobs = {
        "again": ["train", ["--config", job_file, "--save-mode", "ignore"]],
        "refused": ["train", ["--config", job_file]],
        "evaluate": ["evaluate", [*of_model, "--output", folder / "metrics.json"]],
        "predict": ["predict", predict],
        "predict again": ["predict", [*predict, "--save-mode", "ignore"]],
        "resume": ["resume", ["--checkpoint-path", folder / "empty"]],
    }
    for case, (words, *_) in WRONG.items():
        (folder / case).mkdir()
        given = ["--data", inputs / "data.parquet", "--model", inputs / "model.keras"]
        jobs[case] = ["train", [*given, "--output", folder / case / "fitted", *words]]
    written_before = (fitted / "variables.npz").stat().st_mtime_ns
    ended = Ended(zip(jobs, in_one_driver(cluster, (*ONE, *code), folder / "jobs.json", jobs.values()), strict=True))
    ended.folder, ended.fitted = folder, fitted
    ended.written_before, ended.written_after = written_before, (fitted / "variables.npz").stat().st_mtime_ns
    return ended


def test_train_when_submitted_with_a_file_and_shipped_code_then_prints_the_history_and_leaves_a_whole_model(
    trained, inputs
):
    history = last_line(trained)
    lengths = {name: len(values) for name, values in history.items()}
    assert lengths == dict.fromkeys(["loss", "accuracy", "val_loss", "val_accuracy"], EPOCHS)
    assert history["loss"][-1] < history["loss"][0]
    assert (inputs / "fitted" / "_SUCCESS").exists()
    assert list(inputs.glob(".fitted.*")) == []
    # Who watches the job hears of the model.
    [events] = (inputs / "events").glob("*.jsonl")
    first, *_, end, saved = map(json.loads, events.read_text().splitlines())
    assert end["event"] == "fit_end" and first["output"] == saved["path"] == str(inputs / "fitted")
    assert (saved["event"], saved["error"]) == ("model_saved", None)


@slow
def test_train_when_called_again_then_ignore_keeps_the_model_and_prints_its_history(trained, ended):
    assert last_line(ended["again"]) == last_line(trained)
    said = f"train.py: output: expected a path where there is nothing. Received: {ended.fitted}, which is whole."
    assert ended["refused"].returncode == 1
    assert complaint(ended["refused"], "train").startswith(said)
    assert ended.written_before == ended.written_after


@slow
def test_evaluate_when_called_then_prints_and_writes_what_numpy_computes(inputs, probabilities, ended):
    metrics = last_line(ended["evaluate"])
    labels = pq.read_table(inputs / "data.parquet")["label"].to_numpy()
    assert metrics["accuracy"] == pytest.approx(np.mean(probabilities.argmax(axis=1) == labels))
    assert metrics["loss"] == pytest.approx(-np.log(probabilities[np.arange(ROWS), labels]).mean(), rel=1e-5)
    assert json.loads((ended.folder / "metrics.json").read_text()) == metrics


@slow
def test_predict_when_called_then_writes_the_rows_asked_for_and_again_leaves_them(probabilities, ended):
    output = ended.folder / "predictions"
    said = last_line(ended["predict"])
    assert said == {"rows": ROWS - 100, "path": str(output), "written": True}
    table = pq.read_table(output).to_pydict()
    assert sorted(table) == ["class", "id"]
    classes = dict(zip(table["id"], table["class"], strict=True))
    assert classes == {row: float(probabilities[row].argmax()) for row in range(100, ROWS)}
    assert (output / "_SUCCESS").exists()
    assert last_line(ended["predict again"]) == {**said, "written": False}


@slow
def test_resume_when_a_worker_was_killed_then_goes_on_and_ends_as_if_nothing_had_happened(
    cluster, inputs, job_file, trained, code, tmp_path
):
    marker, checkpoints, output = tmp_path / "killed", tmp_path / "checkpoints", tmp_path / "fitted"
    words = ["--config", job_file, "--epochs", EPOCHS, "--output", output, "--checkpoint-path", checkpoints]
    words += ["--callbacks", "net_of_user:killed_once"]
    variables = {"MARKER_OF_THE_KILLED": str(marker)}
    go_on = ["resume", ["--checkpoint-path", checkpoints, "--trusted"]]
    anew = ["train", [*words[:-2], "--output", tmp_path / "other"]]
    jobs = [["train", words], go_on, go_on, anew]
    killed, resumed, again, anew = in_one_driver(cluster, code, tmp_path / "jobs.json", jobs, variables=variables)
    assert killed.returncode == 3, killed.stdout
    assert marker.exists()
    assert "signal 9" in complaint(killed, "train")
    assert list(tmp_path.glob(".fitted.*")) == []
    kept = json.loads((checkpoints / "job.json").read_text())
    assert (kept["epochs"], kept["data"]) == (EPOCHS, str(inputs / "data.parquet"))
    assert "going on after epoch" in resumed.stdout + resumed.stderr
    expected = last_line(trained)
    history = last_line(resumed)
    assert list(history) == list(expected)
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, abs=1e-5)
    with np.load(output / "variables.npz") as after, np.load(inputs / "fitted" / "variables.npz") as before:
        for name in before.files:
            np.testing.assert_allclose(after[name], before[name], atol=1e-5)
    assert last_line(again) == history
    assert anew.returncode == 2
    assert complaint(anew, "train").startswith("train.py: --checkpoint-path: expected a folder without checkpoints.")
    assert json.loads((checkpoints / "job.json").read_text())["output"] == str(output)


@slow
def test_resume_when_there_is_no_job_then_says_so(ended):
    assert ended["resume"].returncode == 2
    assert complaint(ended["resume"], "resume").startswith(
        "resume.py: checkpoint-path: expected the checkpoints of a job"
    )


@slow
@pytest.mark.parametrize("case", WRONG)
def test_train_when_it_cannot_work_then_the_exit_code_tells_whose_fault_it_is(ended, case):
    _, code, line = WRONG[case]
    assert ended[case].returncode == code, ended[case].stdout
    assert complaint(ended[case], "train").startswith(line)
    assert list((ended.folder / case).iterdir()) == []
