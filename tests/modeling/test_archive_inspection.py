"""Model files that nobody trusts are looked through before Keras reads them, whichever Keras that is."""

import io
import json
import tracemalloc
import zipfile

import h5py
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.errors import ConfigurationError
from elephant.modeling.archive_inspection import KnownCode, code_of_file, require_known_code

NEEDS_TENSORFLOW = pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="layers of text need TensorFlow")
TENSOR = {
    "class_name": "__keras_tensor__",
    "config": {"shape": [None, 2], "dtype": "float32", "keras_history": ["x", 0, 0]},
}
CALLED = {"name": "f", "inbound_nodes": [{"args": ["id"], "kwargs": {}}]}
LAMBDA = {"class_name": "__lambda__", "config": {"code": "", "defaults": None, "closure": None}}


def part(module, name, config, /, **more):
    return {"module": module, "class_name": name, "config": config, "registered_name": None, **more}


def function(module, name, /, **more):
    return part(module, "function", name, **more) | {"registered_name": name}


def model_of(layer, **more):
    first = part("keras.layers", "InputLayer", {"batch_shape": [None, 2], "name": "x"}, name="x", inbound_nodes=[])
    return part("keras.src.models.functional", "Functional", {"name": "m", "layers": [first, layer]}, **more)


def layer(name, **config):
    return part("keras.layers", name, {"name": "one", **config})


def archive(config, weights=b""):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as written:
        written.writestr("config.json", json.dumps(config))
        if weights:
            written.writestr("model.weights.h5", weights)
    return content.getvalue()


def hdf5(fill):
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        fill(file)
    return content.getvalue()


