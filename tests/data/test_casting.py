"""Columns as they come, cast to prepared ones, against numpy."""

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest
from tables import every_case

from elephant.data.casting import prepared_batch, prepared_batches
from elephant.data.ragged import RaggedArray
from elephant.data.schema import DENSE, RAGGED, SCALAR, SPARSE, TEXT, DataSchema, Field
from elephant.data.to_numpy import to_values
from elephant.errors import DataError

UTC = datetime.timezone.utc


def values_of(columns, *, kind, dtype, shape=None):
    """Returns what the shard would hold of a batch of the given columns."""
    if not isinstance(columns, dict):
        columns = {"c": columns}
    field = Field("features", tuple(columns), dtype, kind, shape)
    batch = prepared_batch(pa.RecordBatch.from_pydict(columns), DataSchema(inputs=(field,)))
    assert batch.schema.names == ["features"]
    return to_values(batch.column(0), field)


NUMBERS = {
    "double": (pa.array([1.1, -2.7, 1e30]), np.float32([1.1, -2.7, 1e30])),
    "bigint": (pa.array([2**53 + 1, -1, 0]), np.float32([2**53 + 1, -1, 0])),
    "boolean": (pa.array([True, False, True]), np.float32([1, 0, 1])),
    "decimal": (
        pa.array([decimal.Decimal("0.10"), decimal.Decimal("-12345678.91"), decimal.Decimal("0.00")]),
        np.float32([0.1, -12345678.91, 0]),
    ),
    "date": (
        pa.array([datetime.date(1970, 1, 2), datetime.date(1969, 12, 31), datetime.date(2026, 1, 1)]),
        [1, -1, 20454],
    ),
    "timestamp": (
        pa.array([datetime.datetime(1970, 1, 1, 0, 0, 1, 500000, UTC)] * 3, pa.timestamp("us", "UTC")),
        [1.5] * 3,
    ),
    "timestamp in ns": (pa.array([1_500_000_000] * 3, pa.timestamp("ns")), [1.5] * 3),
    "half": (pa.array(np.float16([1.5, 2, 3])), [1.5, 2, 3]),
    "dictionary": (pa.array([5, 6, 5]).dictionary_encode(), [5, 6, 5]),
}


