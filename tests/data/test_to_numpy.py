"""Arrow columns become the arrays that numpy would make of them, or an error that names the column."""

import numpy as np
import pyarrow as pa
import pytest
from tables import every_case

from elephant.data.ragged import RaggedArray
from elephant.data.schema import DENSE, RAGGED, SCALAR, Field
from elephant.data.to_numpy import refuse_bad_weights, refuse_unknown_classes, to_numpy, to_values
from elephant.errors import DataError

FEATURES = Field("features", ("x",), "float32", DENSE, (4,))
FREE = Field("features", ("x",), "float32", DENSE)
COLUMNS = Field("features", ("a", "b", "c", "d"), "float32", DENSE, (4,))
LABEL = Field("label", ("y",), "int32", SCALAR)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 4)]
)
def test_lists_when_converted_then_equal_numpy(kind):
    rows = np.arange(12, dtype="float32").reshape(3, 4)
    converted = to_numpy(pa.array(rows.tolist(), kind), FEATURES)
    assert converted.dtype == np.float32
    np.testing.assert_array_equal(converted, rows)


def test_lists_when_float32_then_are_not_copied():
    column = pa.array([[1.0, 2.0, 3.0, 4.0]], pa.list_(pa.float32()))
    assert to_numpy(column, FEATURES).ctypes.data == column.values.buffers()[1].address


def test_lists_when_sliced_then_hold_the_slice_alone():
    column = pa.array([[float(i)] * 4 for i in range(6)], pa.list_(pa.float32())).slice(2, 3)
    np.testing.assert_array_equal(to_numpy(column, FEATURES)[:, 0], [2, 3, 4])


@every_case(
    ("values", "field", "message"),
    [
        ([[1.0] * 4, None], FEATURES, r"column 'x': expected a value in every row. Received: null in row 11 of"),
        ([[1.0] * 4, [1.0, None, 1.0, 1.0]], FEATURES, r"column 'x', element 1: .* Received: null in row 11 "),
        ([[1.0] * 4, [1.0, None, 1.0, 1.0]], COLUMNS, r"column 'b': expected a number. Received: null in row 11 "),
        (
            [[1.0] * 4, [1.0] * 3],
            FEATURES,
            r"column 'x': expected 4 values .*shape \(4,\).* Received: 3 values in row 11 ",
        ),
        ([[1.0] * 3] * 2, FEATURES, r"Received: 3 values in row 10 .* So have the others: .* Input\(\(3,\)\)"),
        ([[1.0] * 2, [1.0] * 3], FREE, r"column 'x': expected 2 values in every row. Received: 3 values in row 11 "),
    ],
)
def test_lists_when_unusable_then_the_error_names_column_and_row(values, field, message):
    with pytest.raises(DataError, match=message):
        to_numpy(pa.array(values, pa.list_(pa.float32())), field, first_row=10)


def test_lists_when_no_shape_fits_then_the_error_says_the_shape():
    field = Field("features", ("x",), "float32", DENSE, (None, 3))
    assert to_numpy(pa.array([[1.0] * 6], pa.list_(pa.float32())), field).shape == (1, 6)
    with pytest.raises(DataError, match=r"fit the model's shape \(None, 3\). Received: rows of 4 values"):
        to_numpy(pa.array([[1.0] * 4], pa.list_(pa.float32())), field)


def test_scalars_when_null_then_the_error_names_column_and_row():
    np.testing.assert_array_equal(to_numpy(pa.array([1, 2], pa.int32()), LABEL), [1, 2])
    with pytest.raises(DataError, match=r"column 'y': .* Received: null in row 1 "):
        to_numpy(pa.array([1, None], pa.int32()), LABEL)


def test_integers_when_too_large_for_the_model_then_are_refused_and_not_wrapped():
    field = Field("features", ("x",), "uint8", DENSE, (2,))
    fitting = to_numpy(pa.array([[0, 255]], pa.list_(pa.int64())), field)
    assert fitting.dtype == np.uint8 and fitting.tolist() == [[0, 255]]
    with pytest.raises(DataError, match=r"column 'x': expected integers from 0 to 255.* Received: 256 in row 1 of"):
        to_numpy(pa.array([[0, 255], [256, 0]], pa.list_(pa.int64())), field)