# Those of published advisories, and their neighbors.
HOSTILE = {
    "CVE-2025-1550": (function("os", "system", **CALLED), "the function os.system in the place of a layer"),
    "CVE-2025-8747": (function("keras.utils", "get_file", **CALLED), "keras.utils.get_file in the place of a layer"),
    "CVE-2025-9906": (
        function("keras.config", "enable_unsafe_deserialization", **CALLED),
        "keras.config.enable_unsafe_deserialization in the place of a layer",
    ),
    "CVE-2025-12058": (layer("StringLookup", vocabulary="/etc/passwd"), "a file that StringLookup 'one' reads, /etc/p"),
    "CVE-2025-49655": (layer("TorchModuleWrapper"), "the program of TorchModuleWrapper 'one'"),
    "CVE-2026-1462": (layer("TFSMLayer", filepath="/saved"), "the program of TFSMLayer 'one'"),
    "a program of JAX": (layer("JaxLayer"), "the program of JaxLayer 'one'"),
    "a class of the standard library": (part("subprocess", "Popen", {"args": "id"}), "subprocess.Popen of"),
    "a class of an installed package": (part("pandas", "DataFrame", {}), "pandas.DataFrame of"),
    "a class of Keras' of another kind": (part("keras.callbacks", "CSVLogger", {}), "keras.callbacks.CSVLogger of"),
    "an internal name": (part("keras.src.utils.file_utils", "os", {}), "keras.src.utils.file_utils.os of"),
    "a model of Keras' that is downloaded": (
        function("keras.applications", "ResNet50", **CALLED),
        "keras.applications.ResNet50 in the place of a layer",
    ),
    "a lambda": (layer("Lambda", function=LAMBDA), "a lambda of Lambda 'one'"),
    "a lambda for a shape": (layer("Lambda", function="relu", output_shape=LAMBDA), "a lambda of Lambda 'one'"),
    "a Lambda of a function": (layer("Lambda", function=function("os", "system")), "os.system of Lambda 'one'"),
    "a Lambda of the switch": (
        layer("Lambda", function=function("keras.config", "enable_unsafe_deserialization")),
        "keras.config.enable_unsafe_deserialization of Lambda 'one'",
    ),
    "a name that keras.ops has too": (layer("Lambda", function=function("shutil", "copy")), "shutil.copy of Lambda"),
    "a builtin that keras.ops has too": (layer("Lambda", function=function("builtins", "map")), "map of Lambda 'one'"),
    "a function that makes objects": (
        layer("Lambda", function=function("keras.layers", "deserialize")),
        "keras.layers.deserialize of Lambda 'one'",
    ),
    "an activation": (layer("Dense", units=2, activation=function("os", "system")), "os.system of Dense 'one'"),
    "what a layer is called with": (
        layer("Dense", units=2) | {"inbound_nodes": [{"args": [function("os", "system")], "kwargs": {}}]},
        "os.system of Dense 'one'",
    ),
    "a model in a model": (model_of(layer("TimeDistributed", layer=layer("Lambda", function=LAMBDA))), "a lambda of"),
    "a type of TensorFlow's": (part("os", "__typespec__", [], spec_name="system"), "os.__typespec__ of"),
    "no module": ({"class_name": "deserialize", "config": {"config": {}}}, "deserialize of"),
    "no module and a name": (part(None, "Lambda", {"function": LAMBDA}) | {"registered_name": "a>b"}, "a lambda of"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_file_when_it_names_what_is_not_known_then_says_what(case, suffix):
    hostile, wanted = HOSTILE[case]
    config = model_of(hostile)
    content = archive(config)
    if suffix == ".h5":
        content = hdf5(lambda file: file.attrs.update(model_config=json.dumps(config)))
    (found,) = [piece for piece in code_of_file(content, suffix) if wanted in piece]
    with pytest.raises(ConfigurationError, match=r"nobody has trusted the file.*trusted=True"):
        require_known_code(content, suffix, {})
    assert "'" in found or "." in found


@pytest.mark.parametrize("place", ["optimizer", "loss", "metrics"])
def test_file_when_what_it_compiles_with_is_not_known_then_says_so_where_it_is_compiled(place):
    hostile = {"compile_config": {place: [function("os", "system")]}}
    content = archive(model_of(layer("Dense", units=2), **hostile))
    assert code_of_file(content, ".keras") == ["the function os.system of Functional 'm'"]
    assert code_of_file(content, ".keras", is_compiled=False) == []

    def fill(file):
        file.attrs["model_config"] = json.dumps(model_of(layer("Dense", units=2)))
        file.create_group("elephant_optimizer").create_dataset(
            "elephant_compile_config", data=np.void(json.dumps(hostile["compile_config"]).encode())
        )

    assert code_of_file(hdf5(fill), ".h5") == ["the function os.system of the model"]
    trained = {"model_config": json.dumps({}), "training_config": json.dumps(hostile["compile_config"])}
    assert code_of_file(hdf5(lambda file: file.attrs.update(trained)), ".h5") == ["the function os.system of the model"]


def test_file_when_its_arrays_are_in_other_files_then_says_so(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"12345678")

    def fill(file):
        file["linked"] = h5py.ExternalLink(str(secret), "/")
        file.create_dataset("inside/kept", (8,), "uint8", external=[(str(secret), 0, 8)])
        layout = h5py.VirtualLayout((8,), "uint8")
        layout[:] = h5py.VirtualSource(str(secret), "kept", (8,))
        file.create_virtual_dataset("virtual", layout)

    wanted = {f"a link to another file, {secret}", *(f"an array outside of the file, {name}" for name in PLACES)}
    assert set(code_of_file(archive({}, hdf5(fill)), ".keras")) == wanted
    assert set(code_of_file(hdf5(fill), ".h5")) == wanted


PLACES = ("inside/kept", "virtual")


class Own(keras.layers.Layer):
    pass


def half(labels, outputs):
    return keras.ops.mean(outputs - labels) / 2


class Plain:
    def __init__(self, **options):
        raise AssertionError(options)


def test_file_when_names_beside_it_have_led_to_functions_then_has_no_say_in_what_they_are_called_with():
    known = KnownCode(found={"Own": Own, "half": half, "Plain": Plain})

    def pieces(one, **more):
        return code_of_file(archive(model_of(one, **more)), ".keras", known)

    own = part("nets", "Own", {"name": "one"}) | {"registered_name": "Own"}
    compiled = {"loss": function("nets", "half"), "metrics": [[function("nets", "half")], "half"]}
    assert pieces(own, compile_config=compiled) == []
    for one in (
        layer("Lambda", function=function("nets", "half"), arguments={"path": "/"}),
        layer("Lambda", function="half"),
        layer("Activation", activation="half"),
        layer("Dense", units=1, kernel_initializer=function("nets", "half")),
        function("nets", "half", **CALLED),
    ):
        assert len(pieces(one)) == 1
    wrapped = part("keras.src.losses.losses", "LossFunctionWrapper", {"fn": function("nets", "half"), "path": "/"})
    assert len(pieces(own, compile_config={"loss": wrapped})) == 1
    # Neither are they made as classes are, and classes of no kind of Keras' are not made.
    for name in ("half", "Plain"):
        assert len(pieces({"class_name": name, "config": {"path": "/"}})) == 1
    # What is handed over may be used for anything, but in the place of a layer, which it is not.
    given = KnownCode(given={"half": half})
    named = layer("Lambda", function=function("nets", "half"))
    assert code_of_file(archive(model_of(named)), ".keras", given) == []
    assert len(code_of_file(archive(model_of(function("nets", "half", **CALLED))), ".keras", given)) == 1


def functional():
    inputs = keras.Input((8, 8, 3))
    hidden = keras.layers.Conv2D(4, 3, activation="relu", kernel_regularizer="l2", kernel_constraint="max_norm")(inputs)
    hidden = keras.layers.Activation(keras.activations.gelu)(keras.layers.BatchNormalization()(hidden))
    hidden = keras.layers.Reshape((-1, 4))(hidden)
    hidden = keras.layers.Bidirectional(keras.layers.LSTM(3, return_sequences=True))(hidden)
    cells = keras.layers.StackedRNNCells([keras.layers.GRUCell(3), keras.layers.LSTMCell(2)])
    hidden = keras.layers.RNN(cells)(keras.layers.MultiHeadAttention(2, 4)(hidden, hidden))
    outputs = [keras.layers.Dense(2, dtype="mixed_bfloat16", name=name)(hidden) for name in "ab"]
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 10)),
        [keras.losses.CategoricalCrossentropy(from_logits=True), keras.losses.mean_squared_error],
        [["accuracy", keras.metrics.AUC()], [keras.losses.mean_absolute_error]],
    )
    return model


