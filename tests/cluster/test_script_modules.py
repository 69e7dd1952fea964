"""Modules beside the main script: what a model needs of them travels with it."""

import subprocess
import sys
import threading

import pytest
from pyspark import cloudpickle

from elephant.cluster.script_modules import beside_script
from elephant.task.model_batches import pickled

BUILDERS = """
import threading
import halves

lock = threading.Lock()

def build():
    return halves.half(84)

def locked():
    return lock
"""
HALVES = "class Half:\n    share = 2\n\ndef half(value):\n    return value // Half.share\n"


@pytest.fixture
def builders(tmp_path, monkeypatch):
    """A module beside the main script, which imports another one."""
    (tmp_path / "builders.py").write_text(BUILDERS)
    (tmp_path / "halves.py").write_text(HALVES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "script.py"), raising=False)
    import builders

    yield builders
    for name in ("builders", "halves"):
        del sys.modules[name]


def test_builder_when_its_module_lies_beside_the_script_then_runs_where_that_is_not(builders):
    content = pickled(builders.build, "The model's code")
    program = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())())"
    done = subprocess.run(
        [sys.executable, "-c", program], input=content, capture_output=True, cwd="/", timeout=60, check=True
    )
    assert done.stdout.strip() == b"42"
    assert not {"builders", "halves"} & cloudpickle.list_registry_pickle_by_value()


def test_builder_when_its_module_holds_what_cannot_travel_then_travels_by_name(builders):
    assert b"builders" in pickled(builders.locked, "The model's code")


def test_modules_when_they_are_installed_or_no_neighbors_of_the_script_then_are_not_among_those(builders):
    assert beside_script().keys() == {"builders", "halves"}
    assert threading.__name__ not in beside_script()
