import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.collective.ring import allreduce_segments, chunks, gathered_blocks, segment_bounds

worlds = st.integers(2, 20)


@given(st.integers(0, 10_000), worlds)
def test_segments_cover_everything_once_and_evenly(count, world_size):
    bounds = segment_bounds(count, world_size)
    assert bounds[0][0] == 0 and bounds[-1][1] == count and len(bounds) == world_size
    assert all(left[1] == right[0] for left, right in zip(bounds, bounds[1:], strict=False))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 50))
def test_chunks_cover_the_range_in_order(start, length, size):
    pieces = chunks(start, start + length, size)
    assert [index for begin, end in pieces for index in range(begin, end)] == list(range(start, start + length))
    assert all(0 < end - begin <= size for begin, end in pieces)


@given(worlds)
def test_what_a_rank_sends_is_what_its_right_neighbour_receives(world_size):
    for rank in range(world_size):
        added, copied = allreduce_segments(rank, world_size)
        sent = [rank, *added, *copied][:-1]
        right_added, right_copied = allreduce_segments((rank + 1) % world_size, world_size)
        assert sent == right_added + right_copied


@given(worlds)
def test_every_rank_completes_one_segment_and_copies_the_others(world_size):
    completed = [allreduce_segments(rank, world_size)[0][-1] for rank in range(world_size)]
    assert sorted(completed) == list(range(world_size))
    for rank in range(world_size):
        added, copied = allreduce_segments(rank, world_size)
        assert {added[-1], *copied} == set(range(world_size))


@pytest.mark.parametrize("owner, order", [(0, [3, 2, 1]), (2, [1, 0, 3])])
def test_gathered_blocks_come_from_the_nearest_left_rank_first(owner, order):
    assert gathered_blocks(owner, 4) == order