def texts():
    words = keras.layers.TextVectorization(vocabulary=["a", "b"])
    model = keras.Sequential([keras.Input((1,), dtype="string"), words, keras.layers.Embedding(10, 4)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), keras.losses.Huber())
    return model


def pictures():
    flips = keras.layers.Pipeline([keras.layers.RandomFlip(seed=3), keras.layers.RandomRotation(0.1)])
    return keras.Sequential(
        [keras.Input((32, 32, 3)), flips, keras.layers.SpectralNormalization(keras.layers.Dense(3))]
    )


def operations():
    inputs = keras.Input((4,))
    hidden = keras.ops.relu(inputs + 1.0)
    hidden = keras.layers.Lambda(keras.ops.tanh)(hidden)
    return keras.Model(inputs, keras.ops.image.resize(keras.ops.reshape(hidden, (-1, 2, 2, 1)), (3, 3)))


def quantized():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.quantize("int8")
    return model


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
@pytest.mark.parametrize(
    "build", [functional, pytest.param(texts, marks=NEEDS_TENSORFLOW), pictures, operations, quantized]
)
def test_file_when_keras_has_saved_its_own_then_nothing_is_found_and_it_loads(tmp_path, build):
    path = tmp_path / "model.keras"
    build().save(path)
    assert code_of_file(path.read_bytes(), ".keras") == []
    keras.saving.load_model(path)


@NEEDS_TENSORFLOW
def test_features_when_keras_has_written_them_then_nothing_is_found():
    kinds = {"age": "float_normalized", "kind": keras.utils.FeatureSpace.string_hashed(num_bins=3)}
    space = keras.utils.FeatureSpace(kinds, crosses=[keras.utils.FeatureSpace.cross(("age", "kind"), 8)])
    assert code_of_file(archive(keras.saving.serialize_keras_object(space)), ".keras") == []


def test_hdf5_when_keras_has_saved_its_own_then_nothing_is_found(tmp_path):
    for build in (functional, pictures):
        path = tmp_path / f"{build.__name__}.h5"
        build().save(path)
        assert code_of_file(path.read_bytes(), ".h5") == []


def test_file_when_it_is_damaged_then_nothing_is_found_and_nested_without_end_it_is_refused():
    assert code_of_file(b"damaged", ".keras") == []
    assert code_of_file(b"damaged", ".h5") == []
    assert code_of_file(b"damaged", ".hdf5") == []
    deep = '{"config": ' * 100_000 + "0" + "}" * 100_000
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as written:
        written.writestr("config.json", deep)
    assert code_of_file(content.getvalue(), ".keras") == ["a config that is nested too deeply to be looked at"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["class_name", "config", "module", "registered_name", "name"]), inner)
    ),
    max_leaves=12,
)


def test_file_when_its_small_archive_holds_a_huge_config_then_it_is_refused_and_not_read():
    content, blank = io.BytesIO(), b" " * (1 << 20)
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as made, made.open("config.json", "w") as config:
        for _ in range(65):
            config.write(blank)
    assert len(content.getvalue()) < 1 << 18
    tracemalloc.start()
    try:
        assert code_of_file(content.getvalue(), ".keras") == ["a config that is too large to be looked at"]
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@given(JSON)
def test_file_when_its_config_is_anything_then_is_looked_through(config):
    known = KnownCode(found={"": half}, given={"0": Own})
    assert isinstance(
        code_of_file(archive({"compile_config": {"loss": config}, "config": config}), ".keras", known), list
    )
