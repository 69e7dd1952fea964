"""Columns of every kind: what is written comes back as the Python lists that Arrow was given say, in any order."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import every_case

from elephant.data.ragged import RaggedArray, coordinates, dense, padded, strings
from elephant.data.schema import DENSE, RAGGED, SCALAR, SPARSE, TEXT, DataSchema, Field
from elephant.data.shard import Shard, ShardWriter
from elephant.data.to_numpy import to_values
from elephant.errors import DataError

LABEL = Field("label", ("y",), "int32", SCALAR)
VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)
NUMBERS = st.floats(-1e6, 1e6, width=32)


def schema_of(field):
    return DataSchema(inputs=(field,), labels=(LABEL,))


def shard_of(folder, field, kind, rows, cuts):
    """Writes rows, Python values, in record batches that are slices of one Arrow array; opens them again."""
    schema = schema_of(field)
    # Rows before and after, which belong to no batch.
    column = pa.array([rows[-1], *rows, rows[0]], kind)
    numbers = pa.array(range(-1, len(rows) + 1), pa.int32())
    with ShardWriter(folder, schema) as writer:
        for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            parts = [array.slice(start + 1, stop - start) for array in (column, numbers)]
            writer.write(pa.RecordBatch.from_arrays(parts, ["features", "label"]))
        summary = writer.finish()
    return Shard(folder, schema, summary.row_shapes)


def drawn(data, count):
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=3), label="cuts"))
    taken = data.draw(st.lists(st.integers(0, count - 1), max_size=12), label="taken")
    return cuts, np.array(taken, dtype=np.int64)


def taken_rows(tmp_path_factory, field, kind, rows, data, *, in_memory=False):
    """Returns what the shard gives for drawn positions, these, and the shard."""
    cuts, taken = drawn(data, len(rows))
    shard = shard_of(tmp_path_factory.mktemp("shard") / "shard", field, kind, rows, cuts)
    assert shard.num_rows == len(rows)
    values, labels = shard.take(taken)
    assert labels.tolist() == taken.tolist()
    # Read from the files, in stretches, and taken from there.
    held = shard.hold(np.unique(taken)).take(taken)
    for one, other in zip(held, (values, labels), strict=True):
        for part, same in zip(arrays_of(one), arrays_of(other), strict=True):
            np.testing.assert_array_equal(part, same)
    return values, taken, shard


@given(data=st.data(), shape=st.lists(st.integers(1, 3), min_size=1, max_size=3), count=st.integers(1, 9))
def test_nested_arrays_when_taken_then_equal_numpy(tmp_path_factory, data, shape, count):
    rows = np.random.default_rng(count).normal(size=(count, *shape)).astype("float32")
    kind = pa.float64()
    for size in reversed(shape):
        kind = data.draw(st.sampled_from([pa.list_(kind), pa.large_list(kind), pa.list_(kind, size)]))
    told = data.draw(st.sampled_from([None, tuple(shape), (*shape, 1), (None, shape[-1])]))
    field = Field("features", ("x",), "float32", DENSE, told)
    values, taken, shard = taken_rows(tmp_path_factory, field, kind, rows.tolist(), data)
    whole = (int(np.prod(shape[:-1])), shape[-1])
    expected = {None: tuple(shape), (None, shape[-1]): whole}.get(told, told)
    np.testing.assert_array_equal(values, rows[taken].reshape(len(taken), *expected))
    assert values.dtype == np.float32 and shard.row_shapes["features"] == tuple(shape)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "uint8"])
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(6 * 8)])
def test_raw_tensors_when_taken_then_equal_numpy(tmp_path, dtype, kind):
    if pa.types.is_fixed_size_binary(kind):
        kind = pa.binary(6 * np.dtype(dtype).itemsize)
    rows = (np.arange(30) * 3).astype(dtype).reshape(5, 2, 3)
    shard = shard_of(
        tmp_path / "s", Field("features", ("x",), dtype, DENSE, (2, 3)), kind, [row.tobytes() for row in rows], [2]
    )
    np.testing.assert_array_equal(shard.take(np.array([4, 0, 2]))[0], rows[[4, 0, 2]])


def test_raw_tensors_when_a_row_has_other_bytes_then_it_is_named():
    field = Field("features", ("x",), "float32", DENSE, (2, 3))
    with pytest.raises(
        DataError, match=r"column 'x': expected 6 float32 .* in 24 bytes.* Received: 20 bytes in row 8 "
    ):
        to_values(pa.array([b"0" * 24, b"0" * 20], pa.binary()), field, first_row=7)


@given(data=st.data(), inner=st.lists(st.integers(1, 3), max_size=2), count=st.integers(1, 9))
def test_ragged_rows_when_taken_then_equal_the_lists(tmp_path_factory, data, inner, count):
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    rng = np.random.default_rng(count)
    rows = [rng.normal(size=(length, *inner)).astype("float32") for length in lengths]
    kind = pa.float32()
    for _ in inner:
        kind = pa.list_(kind)
    told = data.draw(st.sampled_from([None, (None, *inner), (5, *inner)]))
    field = Field("features", ("x",), "float32", RAGGED, told)
    values, taken, shard = taken_rows(tmp_path_factory, field, pa.list_(kind), [row.tolist() for row in rows], data)
    assert isinstance(values, RaggedArray)
    assert np.diff(values.offsets).tolist() == [lengths[row] for row in taken]
    flat = np.concatenate([rows[row] for row in taken]) if sum(lengths[row] for row in taken) else None
    if flat is not None:
        np.testing.assert_array_equal(values.buffers[0], flat)
    longest = max([lengths[row] for row in taken], default=0)
    expected = np.zeros((len(taken), longest, *inner), "float32")
    for place, row in enumerate(taken):
        expected[place, : lengths[row]] = rows[row]
    if sum(lengths):
        np.testing.assert_array_equal(padded(values), expected)


def test_ragged_rows_when_the_first_batches_have_no_element_then_later_ones_tell_the_shape(tmp_path):
    rows = [[], [], [[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]]
    field = Field("features", ("x",), "float32", RAGGED)
    shard = shard_of(tmp_path / "s", field, pa.list_(pa.list_(pa.float32())), rows, [1, 2])
    assert shard.row_shapes["features"] == (2,)
    np.testing.assert_array_equal(
        padded(shard.take(np.array([3, 0, 2]))[0]),
        [[[3, 4], [5, 6]], [[0, 0], [0, 0]], [[1, 2], [0, 0]]],
    )


@given(data=st.data(), size=st.integers(1, 6), count=st.integers(1, 9))
def test_sparse_rows_when_taken_then_equal_the_dense_matrix(tmp_path_factory, data, size, count):
    matrix = np.zeros((count, size), "float32")
    rows = []
    for row in range(count):
        kept = sorted(data.draw(st.sets(st.integers(0, size - 1))))
        matrix[row, kept] = data.draw(st.lists(NUMBERS, min_size=len(kept), max_size=len(kept)))
        if data.draw(st.booleans()):
            rows.append({"type": 1, "size": None, "indices": None, "values": matrix[row].tolist()})
        else:
            rows.append({"type": 0, "size": size, "indices": kept, "values": matrix[row, kept].tolist()})
    field = Field("features", ("x",), "float32", SPARSE, data.draw(st.sampled_from([None, (size,)])))
    values, taken, shard = taken_rows(tmp_path_factory, field, VECTOR, rows, data)
    np.testing.assert_array_equal(dense(values, size), matrix[taken])
    assert shard.row_shapes["features"] == (size,)
    places = coordinates(values)
    np.testing.assert_array_equal(matrix[taken][places[:, 0], places[:, 1]], values.buffers[1])


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=5)


@given(data=st.data(), shape=st.lists(st.integers(1, 3), max_size=2), count=st.integers(1, 7))
def test_texts_when_taken_then_equal_the_strings(tmp_path_factory, data, shape, count):
    total = count * int(np.prod(shape))
    flat = np.array(data.draw(st.lists(TEXTS, min_size=total, max_size=total)), dtype=object)
    rows = flat.reshape(count, *shape)
    encoded = np.array([text.encode() for text in flat], dtype=object).reshape(count, *shape)
    kind = data.draw(st.sampled_from([pa.string(), pa.large_string(), pa.binary()]))
    given_rows = (encoded if kind == pa.binary() else rows).tolist()
    for _ in shape:
        kind = pa.list_(kind)
    field = Field("features", ("x",), "string", TEXT, tuple(shape) if shape else None)
    values, taken, shard = taken_rows(tmp_path_factory, field, kind, given_rows, data)
    made = strings(values, shard.row_shape(field))
    assert made.tolist() == encoded[taken].tolist() and made.shape == (len(taken), *shape)


@every_case(
    ("field", "kind", "rows", "message"),
    [
        (
            Field("features", ("x",), "float32", DENSE),
            pa.list_(pa.list_(pa.float32())),
            [[[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0]]],
            r"column 'x': expected 2 values in every inner array. Received: 1 value in row 11 of",
        ),
        (
            Field("features", ("x",), "float32", DENSE, (2, 2)),
            pa.list_(pa.list_(pa.float32())),
            [[[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0]]],
            r"column 'x': expected 2 values in every row \(the model's shape \(2, 2\)\). Received: 1 value in row 11 ",
        ),
        (
            Field("features", ("x",), "float32", DENSE),
            pa.list_(pa.list_(pa.list_(pa.float32()))),
            [[[[1.0]], [[2.0]]], [[[1.0]], [[2.0, 3.0]]]],
            r"column 'x': expected 1 value in every inner array. Received: 2 values in row 11 of",
        ),
        (
            Field("features", ("x",), "float32", DENSE),
            pa.list_(pa.list_(pa.float32())),
            [[[1.0], [2.0]], [[3.0], [None]]],
            r"column 'x', element 1: expected a number. Received: null in row 11 of",
        ),
        (
            Field("features", ("x",), "float32", DENSE),
            pa.list_(pa.float32()),
            [[], []],
            r"column 'x': expected at least one value in every row. Received: rows of 0 values",
        ),
        (
            Field("features", ("x",), "float32", RAGGED),
            pa.list_(pa.float32()),
            [[1.0, 2.0], [3.0, None]],
            r"column 'x', element 1: expected a number. Received: null in row 11 of",
        ),
        (
            Field("features", ("x",), "float32", RAGGED),
            pa.list_(pa.list_(pa.float32())),
            [[[1.0, 2.0], [1.0, 2.0]], [[1.0, 2.0], [1.0, 2.0], [1.0]]],
            r"column 'x': expected 2 values in every inner array. Received: 1 value in row 11 of",
        ),
        (
            Field("features", ("x",), "float32", RAGGED),
            pa.list_(pa.list_(pa.float32())),
            [[[1.0, 2.0], [1.0, 2.0]], [[1.0, 2.0], [1.0, None]]],
            r"column 'x', element 1: expected a number. Received: null in row 11 of",
        ),
        (
            Field("features", ("x",), "int8", RAGGED),
            pa.list_(pa.int64()),
            [[1, 2, 3], [4, 500]],
            r"column 'x': expected integers from -128 to 127, .* Received: 500 in row 11 of",
        ),
        (
            Field("features", ("x",), "float32", RAGGED),
            pa.list_(pa.float32()),
            [[1.0], None],
            r"column 'x': expected a value in every row. Received: null in row 11 of",
        ),
        (
            Field("features", ("x",), "float32", SPARSE),
            VECTOR,
            [
                {"type": 0, "size": 3, "indices": [1], "values": [1.0]},
                {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]},
            ],
            r"column 'x': expected 3 values in every row. Received: 2 values in row 11 of",
        ),
        (
            Field("features", ("x",), "float32", SPARSE),
            VECTOR,
            [
                {"type": 0, "size": 3, "indices": [1], "values": [1.0]},
                {"type": 0, "size": 3, "indices": [0, 3], "values": [1.0, 2.0]},
            ],
            r"column 'x': expected indices from 0 to 2, .* Received: 3 in row 11 of",
        ),
        (
            Field("features", ("x",), "float32", SPARSE),
            VECTOR,
            [
                {"type": 0, "size": 3, "indices": [1], "values": [1.0]},
                {"type": 0, "size": 3, "indices": [0, 2], "values": [1.0, None]},
            ],
            r"column 'x', value 1: expected a number. Received: null in row 11 of",
        ),
        (
            Field("features", ("x",), "string", TEXT, (2,)),
            pa.list_(pa.string()),
            [["a", "b"], ["c"]],
            r"column 'x': expected 2 values in every row .* Received: 1 value in row 11 of",
        ),
        (
            Field("features", ("x",), "string", TEXT),
            pa.list_(pa.string()),
            [["a", "b"], ["c", None]],
            r"column 'x', element 1: expected a string. Received: null in row 11 of",
        ),
    ],
)
def test_rows_when_unusable_then_column_and_row_are_named(field, kind, rows, message):
    with pytest.raises(DataError, match=message):
        to_values(pa.array(rows, kind), field, first_row=10)
    # The same in a slice: rows before it do not count.
    with pytest.raises(DataError, match=message):
        to_values(pa.array([rows[0], *rows], kind).slice(1), field, first_row=10)


KINDS = {
    "nested": (Field("features", ("x",), "float32", DENSE, (2, 2)), pa.list_(pa.list_(pa.float32())), [[1, 2], [3, 4]]),
    "ragged": (Field("features", ("x",), "int64", RAGGED), pa.list_(pa.int64()), [1, 2, 3]),
    "sparse": (
        Field("features", ("x",), "float32", SPARSE, (4,)),
        VECTOR,
        {"type": 0, "size": 4, "indices": [1], "values": [2.0]},
    ),
    "text": (Field("features", ("x",), "string", TEXT), pa.string(), "word"),
}


@pytest.mark.parametrize(("field", "kind", "row"), KINDS.values(), ids=KINDS.keys())
def test_shard_when_read_into_memory_or_mapped_then_gives_the_same_after_its_files_are_gone(tmp_path, field, kind, row):
    mapped = shard_of(tmp_path / "s", field, kind, [row] * 3, [1])
    held = Shard(tmp_path / "s", mapped.schema, mapped.row_shapes, in_memory=True)
    assert mapped.num_bytes == held.num_bytes > 0
    mapped.expect(0, 3)
    mapped.unlink()
    assert not (tmp_path / "s").exists()
    mapped.forget()
    held.forget()
    held.expect(0, 3)
    for one, other in zip(mapped.take(np.array([2, 0])), held.take(np.array([2, 0])), strict=True):
        for part, same in zip(arrays_of(one), arrays_of(other), strict=True):
            np.testing.assert_array_equal(part, same)
            assert part.dtype == same.dtype


def arrays_of(values):
    return (values.offsets, *values.buffers) if isinstance(values, RaggedArray) else (values,)


@pytest.mark.parametrize(("field", "kind", "row"), KINDS.values(), ids=KINDS.keys())
def test_shard_when_there_is_no_row_then_its_zeros_have_the_form_of_rows(tmp_path, field, kind, row):
    written = shard_of(tmp_path / "s", field, kind, [row] * 3, [])
    empty = Shard(None, written.schema, written.row_shapes)
    assert empty.num_rows == 0 and empty.num_bytes <= 8
    rows, stand_in = written.take(np.array([0, 1])), empty.zeros(2)
    for one, other in zip(rows, stand_in, strict=True):
        assert [part.dtype for part in arrays_of(one)] == [part.dtype for part in arrays_of(other)]
        assert [part.shape[1:] for part in arrays_of(one)] == [part.shape[1:] for part in arrays_of(other)]
        assert len(one) == len(other)
        assert not any(buffer.any() for buffer in arrays_of(other)[1:])


def test_labels_when_ragged_then_are_kept_beside_the_inputs(tmp_path):
    schema = DataSchema(
        inputs=(Field("features", ("x",), "int32", RAGGED),), labels=(Field("label", ("y",), "float32", RAGGED),)
    )
    inputs, labels = [[1], [], [2, 3]], [[[0.5, 1.5]], [], [[2.5, 3.5], [4.5, 5.5]]]
    with ShardWriter(tmp_path / "s", schema) as writer:
        writer.write(
            pa.RecordBatch.from_arrays(
                [pa.array(inputs, pa.list_(pa.int32())), pa.array(labels, pa.list_(pa.list_(pa.float32())))],
                ["features", "label"],
            )
        )
        summary = writer.finish()
    shard = Shard(tmp_path / "s", schema, summary.row_shapes)
    x, y = shard.take(np.array([2, 1]))
    assert padded(x).tolist() == [[2, 3], [0, 0]]
    assert padded(y).tolist() == [[[2.5, 3.5], [4.5, 5.5]], [[0, 0], [0, 0]]]
