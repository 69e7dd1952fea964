"""Every fault of the fault suite has a promise in every mode, or a reason why it cannot be had, and is on the page."""

import subprocess
import sys
from pathlib import Path

import pytest
from tables import every_case

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import fault_table
from fault_table import Action, Case, Fault, Mode, Moment, Outcome, Part, promised, why_absent

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = str(ROOT / "benchmarks" / "faults.py")
CASES = [Case(fault, mode, moment) for fault in Fault for mode in Mode for moment in Moment]


def rows_on_page():
    """Returns the cells of the table of what was tried in docs/failures.md, by the fault of each row."""
    chapter = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8").partition("\n## What was tried\n")[2]
    lines = [line for line in chapter.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].partition(" ")[0].strip("`"): row[1:] for row in rows}


@every_case("fault", [fault.value for fault in Fault])
def test_fault_when_looked_up_then_has_a_promise_or_a_reason_in_each_mode_and_a_row_on_the_page(fault):
    cells = rows_on_page()[fault]
    assert len(cells) == len(Mode)
    for mode, cell in zip(Mode, cells, strict=True):
        cases = [Case(Fault(fault), mode, moment) for moment in Moment]
        absent = [why_absent(case) for case in cases]
        assert all(reason is None or reason for reason in absent)
        # A dash stands where there is nothing to try.
        assert (cell == "–") == all(absent)


def test_faults_when_compared_with_signals_and_processes_then_are_all_of_them():
    named = {(fault.action, fault.part) for fault in Fault if fault.action}
    assert named == {(action, part) for action in Action for part in Part}
    assert {fault for fault in Fault if fault.action is None} == {
        Fault.CUT_LINK,
        Fault.HALF_OPEN_LINK,
        Fault.FULL_DISK,
        Fault.MEMORY_LIMIT,
        Fault.CLOCK_JUMP,
    }


def test_case_when_written_and_read_then_is_the_same_and_unknown_words_are_refused():
    assert [Case.from_text(str(case)) for case in CASES] == CASES
    with pytest.raises(ValueError, match="melt-cpu"):
        Case.from_text("melt-cpu,run,fit-end")


@every_case(
    ("case", "outcome"),
    [
        ("kill-training,synchronous,mid-epoch", Outcome.FAILS),
        ("kill-training,restarts,mid-epoch", Outcome.RECOVERS),
        ("crash-executor,asynchronous,first-step", Outcome.RECOVERS),
        ("stop-python-worker,synchronous,mid-epoch", Outcome.UNHARMED),
        ("stop-python-worker,run,mid-epoch", Outcome.FAILS),
        ("kill-driver,asynchronous,epoch-end", Outcome.ENDS),
        ("full-disk,restarts,meeting", Outcome.FAILS),
        ("clock-jump,run,fit-end", Outcome.UNHARMED),
    ],
)
def test_promise_when_asked_for_then_is_that_of_the_page(case, outcome):
    assert promised(Case.from_text(case)) is outcome


def test_program_when_asked_for_its_cases_then_lists_those_that_agree_and_begins_none():
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "faults.py"),
        "--list",
        "--only",
        "kill-server,,",
        ",run,first-step",
    ]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    cases = [Case.from_text(line.partition(":")[0]) for line in listed]
    assert len(cases) == len(set(cases)) == len(listed)
    assert set(cases) <= set(fault_table.every_case())
    assert {case.fault for case in cases if case.mode is Mode.ASYNCHRONOUS} == {Fault.KILL_SERVER}
    assert {case.moment for case in cases if case.mode is Mode.RUN} == {Moment.FIRST_STEP}
