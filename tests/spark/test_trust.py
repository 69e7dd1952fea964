"""Nothing that a saved model holds runs where nobody trusts it; names of code that is here need no trust."""

import json
import pickle
import sys
import zipfile
from dataclasses import replace

import keras
import pytest
from pyspark import cloudpickle
from pyspark.ml import PipelineModel

from elephant import KerasEstimator, KerasModel, load_spark_model, predict_udf
from elephant.errors import ConfigurationError
from elephant.jobs.inputs import estimator_of, fitted_model
from elephant.modeling.archive_inspection import code_of_file
from elephant.modeling.model_spec import model_source
from elephant.spark.saving.model_files import source_of
from elephant.spark.saving.persistence import history_of
from elephant.spark.saving.streaming import StreamFolder, StreamState
from elephant.spark.saving.trust import SETTING, name_of, safely_named

OWN = """
from shutil import rmtree

import keras


class Doubled(keras.layers.Layer):
    def call(self, inputs):
        return 2 * inputs


class Plain:
    pass


def squared(labels, predictions):
    return keras.ops.mean(keras.ops.square(labels - predictions), axis=-1)


def build():
    model = keras.Sequential([keras.layers.Input((3,)), Doubled(), keras.layers.Dense(1)])
    model.compile("sgd", squared)
    return model


def declared() -> keras.Model:
    return build()


alias = squared
"""
# Of a package that somebody has installed.
INSTALLED = (
    OWN
    + """

@keras.saving.register_keras_serializable(package="installed_net")
def registered():
    return build()
"""
)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A module of one's own, and one among the installed packages; neither is imported."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own_net.py").write_text(OWN)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed_net.py").write_text(INSTALLED)
    for folder in ("own", "site-packages"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    yield tmp_path
    registry = keras.saving.get_custom_objects()
    for name in [name for name in registry if name.startswith("installed_net>")]:
        del registry[name]
    for name in ("own_net", "installed_net"):
        sys.modules.pop(name, None)


def compiled(*layers, loss="mse"):
    model = keras.Sequential([keras.layers.Input((3,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", loss)
    return model


def with_a_lambda():
    return compiled(keras.layers.Lambda(lambda inputs: inputs / 2, name="halved", output_shape=(3,)))


def unnamed():
    """Returns a class that no other process finds by a name."""

    class Unnamed(keras.layers.Layer):
        def call(self, inputs):
            return inputs + 1

    return Unnamed


@pytest.mark.parametrize(
    ("name", "is_found"),
    [
        ("own_net:Doubled", True),
        ("own_net:build", True),
        ("own_net:Plain", False),
        # It is another module's, and goes by another name.
        ("own_net:rmtree", False),
        ("own_net:keras.utils.get_file", False),
        ("own_net:alias", False),
        ("shutil:rmtree", False),
        ("os:system", False),
        ("this:d", False),
        ("installed_net:Doubled", True),
        ("installed_net:registered", True),
        ("installed_net:build", False),
        ("installed_net:Plain", False),
        ("keras.src.layers.core.dense:Dense", True),
        ("keras.src.utils.file_utils:get_file", False),
        ("pyspark.cloudpickle.cloudpickle:dumps", False),
        ("elephant.spark.hadoop_files:write_file", False),
        ("elephant.__main__:main", False),
        ("__main__:main", False),
        (".own_net:build", False),
    ],
)
def test_name_when_a_file_has_it_then_only_classes_of_keras_kinds_and_what_is_one_s_own_are_found(
    modules, name, is_found
):
    assert (safely_named(name, "/models/digits") is not None) == is_found
    assert "this" not in sys.modules


@pytest.mark.parametrize("module", ["saved.planted", "saved.stages.model.planted"])
def test_name_when_its_module_is_in_what_is_loaded_then_is_not_imported(tmp_path, monkeypatch, module):
    stage = tmp_path / "saved" / "stages" / "model"
    for folder in (tmp_path / "saved", stage):
        (folder / "metadata").mkdir(parents=True)
        (folder / "planted.py").write_text("raise AssertionError('it has been imported')\n\n\ndef build():\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert safely_named(f"{module}:build", f"file:{stage}") is None
    with pytest.raises(AssertionError):
        safely_named(f"{module}:build", "/models/digits")
    for name in [name for name in sys.modules if name.split(".")[0] == "saved"]:
        del sys.modules[name]


DERIVED = """
from importlib import import_module

from nets.bases import Block as Base
from nets import bases

import_module("this")


class Derived(Base):
    pass


class Further(Derived, bases.Mixin):
    pass


class Other(bases.Mixin):
    pass


def build():
    pass
"""


@pytest.mark.parametrize(
    ("name", "is_found"),
    [("Derived", True), ("Further", True), ("Other", False), ("build", False), ("Base", False), ("absent", False)],
)
def test_name_when_its_module_is_not_imported_then_is_only_imported_for_a_class_of_keras_kinds(
    tmp_path, monkeypatch, name, is_found
):
    folder = tmp_path / "site-packages" / "nets"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "bases.py").write_text("from keras.losses import Loss as Block\n\n\nclass Mixin:\n    pass\n")
    (folder / "derived.py").write_text(DERIVED)
    monkeypatch.syspath_prepend(str(folder.parent))
    try:
        assert (safely_named(f"nets.derived:{name}", "/models/digits") is not None) == is_found
        assert ("nets" in sys.modules) == is_found
    finally:
        for module in ("nets", "nets.bases", "nets.derived", "this"):
            sys.modules.pop(module, None)


def test_function_when_loading_calls_it_then_has_to_be_registered(modules):
    assert safely_named("own_net:build", "/models/digits") is not None
    assert safely_named("own_net:build", "/models/digits", is_called=True) is None
    assert safely_named("own_net:declared", "/models/digits", is_called=True) is not None
    assert safely_named("installed_net:registered", "/models/digits", is_called=True) is not None
    assert safely_named("installed_net:declared", "/models/digits", is_called=True) is None


def test_name_when_there_is_none_that_others_find_then_is_none(modules):
    import own_net

    assert name_of(own_net.Doubled) == "own_net:Doubled"
    assert name_of(own_net.alias) == "own_net:squared"
    assert name_of(unnamed()) is None
    assert name_of(own_net.Doubled()) is None
    cloudpickle.register_pickle_by_value(own_net)
    try:
        assert name_of(own_net.Doubled) is None
    finally:
        cloudpickle.unregister_pickle_by_value(own_net)


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_file_when_it_holds_code_then_needs_trust(tmp_path, suffix):
    path, plain = tmp_path / f"model{suffix}", tmp_path / f"plain{suffix}"
    with_a_lambda().save(path)
    compiled().save(plain)
    assert code_of_file(plain.read_bytes(), suffix) == []
    assert code_of_file(b"damaged", suffix) == []
    wanted = rf"expected nothing that runs when it is loaded.*Received: a lambda of Lambda 'halved'\..*{SETTING}=true"
    job = {"model": str(path)}
    for load in (load_spark_model, source_of, predict_udf, lambda _: estimator_of(job), lambda _: fitted_model(job)):
        with pytest.raises(ConfigurationError, match=wanted):
            load(str(path))
    for load in (estimator_of, fitted_model):
        load({**job, "trusted": True})
    assert load_spark_model(path, trusted=True).model.layers[0].name == "halved"
    assert source_of(path, trusted=True).build().layers[0].name == "halved"


def test_file_when_a_layer_is_a_program_of_the_system_then_no_way_of_loading_hands_it_to_keras(
    spark, tmp_path, monkeypatch
):
    called = {"module": "os", "class_name": "function", "config": "system", "registered_name": "system"}
    called |= {"name": "f", "inbound_nodes": [{"args": ["id"], "kwargs": {}}]}
    config = {"module": "keras", "class_name": "Sequential", "config": {"name": "m", "layers": [called]}}
    path, folder = tmp_path / "model.keras", tmp_path / "model"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", json.dumps(config))
    save(compiled(), str(folder))
    (folder / "model.keras").write_bytes(path.read_bytes())
    (folder / ".model.keras.crc").unlink(missing_ok=True)
    stream = StreamFolder(spark, str(tmp_path / "stream"))
    source = replace(model_source(compiled()), archive=path.read_bytes())
    stream.write(StreamState(stream_id="a", batch=0, spec=source, history={}))
    job = {"model": str(path)}
    monkeypatch.setattr(keras.saving, "load_model", None)
    for load in (
        lambda: load_spark_model(path),
        lambda: KerasEstimator(model=str(path)),
        lambda: predict_udf(str(path)),
        lambda: estimator_of(job),
        lambda: fitted_model(job),
        lambda: KerasModel.load(str(folder)),
        lambda: stream.latest(source),
        replace(source, safe_mode=True).build,
    ):
        with pytest.raises(ConfigurationError, match=r"Received: the function os\.system in the place of a layer\."):
            load()


def test_archive_when_a_loss_is_a_lambda_then_it_is_found():
    model = compiled(loss=lambda labels, predictions: (labels - predictions) ** 2)
    assert code_of_file(model_source(model).archive, ".keras") == [f"a lambda of Sequential {model.name!r}"]


def save(model, path, custom_objects=None, **params):
    saved = KerasModel(model_source(model, custom_objects), history={"loss": [0.5]})
    saved._set(**params)
    saved.write().overwrite().save(path)
    return saved


def edited_metadata(folder, edit):
    """Changes the metadata of what is saved in a folder, as anybody may who can write there."""
    (file,) = (folder / "metadata").glob("part-*")
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["classes", "function"])
def test_model_when_its_code_is_in_a_module_of_one_s_own_then_loads_where_that_is_not_imported_yet(
    spark, tmp_path, modules, kind
):
    import own_net

    model = own_net.build if kind == "function" else compiled(own_net.Doubled(), loss=own_net.squared)
    objects = {"Doubled": own_net.Doubled, "squared": own_net.squared} if kind == "classes" else {}
    save(model, str(tmp_path / "model"), objects, preprocessing=own_net.squared)
    assert not (tmp_path / "model" / "code.pkl").exists()
    sys.modules.pop("own_net")
    if kind == "function":
        # Loading calls it, with nothing: whatever it is.
        with pytest.raises(ConfigurationError, match=r"Received: builder=own_net:build\."):
            KerasModel.load(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"), trusted=kind == "function")
    assert loaded.model.layers[0].__class__ is sys.modules["own_net"].Doubled
    assert loaded.getPreprocessing() is sys.modules["own_net"].squared
    (modules / "own" / "own_net.py").unlink()
    sys.modules.pop("own_net")
    with pytest.raises(ConfigurationError, match=r"needs code that is not here: No module named 'own_net'"):
        KerasModel.load(str(tmp_path / "model"), trusted=kind == "function")


def test_model_when_its_code_is_pickled_then_needs_trust_each_time_or_its_class_registered(spark, tmp_path):
    kind, path = unnamed(), str(tmp_path / "model")
    save(compiled(kind()), path, preprocessing=lambda batch: batch["x"])
    refused = r"load: .*model: .*Received: preprocessing \(pickled\); customObjects.Unnamed \(pickled\); a pickle that"
    with pytest.raises(ConfigurationError, match=refused):
        KerasModel.load(path)
    assert history_of(spark, path) == {"loss": [0.5]}
    loaded = KerasModel.load(path, trusted=True)
    assert loaded.getPreprocessing()({"x": 3}) == 3
    # Whoever trusted it once has not trusted it for others.
    loaded.write().overwrite().save(path)
    with pytest.raises(ConfigurationError, match=refused):
        KerasModel.load(path)
    save(compiled(kind()), path)
    with keras.saving.custom_object_scope({"Unnamed": kind}):
        assert isinstance(KerasModel.load(path).model.layers[0], kind)


def test_pipeline_when_it_holds_a_lambda_then_loads_where_the_setting_of_spark_trusts_it(spark, tmp_path):
    path = str(tmp_path / "pipeline")
    PipelineModel([KerasModel(model_source(with_a_lambda()))]).write().overwrite().save(path)
    refused = r"Received: a lambda of Lambda 'halved'\."
    with pytest.raises(ConfigurationError, match=refused):
        PipelineModel.load(path)
    spark.conf.set(SETTING, "true")
    try:
        (stage,) = PipelineModel.load(path).stages
        with pytest.raises(ConfigurationError, match=refused):
            KerasModel.load(f"{path}/stages/0_{stage.uid}", trusted=False)
    finally:
        spark.conf.unset(SETTING)
    assert stage.model.layers[0].name == "halved"


class Planted:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return (open, (str(self._path), "w"))


def test_model_when_its_code_is_pickled_then_loads_with_trust_and_is_not_unpickled_without(spark, tmp_path):
    kind, folder = unnamed(), tmp_path / "model"
    save(compiled(kind()), str(folder), {"Unnamed": kind})
    code = {"customObjects.Unnamed": kind, "preprocessing": unnamed, "marker": Planted(tmp_path / "marker")}
    (folder / "code.pkl").write_bytes(cloudpickle.dumps(code))
    (folder / ".code.pkl.crc").unlink(missing_ok=True)
    with pytest.raises(
        ConfigurationError,
        match=r"Received: customObjects.Unnamed \(pickled\); a pickle that names .*layer.Layer.*io.open",
    ):
        KerasModel.load(str(folder))
    assert not (tmp_path / "marker").exists()
    loaded = KerasModel.load(str(folder), trusted=True)
    assert type(loaded.model.layers[0]).__name__ == "Unnamed"
    assert loaded.getPreprocessing()().__name__ == "Unnamed"
    assert (tmp_path / "marker").exists()


def test_model_when_somebody_has_written_names_or_a_lambda_into_it_then_they_are_refused(spark, tmp_path):
    folder = tmp_path / "model"
    save(compiled(), str(folder))
    edited_metadata(folder, lambda metadata: metadata.update(code={"builder": "os:abort", "preprocessing": None}))
    with pytest.raises(ConfigurationError, match=r"Received: builder=os:abort; preprocessing \(pickled\)\."):
        KerasModel.load(str(folder))
    # Keras itself looks again where the model is built, which may be on an executor.
    loaded = KerasModel(model_source(with_a_lambda()))
    edited_metadata(folder, lambda metadata: metadata.update(code={}))
    source = KerasModel.load(str(folder)).source
    assert source.safe_mode and pickle.loads(pickle.dumps(source)).safe_mode
    object.__setattr__(source, "archive", loaded.source.archive)
    with pytest.raises(ConfigurationError, match="safe_mode"):
        source.build()
    packed = KerasModel(source).packed()
    with pytest.raises(ConfigurationError, match="safe_mode"):
        packed.built()


def test_estimator_when_it_has_class_weights_then_loads_and_with_callbacks_needs_trust(spark, tmp_path):
    path = str(tmp_path / "estimator")
    KerasEstimator(model=compiled(), classWeight={0: 1.0, 3: 2.5}).save(path)
    assert KerasEstimator.load(path).getClassWeight() == {0: 1.0, 3: 2.5}
    KerasEstimator(model=compiled(), callbacks=[keras.callbacks.TerminateOnNaN()]).write().overwrite().save(path)
    with pytest.raises(
        ConfigurationError, match=r"Received: callbacks \(pickled\); a pickle that names keras.src.callbacks"
    ):
        KerasEstimator.load(path)
    assert len(KerasEstimator.load(path, trusted=True).getCallbacks()) == 1
    assert len(KerasEstimator.read().session(spark).load(path, trusted=True).getCallbacks()) == 1


def test_stream_when_its_checkpoint_holds_a_lambda_then_goes_on_where_the_setting_of_spark_trusts_it(spark, tmp_path):
    plain, source = model_source(compiled()), model_source(with_a_lambda())
    folder = StreamFolder(spark, str(tmp_path))
    folder.write(StreamState(stream_id="a", batch=0, spec=plain, history={}))
    assert folder.latest(source).spec.safe_mode
    folder.write(StreamState(stream_id="a", batch=1, spec=source, history={}))
    with pytest.raises(
        ConfigurationError, match=r"fit_stream: .*, micro-batch 1: .*Received: a lambda of Lambda 'halved'"
    ):
        folder.latest(plain)
    spark.conf.set(SETTING, "true")
    try:
        assert StreamFolder(spark, str(tmp_path)).latest(plain).spec.build().layers[0].name == "halved"
    finally:
        spark.conf.unset(SETTING)
