"""``elephant bench``: its arguments and its exit codes; tests/spark/test_programs.py measures with it."""

import json
from types import SimpleNamespace

import pytest
from tables import every_case

from elephant.cli import bench
from elephant.cli.main import main
from elephant.errors import ClusterError
from elephant.monitor.summary import FitSummary

GIVEN = ["bench", "--data", "rows.parquet", "--model", "os:getcwd"]


@every_case(
    ("words", "text"),
    [
        (["bench", "--model", "os:getcwd"], "expected --data or --table. Received: none"),
        (GIVEN[:3], "expected --model"),
        ([*GIVEN, "--workers", "1,zero"], "workers: expected numbers such as 1,2,4"),
        ([*GIVEN, "--workers", "0"], "workers: expected numbers such as 1,2,4"),
        ([*GIVEN, "--steps", "0"], "steps: expected an integer of at least 1"),
        ([*GIVEN, "--num-workers", "2"], "--num-workers: expected the name of a setting"),
        ([*GIVEN, "--master", "spark:/host"], "master: expected spark://HOST:PORT"),
        ([*GIVEN, "--master", "yarn", "--remote", "sc://host"], "both --master and --remote"),
        ([*GIVEN[:-1], "os:getcwded"], "which os does not have"),
    ],
)
def test_arguments_when_they_are_wrong_then_exits_with_2_and_says_which(words, text, capsys):
    assert main(words) == 2
    assert text in capsys.readouterr().err


def test_arguments_when_help_is_asked_for_then_has_own_settings_and_those_of_the_training_job(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert exit.value.code == 0
    assert all(f"--{name} " in shown for name in ("workers", "read-option", "batch-size", "compression"))
    assert "--epochs" not in shown


class Estimator:
    """Stands where a KerasEstimator is: rates are 10 rows/s for each worker, and there are slots for two."""

    def __init__(self, settings):
        self._given = settings

    def fit(self, rows):
        workers, steps, epochs = (self._given[name] for name in ("numWorkers", "stepsPerEpoch", "epochs"))
        if workers > 2:
            raise ClusterError(f"numWorkers={workers}: expected {workers} task slots. Received: 2.")
        seconds = steps * self._given["batchSize"] / 10
        times = dict.fromkeys(("exchange_s", "others_s", "input_s"), 0.0) | {"compute_s": seconds, "seconds": seconds}
        ranks = [
            {"epoch": epoch, "rank": rank, "rows": 10 * seconds, "rows_per_s": 10.0, "bytes_sent": 0} | times
            for epoch in range(epochs)
            for rank in range(workers)
        ]
        return SimpleNamespace(summary=FitSummary(model="m", seconds=epochs * seconds + 3.0, history={}, ranks=ranks))


@pytest.fixture
def estimators(monkeypatch):
    """Takes Spark away; returns what the estimators were made with."""
    made = []
    monkeypatch.setattr("elephant.cli.doctor.start_session", lambda **where: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(bench, "read_rows", lambda session, settings: None)
    monkeypatch.setattr(bench, "estimator_of", lambda settings: made.append(settings) or Estimator(settings))
    return made


def test_bench_when_there_are_too_few_slots_then_is_a_run_with_the_reason_and_exits_with_1(estimators, capsys):
    words = [*GIVEN, "--workers", "4,1,2", "--batch-size", "20", "--strong", "--json"]
    assert main(words) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [(run["workers"], run["batch_size"], run.get("rows_per_s")) for run in printed["runs"]] == [
        (1, 20, 10.0), (2, 10, 20.0), (4, 5, None),
    ]  # fmt: skip
    assert printed["runs"][1]["efficiency"] == 1.0 and printed["runs"][1]["startup_s"] == pytest.approx(3.0)
    assert "expected 4 task slots" in printed["runs"][2]["error"]
    # A step takes 2 s, then 1 s: as many as take two seconds, then as many as take a sixth of a minute.
    assert [made["stepsPerEpoch"] for made in estimators] == [5, 1, 5, 5, 2, 10, 5]
    assert [made["epochs"] for made in estimators] == [2, 2, 6, 2, 2, 6, 2]


def test_bench_when_all_is_measured_then_prints_a_table_writes_a_page_and_exits_with_0(estimators, tmp_path, capsys):
    target = tmp_path / "bench.html"
    assert main([*GIVEN, "--workers", "1,2", "--steps", "3", "--repeats", "2", "--output", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["workers", "rows/s", "spread"]
    assert [line.split()[:4] for line in lines[1:3]] == [["1", "10", "0%", "100%"], ["2", "20", "0%", "100%"]]
    assert lines[-1].startswith("More workers are likely to pay off: 2 reach 100%")
    assert "More workers are likely to pay off" in target.read_text()
    assert [made["stepsPerEpoch"] for made in estimators] == [3, 3]
