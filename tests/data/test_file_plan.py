"""Row groups and files dealt out to workers: every row once, and equal parts."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.data.file_sources import deal_files, deal_rows, files_in_order, read_ahead

GROUPS = st.lists(st.lists(st.integers(0, 50), max_size=5), max_size=6)


@given(groups=GROUPS, workers=st.integers(1, 9), seed=st.none() | st.integers(0, 5))
def test_rows_when_dealt_then_each_is_read_once_and_parts_differ_by_one_row(groups, workers, seed):
    parts = deal_rows(groups, workers, seed=seed)
    read = [
        (piece.file, piece.group, row) for part in parts for piece in part for row in range(piece.start, piece.stop)
    ]
    expected = [
        (file, group, row)
        for file, counts in enumerate(groups)
        for group, rows in enumerate(counts)
        for row in range(rows)
    ]
    assert sorted(read) == expected
    sizes = [sum(piece.stop - piece.start for piece in part) for part in parts]
    assert len(parts) == workers
    assert max(sizes) - min(sizes) <= 1
    # A cut divides one group at most: no worker has more than its own two and whole ones between.
    pieces = sum(len(part) for part in parts)
    assert pieces <= sum(rows > 0 for counts in groups for rows in counts) + workers - 1


def test_rows_when_dealt_in_the_order_of_files_then_neighbours_stay_together():
    parts = deal_rows([[3, 3], [0, 6]], 3)
    assert [[(piece.file, piece.group, piece.start, piece.stop) for piece in part] for part in parts] == [
        [(0, 0, 0, 3), (0, 1, 0, 1)],
        [(0, 1, 1, 3), (1, 1, 0, 2)],
        [(1, 1, 2, 6)],
    ]


def test_rows_when_dealt_by_a_seed_then_groups_of_one_file_go_to_several_workers():
    groups = [[10] * 20, [10] * 20]
    parts = deal_rows(groups, 2, seed=1)
    assert parts == deal_rows(groups, 2, seed=1) != deal_rows(groups, 2, seed=2)
    assert all({piece.file for piece in part} == {0, 1} for part in parts)


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=12), workers=st.integers(1, 9))
def test_files_when_dealt_then_every_record_is_read_once_and_parts_are_balanced(sizes, workers):
    parts = deal_files(sizes, workers)
    for file in range(len(sizes)):
        shares = [share for part in parts for share in part if share.file == file]
        assert sorted(share.index for share in shares) == list(range(shares[0].count))
        assert {share.count for share in shares} == {len(shares)}
    loads = [sum(sizes[share.file] / share.count for share in part) for part in parts]
    assert max(loads) <= 1.25 * sum(loads) / workers + 1e-9


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=12), number=st.integers(1, 9))
def test_files_when_dealt_in_order_then_parts_are_neighbours_and_none_is_empty(sizes, number):
    parts = files_in_order(sizes, number)
    assert [share.file for part in parts for share in part] == list(range(len(sizes)))
    assert all(parts) and len(parts) <= number
    # Apart from its first and last file, a part has no more than its share.
    inner = [sum(sizes[share.file] for share in part[1:-1]) for part in parts]
    assert max(inner) <= sum(sizes) / number


def _reading_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("elephant-reading")]


def test_read_ahead_when_a_batch_is_used_then_the_next_one_is_read_and_errors_come_in_their_place():
    read = []

    def batches():
        for number in range(1, 4):
            read.append(number)
            yield number
        raise OSError("no such file")

    ahead = read_ahead(batches())
    assert next(ahead) == 1
    deadline = time.monotonic() + 30
    while read != [1, 2] and time.monotonic() < deadline:
        time.sleep(0.01)
    # One batch, and no more.
    assert read == [1, 2]
    assert [next(ahead), next(ahead)] == [2, 3]
    with pytest.raises(OSError, match="no such file"):
        next(ahead)
    # One that is left has no thread any more.
    left = read_ahead(iter([1, 2, 3]))
    next(left)
    left.close()
    assert list(read_ahead(iter([]))) == []
    while (reading := _reading_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not reading
