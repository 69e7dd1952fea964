"""Readers of files: any bytes give what was written, or an error of elephant's that names the file."""

import dataclasses
import io
import json
import zipfile
import zlib
from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mutated import EDGES, JSON, mutated, mutated_fields

from elephant.checkpoint.manager import CheckpointManager, read_arrays, write_arrays
from elephant.checkpoint.state import CheckpointManifest, FitState, StoredFile
from elephant.errors import CheckpointError, ConfigurationError, DataError
from elephant.parameter_server import snapshot
from elephant.parameter_server.layout import Layout, ServerSpec
from elephant.parameter_server.store import SnapshotImage
from elephant.storage.folder import DAMAGES, folder_at, sealed, unsealed
from elephant.tables.stored import StoredTable

ARRAYS = {"model/0": np.arange(6, dtype=np.float32).reshape(2, 3), "model/1": np.ones((), np.int64)}
LAYOUT = Layout([("kernel", (4, 3))])
SPEC = ServerSpec(run_id="run", layout=LAYOUT, first_value=0, num_values=LAYOUT.num_values, num_state_values=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder whose files each example writes anew."""
    return tmp_path_factory.mktemp("files")


def written(arrays):
    file = io.BytesIO()
    write_arrays(file, arrays)
    return file.getvalue()


@given(content=mutated(written(ARRAYS)) | st.binary(max_size=200))
def test_arrays_when_their_file_is_damaged_then_are_read_or_damaged(content):
    try:
        arrays = read_arrays(io.BytesIO(content))
    except (*DAMAGES, MemoryError, OSError):
        return
    assert all(isinstance(array, np.ndarray) and not array.dtype.hasobject for array in arrays.values())


@given(content=mutated(sealed({"epochs": 1})) | st.binary(max_size=60) | JSON.map(json.dumps).map(str.encode))
def test_manifest_when_it_is_damaged_then_is_read_or_damaged(content):
    try:
        assert isinstance(unsealed(content), (dict, list, str, int, float, type(None)))
    except DAMAGES:
        return


@given(data=st.data())
def test_checkpoint_when_a_file_is_damaged_then_the_one_before_it_is_read(folder, data):
    path = folder / "checkpoints"
    path.mkdir(exist_ok=True)
    for file in path.iterdir():
        file.unlink()
    names = {}
    for epochs in (1, 2):
        content = written(ARRAYS)
        stored = StoredFile(
            name=f"epoch-{epochs:08d}.0123456789abcdef.state.npz", num_bytes=len(content), crc=zlib.crc32(content)
        )
        (path / stored.name).write_bytes(content)
        names[epochs] = stored.name.replace("state.npz", "json")
        (path / names[epochs]).write_bytes(CheckpointManifest(epochs=epochs, number=epochs, state=stored).to_bytes())
    which = data.draw(st.sampled_from([names[2], names[2].replace("json", "state.npz")]))
    before = (path / which).read_bytes()
    (path / which).write_bytes(data.draw(mutated(before)))
    found = CheckpointManager(folder_at(str(path))).latest(lambda line: None)
    if (path / which).read_bytes() != before:
        assert found.state.epochs == 1
    for name, array in found.state.arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[name])


IMAGE = SnapshotImage(
    values=LAYOUT.zeros() + 1, slots=(LAYOUT.zeros(),), state=np.ones(2), iterations=3,
    entries={0: {"attempt": 1, "step": 2, "call": 0, "highest_call": 0}}, contributions={0: (1.0, np.ones(2))},
)  # fmt: skip


@example(facts={**IMAGE.facts(), "num_slots": 2**62}, damaged=False)
@given(facts=mutated_fields(IMAGE.facts()), damaged=st.booleans())
def test_snapshot_when_its_manifest_is_anything_then_is_read_or_refused_before_it_takes_memory(folder, facts, damaged):
    arrays = folder / "latest-1.arrays"
    snapshot.write_arrays(arrays, IMAGE)
    snapshot.seal(folder, snapshot.LATEST, arrays, facts, "run")
    if damaged:
        arrays.write_bytes(arrays.read_bytes()[:-1])
    try:
        image = snapshot.read_image(folder, snapshot.LATEST, SPEC)
    except DataError as error:
        assert "latest" in str(error)
        return
    assert not damaged
    np.testing.assert_array_equal(image.values, IMAGE.values)


TABLE = StoredTable(url="/tables", name="users", shape=(5, 2), parts=2)


@given(data=st.data())
def test_reference_to_a_table_when_it_is_anything_then_is_one_or_refused(data):
    mark, fields = b"elephant-table:", dataclasses.asdict(TABLE)
    text = data.draw(
        mutated(json.dumps(fields).encode()) | (mutated_fields(fields) | JSON).map(json.dumps).map(str.encode)
    )
    try:
        table = StoredTable.from_array(np.frombuffer(mark + text, np.uint8))
    except CheckpointError:
        return
    assert table.parts > 0 and len(table.shape) == 2 and Path(table.name).name == table.name


@given(data=st.data())
def test_file_of_a_table_when_it_is_damaged_then_has_its_rows_or_is_refused(folder, data):
    table = dataclasses.replace(TABLE, url=str(folder), parts=1)
    table.write(0, np.ones((5, 2), np.float32))
    path = folder / "users.0-of-1.npy"
    header = path.read_bytes()[:-40]
    path.write_bytes(data.draw(mutated(header)) + bytes(data.draw(st.sampled_from([40, 0, 39]))))
    try:
        assert table.part(0, 1).shape == (5, 2)
    except CheckpointError as error:
        assert "users.0-of-1.npy" in str(error)


def example_file(folder):
    import tensorflow as tf

    path = folder / "rows.tfrecord"
    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[1, 2]))
    record = tf.train.Example(features=tf.train.Features(feature={"x": feature})).SerializeToString()
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(record)
        writer.write(record)
    return path


@pytest.fixture(scope="module")
def records(folder):
    """The bytes of a file of TFRecords."""
    return example_file(folder).read_bytes()


@given(data=st.data())
def test_records_when_their_file_is_damaged_then_are_read_or_an_error_that_names_it(folder, records, data):
    from elephant.rank.input.tfrecord_reader import describe, read_shares
    from elephant.storage.filesystem import list_files

    own = folder / "records"
    own.mkdir(exist_ok=True)
    (own / "rows.tfrecord").write_bytes(data.draw(mutated(records) | st.binary(max_size=40)))
    _, found = list_files(str(own))
    try:
        features = describe(str(own), found)
        rows = [row for batch in read_shares(str(own), [(found[0], 0, 1)], features) for row in batch.to_pylist()]
    except DataError as error:
        assert str(own) in str(error)
        return
    assert all(set(row) == set(features) for row in rows)


@pytest.fixture(scope="module")
def archive(folder):
    """The bytes of a model as Keras saves it."""
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.save(folder / "model.keras")
    return (folder / "model.keras").read_bytes()


@given(data=st.data())
def test_model_s_file_when_it_is_damaged_then_is_loaded_or_refused(archive, data):
    from elephant.spark.saving.model_files import model_of_file

    content = data.draw(mutated(archive) | st.just(archive).flatmap(lambda one: with_config(data, one)))
    try:
        model, _ = model_of_file(content, ".keras")
    except ConfigurationError:
        return
    assert isinstance(model, keras.Model)


def with_config(data, archive):
    """Returns archives whose config has other values here and there."""

    def changed(value):
        if isinstance(value, dict):
            name = data.draw(st.sampled_from(sorted(value) or [""]))
            return {**value, name: changed(value.get(name))} if data.draw(st.integers(0, 3)) else data.draw(JSON)
        if isinstance(value, list) and value:
            place = data.draw(st.integers(0, len(value) - 1))
            return [*value[:place], changed(value[place]), *value[place + 1 :]]
        return data.draw(JSON | st.sampled_from(["os", "builtins", "exec", *EDGES]))

    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as given_file, zipfile.ZipFile(made, "w") as other:
        for name in given_file.namelist():
            content = given_file.read(name)
            if name == "config.json":
                content = json.dumps(changed(json.loads(content))).encode()
            other.writestr(name, content)
    return st.just(made.getvalue())


def test_state_when_it_is_as_written_then_is_read(folder):
    manager = CheckpointManager(folder_at(str(folder / "whole")))
    manager.save(FitState(epochs=1, arrays=dict(ARRAYS)))
    np.testing.assert_array_equal(manager.latest().state.arrays["model/0"], ARRAYS["model/0"])
