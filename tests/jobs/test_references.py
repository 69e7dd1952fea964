"""Code that a job names: found where it is importable, and missed in words that help."""

import sys

import keras
import pytest
from tables import every_case

from elephant.errors import ConfigurationError
from elephant.jobs.inputs import resolve, resolve_all, resolve_callbacks
from elephant.jobs.settings import is_reference

CODE = """
import keras

class Scale:
    @staticmethod
    def twice(x):
        return 2 * x

stop = keras.callbacks.EarlyStopping(patience=3)

def both():
    return [keras.callbacks.TerminateOnNaN(), keras.callbacks.EarlyStopping(patience=1)]
"""


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    (tmp_path / "shipped_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "shipped_code"
    sys.modules.pop("shipped_code", None)


def test_reference_when_there_then_is_what_it_names(shipped):
    assert resolve("preprocessing", f"{shipped}:Scale.twice")(4) == 8
    assert resolve_all("custom-objects", {"Mine": f"{shipped}:Scale"})["Mine"].twice(3) == 6


def test_callbacks_when_named_by_object_class_and_function_then_all_are_made(shipped):
    names = [f"{shipped}:stop", "keras.callbacks:TerminateOnNaN", f"{shipped}:both"]
    made = resolve_callbacks("callbacks", names)
    kinds = [keras.callbacks.EarlyStopping, keras.callbacks.TerminateOnNaN, keras.callbacks.TerminateOnNaN]
    assert [type(callback) for callback in made] == [*kinds, keras.callbacks.EarlyStopping]
    assert [made[0].patience, made[3].patience] == [3, 1]


def test_reference_when_the_module_is_missing_then_says_how_to_ship_it():
    with pytest.raises(ConfigurationError, match="model: expected a module that can be imported.*--py-files"):
        resolve("model", "not_shipped:build")


def test_reference_when_the_name_is_missing_then_says_so(shipped):
    with pytest.raises(ConfigurationError, match=f"model: expected a name in {shipped}. Received: '{shipped}:nothing'"):
        resolve("model", f"{shipped}:nothing")


@every_case(
    ("text", "expected"),
    [
        ("models:build", True),
        ("models.digits:Net.build", True),
        ("s3a://bucket/fitted", False),
        ("hdfs:///models/digits", False),
        ("dbfs:/models/digits", False),
        ("file:model.keras", False),
        ("/models/digits", False),
        ("fitted", False),
    ],
)
def test_model_when_named_then_paths_and_references_are_told_apart(text, expected):
    assert is_reference(text) is expected
