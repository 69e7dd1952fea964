"""``elephant verify``: its arguments, what it prints, and its exit codes; tests/spark/test_programs.py runs it."""

import json

import pytest

from elephant.cli import own_model, verify
from elephant.cli.main import main
from elephant.driver.verification import Difference, Verification


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "expected --data or --table. Received: none"),
        (["os:getcwd"], "expected --data or --table. Received: none"),
        (["os:getcwd", "rows.parquet", "--rows", "1"], "rows: expected an integer of at least 2. Received: '1'"),
        (["os:getcwd", "rows.parquet", "--epochs", "3"], "expected the name of a setting. Received: an unknown one"),
        (["os:getcwd", "rows.parquet", "more"], "Received: an unknown one"),
        (["os:getcwd", "rows.parquet", "--table", "rows"], "expected --data or --table. Received: both"),
    ],
)
def test_verify_when_arguments_are_wrong_then_exits_with_2_and_says_which(words, text, capsys):
    assert main(["verify", *words]) == 2
    assert text in capsys.readouterr().err


@pytest.fixture
def compared(monkeypatch):
    """What is asked of an estimator; each verification answers with the next of a list."""
    asked, answers = [], []

    class Estimator:
        def __init__(self, settings):
            self.settings = settings

        def verify(self, given, rows):
            asked.append((self.settings, given, rows))
            return answers.pop()

    class Session:
        def stop(self):
            pass

    monkeypatch.setattr(own_model, "_started_session", lambda name, settings: Session())
    monkeypatch.setattr(verify, "read_rows", lambda session, settings: settings["data"])
    monkeypatch.setattr(verify, "estimator_of", Estimator)
    return asked, answers


def verification(difference):
    return Verification(
        rows=(6, 4),
        batch_size=2,
        epochs=2,
        weights=(Difference(name="kernel", difference=difference, scale=1.0),),
        metrics=(),
        causes=(),
        random_spread=None,
        tolerance=1e-4,
        seconds=1.0,
    )


@pytest.mark.parametrize(("difference", "code"), [(0.0, 0), (0.5, 1)])
def test_verify_when_compared_then_the_exit_code_says_whether_they_are_equal(compared, difference, code, capsys):
    asked, answers = compared
    answers += [verification(difference), verification(difference)]
    assert main(["verify", "os:getcwd", "rows.parquet", "--rows", "50", "--batch-size", "8"]) == code
    assert f"equal within 1e-04: {'no' if code else 'yes'}" in capsys.readouterr().out.lower()
    assert main(["verify", "os:getcwd", "rows.parquet", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["equal"] is not bool(code)
    assert [(settings["model"], given, rows) for settings, given, rows in asked] == [
        ("os:getcwd", "rows.parquet", 50),
        ("os:getcwd", "rows.parquet", 1000),
    ]
    assert asked[0][0]["batchSize"] == 8
