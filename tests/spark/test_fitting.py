"""What an asynchronous fit finds out of the first row, where the model does not tell it. No Spark."""

import numpy as np
import pyarrow as pa
import pytest

from elephant.data.schema import DENSE, SPARSE, DataSchema, Field
from elephant.data.to_numpy import to_values
from elephant.spark.fit import _row_spec

_VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


class FileRow:
    """A source of one row."""

    def __init__(self, column):
        self.column = column

    def first_row(self):
        return pa.RecordBatch.from_arrays([self.column], ["features"])


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        (SPARSE, pa.array([{"type": 0, "size": 5, "indices": [1], "values": [2.0]}], _VECTOR)),
        (SPARSE, pa.array([{"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]}], _VECTOR)),
        (DENSE, pa.array([np.zeros((2, 3), "<f4").tobytes()])),
        (DENSE, pa.array([[1.0, 2.0, 3.0]])),
    ],
    ids=["sparse vector", "dense vector", "binary tensor", "array"],
)
def test_row_spec_when_the_model_tells_no_shape_then_the_first_row_does_as_in_a_shard(kind, column):
    field = Field("features", ("x",), "float32", kind)
    _, natural = to_values(column, field, first_row=0, row_shape=None)
    (tensor,) = _row_spec(FileRow(column), DataSchema(inputs=(field,))).tensors
    assert tensor.shape == field.row_shape(natural) != ()
