"""The feed gives the rows that the plan says, whatever runs they are read in: compared with numpy's own indexing."""

import itertools

import keras
import numpy as np
import pytest
from rank_pool import write_shard

from elephant.config import FitConfig
from elephant.data.epoch_plan import EpochPlan, row_order
from elephant.data.schema import DENSE, SCALAR, DataSchema, Field
from elephant.data.shard import Shard
from elephant.training import feed as feed_module
from elephant.training.feed import Feed

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
    return [tuple(np.asarray(part) for part in batch) for batch in batches]


@pytest.mark.parametrize("run_rows", [1, 8, 1000], ids=lambda rows: f"runs of {rows} rows")
@pytest.mark.parametrize("shuffle", [True, False])
def test_training_batches_when_drawn_over_epochs_then_follow_the_row_order(open_shard, monkeypatch, run_rows, shuffle):
    monkeypatch.setattr(feed_module, "_RUN_BYTES", run_rows * ROW_BYTES)
    rows, batch_size, rank = 11, 4, 1
    # Rank 0 has more rows: this rank takes part in two steps without any.
    plan = EpochPlan(training_rows=(20, rows), validation_rows=(0, 0), batch_size=batch_size)
    schema = DataSchema(inputs=(FEATURES,), labels=(LABEL,), weights=(WEIGHT,))
    config = FitConfig(batch_size=batch_size, shuffle=shuffle, seed=5)
    feed = Feed(open_shard(rows, schema), plan, config, rank)
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


def test_training_batches_when_there_is_neither_row_nor_label_then_are_zeros_of_the_agreed_shape(open_shard):
    plan = EpochPlan(training_rows=(5, 0), validation_rows=(0, 0), batch_size=2)
    feed = Feed(open_shard(0, DataSchema(inputs=(FEATURES,))), plan, FitConfig(batch_size=2), 1)
    for batch in as_numpy(itertools.islice(feed.training_batches(), 4)):
        (features,) = batch
        np.testing.assert_array_equal(features, np.zeros((1, 2, 3), "float32"))
    assert feed.rows.tensors[0].shape == (2, 3)


def test_validation_batches_when_drawn_twice_then_are_the_marked_rows_in_order_both_times(open_shard):
    schema = DataSchema(inputs=(FEATURES,), labels=(LABEL,), validation=VALIDATION)
    plan = EpochPlan(training_rows=(9,), validation_rows=(3,), batch_size=2)
    feed = Feed(open_shard(12, schema), plan, FitConfig(batch_size=2), 0)
    for _ in range(2):
        labels = [label.tolist() for _, label in as_numpy(feed.validation_batches())]
        assert labels == [[3, 7], [11]]
    trained = [label for _, label in as_numpy(itertools.islice(feed.training_batches(), plan.steps))]
    assert sorted(np.concatenate(trained)) == [0, 1, 2, 4, 5, 6, 8, 9, 10]


def test_batches_when_the_backend_is_not_tensorflow_then_are_the_same(open_shard, monkeypatch):
    schema = DataSchema(inputs=(FEATURES,), labels=(LABEL,), validation=VALIDATION)
    plan = EpochPlan(training_rows=(9,), validation_rows=(3,), batch_size=2)
    shard = open_shard(12, schema)
    expected = Feed(shard, plan, FitConfig(batch_size=2), 0)
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    feed = Feed(shard, plan, FitConfig(batch_size=2), 0)
    for _ in range(2):
        assert [label.tolist() for _, label in as_numpy(feed.validation_batches())] == [[3, 7], [11]]
    drawn = as_numpy(itertools.islice(feed.training_batches(), 2 * plan.steps))
    monkeypatch.undo()
    for batch, other in zip(drawn, as_numpy(itertools.islice(expected.training_batches(), len(drawn))), strict=True):
        for part, same in zip(batch, other, strict=True):
            np.testing.assert_array_equal(part, same)
