"""The feed gives the rows that the plan says, whatever runs they are read in: compared with numpy's own indexing."""

import gc
import itertools
import threading
import time
import types

import keras
import numpy as np
import pyarrow as pa
import pytest
from rank_pool import write_shard

from elephant.backends import backend_named
from elephant.config import FitConfig
from elephant.data import shuffling
from elephant.data.epoch_plan import EpochPlan, row_order
from elephant.data.schema import DENSE, RAGGED, SCALAR, SPARSE, TEXT, DataSchema, Field
from elephant.data.shard import Shard, ShardWriter
from elephant.rank.input import feed as feed_module
from elephant.rank.input.feed import BatchFeed
from elephant.rank.input.preprocessed_shard import BatchChanges
from elephant.rank.input.preprocessing import Preprocessing

tf = pytest.importorskip("tensorflow")

FEATURES = Field("features", ("x",), "float32", DENSE, (2, 3))
LABEL = Field("label", ("y",), "int32", SCALAR)
WEIGHT = Field("weight", ("w",), "float32", SCALAR)
VALIDATION = Field("validation", ("v",), "bool", SCALAR)
ROW_BYTES = 6 * 4 + 4 + 4


def columns_of(rows):
    return {
        "features": np.arange(rows * 6, dtype="float32").reshape(rows, 2, 3),
        "label": np.arange(rows, dtype="int32"),
        "weight": np.linspace(1, 2, rows, dtype="float32"),
        "validation": np.arange(rows) % 4 == 3,
    }


@pytest.fixture
def open_shard(tmp_path):
    shards = []

    def open_(rows, schema):
        summary = write_shard(tmp_path / "shard", schema, columns_of(rows))
        shards.append(Shard(tmp_path / "shard" if rows else None, schema, {**summary.row_shapes, "features": (6,)}))
        return shards[-1]

    yield open_
    for shard in shards:
        shard.close()


def as_numpy(batches):
    """Returns batches as tuples of arrays; those without labels are an array each."""
    return [
        tuple(np.asarray(part) for part in batch) if isinstance(batch, tuple) else np.asarray(batch)
        for batch in batches
    ]


@pytest.mark.parametrize("run_rows", [1, 8, 1000], ids=lambda rows: f"runs of {rows} rows")
@pytest.mark.parametrize("shuffle", [True, False])
def test_training_batches_when_drawn_over_epochs_then_follow_the_row_order(open_shard, monkeypatch, run_rows, shuffle):
    monkeypatch.setattr(feed_module, "_RUN_BYTES", run_rows * ROW_BYTES)
    rows, batch_size, rank = 11, 4, 1
    # Rank 0 has more rows: this rank takes part in two steps without any.
    plan = EpochPlan(training_rows=(20, rows), validation_rows=(0, 0), batch_size=batch_size)
    schema = DataSchema(inputs=(FEATURES,), labels=(LABEL,), weights=(WEIGHT,))
    # The batch of a worker is shared by its two ranks.
    config = FitConfig(batch_size=2 * batch_size, gpus_per_worker=2, shuffle=shuffle, seed=5)
    feed = BatchFeed(open_shard(rows, schema), plan, config, rank)
    drawn = as_numpy(itertools.islice(feed.training_batches(first_epoch=2), 3 * plan.steps))
    columns = columns_of(rows)
    expected = []
    for epoch in (2, 3, 4):
        order = row_order(5, epoch, rank, rows, shuffle=shuffle)
        expected += [order[:4], order[4:8], order[8:], [0], [0]]
    assert len(drawn) == len(expected)
    for batch, at in zip(drawn, expected, strict=True):
        for part, name in zip(batch, ("features", "label", "weight"), strict=True):
            np.testing.assert_array_equal(part, columns[name][at])
            assert part.dtype == columns[name].dtype


