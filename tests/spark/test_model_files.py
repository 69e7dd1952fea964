"""Models on any file system come back as they went: weights, compile settings, the state of the optimizer."""

import io
import json
import sys
import zipfile
from types import SimpleNamespace

import h5py
import keras
import numpy as np
import pytest
from tiers import in_tiers

from elephant import KerasModel, SparkMLlibModel, SparkModel, load_spark_model
from elephant.errors import ConfigurationError
from elephant.modeling.model_spec import model_source
from elephant.spark.hadoop_files import read_file, read_model_bytes, write_file, write_model_bytes
from elephant.storage.folder import ArrowFolder, File, file_at

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = [X[:, :1], X[:, 1:3]]


def squashed(x):
    return keras.ops.tanh(x) / 2


def model_with_settings():
    """Returns a model whose settings are all but the usual ones, and whose optimizer has a state."""
    keras.utils.set_random_seed(1)
    inputs = keras.layers.Input((4,))
    outputs = [keras.layers.Dense(1, name="a")(inputs), keras.layers.Dense(2, squashed, name="b")(inputs)]
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(0.01),
        {"a": "mse", "b": keras.losses.Huber()},
        loss_weights={"a": 2.0, "b": 0.5},
        metrics={"a": ["mae"], "b": []},
        weighted_metrics={"a": ["mse"], "b": []},
    )
    model.fit(X, Y, epochs=2, verbose=0)
    return model


@pytest.mark.parametrize("suffix", in_tiers([".keras", ".h5"], fast=[".keras"], slow="the older format"))
def test_model_when_saved_and_loaded_then_goes_on_as_it_would_have(tmp_path, suffix):
    model = model_with_settings()
    saved = SparkModel(
        model, mode="asynchronous", frequency=3, num_workers=2, batch_size=7, seed=5,
        custom_objects={"squashed": squashed},
    )  # fmt: skip
    path = str(tmp_path / f"model{suffix}")
    saved.save(path)
    loaded = load_spark_model(path, custom_objects={"squashed": squashed})
    assert type(loaded) is SparkModel
    assert loaded.get_config() == saved.get_config()
    assert (loaded.mode, loaded.frequency, loaded.num_workers, loaded.batch_size) == ("asynchronous", 3, 2, 7)
    # Loss weights, metrics and weighted metrics are in the numbers; the optimizer's state is in those after a step.
    for _ in range(2):
        assert loaded.evaluate(X, Y, return_dict=True) == pytest.approx(
            model.evaluate(X, Y, verbose=0, return_dict=True)
        )
        model.fit(X, Y, verbose=0, shuffle=False)
        loaded.model.fit(X, Y, verbose=0, shuffle=False)
    np.testing.assert_allclose(loaded.model.get_weights()[0], model.get_weights()[0], rtol=1e-6)
    # The model that was saved is as it was.
    assert "optimizer" in model.get_compile_config()
    saved.save(path)
    with pytest.raises(FileExistsError, match=r"expected no file at .*\. Remove it, or pass another path"):
        saved.save(path, overwrite=False)


@pytest.mark.parametrize("loss", ["mse", "categorical_crossentropy"])
def test_files_when_elephas_or_keras_wrote_them_then_load(tmp_path, loss):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", loss, metrics=["acc"])
    path = str(tmp_path / "model.h5")
    model.save(path)
    assert load_spark_model(path).model.loss == loss
    config = {"parameter_server_mode": "http", "mode": "hogwild", "frequency": "epoch", "num_workers": 4, "foo": 1}
    with h5py.File(path, "a") as file:
        file.attrs["distributed_config"] = json.dumps({"class_name": "SparkMLlibModel", "config": config})
    loaded = load_spark_model(path)
    assert type(loaded) is SparkMLlibModel
    assert (loaded.mode, loaded.frequency, loaded.num_workers) == ("hogwild", "epoch", 4)
    np.testing.assert_array_equal(loaded.master_network.get_weights()[0], model.get_weights()[0])


