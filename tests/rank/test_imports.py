"""Packages that are passed over are as if absent for a moment, and there again afterwards. The collector rests."""

import gc
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elephant.rank.executor import passed_over, quick_imports

ROOT = Path(__file__).resolve().parents[2]


def test_package_when_passed_over_then_cannot_be_imported_until_it_is_over(tmp_path, monkeypatch):
    (tmp_path / "elephant_made_for_this_test.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    with passed_over("elephant_made_for_this_test"), pytest.raises(ImportError):
        importlib.import_module("elephant_made_for_this_test")
    assert importlib.import_module("elephant_made_for_this_test").value == 1
    with passed_over("elephant_made_for_this_test"):
        assert importlib.import_module("elephant_made_for_this_test").value == 1
    del sys.modules["elephant_made_for_this_test"]


@pytest.mark.parametrize("collects", [True, False])
def test_collector_when_imports_are_over_then_is_as_before_and_leaves_what_was_imported_alone(collects):
    if not collects:
        gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), quick_imports():
            during, made = gc.isenabled(), [[] for _ in range(1000)]
            raise ZeroDivisionError
        walked = {id(each) for each in gc.get_objects()}
        assert (during, gc.isenabled()) == (False, collects)
        assert not any(id(each) in walked for each in made)
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.slow("imports all packages in a process; the tests above hold what is passed over, and for how long")
def test_fit_program_when_prepared_then_keras_is_there_and_sklearn_can_still_be_imported():
    code = """if True:
        import json, sys
        from elephant.rank.program import PROGRAMS
        PROGRAMS["fit"].prepare()
        first = [name for name in ("keras", "sklearn", "matplotlib") if name in sys.modules]
        import matplotlib, sklearn.base, keras
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        print(json.dumps([first, sklearn.base.__name__, model.count_params()]))
    """
    # Without what hides these packages from Keras in the tests' own processes.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [["keras"], "sklearn.base", 3]
