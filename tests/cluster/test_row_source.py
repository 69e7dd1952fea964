"""What a task makes of rows that Spark stops handing on, and of errors of its own."""

import pyarrow as pa
import pytest

from elephant.cluster.row_source import InputStreamError, run_on_stream

BATCH = pa.RecordBatch.from_pydict({"x": [1]})


def broken_stream():
    yield BATCH
    raise pa.ArrowInvalid("Tried reading schema message, was null or length 0")


def test_task_when_spark_hands_on_no_more_rows_then_hears_that_and_not_of_the_stream():
    with pytest.raises(InputStreamError, match="no more rows"):
        list(run_on_stream(lambda batches: iter(list(batches)), None, broken_stream()))


def test_task_when_it_fails_by_itself_then_keeps_its_error():
    def task(batches):
        for _ in batches:
            raise KeyError("own")
        yield

    with pytest.raises(KeyError, match="own"):
        list(run_on_stream(task, None, iter([BATCH])))
