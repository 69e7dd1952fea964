"""What is saved beside a model may be anything: reading it ends well, or with an error of elephant's."""

import json
from dataclasses import asdict

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odd_arrays import ODD_ARRAYS, member, unknown_compression

from elephant import KerasEstimator, KerasModel
from elephant.checkpoint.state import FitState, identity_of
from elephant.config import FitConfig
from elephant.driver.recovery.restarts import options_of_fit
from elephant.errors import CheckpointError, ConfigurationError
from elephant.modeling.model_spec import Servable, model_source
from elephant.spark.saving.persistence import stage_of
from elephant.spark.saving.streaming import StreamState

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def places_of(form, place=()):
    """Yields the place of each part of a JSON value."""
    parts = form.items() if isinstance(form, dict) else enumerate(form) if isinstance(form, list) else ()
    for key, part in parts:
        yield (*place, key)
        yield from places_of(part, (*place, key))


def replaced(form, place, value):
    """Returns a copy of a JSON value with another part at a place; the part is left out where there is none."""
    copied = json.loads(json.dumps(form))
    owner = copied
    for key in place[:-1]:
        owner = owner[key]
    if value is None and isinstance(owner, dict):
        del owner[place[-1]]
    else:
        owner[place[-1]] = value
    return copied


@pytest.fixture(scope="module")
def saved():
    """Metadata of a fitted model, and its archive."""
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    source = model_source(model)
    about = {
        "facts": source.info.to_json(),
        "settings": asdict(source.settings),
        "rows": {"x": 0, "tensors": [{"shape": [3], "dtype": "float32", "sparse": False}]},
    }
    metadata = {
        "class": "elephant.spark.model.KerasModel",
        "uid": "KerasModel_1",
        "sparkVersion": "4.0.0",
        "paramMap": {"featuresCol": "x"},
        "defaultParamMap": {"predictionCol": "prediction"},
        "history": {"loss": [0.5]},
        "trainingStatistics": {},
        "plan": [{"rank": 0}],
        "kerasModel": about,
        "code": {"customObjects.Own": None},
        "files": ["model.keras"],
    }
    return json.loads(json.dumps(metadata)) | {"code": {}}, source.archive


@pytest.mark.parametrize("cls", [KerasModel, KerasEstimator])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_metadata_when_a_part_is_anything_then_loads_or_is_an_error_of_elephant_s(saved, cls, data):
    metadata, archive = saved
    if cls is KerasEstimator:
        metadata = {**metadata, "classWeight": [[0, 1.0]], "defaultParamMap": {}}
    places = list(places_of(metadata))
    odd = replaced(metadata, data.draw(st.sampled_from(places)), data.draw(JSON))
    contents = {"model.keras": archive, "code.pkl": None, "variables.npz": None}
    for trusted in (False, True):
        try:
            stage = stage_of(cls, odd, contents, "/models/digits", trusted=trusted)
        except ConfigurationError as error:
            assert "/models/digits" in str(error)
        else:
            assert isinstance(stage, cls)


def test_metadata_when_they_are_as_saved_then_load(saved):
    metadata, archive = saved
    loaded = stage_of(
        KerasModel,
        metadata,
        dict.fromkeys(["code.pkl", "variables.npz"]) | {"model.keras": archive},
        "/m",
        trusted=False,
    )
    assert (
        loaded.history == {"loss": [0.5]}
        and loaded.getFeaturesCol() == "x"
        and loaded.source.build().count_params() == 4
    )


@pytest.mark.parametrize("case", ODD_ARRAYS)
def test_arrays_when_they_are_none_then_is_an_error_of_elephant_s(saved, case):
    metadata, archive = saved
    contents = {"model.keras": archive, "code.pkl": None, "variables.npz": ODD_ARRAYS[case]}
    with pytest.raises(ConfigurationError, match=r"load: /models/digits: expected what save or write has made"):
        stage_of(KerasModel, metadata, contents, "/models/digits", trusted=False)


@pytest.mark.parametrize(
    "archive",
    [
        b"",
        b"PK",
        member("config.json", b"[]"),
        member("config.json", b"{}"),
        member("config.json", b"\xff"),
        member("config.json", b"[" * 100_000),
        member("config.json", json.dumps({"class_name": "Sequential", "config": 3}).encode()),
        member("config.json", json.dumps({"compile_config": 3, "class_name": [], "config": {}}).encode()),
        unknown_compression(),
    ],
)
def test_archive_when_it_is_none_then_is_an_error_of_elephant_s(saved, archive):
    metadata, _ = saved
    contents = {"model.keras": archive, "code.pkl": None, "variables.npz": None}
    with pytest.raises(ConfigurationError, match=r"expected|cannot"):
        stage_of(KerasModel, metadata, contents, "/m", trusted=False).source.build()
    with pytest.raises(ConfigurationError, match=r"expected|cannot"):
        Servable.of(stage_of(KerasModel, metadata, contents, "/m", trusted=False).source).build()


@given(st.binary(max_size=200))
def test_arrays_when_they_are_any_bytes_then_are_an_error_of_elephant_s(content):
    odd = {"model.keras": None, "code.pkl": None, "variables.npz": content}
    with pytest.raises(ConfigurationError):
        stage_of(KerasModel, {"kerasModel": {}}, odd, "/m", trusted=False)
    assert np.frombuffer(content, np.uint8).size == len(content)


ROWS = {"x": 0, "tensors": [{"shape": [3], "dtype": "float32", "sparse": False}]}
FACTS = {
    "fit": identity_of(FitConfig()),
    "rows": ROWS,
    "num_workers": 2,
    "stopped": False,
    "optimizer_names": ["adam"],
    "callbacks": [None],
    "optimizers": [[0, 1]],
}


@given(st.sampled_from(list(places_of(FACTS))), JSON)
def test_facts_of_a_fit_when_a_part_is_anything_then_are_read_or_an_error_of_elephant_s(place, value):
    assert options_of_fit(FACTS, "/kept") is FACTS["fit"]
    try:
        options_of_fit(replaced(FACTS, place, value), "/kept")
    except CheckpointError as error:
        assert "checkpointPath=/kept: expected a checkpoint" in str(error)


@given(st.sampled_from(list(places_of({"stream": "a", "rows": ROWS}))), JSON)
def test_facts_of_a_stream_when_a_part_is_anything_then_are_read_or_an_error_of_elephant_s(saved, place, value):
    metadata, archive = saved
    contents = {"model.keras": archive, "code.pkl": None, "variables.npz": None}
    source = stage_of(KerasModel, metadata, contents, "/m", trusted=False).source
    arrays = {"archive/0": np.frombuffer(archive, np.uint8)}
    try:
        facts = replaced({"stream": "a", "rows": ROWS}, place, value)
        StreamState.from_fit_state(FitState(epochs=1, arrays=arrays, facts=facts), source)
    except CheckpointError as error:
        assert "checkpointLocation: expected a checkpoint of a stream" in str(error)