def test_marks_of_validation_when_they_are_0_and_1_then_are_taken_and_others_refused():
    field = Field("validation", ("v",), "bool", SCALAR)
    for kind in (pa.int32(), pa.int64(), pa.float64(), pa.bool_()):
        assert to_numpy(pa.array([1, 0]).cast(kind), field).tolist() == [True, False]
    with pytest.raises(DataError, match="column 'v': expected true and false, or 1 for .* Received: 2 in row 1 of the"):
        to_numpy(pa.array([1, 2]), field)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_weights_when_negative_or_not_finite_then_are_refused(bad):
    field = Field("weight", ("w",), "float32", SCALAR)
    with pytest.raises(DataError, match=r"column 'w': expected weights .* in row 6 "):
        refuse_bad_weights(np.array([1.0, bad]), field.title, 5)


@every_case(
    ("labels", "options", "message"),
    [
        ([0, 2, 1], {}, None),
        ([0.0, 2.9, -0.9], {}, None),
        ([0, 3, 1], {}, r"column 'y': expected class numbers from 0 to 2, .* Received: 3 in row 11 of the partition"),
        ([0, 1, -1], {}, r"Received: -1 in row 12 "),
        ([0, 1, float("nan")], {}, r"Received: nan in row 12 "),
        ([0, -1, 2], {"ignored_class": -1}, None),
        ([0, -1, 5], {"ignored_class": -1}, r"Received: 5\.?0? in row 12 "),
        ([[0, 1], [2, 7]], {}, r"Received: 7 in row 11 "),
        ([0, 99, -5], {"num_classes": None}, None),
        ([0.0, 0.25, 1.0], {"num_classes": 2, "is_probability": True}, None),
        (
            [0, 1, 1.5],
            {"num_classes": 2, "is_probability": True},
            r"from 0 to 1, or probabilities between them, because .* Received: 1.5 in row 12 ",
        ),
        ([0, -0.1, 1], {"num_classes": 2, "is_probability": True}, r"Received: -0.1 in row 11 "),
    ],
)
def test_labels_when_they_are_none_of_the_classes_then_the_error_names_column_and_row(labels, options, message):
    field = Field("label", ("y",), "float32", SCALAR, **{"num_classes": 3, **options})
    if message is None:
        refuse_unknown_classes(np.array(labels), field, 10)
        return
    with pytest.raises(DataError, match=message):
        refuse_unknown_classes(np.array(labels), field, 10)


def test_labels_when_they_are_sequences_then_the_error_names_the_row_of_the_element():
    field = Field("label", ("y",), "int32", RAGGED, (None,), num_classes=3)
    labels = RaggedArray(np.array([0, 2, 2, 5]), (np.array([0, 1, 2, 0, 4]),))
    with pytest.raises(DataError, match="Received: 4 in row 12 of the partition"):
        refuse_unknown_classes(labels, field, 10)


PICTURES = Field("features", ("x",), "float32", DENSE, (None, None, 3))


def test_pictures_when_several_sizes_are_free_then_nested_lists_tell_them():
    rows = np.arange(2 * 4 * 5 * 3, dtype="float32").reshape(2, 4, 5, 3)
    values, natural = to_values(pa.array(rows.tolist()), PICTURES)
    assert natural == (4, 5, 3) == PICTURES.row_shape(natural)
    np.testing.assert_array_equal(values, rows)


@every_case(
    ("rows", "message"),
    [
        (np.ones((2, 60)), r"fit the model's shape \(None, None, 3\). Received: rows of 60 values. Nested arrays tell"),
        (np.ones((2, 4, 5, 1)), r"expected 3 values in every inner array. Received: 1 value"),
        (np.ones((2, 20, 3)), r"fit the model's shape \(None, None, 3\). Received: rows of shape \(20, 3\)"),
    ],
)
def test_pictures_when_rows_do_not_tell_their_sizes_then_says_what_does(rows, message):
    with pytest.raises(DataError, match=message):
        to_values(pa.array(rows.tolist()), PICTURES)
