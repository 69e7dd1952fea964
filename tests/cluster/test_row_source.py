"""What a task makes of rows that Spark stops handing on, and of errors of its own."""

import pyarrow as pa
import pytest

from elephant.cluster import row_source
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


class Rdd:
    """Stands for an RDD whose tasks run here, one after the other."""

    def __init__(self, number):
        self.number, self.asked = number, []

    def withResources(self, profile):
        self.asked.append(profile)
        return self

    def barrier(self):
        self.asked.append("barrier")
        return self

    def mapPartitions(self, function):
        self.asked.append(function.__qualname__)
        self.collect = lambda: [row for _ in range(self.number) for row in function(iter(()))]
        return self


@pytest.mark.parametrize("profile", [None, "gpus"])
def test_tasks_without_rows_when_there_is_a_context_then_are_one_function_of_an_rdd_and_no_frame_s(
    monkeypatch, profile
):
    made = []

    class Context:
        def parallelize(self, records, number):
            assert list(records) == []
            made.append(Rdd(number))
            return made[-1]

    monkeypatch.setattr(row_source, "jvm_context", lambda session: Context())
    rows = row_source.NoRows(None, 2).repartitioned(3)
    results = rows.run(lambda batches: iter([(5, b"a"), (6, bytes(list(batches)))]), barrier=True, profile=profile)
    assert results == [{"rank": 5, "result": b"a"}, {"rank": 6, "result": b""}] * 3
    [rdd] = made
    # Two functions, of which the profile is between, would be two Python processes for each task.
    assert rdd.asked[:-1] == [*([profile] if profile else []), "barrier"] and "run_on_nothing" in rdd.asked[-1]