def test_model_when_its_layers_take_no_options_then_keras_loads_the_file(tmp_path):
    class Doubled(keras.layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.inner = keras.layers.Dense(units)

        def call(self, inputs):
            return 2 * self.inner(inputs)

    model = keras.Sequential([keras.layers.Input((4,)), Doubled(3)])
    model.compile("sgd", "mse")
    KerasModel(model_source(model)).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"Doubled": Doubled})
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))


def test_model_when_given_as_a_path_then_is_loaded(tmp_path):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(SparkModel(tmp_path / "model.keras").model.get_weights()[0], model.get_weights()[0])


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        ("model.txt", ConfigurationError, r"expected a name that ends in .keras or .h5. Received: '.*model.txt'"),
        ("no.keras", FileNotFoundError, r"expected a file at .*no.keras"),
        ("broken.keras", ConfigurationError, r"path=/.*/broken.keras: expected a zip archive.* Received: 7 bytes that"),
        ("broken.h5", ConfigurationError, r"path=/.*/broken.h5: expected an HDF5 file.* Received: 7 bytes that"),
        ("empty.keras", ConfigurationError, r"expected a Keras model.* cannot load.* custom_objects={'Name': Name}"),
    ],
)
def test_load_when_there_is_no_model_then_says_so(tmp_path, path, error, text):
    (tmp_path / "broken.keras").write_bytes(b"nothing")
    (tmp_path / "broken.h5").write_bytes(b"nothing")
    with zipfile.ZipFile(tmp_path / "empty.keras", "w"):
        pass
    with pytest.raises(error, match=text):
        load_spark_model(str(tmp_path / path))


@pytest.mark.parametrize("folder", ["viewfs://files/data", "file:{}", "{}"])
def test_files_when_written_through_spark_then_are_read_back(spark, tmp_path, folder):
    # A file system by another name, with the local one behind it: to elephant it is one like HDFS.
    spark.sparkContext._jsc.hadoopConfiguration().set("fs.viewfs.mounttable.files.link./data", f"file://{tmp_path}")
    path = f"{folder.format(tmp_path)}/some folder/part"
    assert read_file(spark, path) is None
    write_file(spark, path, b"1")
    # What is below a file is not there.
    assert read_file(spark, f"{path}/part") is None
    with pytest.raises(FileExistsError, match="expected no file at .*/some folder/part. Received"):
        write_file(spark, path, b"2")
    assert read_file(spark, path) == (tmp_path / "some folder" / "part").read_bytes() == b"1"
    write_file(spark, path, b"3", overwrite=True)
    assert read_file(spark, path) == b"3"
    (tmp_path / "some folder" / "inner").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(spark, path.replace("part", "inner"), b"")
    assert list((tmp_path / "some folder" / "inner").iterdir()) == []
    write_model_bytes(f"{folder.format(tmp_path)}/part", b"4")
    assert read_model_bytes(f"{folder.format(tmp_path)}/part") == (tmp_path / "part").read_bytes() == b"4"
    assert sorted(item.name for item in tmp_path.iterdir() if not item.name.startswith(".")) == ["part", "some folder"]


def test_files_when_their_scheme_has_no_slash_then_are_refused(spark):
    with pytest.raises(ConfigurationError, match="expected a slash after the scheme, .* Received: 'file:model.keras'"):
        write_file(spark, "file:model.keras", b"")


def test_folders_when_they_are_of_a_mount_then_take_files_in_order(tmp_path, monkeypatch):
    # A mount takes no file that is renamed into its place.
    monkeypatch.setattr("elephant.storage.folder.mounted_here", lambda path: path)
    monkeypatch.setattr("os.replace", None)
    file = file_at(str(tmp_path / "folder" / "file"))
    file.write(b"1")
    file.write(b"2", overwrite=True)
    assert (file.read(), file.folder.names()) == (b"2", ["file"])