@pytest.mark.parametrize(("column", "expected"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_when_prepared_then_are_the_documented_ones(column, expected):
    values, _ = values_of(column, kind=SCALAR, dtype="float32")
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.float32(expected))


def test_decimals_when_prepared_as_doubles_then_are_rounded_once():
    texts = [
        f"{number}.{digits}"
        for number, digits in zip(range(0, 10**12, 10**9), range(10**6, 10**9, 999_983), strict=False)
    ]
    column = pa.array([decimal.Decimal(text) for text in texts])
    values, _ = values_of(column, kind=SCALAR, dtype="float64")
    np.testing.assert_array_equal(values, [float(text) for text in texts])


def test_numbers_when_the_model_takes_integers_then_fractions_go_and_what_does_not_fit_is_refused():
    values, _ = values_of(pa.array([1.9, -1.9, 0.0]), kind=SCALAR, dtype="int32")
    np.testing.assert_array_equal(values, [1, -1, 0])
    values, _ = values_of(pa.array([decimal.Decimal("-1.75"), decimal.Decimal("2.50")]), kind=SCALAR, dtype="int32")
    np.testing.assert_array_equal(values, [-1, 2])
    with pytest.raises(
        DataError, match="'c': expected numbers from .* because the model takes int32. Received: nan in row 1"
    ):
        values_of(pa.array([1.0, float("nan")]), kind=SCALAR, dtype="int32")
    with pytest.raises(DataError, match="expected integers from -128 to 127, .* Received: 300 in row 1"):
        values_of(pa.array([1, 300]), kind=SCALAR, dtype="int8")


MATRIX = np.array([[1.5, 0.0, -2.0], [0.0, 3.25, 4.0], [7.0, 8.0, 9.0]])
LISTS = {
    "double": pa.array(MATRIX.tolist()),
    "float": pa.array(MATRIX.tolist(), pa.list_(pa.float32())),
    "large": pa.array(MATRIX.tolist(), pa.large_list(pa.float64())),
    "fixed": pa.array(MATRIX.tolist(), pa.list_(pa.float64(), 3)),
    "decimal": pa.array([[decimal.Decimal(str(value)) for value in row] for row in MATRIX]),
    "slice": pa.array([[0.0] * 3, *MATRIX.tolist(), [0.0] * 3]).slice(1, 3),
    "raw bytes": pa.array([row.astype("<f4").tobytes() for row in MATRIX]),
}


@pytest.mark.parametrize("column", LISTS.values(), ids=LISTS)
def test_lists_when_prepared_then_are_a_matrix(column):
    values, shape = values_of(column, kind=DENSE, dtype="float32")
    assert shape == (3,)
    np.testing.assert_array_equal(values.reshape(3, 3), MATRIX.astype("float32"))


def test_lists_when_nested_then_keep_their_shape():
    rows = np.arange(24.0).reshape(2, 3, 4)
    values, shape = values_of(pa.array(rows.tolist()), kind=DENSE, dtype="float32")
    assert shape == (3, 4)
    np.testing.assert_array_equal(values, rows)


def test_lists_when_they_are_of_any_length_then_are_cut_where_they_were():
    values, _ = values_of(pa.array([[1.0, 2.0], [], [3.0]]), kind=RAGGED, dtype="float32", shape=(None,))
    assert isinstance(values, RaggedArray)
    assert values.offsets.tolist() == [0, 2, 2, 3]
    assert values.buffers[0].tolist() == [1, 2, 3]


def test_columns_when_they_make_one_vector_then_rows_hold_one_of_each():
    columns = {"a": pa.array([1, 2]), "b": pa.array([0.5, 1.5]), "c": pa.array([True, False])}
    values, shape = values_of(columns, kind=DENSE, dtype="float32", shape=(3,))
    assert shape == (3,)
    np.testing.assert_array_equal(values, [[1, 0.5, 1], [2, 1.5, 0]])


VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def vectors():
    dense = {"type": 1, "size": None, "indices": None, "values": [1.5, 0.0, -2.0]}
    sparse = {"type": 0, "size": 3, "indices": [1, 2], "values": [3.25, 4.0]}
    return pa.array([dense, sparse, {**dense, "values": [7.0, 8.0, 9.0]}], VECTOR)


@pytest.mark.parametrize("column", [vectors(), pa.concat_arrays([vectors(), vectors()]).slice(3)], ids=["all", "slice"])
def test_vectors_when_dense_and_sparse_ones_are_mixed_then_are_a_matrix(column):
    values, _ = values_of(column, kind=DENSE, dtype="float32")
    np.testing.assert_array_equal(values, MATRIX.astype("float32"))


def test_vectors_when_the_model_takes_them_sparse_then_stay_sparse():
    values, shape = values_of(vectors(), kind=SPARSE, dtype="float32")
    assert shape == (3,)
    assert values.offsets.tolist() == [0, 3, 5, 8]
    assert values.buffers[0].tolist() == [0, 1, 2, 1, 2, 0, 1, 2]


def test_strings_when_prepared_then_keep_their_bytes():
    values, _ = values_of(pa.array(["a", "", "äb"]).dictionary_encode(), kind=TEXT, dtype="string")
    assert values.buffers[0].tobytes() == "aäb".encode()
    assert values.offsets.tolist() == [0, 1, 1, 4]


def test_raw_bytes_when_prepared_then_are_not_copied():
    column = LISTS["raw bytes"]
    field = Field("features", ("c",), "float32", DENSE)
    batch = prepared_batch(pa.RecordBatch.from_pydict({"c": column}), DataSchema(inputs=(field,)))
    assert batch.column(0).buffers()[2].address == column.buffers()[2].address
    values, _ = to_values(batch.column(0), field)
    assert values.__array_interface__["data"][0] == column.buffers()[2].address


@pytest.mark.parametrize(
    ("column", "kind", "message"),
    [
        (pa.array([1.0, None]), SCALAR, "column 'c': expected a value in every row. Received: null in row 1"),
        (pa.array([[1.0], None]), DENSE, "column 'c': expected a value in every row. Received: null in row 1"),
        (pa.array([[1.0, 2.0], [1.0, None]]), DENSE, "'c', element 1: expected a number. Received: null in row 1"),
        (
            pa.array([vectors()[0].as_py(), None], VECTOR),
            DENSE,
            "column 'c': expected a value in every row. Received: null in row 1",
        ),
    ],
    ids=["number", "list", "element", "vector"],
)
def test_nulls_when_prepared_then_stay_and_are_refused(column, kind, message):
    with pytest.raises(DataError, match=message):
        values_of(column, kind=kind, dtype="float32")


def test_nulls_when_several_columns_make_a_vector_then_are_refused_by_the_column_s_name():
    with pytest.raises(DataError, match="column 'b': expected a number. Received: null in row 0"):
        values_of({"a": pa.array([1.0]), "b": pa.array([None], pa.float64())}, kind=DENSE, dtype="float32")


def test_fractions_beside_integers_when_the_model_takes_integers_then_are_whole_or_refused_by_their_row():
    def batch(value):
        return pa.RecordBatch.from_pydict({"a": pa.array([2**53 + 1]), "b": pa.array([value], pa.float64())})

    schema = DataSchema(inputs=(Field("features", ("a", "b"), "int64", DENSE, (2,)),))
    made = [batch.column(0).to_pylist() for batch in prepared_batches([batch(7.9), batch(-7.9)], schema)]
    assert made == [[[2**53 + 1, 7]], [[2**53 + 1, -7]]]
    for value in (float("nan"), 2.0**63, -1e30):
        with pytest.raises(DataError, match="'a', 'b': .* that an integer holds, .* in row 1 of the partition"):
            list(prepared_batches([batch(1.0), batch(value)], schema))


@pytest.mark.parametrize(
    "column",
    [pa.array([1, 2**63], pa.uint64()), pa.array([decimal.Decimal(1), decimal.Decimal(2**63)])],
    ids=["uint64", "decimal"],
)
def test_numbers_when_no_integer_of_64_bits_holds_them_then_the_error_names_value_and_row(column):
    with pytest.raises(DataError, match=f"'c': expected numbers that an integer holds, .* {2**63} in row 1 of the"):
        values_of(column, kind=SCALAR, dtype="int64")


def test_decimals_when_all_digits_are_behind_the_point_then_integers_of_them_are_zero():
    for digits in (3, 38):
        column = pa.array([decimal.Decimal("0.999"), decimal.Decimal("-0.5")], pa.decimal128(digits, digits))
        values, _ = values_of(column, kind=SCALAR, dtype="int32")
        np.testing.assert_array_equal(values, [0, 0])


@every_case(("index", "place"), [(3, 1), (-1, 1), (3, 2)])
def test_vectors_when_an_index_is_outside_then_no_other_row_gets_its_value(index, place):
    rows = [{"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]} for _ in range(3)]
    rows[place] = {"type": 0, "size": 3, "indices": [0, index], "values": [4.0, 5.0]}
    message = f"'c': expected indices from 0 to 2, of vectors of size 3. Received: {index} in row {place} of"
    with pytest.raises(DataError, match=message):
        values_of(pa.array(rows, VECTOR), kind=DENSE, dtype="float32")
