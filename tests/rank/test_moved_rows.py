"""Rows of virtual shards that move from rank to rank: every one arrives whole, in columns of any kind."""

import numpy as np
import pytest
from rank_pool import write_shard
from rank_threads import run_threads

from elephant.data.schema import DENSE, PIECE, RAGGED, SCALAR, TEXT, DataSchema, Field
from elephant.data.shard import Shard, content_hashes
from elephant.data.virtual_shards import elastic_plan, piece_counts
from elephant.rank.input import moved_rows
from elephant.rank.input.moved_rows import moved_shard

RANKS, PIECES, ROWS = 3, 9, 400
SCHEMA = DataSchema(
    inputs=(
        Field("features", ("x",), "float32", DENSE, (2, 3)),
        Field("features_1", ("s",), "int32", RAGGED),
        Field("features_2", ("t",), "string", TEXT),
    ),
    labels=(Field("label", ("y",), "int64", SCALAR),),
    weights=(Field("weight", ("w",), "float32", SCALAR),),
    validation=Field("validation", ("v",), "bool", SCALAR),
    piece=Field(PIECE, ("p",), "int32", SCALAR),
)


def columns_of(rows):
    rng = np.random.default_rng(7)
    return {
        "features": rng.normal(size=(rows, 6)).astype("float32"),
        "features_1": [rng.integers(0, 99, rng.integers(1, 9)).astype("int32") for _ in range(rows)],
        "features_2": [["a" * int(rng.integers(0, 5)), "ä"] for _ in range(rows)],
        "label": np.arange(rows),
        "weight": rng.uniform(size=rows).astype("float32"),
        "validation": rng.uniform(size=rows) < 0.2,
        PIECE: rng.integers(0, PIECES, rows).astype("int32"),
    }


def part_of(columns, rows):
    return {
        name: values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]
        for name, values in columns.items()
    }


@pytest.mark.parametrize("chunk_bytes", [300, 1 << 20], ids=["a few rows at a time", "all at once"])
def test_rows_when_virtual_shards_move_twice_then_are_those_of_their_owners_in_all_columns(
    tmp_path, monkeypatch, chunk_bytes
):
    monkeypatch.setattr(moved_rows, "_CHUNK_BYTES", chunk_bytes)
    columns = columns_of(ROWS)
    owners = [(0, 1, 2) * 3, (0, 0, 2, 1, 1, 0, 2, 1, 2), (0, 0, 2, 0, 1, 0, 2, 0, 2)]
    paths = [tmp_path / str(rank) for rank in range(RANKS)]
    summaries = [
        write_shard(path, SCHEMA, part_of(columns, np.flatnonzero(np.array(owners[0])[columns[PIECE]] == rank)))
        for rank, path in enumerate(paths)
    ]
    shapes = summaries[0].row_shapes
    write_shard(tmp_path / "all", SCHEMA, columns)
    whole = Shard(tmp_path / "all", SCHEMA, shapes)
    hashes = content_hashes(whole)
    counts = [
        piece_counts(columns[PIECE][dealt], np.flatnonzero(columns["validation"][dealt]), PIECES)
        for dealt in (np.flatnonzero(np.array(owners[0])[columns[PIECE]] == rank) for rank in range(RANKS))
    ]
    dealt = elastic_plan(counts, batch_size=4, global_rows=12, validation_fraction=0.0, is_marked=True)
    plans = [dealt, *(dealt.with_owners(after) for after in owners[1:])]

    def move(communicator):
        shard = Shard(paths[communicator.rank], SCHEMA, shapes)
        for before, after in zip(plans, plans[1:], strict=False):
            shard = moved_shard(shard, before, after, communicator)
            assert shard.num_rows == after.training_rows[communicator.rank] + after.validation_rows[communicator.rank]
        labels = shard.column(SCHEMA.labels[0], np.arange(shard.num_rows))
        marked = labels[shard.validation_rows()]
        found = (labels, content_hashes(shard), shard.pieces(), marked)
        shard.close()
        return found

    for rank, (labels, found, pieces, marked) in enumerate(run_threads(RANKS, move)):
        expected = np.flatnonzero(np.array(owners[-1])[columns[PIECE]] == rank)
        assert sorted(labels) == expected.tolist()
        np.testing.assert_array_equal(found, hashes[labels])
        np.testing.assert_array_equal(pieces, columns[PIECE][labels])
        assert sorted(marked) == np.flatnonzero(columns["validation"] & np.isin(np.arange(ROWS), expected)).tolist()
    # What Spark has dealt stays for a rank that begins again, and nothing else.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "all"]
    whole.close()


def test_rows_when_those_of_a_rank_stay_then_are_not_written_anew(tmp_path):
    columns = columns_of(30)
    columns[PIECE] %= 3
    columns["validation"][:] = False
    all_counts = piece_counts(columns[PIECE], np.array([], np.int64), 3)
    counts = [all_counts * (np.arange(3) == rank)[:, np.newaxis] for rank in range(3)]
    plan = elastic_plan(counts, batch_size=4, global_rows=12, validation_fraction=0.0, is_marked=True)
    shapes = [
        write_shard(tmp_path / str(rank), SCHEMA, part_of(columns, np.flatnonzero(columns[PIECE] == rank))).row_shapes
        for rank in range(3)
    ]

    def move(communicator):
        shard = Shard(tmp_path / str(communicator.rank), SCHEMA, shapes[0])
        return moved_shard(shard, plan, plan.with_owners((0, 0, 2)), communicator) is shard

    assert run_threads(3, move) == [False, False, True]
