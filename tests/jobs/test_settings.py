"""The table of settings: nothing that the estimator can be told is forgotten, and nothing else is in it."""

import inspect
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.errors import ConfigurationError
from elephant.jobs.settings import ALTERNATIVES, EVALUATE, PARAMS, PREDICT, SETTINGS, TRAIN, settings_of
from elephant.jobs.submission import read_saved_settings

# The model and its custom objects are settings of their own, because they are no params of a fitted model.
GIVEN_OTHERWISE = {"self", "model", "customObjects", "unknown"}


def test_params_when_compared_with_the_estimator_then_none_is_forgotten():
    from elephant import KerasEstimator

    accepted = set(inspect.signature(KerasEstimator.__init__).parameters) - GIVEN_OTHERWISE
    assert {setting.name for setting in PARAMS} == accepted


def test_params_when_compared_with_the_fitted_model_then_evaluate_knows_all_of_them():
    from elephant import KerasModel

    declared = {name for name in dir(KerasModel) if type(getattr(KerasModel, name)).__name__ == "Param"}
    assert {setting.name for setting in PARAMS if EVALUATE in setting.jobs} == declared
    assert {setting.name for setting in PARAMS if PREDICT in setting.jobs} <= declared


def test_settings_when_listed_then_each_comes_once():
    names = [setting.name for setting in SETTINGS]
    assert len(names) == len(set(names))
    assert {name for names in ALTERNATIVES for name in names} <= set(names)


def test_settings_when_those_of_resume_are_compared_then_only_the_switch_that_it_sets_is_missing():
    missing = {setting.name for setting in settings_of(TRAIN)} - {setting.name for setting in settings_of("resume")}
    assert missing == {"resume"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(JSON | st.dictionaries(st.sampled_from([setting.key for setting in SETTINGS]), JSON, max_size=4))
def test_saved_settings_when_they_are_any_json_then_are_read_or_an_error_of_elephant_s(content):
    try:
        assert isinstance(read_saved_settings(json.dumps(content).encode(), settings_of(TRAIN), "job.json"), dict)
    except ConfigurationError as error:
        assert "Received:" in str(error)


@pytest.mark.parametrize("content", [b"[]", b"3", b"\xff", b"{", b"[" * 100_000])
def test_saved_settings_when_they_are_none_then_is_an_error_of_elephant_s(content):
    with pytest.raises(ConfigurationError, match=r"job.json: expected a job's settings as"):
        read_saved_settings(content, settings_of(TRAIN), "job.json")
