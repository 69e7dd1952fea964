"""A DataFrame that tells how often Spark has computed each of its partitions."""

import os
import time
import uuid
from pathlib import Path

import psutil
from keras_reference import classifier_data, split
from spark_frames import partitioned_frame, split_rows

SIZES = (15, 9)
SCHEMA = "features array<double>, label double"


class CountedSource:
    """A frame whose partitions leave a mark each time that they are computed.

    Args:
        folder: For the marks.
        sizes: Rows of each partition.
        failures: How often the first partition cannot be computed.

    Attributes:
        parts: Arrays by name of each partition.
    """

    def __init__(self, spark, folder, sizes=SIZES, failures=0):
        columns = classifier_data(sum(sizes))
        self._folder = folder
        self.parts = split(columns, sizes)
        plain = partitioned_frame(spark, split_rows(columns, sizes), SCHEMA)
        self.frame = plain.mapInPandas(marking(str(folder), failures), SCHEMA)

    @property
    def reads(self):
        """How often each partition was computed."""
        places = [int(name.split("-")[0]) for name in os.listdir(self._folder)]
        return [places.count(place) for place in range(len(self.parts))]

    @property
    def readers(self):
        """The processes that started those which have computed partitions; each is a child of an executor."""
        return {int(path.read_text()) for path in Path(self._folder).iterdir()}


def marking(folder, failures):
    """Returns a function for ``mapInPandas`` that leaves a mark."""

    def rows(frames):
        from pyspark import TaskContext

        place = TaskContext.get().partitionId()
        with open(os.path.join(folder, f"{place}-{uuid.uuid4()}"), "w", encoding="utf-8") as mark:
            mark.write(str(os.getppid()))
        if place == 0 and sum(name.startswith("0-") for name in os.listdir(folder)) <= failures:
            raise RuntimeError("no rows today")
        yield from frames

    return rows


def keeps_nothing(spark):
    """Returns whether Spark's cache is empty."""
    return spark._jsparkSession.sharedState().cacheManager().isEmpty()


def block_managers(spark):
    """Returns the addresses of the executors' block managers that the driver knows."""
    return set(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().keySet().mkString(" ").split())


def end_an_executor_with_rows(spark, source):
    """Kills one, and waits until Spark knows: before, others read on this host what it had on its disk."""
    known = block_managers(spark)
    victim = psutil.Process(min(source.readers))
    while victim is not None and "--executor-id" not in victim.cmdline():
        victim = victim.parent()
    assert victim is not None, "the rows were read by a process of no executor"
    victim.kill()
    victim.wait(20)
    deadline = time.monotonic() + 60
    while known <= block_managers(spark):
        assert time.monotonic() < deadline, "Spark takes the executor for alive"
        time.sleep(0.1)
