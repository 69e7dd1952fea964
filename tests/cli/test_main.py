"""The program's arguments, and what it prints."""

import json
import os
import re
import subprocess
import sys
import threading

import pytest

from elephant import __version__
from elephant.cli import main as program
from elephant.cli.doctor import checked
from elephant.cli.main import as_json, as_table
from elephant.cluster.checks.registry import check_result


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "COMMAND"),
        (["operate"], "invalid choice: 'operate'"),
        (["doctor", "--workers", "0"], "--workers: expected an integer of at least 1, received '0'"),
        (["doctor", "--workers", "two"], "--workers: expected an integer"),
        (["doctor", "--workers", "²"], "--workers: expected an integer"),
        (["doctor", "--mode", "turbo"], "invalid choice: 'turbo'"),
        (["doctor", "--conf", "spark.task.cpus"], "--conf: expected NAME=VALUE, received 'spark.task.cpus'"),
        (["doctor", "--conf", "=1"], "--conf: expected NAME=VALUE"),
        (["doctor", "--timeout", "nan"], "--timeout: expected seconds"),
        (["doctor", "--timeout", "-1"], "--timeout: expected seconds"),
        (["doctor", "--timeout", "1e99"], "--timeout: expected seconds"),
        (["doctor", "--master", " "], "--master: expected some text"),
        (["doctor", "--master", "yarn", "--remote", "sc://host"], "not allowed with argument"),
        (["doctor", "--turbo"], "unrecognized arguments: --turbo"),
        (["doctor", "--", "3"], "unrecognized arguments: -- 3"),
        (["doctor", "--master", "spark:/host"], "--master: master: expected spark://HOST:PORT"),
        (["run"], "the following arguments are required: SCRIPT"),
        (["report"], "the following arguments are required: RUN"),
        (["run", "train.py", "--epochs", "3"], "arguments: --epochs 3. Arguments of the script come behind --"),
        (["run", "train.py", "--timeouts", "collective_s=soon"], "expected NAME=SECONDS, received 'collective_s=soon'"),
    ],
)
def test_arguments_when_they_are_wrong_then_exits_with_2_and_says_which(arguments, text, capsys):
    with pytest.raises(SystemExit) as exit:
        program.main(arguments)
    assert exit.value.code == 2
    assert text in capsys.readouterr().err


HELP = [
    (["--help"], "doctor"),
    (["doctor", "--help"], "0 a fit would work; 1 a fit would fail; 2 wrong arguments"),
    (["run", "--help"], "elephant run train.py --num-workers 4 -- --epochs 3"),
    (["bench", "--help"], "--workers VALUE"),
    (["verify", "--help"], "elephant verify MODEL ROWS"),
    (["doctor", "--help"], "--fit"),
    (["--version"], f"elephant {__version__}"),
]


def test_program_when_asked_for_help_then_needs_neither_spark_nor_keras():
    code = (
        "import sys, runpy; blocked = ('pyspark', 'keras', 'tensorflow', 'pyarrow', 'numpy')\n"
        "sys.modules.update({name: None for name in blocked})\n"
        f"for words in {[words for words, _ in HELP]}:\n"
        "    sys.argv[1:] = words\n"
        "    try:\n"
        "        runpy.run_module('elephant', run_name='__main__')\n"
        "    except SystemExit as end:\n"
        "        print('ENDED', end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *said, rest = done.stdout.split("ENDED 0\n")
    assert rest == "" and len(said) == len(HELP)
    assert [text for (_, text), shown in zip(HELP, said, strict=True) if text not in shown] == []


FINDINGS = [
    check_result("Java", "ok", expected="Java 17", received="17 in /usr"),
    check_result("disk", "warning", expected="more room", received="0.5 GB", remedy="Free some."),
    check_result("numWorkers=3", "failure", expected="3 task slots", received="2", remedy="Lower numWorkers to 2."),
    check_result("clocks", "unknown", expected="the time", received="nobody to ask"),
]


def test_table_when_printed_then_has_a_remedy_below_each_line_that_failed():
    lines = as_table(FINDINGS).splitlines()
    assert lines[1:] == [
        "ok    Java          17 in /usr",
        "warn  disk          0.5 GB",
        "      expected: more room",
        "      remedy:   Free some.",
        "FAIL  numWorkers=3  2",
        "      expected: 3 task slots",
        "      remedy:   Lower numWorkers to 2.",
        "?     clocks        nobody to ask",
        "",
        "a fit would fail: 1 check failed; 1 warning",
    ]
    assert as_table(FINDINGS[:1]).splitlines()[-1] == "a fit would work"


def test_table_when_printed_on_a_terminal_then_says_the_same_in_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    colored = as_table(FINDINGS, is_terminal=True)
    assert "\x1b[" in colored
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in colored.splitlines()] == as_table(
        FINDINGS
    ).splitlines()


