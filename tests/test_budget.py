"""The suite's own plugins, in real runs of a tiny suite: budgets of seconds, and what tests share a process."""

import re
from pathlib import Path

import pytest
from budget import Limits
from tiny_suite import TinySuite

SLOW = "import time\n\ndef test_slow():\n    time.sleep(0.4)\n"
BUDGET = """
tolerance = 1.5
slow_s = 0.2
[folders]
"tests/a" = 100
"tests/b" = 0.1
"""
TWICE_OVER = "so it did in the run before"


@pytest.fixture
def suite_of(tmp_path):
    def make(files, conftest='pytest_plugins = ["budget"]\n'):
        return TinySuite(tmp_path, {"tests/conftest.py": conftest, "budget.toml": BUDGET, **files})

    return make


def test_run_when_tests_are_over_budget_twice_then_fails_the_second_time(suite_of):
    suite = suite_of({"tests/b/test_b.py": SLOW, "tests/a/test_a.py": "def test_quick():\n    pass\n"})
    status, said = suite.run("--budget=budget.toml")
    folder = r"tests/b took \d s, more than 1.5 times its 0.1 s"
    test = r"tests/b/test_b.py::test_slow took 0.\d s, more than 0.2 s, and is not marked as slow"
    assert status == 0
    assert re.search(f"budget: warning: {folder}", said) and re.search(f"budget: warning: {test}", said)
    assert "tests/a took" not in said
    # Several processes tell it as one does.
    status, said = suite.run("--budget=budget.toml", "-n", "2")
    assert status == 1
    assert re.search(f"budget: FAILED: {folder}; {TWICE_OVER}", said)
    assert re.search(f"budget: FAILED: {test}; {TWICE_OVER}", said)


@pytest.mark.slow("runs of a tiny suite; the first test has such runs, and budgets are of `make test-all`")
def test_run_when_the_one_before_was_within_budget_then_only_warns(suite_of, tmp_path):
    suite = suite_of({"tests/a/test_a.py": SLOW})
    quick = SLOW.replace("0.4", "0")
    for text, warned in ((SLOW, True), (quick, False), (SLOW, True)):
        (tmp_path / "tests" / "a" / "test_a.py").write_text(text)
        status, said = suite.run("--budget=budget.toml")
        assert (status, "budget: warning" in said) == (0, warned)


@pytest.mark.slow("runs of a tiny suite; the first test has such runs, and budgets are of `make test-all`")
def test_run_when_it_remembers_no_run_before_then_only_warns(suite_of):
    suite = suite_of({"tests/b/test_b.py": SLOW, "tests/a/test_a.py": SLOW})
    for _ in range(2):
        status, said = suite.run("--budget=budget.toml", "-p", "no:cacheprovider")
        assert status == 0 and "budget: FAILED" not in said
        assert len(re.findall("budget: warning: ", said)) == 3


def test_run_when_all_its_tests_together_are_over_budget_then_fails_at_once(suite_of, tmp_path):
    suite = suite_of({"tests/b/test_b.py": SLOW})
    (tmp_path / "budget.toml").write_text('tolerance = 1.5\n[folders]\n"tests/a" = 0.1\n"tests/b" = 0.1\n')
    status, said = suite.run("--budget=budget.toml", "-p", "no:cacheprovider")
    assert status == 1
    assert re.findall("budget: FAILED: (.*)", said) == ["all tests took 0 s, more than 1.5 times their 0.2 s"]
    assert re.findall("budget: warning: (.*) took", said) == ["tests/b"]


@pytest.mark.slow("runs of a tiny suite; the first test has such runs, and budgets are of `make test-all`")
def test_run_when_the_machine_is_slower_than_that_of_the_budget_then_everything_may_take_longer(suite_of, tmp_path):
    suite = suite_of({"tests/b/test_b.py": SLOW, "tests/a/test_a.py": SLOW})
    for cpu_s, is_over in ((1e-6, False), (1e6, True)):
        (tmp_path / "budget.toml").write_text(f'{BUDGET}\n[speed]\nprogram = "sum(range(1000))"\ncpu_s = {cpu_s}\n')
        status, said = suite.run("--budget=budget.toml", "-p", "no:cacheprovider")
        assert (status, "budget: warning" in said) == (0, is_over)
        assert "times the seconds of the budget's" in said


