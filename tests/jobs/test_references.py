"""Code that a job names: found where it is importable, and missed in words that help."""

import sys

import keras
import pytest
from tables import every_case

from elephant.errors import ConfigurationError
from elephant.jobs.inputs import require_code, resolve, resolve_all, resolve_callbacks
from elephant.kinds import is_reference

CODE = """
import keras

class Scale:
    @staticmethod
    def twice(x):
        return 2 * x

stop = keras.callbacks.EarlyStopping(patience=3)

def needs(units):
    pass

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
def test_model_when_named_then_paths_and_references_are_without_repeated(text, expected):
    assert is_reference(text) is expected


@every_case(
    ("settings", "said"),
    [
        (
            {"model": "shipped_cod:build"},
            "model: .*No module named 'shipped_cod'. Did you mean 'shipped_code'?.*--py-file",
        ),
        ({"model": "keras.laiers:Dense"}, "model: .*Did you mean 'keras.layers'?"),
        (
            {"model": "shipped_code:bot"},
            "model: .*'shipped_code:bot', which shipped_code does not have. .*mean 'both'?",
        ),
        (
            {"model": "shipped_code:stop"},
            "model: expected a function .* Received: 'shipped_code:stop', a EarlyStopping.",
        ),
        (
            {"model": "shipped_code:needs"},
            "model: expected a function without arguments. .*:needs': missing a required argument: 'units'.",
        ),
        ({"callbacks": ["shipped_code:both", "shipped_code:nothing"]}, "callbacks: expected a name in shipped_code"),
        ({"customObjects": {"Scale": "shipped_code:Skale"}}, "custom-objects: .*Did you mean 'Scale'?"),
    ],
)
def test_code_when_a_setting_names_none_then_is_missed_with_the_name_that_is_near(settings, said, shipped):
    with pytest.raises(ConfigurationError, match=said.replace("?", r"\?")):
        require_code(settings)


def test_code_when_settings_name_what_is_there_or_a_file_then_passes(shipped):
    require_code({"model": f"{shipped}:both", "callbacks": ["keras.callbacks:TerminateOnNaN"], "epochs": 3})
    require_code({"model": "hdfs:///models/digits.keras"})
    require_code({"checkpointPath": "hdfs:///checkpoints"})
