"""Which tests of the suite share a process, in real runs of a tiny suite under pytest-xdist."""

import re

import pytest
from grouping import balanced
from tiny_suite import TinySuite

CONFTEST = """
    import pytest

    pytest_plugins = ["grouping"]

    @pytest.fixture(scope="session")
    def spark(): pass

    @pytest.fixture(scope="session")
    def rank_pool(): pass
"""


def text_using(fixture, count=4):
    return "\n".join(f"def test_{number}({fixture}):\n    pass" for number in range(count))


FILES = {
    "tests/conftest.py": CONFTEST,
    "tests/a/test_plain.py": text_using("", 6),
    "tests/a/test_ranks.py": text_using("rank_pool"),
    "tests/a/test_module.py": "import pytest\n@pytest.fixture(scope='module')\ndef own(): pass\n" + text_using("own"),
    "tests/c/test_one.py": text_using("spark"),
    "tests/c/test_two.py": text_using("spark"),
    "tests/c/test_three.py": text_using("spark"),
    "tests/c/test_more_ranks.py": text_using("rank_pool"),
    "tests/d/conftest.py": "import pytest\n@pytest.fixture(scope='session')\ndef own(): pass\n",
    "tests/d/test_one.py": text_using("own"),
    "tests/d/test_two.py": text_using("own"),
}


def processes_by_file(ended):
    status, said = ended
    assert status == 0, said
    found = {}
    for process, file in re.findall(r"^\[(gw\d)\] .*PASSED (\S+?)::", said, re.MULTILINE):
        found.setdefault(file.removeprefix("tests/"), set()).add(process)
    return found


@pytest.fixture(scope="module")
def processes_of_files(tmp_path_factory):
    """The processes in which the tests of each file ran."""
    suite = TinySuite(tmp_path_factory.mktemp("suite"), FILES)
    found = processes_by_file(suite.run("-n", "2", "--dist", "loadscope", "-v"))
    assert sorted(found) == sorted(path.removeprefix("tests/") for path in FILES if "conftest" not in path)
    return found


def test_files_when_they_use_spark_then_have_two_sessions(processes_of_files):
    used = [processes_of_files[f"c/test_{name}.py"] for name in ("one", "two", "three")]
    assert [len(processes) for processes in used] == [1, 1, 1]
    assert set.union(*used) == {"gw0", "gw1"}


def test_files_when_slow_tests_do_not_run_then_have_one_session(tmp_path):
    suite = TinySuite(tmp_path, FILES)
    found = processes_by_file(suite.run("-n", "2", "--dist", "loadscope", "-v", "-m", "not slow"))
    assert len(set.union(*(found[f"c/test_{name}.py"] for name in ("one", "two", "three")))) == 1


@pytest.mark.parametrize("files", [("a/test_ranks.py", "c/test_more_ranks.py"), ("d/test_one.py", "d/test_two.py")])
def test_files_when_they_share_processes_then_run_in_one(processes_of_files, files):
    assert len(set.union(*(processes_of_files[file] for file in files))) == 1


def test_file_when_it_has_a_fixture_for_all_its_tests_then_runs_in_one_process(processes_of_files):
    assert len(processes_of_files["a/test_module.py"]) == 1


def test_groups_when_collected_then_stand_in_the_order_of_their_length(tmp_path):
    _, said = TinySuite(tmp_path, FILES).run("--collect-only", "-q")
    files = list(dict.fromkeys(re.findall(r"^tests/(\S+)::", said, re.MULTILINE)))
    assert sorted(files[:3]) == ["c/test_one.py", "c/test_three.py", "c/test_two.py"]
    assert sorted(files[3:5]) == ["a/test_ranks.py", "c/test_more_ranks.py"]
    assert sorted(files[5:7]) == ["d/test_one.py", "d/test_two.py"]
    assert files[7:] == ["a/test_module.py", "a/test_plain.py"]


def test_marker_when_a_test_uses_spark_then_is_there(tmp_path):
    _, said = TinySuite(tmp_path, FILES).run("--collect-only", "-q", "-m", "spark")
    assert set(re.findall(r"^tests/(\S+)::", said, re.MULTILINE)) == {
        "c/test_one.py",
        "c/test_two.py",
        "c/test_three.py",
    }


def test_run_when_a_test_passes_its_deadline_then_is_not_run_again_and_the_others_are(tmp_path):
    files = {
        "tests/conftest.py": CONFTEST,
        "tests/test_a.py": """
            import time
            import pytest

            @pytest.fixture(scope="module")
            def own(): pass

            def test_before(own): pass

            @pytest.mark.timeout(1, method="thread")
            def test_hanging(own): time.sleep(30)

            def test_after(own): pass
        """,
        "tests/test_b.py": text_using("", 3),
    }
    status, said = TinySuite(tmp_path, files).run("-n", "2", "--dist", "loadscope", "-o", "faulthandler_timeout=0.5")
    assert status == 1
    assert re.search("^=+ 1 failed, 5 passed in ", said, re.MULTILINE)
    # The stacks come from the interpreter itself: what pytest-timeout prints in a process of xdist is lost.
    assert "Timeout" in said and "in test_hanging" in said


def test_balance_when_files_differ_in_size_then_the_loads_are_close():
    sizes = {"a": 9, "b": 5, "c": 4, "d": 3, "e": 3}
    groups = balanced(sizes, 2)
    loads = [sum(sizes[name] for name in sizes if groups[name] == group) for group in (0, 1)]
    assert sorted(loads) == [12, 12]
    assert balanced(dict(reversed(sizes.items())), 2) == groups
