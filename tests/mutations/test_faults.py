"""The planted faults apply to the code as it is, and the tests that are to find them are there."""

import ast
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    from faults import FAULTS

    yield FAULTS
    for name in ("fault", "faults"):
        sys.modules.pop(name)


def test_faults_when_planted_then_each_applies_once_and_gives_python(faults):
    names = [fault.name for fault in faults]
    assert len(names) >= 60 and len(set(names)) == len(names)
    for fault in faults:
        text = fault.planted(ROOT)
        assert text != (ROOT / fault.file).read_text(encoding="utf-8"), fault.name
        ast.parse(text)
        assert fault.breaks.endswith("."), fault.name


def test_faults_when_their_tests_are_named_then_these_are_there(faults):
    functions = {}
    for fault in faults:
        assert fault.tests, fault.name
        for test in fault.tests:
            file, _, function = test.partition("::")
            assert (ROOT / file).is_file(), f"{fault.name}: there is no {file}"
            if file not in functions:
                tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
                functions[file] = {
                    node.name: "".join(map(ast.unparse, node.decorator_list))
                    for node in tree.body
                    if isinstance(node, ast.FunctionDef)
                }
            name = function.partition("[")[0]
            assert not name or name in functions[file], f"{fault.name}: there is no {test}"
            assert not name or "mark.slow" not in functions[file][name], f"{fault.name}: `make test` leaves out {test}"
