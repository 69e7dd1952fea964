"""Numbers between numpy and Arrow without pandas, against pyarrow's own ways."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from elephant.data.ragged import RaggedArray
from elephant.data.schema import DENSE, RAGGED, SPARSE, TEXT, Field
from elephant.data.to_arrow import from_arrow, raw_bytes, raw_column, raw_type, to_arrow, zero_for_null
from elephant.data.to_numpy import to_values

NUMBERS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64", "float16", "float32", "float64", ">i4", ">f8"])
def test_numbers_when_made_arrow_and_sliced_then_are_those_of_pyarrow(dtype):
    values = NUMBERS.astype(dtype)
    expected = pa.array(values.astype(values.dtype.newbyteorder("=")))
    for given in (values, np.repeat(values, 2)[::2]):
        assert to_arrow(given).equals(expected)
    for part in (expected, expected[3:], expected[9:4]):
        found = from_arrow(part)
        np.testing.assert_array_equal(found, part.to_numpy(zero_copy_only=False))
        assert found.dtype == part.to_numpy(zero_copy_only=False).dtype


def test_values_with_nulls_when_taken_over_then_are_those_of_pyarrow():
    nulls = NUMBERS > 4
    expected = pa.array(NUMBERS, mask=nulls)
    assert to_arrow(NUMBERS, nulls).equals(expected)
    for part in (expected, expected[5:], expected[:0]):
        np.testing.assert_array_equal(from_arrow(part), part.to_numpy(zero_copy_only=False))
        assert zero_for_null(part).tolist() == part.fill_null(0).to_pylist()


@pytest.mark.parametrize("start", [0, 3, 8, 10])
def test_booleans_when_they_begin_at_any_bit_then_are_those_of_pyarrow(start):
    part = pa.array(NUMBERS > 2)[start:]
    assert from_arrow(part).tolist() == part.to_pylist()


def test_integers_when_the_type_cannot_hold_them_then_are_refused():
    with pytest.raises(OverflowError, match="expected int32. Received: 0 to 2147483648"):
        to_arrow(np.array([0, 2**31]), dtype="int32")
    with pytest.raises(TypeError, match="booleans"):
        to_arrow(NUMBERS > 2)


def test_rows_when_a_task_prepares_and_reads_them_then_pandas_is_not_imported():
    code = """
        import sys
        import numpy as np, pyarrow as pa
        from elephant.data.casting import prepared_batches
        from elephant.data.schema import DENSE, FEATURES, LABEL, SCALAR, DataSchema, Field
        from elephant.data.to_arrow import to_arrow
        from elephant.data.to_numpy import to_values

        lists = pa.ListArray.from_arrays(to_arrow(np.array([0, 2, 4], "int32")), to_arrow(np.arange(4.0)))
        batch = pa.RecordBatch.from_arrays([lists, to_arrow(np.arange(2))], ["x", "y"])
        fields = Field(FEATURES, ("x",), "float32", DENSE, (2,)), Field(LABEL, ("y",), "float32", SCALAR)
        schema = DataSchema(inputs=fields[:1], labels=fields[1:])
        (made,) = prepared_batches([batch], schema)
        read = [to_values(column, field)[0].tolist() for column, field in zip(made.columns, fields)]
        print(read, "pandas" in sys.modules)
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[[[0.0, 1.0], [2.0, 3.0]], [0.0, 1.0]] False\n"


OFFSETS = np.array([0, 2, 2, 5])
RAW = {
    "numbers": (Field("label", ("y",), "uint64", DENSE, ()), NUMBERS[:3].astype("uint64") + 2**63),
    "halves": (Field("features", ("x",), "float16", DENSE, (1, 3)), NUMBERS[:9].astype("float16").reshape(3, 1, 3) / 3),
    "marks": (Field("features", ("x",), "bool", DENSE, (2,)), np.array([[True, False], [False, True], [True, True]])),
    "not numbers": (Field("label", ("y",), "float32", DENSE, ()), np.array([np.nan, -0.0, np.inf], "float32")),
    "sequences": (
        Field("features", ("x",), "float32", RAGGED, (None, 2)),
        RaggedArray(OFFSETS, (np.arange(10, dtype="float32").reshape(5, 2) / 7,)),
    ),
    "empty sequences": (
        Field("features", ("x",), "int32", RAGGED, (None,)), RaggedArray(np.zeros(4, int), (np.zeros(0, "int32"),)),
    ),
    "vectors": (
        Field("features", ("x",), "float32", SPARSE, (9,), sparse_tensor=True),
        RaggedArray(OFFSETS, (np.array([1, 8, 0, 3, 4], "int32"), np.arange(5, dtype="float32") / 3)),
    ),
    "texts": (
        Field("features", ("x",), "string", TEXT, (2,)),
        RaggedArray(np.array([0, 1, 1, 4, 4, 4, 5]), (np.frombuffer(b"a\0\xffcd", np.uint8),)),
    ),
    "one text": (
        Field("features", ("x",), "string", TEXT, ()), RaggedArray(OFFSETS, (np.frombuffer(b"ab cd", np.uint8),)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RAW)
def test_rows_for_a_model_when_they_are_raw_bytes_then_come_back_to_the_bit(case):
    field, values = RAW[case]
    column = raw_column(field, values)
    assert column.type == raw_type(field) and len(column) == 3
    # Spark hands on parts of messages.
    sliced = pa.concat_arrays([column[:2], column, column])[2:5]
    for part in (column, sliced):
        found, _ = to_values(part, field)
        for one, wanted in zip(arrays_of(found), arrays_of(values), strict=True):
            assert one.dtype == wanted.dtype and one.tobytes() == wanted.tobytes()


def arrays_of(values):
    return (values.offsets, *values.buffers) if isinstance(values, RaggedArray) else (values,)


def test_raw_bytes_when_they_are_too_many_for_arrow_then_says_so(monkeypatch):
    monkeypatch.setattr("elephant.data.to_arrow._MOST_BYTES", 15)
    with pytest.raises(OverflowError, match=r"expected less than 2 GiB\. Received: 16 bytes in 2 rows"):
        raw_bytes(np.zeros((2, 2), "float32"))
