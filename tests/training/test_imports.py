"""Packages that are passed over are as if absent for a moment, and there again afterwards."""

import importlib
import json
import subprocess
import sys

import pytest

from elephant.training.imports import passed_over


def test_package_when_passed_over_then_cannot_be_imported_until_it_is_over(tmp_path, monkeypatch):
    (tmp_path / "elephant_made_for_this_test.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    with passed_over("elephant_made_for_this_test"), pytest.raises(ImportError):
        importlib.import_module("elephant_made_for_this_test")
    assert importlib.import_module("elephant_made_for_this_test").value == 1
    with passed_over("elephant_made_for_this_test"):
        assert importlib.import_module("elephant_made_for_this_test").value == 1
    del sys.modules["elephant_made_for_this_test"]


def test_fit_program_when_prepared_then_keras_is_there_and_sklearn_can_still_be_imported():
    code = """if True:
        import json, sys
        from elephant.training.program import PROGRAMS
        PROGRAMS["fit"].prepare()
        first = [name for name in ("keras", "sklearn", "matplotlib") if name in sys.modules]
        import matplotlib, sklearn.base, keras
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        print(json.dumps([first, sklearn.base.__name__, model.count_params()]))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [["keras"], "sklearn.base", 3]
