"""What a worker is told crosses the pipe as it is."""

from elephant.config import Timeouts
from elephant.parameter_server.layout import Layout
from elephant.rank.rank_info import RankInfo
from elephant.rank.rank_progress import TrainingPosition


def test_rank_info_of_a_worker_when_it_crosses_the_pipe_then_is_the_same():
    layout = Layout([("kernel", (3, 2)), ("bias", ())])
    rank_info = RankInfo(
        rank=2,
        attempt=2**40,
        num_rows=[0, 0, 10, 0],
        num_marked=[0, 0, 3, 0],
        row_shapes={"features": (3,)},
        shard=None,
        driver=("10.0.0.1", 7),
        run_id="run",
        token="00ff",
        servers=[("10.0.0.1", 8), ("::1", 9)],
        layout=layout.to_json(),
        host="h",
        device="CPU",
        threads=1,
        timeouts=Timeouts(connect_s=3),
    )
    assert "00ff" not in repr(rank_info)
    again = RankInfo.from_bytes(rank_info.to_bytes())
    assert again == rank_info
    assert again.weights_layout.digest == layout.digest
    assert again.servers == [("10.0.0.1", 8), ("::1", 9)]


def test_place_when_a_worker_begins_in_mid_epoch_then_counts_its_own_steps():
    place = TrainingPosition(steps=5, first=3, epoch=1, batch=2)
    assert (place.number, place.taken, place.ends_epoch) == (8, 0, False)
    place.batch = 4
    assert (place.number, place.taken, place.ends_epoch) == (10, 2, True)
