"""Rows that a Spark task preprocesses once, for several fits: what it hands on, and how many rows a call gets."""

import keras
import numpy as np
import pyarrow as pa
from pyspark import cloudpickle

from elephant.data.schema import DENSE, RAGGED, SCALAR, VALIDATION, DataSchema, Field
from elephant.data.to_numpy import to_values
from elephant.modeling.model_spec import KerasSettings
from elephant.rank.input.preprocessing import schema_from_text
from elephant.task.model_batches import PackedFunction, PreprocessingTask, preprocessed_columns

RAW = DataSchema(
    inputs=(Field("features", ("n",), "int64", SCALAR),),
    validation=Field(VALIDATION, ("fold",), "bool", SCALAR),
    x={"n": 0},
)
TARGET = DataSchema(
    inputs=(
        Field("features", ("n",), "float32", DENSE, (None, 2)),
        Field("features_1", ("n",), "int32", RAGGED, (None,)),
    ),
    x={"squares": 0, "words": 1},
)


def task_of(function, batch_size=4):
    return PreprocessingTask(
        function=PackedFunction.of(function, TARGET, ["squares", "words"]),
        schema=RAW,
        settings=cloudpickle.dumps(KerasSettings.current()),
        backend=keras.config.backend(),
        batch_size=batch_size,
    )


def chunks_of(*sizes):
    ends = np.cumsum([0, *sizes])
    numbers = [np.arange(start, stop) for start, stop in zip(ends[:-1], ends[1:], strict=True)]
    return [[pa.array(part), pa.array((part % 3).astype("int32"))] for part in numbers]


def made(batch):
    numbers = batch["n"]
    squares = (numbers[:, None, None] ** np.array([[1.0, 2.0]])).repeat(3, axis=1)
    return {"squares": squares, "words": [np.arange(number % 4) for number in numbers]}


def test_rows_when_preprocessed_then_the_schema_comes_once_and_all_can_be_read_back(monkeypatch):
    # As little as this is sent on at once: a part of what a call has made.
    monkeypatch.setattr("elephant.task.model_batches._SENT_BYTES", 100)
    task = task_of(made)
    pieces = list(preprocessed_columns(task, iter(chunks_of(10, 7))))
    assert task.names == ["features", "features_1", "validation"]
    assert len(pieces) > 5 and sum(len(piece[0]) for piece in pieces) == 17
    squares, words, folds, schemas = (pa.concat_arrays(column) for column in zip(*pieces, strict=True))
    [text] = schemas.drop_null()
    assert schemas[0] == text
    schema = schema_from_text(text.as_py().decode(), TARGET)
    assert [field.shape for field in schema.inputs] == [(3, 2), (None,)]
    numbers = np.arange(17)
    found, _ = to_values(squares, schema.inputs[0])
    np.testing.assert_array_equal(found.reshape(17, 3, 2), made({"n": numbers})["squares"].astype("float32"))
    found, _ = to_values(words, schema.inputs[1])
    np.testing.assert_array_equal(np.diff(found.offsets), numbers % 4)
    np.testing.assert_array_equal(found.buffers[0], np.concatenate([np.arange(number % 4) for number in numbers]))
    assert folds.to_pylist() == (numbers % 3).tolist()


def test_rows_when_preprocessed_then_calls_get_the_rows_of_a_batch_or_more_of_small_ones(monkeypatch):
    def mark(batch):
        return {"squares": np.full((len(batch["n"]), 1, 2), len(batch["n"])), "words": [[1]] * len(batch["n"])}

    sizes = []
    for chunk_bytes in (1, 12 * 9, 12 * 5000):
        monkeypatch.setattr("elephant.task.model_batches._CHUNK_BYTES", chunk_bytes)
        pieces = list(preprocessed_columns(task_of(mark), iter(chunks_of(2100))))
        sizes.append([len(piece[0]) for piece in pieces])
        assert [to_values(piece[0], TARGET.inputs[0])[0].max() for piece in pieces] == sizes[-1]
    assert [max(part) for part in sizes] == [4, 9, 1024] and {sum(part) for part in sizes} == {2100}