def test_files_when_they_cannot_be_replaced_then_what_was_there_stays():
    class Full(io.BytesIO):
        def write(self, content):
            raise OSError("the quota is used up")

    removed = []
    store = SimpleNamespace(
        create_dir=lambda path, recursive: None, open_output_stream=lambda path: Full(), delete_file=removed.append
    )
    with pytest.raises(OSError, match="quota"):
        File(ArrowFolder(store, "bucket/fits", "s3://bucket/fits"), "fit.jsonl").write(b"events", overwrite=True)
    assert not removed


def test_models_when_saved_where_only_fsspec_reaches_then_come_back_with_and_without_spark(spark):
    pytest.importorskip("fsspec")
    path = "memory://models/digits.keras"
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    SparkModel(model, num_workers=3).save(path)
    assert read_file(spark, path) == read_model_bytes(path)
    assert load_spark_model(path).num_workers == 3
    with pytest.raises(FileExistsError):
        write_file(spark, path, b"")
    assert read_file(spark, "memory://models/none.keras") is None
    with pytest.raises(ConfigurationError, match="that pyarrow or fsspec opens. Received: 'nowhere://a.keras'"):
        read_model_bytes("nowhere://a.keras")


def test_export_when_written_then_serves_what_the_model_gives(tmp_path, monkeypatch):
    import tensorflow as tf

    model = model_with_settings()
    fitted = KerasModel(model_source(model, {"squashed": squashed}))
    url = f"memory://export-{tmp_path.name}/digits/1"
    fitted.export(url)
    fitted.export(tmp_path / "digits" / "1")
    assert file_at(f"{url}/saved_model.pb").read() and file_at(f"{url}/variables/variables.index").read()
    # As servers open it.
    served = tf.saved_model.load(tmp_path / "digits" / "1")
    for made, expected in zip(tf.nest.flatten(served.serve(X)), model.predict(X, verbose=0), strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(keras.Model, "export", lambda *_, **__: pytest.fail("exported before it looked"))
    for taken in (tmp_path / "digits" / "1", tmp_path / "digits", url):
        with pytest.raises(FileExistsError, match="path: expected nothing there yet"):
            fitted.export(taken)
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="format='pmml': Keras cannot export .*tf_saved_model"):
        fitted.export(tmp_path / "other", format="pmml")


@pytest.mark.parametrize(
    "url", in_tiers(["{0}/digits/1", "memory://broken-{1}/digits/1"], fast=["{0}/digits/1"], slow="another file system")
)
def test_export_when_a_copy_fails_then_leaves_nothing_behind(tmp_path, monkeypatch, url):
    fitted = KerasModel(model_source(model_with_settings(), {"squashed": squashed}))
    url, write = url.format(tmp_path, tmp_path.name), File.write

    def failing(file, content, **options):
        if file.name == "saved_model.pb":
            raise OSError("the disk is full")
        write(file, content, **options)

    monkeypatch.setattr(File, "write", failing)
    with pytest.raises(OSError, match="the disk is full"):
        fitted.export(url)
    assert file_at(f"{url}/variables/variables.index").read() is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith(".")]
    monkeypatch.undo()
    fitted.export(url)


def test_export_when_a_package_is_missing_then_says_what_to_install(tmp_path, monkeypatch):
    # Python's own way to say that a module is not there.
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    fitted = KerasModel(model_source(model_with_settings(), {"squashed": squashed}))
    with pytest.raises(ImportError, match="format='onnx': .*Run pip install tf2onnx onnx"):
        fitted.export(tmp_path / "digits.onnx", format="onnx")
    assert not list(tmp_path.iterdir())


def test_model_when_it_cannot_take_the_place_of_what_is_there_then_leaves_nothing_beside_it(tmp_path):
    folder = tmp_path / "model.keras"
    folder.mkdir()
    with pytest.raises(IsADirectoryError):
        write_model_bytes(folder, b"model")
    assert list(tmp_path.iterdir()) == [folder]
    with pytest.raises(FileNotFoundError, match="expected a folder .*nowhere for model.keras"):
        write_model_bytes(tmp_path / "nowhere" / "model.keras", b"model")
