"""Rows that executors are to keep, where Spark keeps none."""

import pytest

from elephant.cluster.prepared_rows import Form, RowsOnDisk


class Refusing:
    """A frame of a cluster without a cache, as that of Databricks without servers."""

    tries = 0

    def persist(self, level):
        self.tries += 1
        raise RuntimeError("[NOT_SUPPORTED_WITH_SERVERLESS] PERSIST TABLE is not supported on serverless compute.")

    def unpersist(self):
        raise RuntimeError("nothing is kept")


def test_rows_when_spark_keeps_none_then_the_user_is_warned_once_and_frames_stay_as_they_are():
    rows, frame = RowsOnDisk(), Refusing()
    with pytest.warns(UserWarning, match="each fit reads them again: .*PERSIST TABLE is not supported") as warned:
        assert rows.of(Form(schema=None, number=2), frame) is frame
        assert rows.of(Form(schema=None, number=3), frame) is frame
    assert len(warned) == 1 and frame.tries == 1
    assert rows.is_released and not rows.release()
