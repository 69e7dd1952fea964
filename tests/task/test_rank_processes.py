"""The rows of a task with several ranks are dealt out to them in turn, whatever batches they come in."""

import numpy as np
import pyarrow as pa
import pytest

from elephant.data.schema import SCALAR, DataSchema, Field
from elephant.data.shard import Shard
from elephant.task.task import RankProcessGroup

SCHEMA = DataSchema(inputs=(Field("features", ("x",), "float32", SCALAR),))


class Started:
    """Stands for a process that was started."""

    def __init__(self, folder):
        self.work_folder = folder

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize("sizes", [(7,), (3, 1, 0, 5), (1,) * 8, (2,)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_when_a_task_has_several_ranks_then_are_dealt_out_in_turn(tmp_path, count, sizes):
    for place in range(count):
        (tmp_path / str(place)).mkdir()
    values = np.arange(sum(sizes), dtype="float32")
    bounds = np.cumsum([0, *sizes])
    batches = [
        pa.record_batch({"features": values[first:last]}) for first, last in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    starts = [lambda place=place: Started(tmp_path / str(place)) for place in range(count)]
    with RankProcessGroup(5, starts) as rank_processes:
        assert [rank_handle.rank for rank_handle in rank_processes.all] == [5 + place for place in range(count)]
        summaries = rank_processes.write(batches, SCHEMA)
        for place, (rank_handle, summary) in enumerate(zip(rank_processes.all, summaries, strict=True)):
            shard = Shard(rank_handle.shard if summary.num_rows else None, SCHEMA, {})
            (rows,) = shard.take(np.arange(summary.num_rows))
            assert rows.tolist() == values[place::count].tolist()
            shard.close()
