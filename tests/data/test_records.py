"""Records of arrays, numbers, strings and vectors become the batches that numpy makes of them, in parts."""

import numpy as np
import pytest
from tables import every_case

from elephant.data import records
from elephant.data.ragged import dense, padded, strings
from elephant.data.records import RecordPlan
from elephant.data.schema import DENSE, RAGGED, SCALAR, SPARSE, TEXT, DataSchema, Field
from elephant.data.shard import Shard, ShardWriter
from elephant.errors import DataError


class Sparse:
    """A vector as Spark's are: this layer does not know Spark."""

    def __init__(self, size, indices, values):
        self.size, self.indices, self.values = size, np.array(indices, np.int32), np.array(values)

    def toArray(self):
        array = np.zeros(self.size)
        array[self.indices] = self.values
        return array


def plan_of(*fields, nest=0, shapes=None, **options):
    shapes = shapes or [() if field.shape is None else field.shape for field in fields]
    return RecordPlan(schema=DataSchema(tuple(fields)), nest=nest, shapes=tuple(shapes), **options)


def through_a_shard(plan, rows, folder):
    """Returns the columns as a training process reads them."""
    with ShardWriter(folder / "shard", plan.schema) as writer:
        for batch in plan.batches(iter(rows)):
            writer.write(batch)
        summary = writer.finish()
    shard = Shard(folder / "shard", plan.schema, summary.row_shapes)
    return shard.take(np.arange(len(rows)))


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "uint8", "bool"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_arrays_when_records_hold_them_then_equal_numpy_in_any_chunks(tmp_path, monkeypatch, dtype, chunk):
    monkeypatch.setattr(records, "_BATCH_RECORDS", chunk)
    values = np.random.default_rng(0).integers(0, 2, (7, 2, 3)).astype(dtype)
    plan = plan_of(Field("features", ("x",), "float32", DENSE, (2, 3)))
    (taken,) = through_a_shard(plan, list(values), tmp_path)
    assert taken.dtype == np.float32
    np.testing.assert_array_equal(taken, values)


@pytest.mark.parametrize(
    ("given", "dtype", "kept"),
    [
        ([1, np.int64(2), np.array(3)], "int64", [1, 2, 3]),
        ([1.0, np.float64(2), 3], "int64", [1, 2, 3]),
        ([1, 2.5, np.float32(3)], "float32", [1, 2.5, 3]),
        ([True, False, np.True_], "int32", [1, 0, 1]),
    ],
    ids=str,
)
def test_numbers_when_of_any_type_then_have_the_type_of_the_column(tmp_path, given, dtype, kept):
    (taken,) = through_a_shard(plan_of(Field("label", ("y",), dtype, SCALAR)), given, tmp_path)
    assert taken.dtype == dtype and taken.tolist() == kept


def test_records_when_nested_then_every_part_finds_its_column(tmp_path):
    fields = [Field(f"f{n}", (f"f{n}",), "float32", SCALAR) for n in range(3)]
    plan = plan_of(*fields, nest=({"b": 1, "a": (0, 3)}, 2))
    taken = through_a_shard(plan, [({"a": [1, None], "b": 2}, 3), ({"b": 5, "a": (4, "x")}, 6)], tmp_path)
    assert [part.tolist() for part in taken] == [[1, 4], [2, 5], [3, 6]]


def test_vectors_when_they_hold_several_inputs_then_are_cut(tmp_path):
    fields = [Field("a", ("a",), "float32", DENSE, (2,)), Field("b", ("b",), "int32", DENSE, (1,))]
    plan = plan_of(*fields, cut=(2, 1))
    first, second = through_a_shard(plan, [np.array([1.0, 2, 3]), [4.0, 5, 6]], tmp_path)
    assert first.tolist() == [[1, 2], [4, 5]] and second.tolist() == [[3], [6]]
    with pytest.raises(DataError, match=r"record 1 of the partition: expected 3 values.* Received: 2\."):
        list(plan.batches([[1, 2, 3], [1, 2]]))