_PATH = "/opt/environments" * 12


def test_table_when_a_text_looks_like_markup_or_is_long_then_is_printed_as_it_is():
    long = check_result(
        "GPUs", "ok", expected="", received="[bold]tensorflow[and-cuda][/] :smile: " + "word " * 30 + _PATH
    )
    lines = as_table([long]).splitlines()
    assert lines[1].startswith("ok    GPUs   [bold]tensorflow[and-cuda][/] :smile: word")
    assert lines[2].startswith(" " * 13 + "word") and max(map(len, lines)) <= 120
    assert _PATH in "".join(line.strip() for line in lines)


def test_table_when_rich_is_not_installed_then_is_plain_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    lines = as_table(FINDINGS).splitlines()
    assert lines[2] == "numWorkers=3: expected 3 task slots. Received: 2. Lower numWorkers to 2."
    assert lines[-1] == "a fit would fail: 1 check failed; 1 warning"


def test_json_when_printed_then_holds_every_finding():
    short_text = json.loads(as_json(FINDINGS))
    assert (short_text["healthy"], short_text["elephant"]) == (False, __version__)
    assert [one["status"] for one in short_text["findings"]] == ["ok", "warning", "failure", "unknown"]
    assert json.loads(as_json(FINDINGS[:2]))["healthy"] is True


def test_check_when_it_hangs_then_ends_at_its_deadline_with_a_failure():
    release = threading.Event()
    try:
        found = checked("jobs", 0.05, lambda: [release.wait()], expected="an answer", remedy="Look.")
    finally:
        release.set()
    assert [str(one) for one in found] == ["jobs: expected an answer. Received: nothing within 0.05 s. Look."]


def test_check_when_it_raises_then_its_error_is_the_finding():
    def fail():
        raise OSError("no way\n\na page of stack")

    found = checked("jobs", 10.0, fail, expected="an answer", remedy="Look.")
    assert [one.received for one in found] == ["OSError: no way"]


def test_report_when_given_a_folder_a_name_or_a_file_then_writes_the_newest_fit_and_says_where(tmp_path, capsys):
    folder = tmp_path / "fits"
    folder.mkdir()
    for age, name in ((100, "20261123T1-a"), (0, "20261122T1-b")):
        path = folder / f"{name}.jsonl"
        path.write_text(json.dumps({"event": "fit_begin", "time": 1.0, "params": {}, "model": name}) + "\n")
        os.utime(path, (2_000_000_000 - age,) * 2)
    for run, name in ((folder, "20261122T1-b"), (folder / "20261123T1-a", "20261123T1-a"), (path, "20261122T1-b")):
        assert program.main(["report", str(run), "--output", str(tmp_path)]) == 0
        written = tmp_path / f"{name}.html"
        assert capsys.readouterr().out == f"{written}\n" and f"<h1>Fit of {name}</h1>" in written.read_text()
        written.unlink()


def test_report_when_there_are_no_events_then_says_what_was_expected(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("notes")
    for run, text in (
        (tmp_path / "none", f"elephant report: {tmp_path}/none: path: expected a file or a folder. Received: "),
        (tmp_path, "expected a folder with files *.jsonl, which eventsPath leaves. Received: 1 other files."),
        (tmp_path / "notes.txt", "line 1: expected an event of a fit"),
    ):
        assert program.main(["report", str(run)]) == 2
        assert text in capsys.readouterr().err
