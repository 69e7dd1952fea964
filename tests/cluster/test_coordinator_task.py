"""Parts of a run that rank 0 hosts, without Spark."""

from elephant.cluster.coordinator_spec import CoordinatorInfo
from elephant.cluster.coordinator_task import EarlyOutput
from elephant.cluster.task import PIECE_BYTES, result_rows, results_by_rank
from elephant.config import Timeouts


def test_results_by_rank_when_results_are_large_then_joins_their_pieces():
    results = {0: bytes(range(256)) * 10_000, 1: b"", -1: b"x" * PIECE_BYTES}
    batches = [batch for rank, result in results.items() for batch in result_rows(rank, result)]
    assert max(len(row["result"]) for batch in batches for row in batch.to_pylist()) <= PIECE_BYTES
    assert [batch.num_rows for batch in batches] == [1] * 5
    assert results_by_rank(row for batch in batches for row in batch.to_pylist()) == results


def test_host_place_when_it_crosses_the_pipe_then_is_the_same():
    place = CoordinatorInfo(
        run_id="r",
        token="00ff",
        num_ranks=3,
        channel_fd=7,
        server_fds=[8, 9],
        timeouts=Timeouts(connect_s=3.0),
        extras=b'\n{"not": "json"}\n\x80\x04',
    )
    assert CoordinatorInfo.from_bytes(place.to_bytes()) == place
    assert "00ff" not in repr(place)


class Lines:
    def __init__(self):
        self.lines, self.closed = [], False

    def add(self, line):
        self.lines.append(line)

    def close(self):
        self.closed = True


def test_early_lines_when_they_come_before_the_ranks_have_met_then_are_sent_afterwards():
    early, lines = EarlyOutput(), Lines()
    for number in range(300):
        early.add(str(number))
    early.begin(lines)
    early.add("late")
    early.close()
    assert lines.lines == [*map(str, range(200)), "late"] and lines.closed
    # Of ranks that never meet nobody wants the lines.
    EarlyOutput().close()


def test_early_lines_when_nobody_asks_for_them_before_the_end_then_keep_the_first_and_count_the_rest():
    early = EarlyOutput()
    for number in range(203):
        early.add(str(number))
    early.add(" ")
    early.close()
    assert early.taken() == ([str(number) for number in range(200)], 3)