@pytest.mark.parametrize("run_rows", [1, 8], ids=lambda rows: f"runs of {rows} rows")
def test_steps_when_rows_come_after_they_began_then_their_waiting_is_counted(open_shard, monkeypatch, run_rows):
    monkeypatch.setattr(feed_module, "_RUN_BYTES", run_rows * ROW_BYTES)
    clock = iter(range(100, 200))
    monkeypatch.setattr(feed_module, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    schema = DataSchema(inputs=(FEATURES,), labels=(LABEL,), weights=(WEIGHT,))
    plan = EpochPlan(training_rows=(8,), validation_rows=(0,), batch_size=4)
    feed = BatchFeed(open_shard(8, schema), plan, FitConfig(batch_size=4, shuffle=False), 0)
    batches = iter(feed.training_batches(first_epoch=1, first_step=1))
    for _ in range(3):
        next(batches)
    # Runs are ready at 100, 101 and so on: the first one has the second batch of its pass alone.
    feed.step_ended(97.0)
    assert feed.waited_s == 3.0
    feed.step_ended(98.0, steps=2)
    assert feed.waited_s == 3.0 + {1: 3.0 + 4.0, 8: 3.0}[run_rows]
    feed.step_ended(150.0)
    assert feed.waited_s == 3.0 + {1: 3.0 + 4.0, 8: 3.0}[run_rows]


def test_training_batches_when_there_is_neither_row_nor_label_then_are_zeros_of_the_agreed_shape(open_shard):
    plan = EpochPlan(training_rows=(5, 0), validation_rows=(0, 0), batch_size=2)
    feed = BatchFeed(open_shard(0, DataSchema(inputs=(FEATURES,))), plan, FitConfig(batch_size=2), 1)
    for features in as_numpy(itertools.islice(feed.training_batches(), 4)):
        np.testing.assert_array_equal(features, np.zeros((1, 2, 3), "float32"))
    assert feed.rows.tensors[0].shape == (2, 3)


def test_validation_batches_when_drawn_twice_then_are_the_marked_rows_in_order_both_times(open_shard):
    schema = DataSchema(inputs=(FEATURES,), labels=(LABEL,), validation=VALIDATION)
    plan = EpochPlan(training_rows=(9,), validation_rows=(3,), batch_size=2)
    feed = BatchFeed(open_shard(12, schema), plan, FitConfig(batch_size=2), 0)
    for _ in range(2):
        labels = [label.tolist() for _, label in as_numpy(feed.validation_batches())]
        assert labels == [[3, 7], [11]]
    trained = [label for _, label in as_numpy(itertools.islice(feed.training_batches(), plan.steps))]
    assert sorted(np.concatenate(trained)) == [0, 1, 2, 4, 5, 6, 8, 9, 10]


def test_batches_when_the_backend_is_not_tensorflow_then_are_the_same(open_shard, monkeypatch):
    schema = DataSchema(inputs=(FEATURES,), labels=(LABEL,), validation=VALIDATION)
    plan = EpochPlan(training_rows=(9,), validation_rows=(3,), batch_size=2)
    shard = open_shard(12, schema)
    expected = BatchFeed(shard, plan, FitConfig(batch_size=2), 0)
    monkeypatch.setattr(feed_module, "current", lambda: backend_named("jax"))
    feed = BatchFeed(shard, plan, FitConfig(batch_size=2), 0)
    for _ in range(2):
        assert [label.tolist() for _, label in as_numpy(feed.validation_batches())] == [[3, 7], [11]]
    drawn = as_numpy(itertools.islice(feed.training_batches(), 2 * plan.steps))
    monkeypatch.undo()
    for batch, other in zip(drawn, as_numpy(itertools.islice(expected.training_batches(), len(drawn))), strict=True):
        for part, same in zip(batch, other, strict=True):
            np.testing.assert_array_equal(part, same)


def test_batches_when_another_backend_gets_no_labels_then_are_what_keras_takes_from_a_generator(
    open_shard, monkeypatch
):
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

    shard = open_shard(4, DataSchema(inputs=(FEATURES,)))
    monkeypatch.setattr(feed_module, "current", lambda: backend_named("jax"))
    feed = BatchFeed(shard, plan_of(4, 2), FitConfig(batch_size=2), 0)
    batches = GeneratorDataAdapter(itertools.islice(feed.training_batches(), 2)).get_numpy_iterator()
    assert [keras.utils.unpack_x_y_sample_weight(batch)[0].shape for batch in batches] == [(2, 2, 3), (2, 2, 3)]


VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def shard_of(folder, schema, **columns):
    """Writes Arrow arrays by role."""
    with ShardWriter(folder, schema) as writer:
        writer.write(pa.RecordBatch.from_arrays(list(columns.values()), list(columns)))
        summary = writer.finish()
    return Shard(folder, schema, summary.row_shapes)


def plan_of(rows, batch_size, **options):
    return EpochPlan(training_rows=(rows,), validation_rows=(0,), batch_size=batch_size, **options)


def test_batches_when_sequences_differ_in_length_then_are_padded_to_their_longest_and_never_to_nothing(tmp_path):
    rows = [[1], [2, 2, 2], [], [], [5, 5], [6]]
    schema = DataSchema(inputs=(Field("features", ("x",), "int32", RAGGED, (None,)),))
    shard = shard_of(tmp_path / "s", schema, features=pa.array(rows, pa.list_(pa.int32())))
    feed = BatchFeed(shard, plan_of(6, 2), FitConfig(batch_size=2, shuffle=False), 0)
    drawn = [x.tolist() for x in as_numpy(itertools.islice(feed.training_batches(), 3))]
    assert drawn == [[[1, 0, 0], [2, 2, 2]], [[0], [0]], [[5, 5], [6, 0]]]
    assert feed.rows.tensors[0].shape == (None,)


def test_batches_when_an_input_is_sparse_then_the_model_gets_sparse_tensors(tmp_path):
    matrix = np.array([[0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0]], "float32")
    rows = [
        {"type": 0, "size": 4, "indices": np.flatnonzero(row).tolist(), "values": row[row != 0].tolist()}
        for row in matrix
    ]
    rows[2] = {"type": 1, "size": None, "indices": None, "values": matrix[2].tolist()}
    schema = DataSchema(
        inputs=(Field("features", ("x",), "float32", SPARSE, (4,), sparse_tensor=True),), labels=(LABEL,)
    )
    shard = shard_of(tmp_path / "s", schema, features=pa.array(rows, VECTOR), label=pa.array([0, 1, 2], pa.int32()))
    plan = EpochPlan(training_rows=(3, 9), validation_rows=(0, 0), batch_size=2)
    feed = BatchFeed(shard, plan, FitConfig(batch_size=2, shuffle=False), 0)
    model = keras.Sequential(
        [keras.layers.Input((4,), sparse=True), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )
    batches = list(itertools.islice(feed.training_batches(), 3))
    sums = [model(x).numpy()[:, 0].tolist() for x, _ in batches]
    # The third is the stand-in of a rank that has run out.
    assert sums == [[3, 0], [3], [3]]
    assert all(isinstance(x, tf.SparseTensor) for x, _ in batches)
    assert tf.sparse.to_dense(batches[1][0]).numpy().tolist() == matrix[2:].tolist()
    # The same data where the model takes dense ones.
    dense_schema = DataSchema(inputs=(Field("features", ("x",), "float32", SPARSE, (4,)),), labels=(LABEL,))
    shard = shard_of(
        tmp_path / "d", dense_schema, features=pa.array(rows, VECTOR), label=pa.array([0, 1, 2], pa.int32())
    )
    feed = BatchFeed(shard, plan, FitConfig(batch_size=2, shuffle=False), 0)
    drawn = [x for x, _ in as_numpy(itertools.islice(feed.training_batches(), 2))]
    np.testing.assert_array_equal(np.concatenate(drawn), matrix)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_batches_when_inputs_are_strings_then_layers_look_them_up(tmp_path, shape):
    words = np.array([["on", "off"], ["", "on"], ["é", "off"]], dtype=object)
    rows = words if shape else words[:, 0]
    kind = pa.list_(pa.string()) if shape else pa.string()
    schema = DataSchema(inputs=(Field("features", ("x",), "string", TEXT, shape or None),))
    shard = shard_of(tmp_path / "s", schema, features=pa.array(rows.tolist(), kind))
    feed = BatchFeed(shard, plan_of(3, 2), FitConfig(batch_size=2, shuffle=False), 0)
    lookup = keras.layers.StringLookup(vocabulary=["on", "off", "é"])
    found = [lookup(x).numpy() for x in itertools.islice(feed.training_batches(), 2)]
    expected = np.vectorize({"on": 1, "off": 2, "é": 3, "": 0}.get)(rows)
    np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize("batch_size", [4, 5])
@pytest.mark.parametrize("run_rows", [1, 1000])
@pytest.mark.parametrize("steps", [1, 2, 4, 7])
def test_batches_when_epochs_have_so_many_steps_then_passes_follow_one_another(
    open_shard, monkeypatch, batch_size, run_rows, steps
):
    monkeypatch.setattr(feed_module, "_RUN_BYTES", run_rows * ROW_BYTES)
    rows = 11
    plan = EpochPlan(training_rows=(16, rows), validation_rows=(0, 0), batch_size=batch_size, steps_per_epoch=steps)
    feed = BatchFeed(open_shard(rows, DataSchema(inputs=(LABEL,))), plan, FitConfig(batch_size=batch_size, seed=5), 1)
    expected = []
    for number in range(4):
        order = row_order(5, number, 1, rows, shuffle=True)
        batches = [order[first : first + batch_size] for first in range(0, rows, batch_size)]
        expected += batches + [[0]] * (plan.pass_steps - len(batches))
    expected = [np.asarray(batch).tolist() for batch in expected]
    drawn = [x.tolist() for x in as_numpy(itertools.islice(feed.training_batches(), len(expected)))]
    assert drawn == expected
    for epoch, step in ((1, 0), (2, steps - 1), (1, steps // 2)):
        first = epoch * steps + step
        if first < len(expected):
            drawn = as_numpy(itertools.islice(feed.training_batches(epoch, step), len(expected) - first))
            assert [x.tolist() for x in drawn] == expected[first:]


def test_batches_when_rows_are_more_than_are_shuffled_as_a_whole_then_every_row_comes_once_a_pass(
    open_shard, monkeypatch
):
    for name, value in {"WHOLE_BYTES": 400, "BLOCK_BYTES": 256, "LEAST_WINDOW_BYTES": 1024}.items():
        monkeypatch.setattr(shuffling, name, value)
    schema = DataSchema(inputs=(FEATURES,), labels=(LABEL,), validation=VALIDATION)
    shard = open_shard(203, schema)
    marked = np.flatnonzero(columns_of(203)["validation"])
    plan = EpochPlan(training_rows=(203 - len(marked),), validation_rows=(len(marked),), batch_size=8)
    held, expected, hold, take = [], [], shard.hold, shard.take
    monkeypatch.setattr(shard, "hold", lambda rows, *spare: held.append(len(rows)) or hold(rows, *spare))
    monkeypatch.setattr(shard, "expect", lambda start, stop: expected.extend(range(start, stop)))
    feed = BatchFeed(shard, plan, FitConfig(batch_size=8, seed=2), 0)
    monkeypatch.setattr(shard, "take", None)
    passes = []
    for epoch in range(2):
        held.clear()
        batches = as_numpy(itertools.islice(feed.training_batches(first_epoch=epoch), plan.steps))
        labels = np.concatenate([label for _, label in batches])
        np.testing.assert_array_equal(np.concatenate([x for x, _ in batches]), columns_of(203)["features"][labels])
        assert sorted(labels) == sorted(set(range(203)) - set(marked))
        assert max(held) <= 16 and sum(held) >= len(labels)
        passes.append(labels.tolist())
    assert passes[0] != passes[1] and set(expected) <= set(range(203)) and len(set(expected)) > 150
    kept = np.concatenate([label for _, label in as_numpy(feed.validation_batches())])
    np.testing.assert_array_equal(kept, marked)
    again = as_numpy(itertools.islice(feed.training_batches(first_epoch=1, first_step=5), 3))
    assert np.concatenate([label for _, label in again]).tolist() == passes[1][40:64]
    monkeypatch.setattr(shard, "take", take)
    in_memory = BatchFeed(shard, plan, FitConfig(batch_size=8, seed=2, cache="memory"), 0)
    labels = np.concatenate([y for _, y in as_numpy(itertools.islice(in_memory.training_batches(), plan.steps))])
    kept = np.setdiff1d(np.arange(203), marked)
    assert labels.tolist() == kept[row_order(2, 0, 0, len(kept), shuffle=True)].tolist()


def padded_elements(feed, steps):
    drawn = as_numpy(itertools.islice(feed.training_batches(), steps))
    return drawn, sum(x.size for x in drawn)


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_when_made_by_length_then_hold_every_row_once_and_little_padding(tmp_path, shuffle):
    lengths = np.random.default_rng(3).integers(1, 60, 1003)
    rows = [[row + 1] * length for row, length in enumerate(lengths.tolist())]
    schema = DataSchema(inputs=(Field("features", ("x",), "int32", RAGGED, (None,)),))
    shard = shard_of(tmp_path / "s", schema, features=pa.array(rows, pa.list_(pa.int32())))
    plan = plan_of(1003, 8)
    counts = {}
    for by_length in (False, True):
        config = FitConfig(batch_size=8, shuffle=shuffle, seed=1, bucket_by_length=by_length)
        drawn, counts[by_length] = padded_elements(BatchFeed(shard, plan, config, 0), 2 * plan.steps)
        for first in (0, plan.steps):
            batches = drawn[first : first + plan.steps]
            assert [len(batch) for batch in batches] == [8] * 125 + [3]
            assert sorted(batch[row, 0] for batch in batches for row in range(len(batch))) == list(range(1, 1004))
            assert all((batch != 0).sum() == lengths[batch[:, 0] - 1].sum() for batch in batches)
        again, _ = padded_elements(BatchFeed(shard, plan, config, 0), plan.steps)
        assert all(np.array_equal(one, other) for one, other in zip(again, drawn, strict=False))
    used = 2 * lengths.sum()
    assert counts[True] - used < 0.1 * (counts[False] - used)
    if shuffle:
        widths = [batch.shape[1] for batch in drawn[: plan.steps]]
        # Short and long batches are mixed.
        assert abs(np.corrcoef(np.arange(99), widths[:99])[0, 1]) < 0.5


def test_batches_when_made_by_length_then_every_pass_and_rank_has_an_order_of_its_own(tmp_path):
    # No two rows are of one length: which rows share a batch is always the same, and only the order can differ.
    rows = [[row + 1] * (row + 1) for row in range(160)]
    schema = DataSchema(inputs=(Field("features", ("x",), "int32", RAGGED, (None,)),))
    shard = shard_of(tmp_path / "s", schema, features=pa.array(rows, pa.list_(pa.int32())))
    config = FitConfig(batch_size=8, seed=1, bucket_by_length=True)
    plan = EpochPlan(training_rows=(160, 160), validation_rows=(0, 0), batch_size=8)
    orders = set()
    for rank in (0, 1):
        drawn, _ = padded_elements(BatchFeed(shard, plan, config, rank), 3 * plan.steps)
        widths = [batch.shape[1] for batch in drawn]
        passes = [tuple(widths[first : first + 20]) for first in (0, 20, 40)]
        assert {tuple(sorted(order)) for order in passes} == {tuple(range(8, 161, 8))}
        orders |= set(passes)
    assert len(orders) == 6


def test_validation_rows_when_drawn_then_are_other_ones_on_each_rank_and_never_trained_on(open_shard):
    schema = DataSchema(inputs=(FEATURES,), labels=(LABEL,))
    plan = EpochPlan(training_rows=(60, 60), validation_rows=(20, 20), batch_size=8)
    drawn, shard = [], open_shard(80, schema)
    for rank in (0, 1):
        feed = BatchFeed(shard, plan, FitConfig(batch_size=8, seed=5, validation_fraction=0.25), rank)
        kept = np.concatenate([label for _, label in as_numpy(feed.validation_batches())]).tolist()
        used = np.concatenate(
            [label for _, label in as_numpy(itertools.islice(feed.training_batches(), 2 * plan.steps))]
        )
        assert sorted(set(used)) == sorted(set(range(80)) - set(kept)) and len(kept) == 20
        drawn.append(kept)
    # The same rows on both ranks: only the rank tells the draws apart.
    assert drawn[0] != drawn[1]


def test_user_functions_when_training_and_validation_batches_are_made_at_once_then_no_two_calls_overlap(tmp_path):
    schema = DataSchema(inputs=(Field("features", ("x",), "float32", SCALAR),), x={"x": 0})
    target = DataSchema(inputs=(Field("features", ("x",), "float32", DENSE, (1,)),))
    inside, most = [], []

    def function(batch):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return batch["x"]

    preprocessing = Preprocessing(function, schema, target, ["numbers"], {})
    rows = Shard(None, target, {"features": (1,)})
    changes = BatchChanges(rows, preprocessing=preprocessing, augmentation=None, place=(0, 0))
    values = [np.zeros(2, np.float32)]
    threads = [
        threading.Thread(target=lambda: [changes.training(values, 0, step) for step in range(5)], name="training"),
        threading.Thread(target=lambda: [changes.validation(values, step) for step in range(5)], name="validation"),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1] * 10


class AddsAHundred:
    """Changes training batches as `BatchChanges` does, and notes which."""

    any = True

    def __init__(self, shard):
        self.row_shard = shard
        self.places = []

    def training(self, values, epoch, step):
        self.places.append((epoch, step))
        return tuple(value + 100 for value in values)

    def validation(self, values, batch):
        return values


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize("kind", ["rows of one size", "sequences", "changed in every epoch"])
def test_batches_when_the_model_has_the_first_then_the_next_are_read_unasked(tmp_path, monkeypatch, backend, kind):
    monkeypatch.setattr(feed_module, "_RUN_BYTES", 1)
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    sequences = kind == "sequences"
    field = Field("features", ("x",), "int32", RAGGED if sequences else SCALAR, (None,) if sequences else None)
    numbers = pa.array([[row] for row in range(12)], pa.list_(pa.int32())) if sequences else pa.array(range(12))
    schema = DataSchema(inputs=(field,))
    shard = shard_of(tmp_path / "s", schema, features=numbers)
    read, second = [], threading.Event()
    take = shard.take

    def noting(rows):
        read.append(rows.tolist())
        if len(read) == 2:
            second.set()
        return take(rows)

    changes = AddsAHundred(shard)
    feed = BatchFeed(
        shard,
        plan_of(12, 2, steps_per_epoch=4),
        FitConfig(batch_size=2, shuffle=False),
        0,
        changes if kind == "changed in every epoch" else None,
    )
    monkeypatch.setattr(shard, "take", noting)
    batches = iter(feed.training_batches())
    first = as_numpy([next(batches)])[0]
    # Nobody asks for the second batch; were it read only then, this wait would end without it.
    assert second.wait(timeout=60)
    later = as_numpy([next(batches)])[0]
    drawn = [np.ravel(first).tolist(), np.ravel(later).tolist()]
    if kind == "changed in every epoch":
        assert drawn == [[100, 101], [102, 103]]
        for _ in range(4):
            next(batches)
        assert changes.places[:6] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    else:
        assert drawn == [[0, 1], [2, 3]]
    del batches
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "elephant-feed"]


def test_batches_when_reading_fails_on_its_thread_then_the_error_comes_to_the_model(open_shard, monkeypatch):
    monkeypatch.setattr(feed_module, "current", lambda: backend_named("jax"))
    shard = open_shard(4, DataSchema(inputs=(LABEL,)))
    feed = BatchFeed(shard, plan_of(4, 2), FitConfig(batch_size=2), 0)

    def fail(rows):
        raise OSError("the disk is gone")

    monkeypatch.setattr(shard, "take", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(feed.training_batches()))


def test_batches_by_length_when_rows_are_all_of_one_length_then_every_row_is_drawn_once(open_shard):
    # Preprocessing that is kept can make such rows of sequences; a run then holds more batches than a pool does.
    rows, batch_size = 600, 2
    config = FitConfig(batch_size=batch_size, bucket_by_length=True)
    schema = DataSchema(inputs=(FEATURES,), labels=(LABEL,))
    feed = BatchFeed(open_shard(rows, schema), plan_of(rows, batch_size), config, 0)
    drawn = as_numpy(itertools.islice(feed.training_batches(), rows // batch_size))
    assert sorted(np.concatenate([labels for _, labels in drawn])) == list(range(rows))