def test_sequences_strings_and_sparse_vectors_when_in_records_then_are_kept_as_they_are(tmp_path):
    plan = plan_of(
        Field("s", ("s",), "int32", RAGGED, (None,)),
        Field("v", ("v",), "float32", RAGGED, (None, 2)),
        Field("t", ("t",), "string", TEXT, (2,)),
        Field("p", ("p",), "float32", SPARSE, (4,)),
        nest=(0, 1, 2, 3),
        shapes=[(), (2,), (2,), (4,)],
    )
    rows = [
        ([1, 2, 3], np.ones((1, 2)), ["a", "ü"], Sparse(4, [1, 3], [5.0, 7.0])),
        ([], np.zeros((0, 2)), np.array(["", "b"]), np.array([1.0, 0, 0, 2])),
        (np.array([4]), [[2, 3], [4, 5]], ("c", b"d"), Sparse(4, [], [])),
    ]
    sequences, vectors, text, sparse = through_a_shard(plan, rows, tmp_path)
    assert padded(sequences).tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert padded(vectors)[2].tolist() == [[2, 3], [4, 5]]
    assert strings(text, (2,)).tolist() == [[b"a", "ü".encode()], [b"", b"b"], [b"c", b"d"]]
    assert dense(sparse, 4).tolist() == [[0, 5, 0, 7], [1, 0, 0, 2], [0, 0, 0, 0]]
    assert len(sparse.buffers[1]) == 6


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr", "lil"])
def test_sparse_vectors_when_rows_of_scipy_in_any_form_then_equal_the_dense_ones(tmp_path, form):
    scipy_sparse = pytest.importorskip("scipy.sparse")
    # The last element of the second row is given in two parts.
    rows = [([5.0, 7.0], [1, 3]), ([1.0, 2.0, 3.0], [0, 3, 3]), ([], [])]
    matrices = [
        scipy_sparse.csr_matrix((np.array(values), np.array(places, int), [0, len(places)]), shape=(1, 4))
        for values, places in rows
    ]
    plan = plan_of(Field("p", ("p",), "float32", SPARSE, (4,)), shapes=[(4,)])
    (sparse,) = through_a_shard(plan, [matrix.asformat(form) for matrix in matrices], tmp_path)
    assert dense(sparse, 4).tolist() == [[0, 5, 0, 7], [1, 0, 0, 5], [0, 0, 0, 0]]


def test_sparse_vectors_when_one_is_a_matrix_of_several_rows_then_the_error_names_it():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    plan = plan_of(Field("p", ("p",), "float32", SPARSE, (2,)), shapes=[(2,)])
    rows = [scipy_sparse.csr_matrix([[0.0, 1.0]]), scipy_sparse.csr_matrix([[0.0, 1.0], [3.0, 0.0]])]
    with pytest.raises(DataError, match=r"column 'p': expected a vector .* of shape \(2, 2\) in record 1"):
        list(plan.batches(rows))


def test_large_records_when_read_then_few_are_held_at_a_time(monkeypatch):
    monkeypatch.setattr(records, "_BATCH_BYTES", 1000)
    handed_out = []

    def generate():
        for number in range(50):
            handed_out.append(number)
            yield np.full(100, number, "float32")

    batches = plan_of(Field("x", ("x",), "float32", DENSE, (100,))).batches(generate())
    assert next(batches).num_rows == 3 and len(handed_out) == 3
    assert sum(batch.num_rows for batch in batches) == 47


def test_records_when_there_are_none_then_there_is_no_batch():
    assert list(plan_of(Field("x", ("x",), "float32", SCALAR)).batches(iter([]))) == []


PAIR = (Field("x", ("x",), "float32", DENSE, (2,)), Field("y", ("y",), "int64", SCALAR))


@every_case(
    ("record", "text"),
    [
        (([1.0, 2.0],), r"record 9000 of the partition: expected 2 parts. Received: 1. All records must have"),
        ([1.0], r"record 9000 of the partition: expected 2 parts. Received: 1"),
        (
            ([1.0], 0),
            r"column 'x': expected shape \(2,\) in every record.* Received: list of shape \(1,\) in record 9000",
        ),
        (([[1.0, 2.0]], 0), r"column 'x': .* Received: list of shape \(1, 2\) in record 9000"),
        (([1.0, [2.0]], 0), r"column 'x': .* Received: list in record 9000"),
        ((None, 0), r"column 'x': .* Received: None in record 9000"),
        ((["a", "b"], 0), r"column 'x': .* Received: list in record 9000"),
        (([1.0, 2.0], 0.5), r"column 'y': expected integers.* Received: 0.5 in record 9000 .* make them floats"),
        (([1.0, 2.0], float("nan")), r"column 'y': expected integers.* Received: nan in record 9000"),
        (([1.0, 2.0], 1e19), r"column 'y': expected integers.* Received: 1e\+19 in record 9000"),
        (([1.0, 2.0], [1]), r"column 'y': expected shape \(\) in every record.* list of shape \(1,\) in record 9000"),
    ],
)
def test_records_when_one_is_unlike_the_first_then_the_error_names_it(record, text):
    rows = [([1.0, 2.0], 0)] * 9000
    with pytest.raises(DataError, match=text):
        list(plan_of(*PAIR, nest=(0, 1)).batches([*rows, record]))


@pytest.mark.parametrize(
    ("field", "shape", "good", "bad"),
    [
        (Field("x", ("x",), "float32", RAGGED, (None, 2)), (2,), [[1, 2]], [[1, 2, 3]]),
        (Field("x", ("x",), "string", TEXT, ()), (), "a", 1),
        (Field("x", ("x",), "string", TEXT, (2,)), (2,), ["a", "b"], ["a"]),
        (Field("x", ("x",), "float32", SPARSE, (2,)), (2,), Sparse(2, [0], [1.0]), "a"),
    ],
    ids=["ragged", "text", "texts", "sparse"],
)
def test_other_kinds_when_one_record_is_unlike_the_first_then_the_error_names_it(field, shape, good, bad):
    with pytest.raises(DataError, match=r"column 'x': expected .* in record 1 of the partition"):
        list(plan_of(field, shapes=[shape]).batches([good, bad]))