def test_budget_when_its_folders_are_summed_then_takes_two_processes_40_minutes():
    limits = Limits.read(Path(__file__).parent / "budget.toml")
    assert sum(limits.folders.values()) / 2 <= 40 * 60


@pytest.mark.slow("runs of a tiny suite; the first test has such runs, and budgets are of `make test-all`")
def test_run_when_it_is_of_some_tests_or_has_no_budget_then_judges_nothing(suite_of):
    suite = suite_of({"tests/b/test_b.py": SLOW})
    assert suite.run("--budget=budget.toml")[0] == 0
    for arguments in (["--budget=budget.toml", "tests/b"], ["--budget=budget.toml", "-k", "slow"], []):
        status, said = suite.run(*arguments)
        assert (status, "budget: " in said) == (0, False)
    assert suite.run("--budget=budget.toml")[0] == 1


def test_report_when_tests_have_run_then_lists_the_slowest_and_the_sums_of_folders(suite_of):
    many = "".join(f"def test_{number}():\n    pass\n" for number in range(25))
    suite = suite_of({"tests/a/test_a.py": many, "tests/b/test_b.py": SLOW})
    _, said = suite.run("--budget=budget.toml", "-n", "2")
    listed = re.findall(r"^ +(\d+\.\d\d) s  (tests/\S+)$", said, re.MULTILINE)
    assert len(listed) == 20
    assert listed[0][1] == "tests/b/test_b.py::test_slow" and float(listed[0][0]) >= 0.3
    assert re.search(r"^ +0 of  100 s  tests/a$", said, re.MULTILINE)


def test_folder_when_it_has_no_budget_then_is_named(suite_of):
    suite = suite_of({"tests/c/test_c.py": "def test_quick():\n    pass\n"})
    assert "budget: warning: tests/c has no budget" in suite.run("--budget=budget.toml")[1]


def test_test_when_it_is_marked_or_waits_for_a_shared_fixture_then_may_take_long(suite_of):
    text = """
        import time

        import pytest

        @pytest.fixture(scope="session")
        def dear():
            time.sleep(0.3)
            yield
            time.sleep(0.3)

        def test_first(dear):
            pass

        @pytest.mark.slow("it sleeps")
        def test_slow():
            time.sleep(0.3)

        def test_last(dear):
            pass
    """
    status, said = suite_of({"tests/a/test_a.py": text}).run("--budget=budget.toml")
    assert status == 0 and "budget: " not in said
    assert float(re.search(r"(\d\.\d\d) s  \S+::test_first", said)[1]) >= 0.3


def test_marks_when_they_give_no_reason_then_are_refused(suite_of):
    marks = ["slow", "slow()", 'slow("")', "slow(3)", 'slow(reason=" ")']
    several = "@pytest.mark.parametrize('x', [1, 2])"
    text = "import pytest\n" + "".join(
        f"@pytest.mark.{mark}\n{several}\ndef test_{place}(x):\n    pass\n" for place, mark in enumerate(marks)
    )
    status, said = suite_of({"tests/test_a.py": text}).run("-n", "2")
    assert status != 0 and "passed" not in said
    named = ", ".join(f"tests/test_a.py::test_{place}" for place in range(len(marks)))
    assert f'Expected @pytest.mark.slow("reason"). Received no reason: {named}.' in said


def test_marks_when_they_give_a_reason_then_are_taken(suite_of):
    marks = ['slow("it sleeps")', 'slow(reason="it sleeps")']
    text = "import pytest\n" + "".join(
        f"@pytest.mark.{mark}\ndef test_{place}():\n    pass\n" for place, mark in enumerate(marks)
    )
    status, said = suite_of({"tests/test_a.py": text}).run("-m", "slow")
    assert status == 0 and "2 passed" in said


def test_test_when_the_budget_names_it_with_a_reason_then_may_take_long(suite_of, tmp_path):
    suite = suite_of({"tests/a/test_a.py": SLOW})
    (tmp_path / "budget.toml").write_text(
        f'{BUDGET}\n[kept]\n"tests/a/test_a.py::test_slow" = "the only one of its kind"\n'
    )
    status, said = suite.run("--budget=budget.toml")
    assert (status, "budget: warning" in said) == (0, False)
