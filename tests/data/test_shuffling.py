"""The order of a pass: every row once, decided by numbers alone, and nearly as random as a whole shuffle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.data import shuffling
from elephant.data.epoch_plan import row_order
from elephant.data.shuffling import Blocks, PassOrder, blocks_of, left_over, order_by_length


def whole_pass(order, num_rows, step=None):
    step = step or max(num_rows, 1)
    return np.concatenate(
        [np.empty(0, np.int64)]
        + [part for first in range(0, num_rows, step) for part in order.parts(first, min(first + step, num_rows))]
    )


@given(
    num_rows=st.integers(0, 300),
    block=st.integers(1, 40),
    window=st.integers(1, 6),
    step=st.integers(1, 50),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_order_when_read_in_pieces_of_any_length_then_is_one_permutation(num_rows, block, window, step, epoch, shuffle):
    blocks = Blocks(block, window)
    entered = []
    order = PassOrder(3, epoch, 1, num_rows, blocks, shuffle=shuffle, entered=lambda window, _: entered.append(window))
    rows = whole_pass(order, num_rows, step)
    assert sorted(rows.tolist()) == list(range(num_rows))
    assert entered == list(range(len(entered)))
    np.testing.assert_array_equal(rows, whole_pass(PassOrder(3, epoch, 1, num_rows, blocks, shuffle=shuffle), num_rows))
    if not shuffle:
        assert rows.tolist() == list(range(num_rows))
    place = 0
    for number in entered:
        members = [row for first, last in order.blocks_of_window(number) for row in range(first, last)]
        assert sorted(rows[place : place + len(members)].tolist()) == sorted(members)
        place += len(members)
    assert place == num_rows and order.blocks_of_window(len(entered)) == []


def test_order_when_rows_fit_into_memory_then_is_that_of_a_whole_shuffle():
    order = PassOrder(7, 2, 1, 1000, blocks_of(1000, 1000 * 100), shuffle=True)
    np.testing.assert_array_equal(whole_pass(order, 1000, 64), row_order(7, 2, 1, 1000, shuffle=True))


def test_order_when_seed_pass_or_rank_differs_then_differs():
    orders = [
        whole_pass(PassOrder(*key, 500, Blocks(10, 5), shuffle=True), 500).tolist()
        for key in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))
    ]
    assert len({tuple(order) for order in orders}) == 4


@given(num_rows=st.integers(1, 10**9), row_bytes=st.integers(1, 10**7))
def test_blocks_when_rows_are_many_then_a_window_stays_within_its_limits(num_rows, row_bytes):
    blocks = blocks_of(num_rows, num_rows * row_bytes)
    if num_rows * row_bytes <= shuffling.WHOLE_BYTES:
        assert blocks == Blocks(num_rows, 1)
        return
    counted = max(row_bytes, 64)
    assert blocks.rows == 1 or blocks.rows * counted <= shuffling.BLOCK_BYTES
    window = blocks.rows * blocks.window * counted
    assert window <= max(shuffling.MOST_WINDOW_BYTES, counted)
    # At least a sixteenth of the rows, up to the limit.
    if row_bytes >= 64:
        assert window >= 0.9 * min(num_rows * row_bytes / 16, shuffling.MOST_WINDOW_BYTES) - counted


def test_quality_when_shuffled_by_blocks_then_is_near_that_of_a_whole_shuffle():
    # A shard of 1 GiB of rows of 3 KiB: 64 MiB windows of 256 blocks.
    num_rows, row_bytes, batch = 349_525, 3072, 64
    blocks = blocks_of(num_rows, num_rows * row_bytes)
    assert blocks.window > 200
    rows = whole_pass(PassOrder(1, 0, 0, num_rows, blocks, shuffle=True), num_rows)
    places = np.empty(num_rows)
    places[rows] = np.arange(num_rows)
    # Where a row lies says nothing of when it comes.
    assert abs(np.corrcoef(places, np.arange(num_rows))[0, 1]) < 0.05
    # Rows that are neighbors on disk share a batch hardly more often than in a whole shuffle: of all pairs
    # (block - 1) / block are in one window, and there as likely as any two of its rows to share a batch.
    together = np.mean(places[1:] // batch == places[:-1] // batch)
    assert together < 2 * batch / (blocks.rows * blocks.window)
    # A batch draws from many blocks: as many as 64 balls find of 256 boxes, about 57.
    of_batch = rows[: num_rows // batch * batch].reshape(-1, batch) // blocks.rows
    distinct = np.mean([len(set(batch_blocks)) for batch_blocks in of_batch[::50].tolist()])
    expected = blocks.window * (1 - (1 - 1 / blocks.window) ** batch)
    assert distinct == pytest.approx(expected, rel=0.05)
    # ... and these lie all over the shard: the mean of a batch's places varies as that of random rows does, but for
    # the blocks of its window being the same for all of the window's batches.
    means = rows[: num_rows // batch * batch].reshape(-1, batch).mean(axis=1) / num_rows
    assert np.std(means) < 1.5 * np.sqrt(1 / 12 / batch + 1 / 12 / blocks.window)
    # Labels that are sorted on disk, the worst case: every batch still sees nearly the whole range.
    ranges = np.ptp(of_batch * blocks.rows / num_rows, axis=1)
    assert np.quantile(ranges, 0.01) > 0.8


def test_quality_when_passes_follow_then_rows_meet_others():
    num_rows, blocks = 20_000, Blocks(10, 50)
    windows = []
    for epoch in range(2):
        rows = whole_pass(PassOrder(1, epoch, 0, num_rows, blocks, shuffle=True), num_rows)
        windows.append({frozenset(rows[first : first + 500].tolist()) for first in range(0, num_rows, 500)})
    shared = [max(len(window & other) for other in windows[1]) for window in windows[0]]
    # Of 500 rows, 12.5 on average are together again.
    assert max(shared) < 100


@given(batches=st.integers(0, 40), batch_size=st.integers(1, 9), shuffle=st.booleans(), seed=st.integers(0, 99))
def test_order_by_length_when_made_then_batches_are_of_like_length_and_in_any_order(batches, batch_size, shuffle, seed):
    lengths = np.random.default_rng(seed).integers(0, 50, batches * batch_size)
    key = (seed, 0, 1, 2) if shuffle else None
    order = order_by_length(lengths, batch_size, key)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    np.testing.assert_array_equal(order, order_by_length(lengths, batch_size, key))
    spans = np.sort(lengths[order].reshape(-1, batch_size), axis=1)[:, [0, -1]]
    if shuffle:
        spans = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
    # Sorted by length and cut: no batch's lengths reach into the next one's.
    assert all(before <= after for before, after in zip(spans[:-1, 1], spans[1:, 0], strict=True))


def test_order_by_length_when_seed_pass_rank_or_pool_differs_then_differs():
    lengths = np.arange(200)
    keys = ((1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1))
    assert len({tuple(order_by_length(lengths, 4, key).tolist()) for key in keys}) == len(keys)


@given(num_rows=st.integers(0, 60), data=st.data())
def test_left_over_when_rows_are_taken_out_then_are_the_others_in_order(num_rows, data):
    taken = np.array(sorted(data.draw(st.sets(st.integers(0, max(num_rows - 1, 0)), max_size=num_rows))), np.int64)
    expected = np.setdiff1d(np.arange(num_rows), taken)
    np.testing.assert_array_equal(left_over(np.arange(len(expected)), taken), expected)
