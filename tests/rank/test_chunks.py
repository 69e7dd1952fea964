"""Arrow chunks that cross to another process and come back, and what happens when one side fails."""

import itertools
import os
import socket
import threading

import numpy as np
import pyarrow as pa
import pytest
from leaks import nothing_left_behind as nothing_left_behind

from elephant.errors import DataError, TrainingError
from elephant.rank.chunks import ChunkChannel, HungUpError

DEADLINE_S = 60


@pytest.fixture
def channel():
    """One end, whose other one is served by a thread."""
    ours, (connection, sending, receiving) = ChunkChannel.pair()
    theirs = ChunkChannel(socket.socket(fileno=connection), sending, receiving)
    ours._connection.settimeout(DEADLINE_S)
    thread = threading.Thread(target=theirs.serve, name="the other process")
    thread.start()
    yield ours
    ours.close()
    thread.join(DEADLINE_S)
    theirs.close()
    assert not thread.is_alive()


def doubled(chunks):
    for (column,) in chunks:
        yield [pa.array(np.asarray(column) * 2), column]


def echoed(chunks):
    yield from chunks


def counted(chunks):
    yield sum(len(columns[0]) for columns in chunks)


def kept(chunks):
    """Returns what the columns hold: as Python values at once, or else the next chunk would take their place."""
    return [[column.to_pylist() for column in columns] for columns in chunks]


def refused(chunks):
    next(chunks)
    raise DataError("row 3: expected a number")


def broken(chunks):
    return {}["no such column"]


def nothing(chunks):
    return []


def test_results_when_a_function_makes_columns_of_each_chunk_then_they_are_those_of_numpy(channel):
    parts = [np.arange(size, dtype="float64") + size for size in (1, 1000, 7)]
    made = list(channel.results(doubled, ([pa.array(part)] for part in parts)))
    for part, (twice, same) in zip(parts, made, strict=True):
        np.testing.assert_array_equal(twice, part * 2)
        np.testing.assert_array_equal(same, part)


def test_results_when_one_function_follows_the_other_then_each_has_its_own_chunks(channel):
    assert list(channel.results(counted, [[pa.array([1, 2])], [pa.array([3])]])) == [3]
    assert list(channel.results(nothing, [[pa.array([1])]])) == []
    assert list(channel.results(counted, [])) == [0]
    assert list(channel.results(echoed, [[pa.array([5])]])) == [[pa.array([5])]]


def test_results_when_a_chunk_is_larger_than_those_before_then_all_come_whole(channel):
    # Over the mebibyte by which the memory grows, and back.
    sizes = (10, 200_000, 3, 1_500_000, 1)
    made = list(channel.results(doubled, ([pa.array(np.full(size, float(size)))] for size in sizes)))
    for size, (twice, same) in zip(sizes, made, strict=True):
        np.testing.assert_array_equal(twice, np.full(size, 2.0 * size))
        assert len(same) == size


def test_results_when_they_are_kept_then_later_ones_do_not_take_their_place(channel):
    kept_items = list(channel.results(echoed, ([pa.array([number] * 50)] for number in range(40))))
    assert [item[0].to_pylist() for item in kept_items] == [[number] * 50 for number in range(40)]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", None, "ö" * 300, ""]),
        pa.array([[1.0, 2.0], [], None, [3.0]]),
        pa.array([[[1], [2, 3]], [], [None, [4]], None]),
        pa.array([{"x": 1, "y": "b"}, None, {"x": None, "y": ""}, {"x": 2, "y": "c"}]),
        pa.array([b"\x00", b"", None, b"\xff" * 9]),
        pa.array([True, None, False, True]),
        pa.array(["x", "y", "x", None]).dictionary_encode(),
        pa.array([None, None, None, None], pa.int32()),
    ],
    ids=["strings", "lists", "nested lists", "structs", "binary", "booleans", "dictionary", "nulls"],
)
def test_results_when_columns_are_slices_then_their_rows_alone_cross(channel, column):
    slices = [column, column.slice(1, 2), column.slice(3), column.slice(0, 0)]
    wanted = [part.to_pylist() for part in slices]
    got = list(channel.results(echoed, ([part, part] for part in slices)))
    assert [[part.to_pylist() for part in item] for item in got] == [[rows, rows] for rows in wanted]
    assert [part.type for part in got[1]] == [column.type] * 2


def test_results_when_the_function_returns_no_arrays_then_they_cross_as_they_are(channel):
    assert list(channel.results(kept, [[pa.array([1]), pa.array(["a"])]])) == [[[1], ["a"]]]


def test_results_when_the_function_raises_then_its_error_keeps_type_and_traceback_and_the_channel_its_order(channel):
    with pytest.raises(DataError, match="^row 3: expected a number$"):
        list(channel.results(refused, [[pa.array([1])], [pa.array([2])]]))
    with pytest.raises(KeyError) as raised:
        list(channel.results(broken, []))
    # Where in that process it was raised.
    assert "in broken" in str(raised.value.__cause__) and 'return {}["no such column"]' in str(raised.value.__cause__)
    assert list(channel.results(counted, [[pa.array([1, 2])]])) == [2]


class PickyError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class StubbornError(Exception):
    def __reduce__(self):
        raise RuntimeError("cannot be pickled")


def picky(chunks):
    raise PickyError("one", "two")


def stubborn(chunks):
    raise StubbornError("with a lock in it")


def truncated(chunks):
    raise EOFError("the user's file is shorter than it says")


def unpicklable(chunks):
    yield threading.Lock()


def uneven(chunks):
    yield [pa.array([1]), pa.array([1, 2])]


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (picky, TrainingError, "^PickyError: one and two$"),
        (stubborn, TrainingError, "^StubbornError: with a lock in it$"),
        (truncated, EOFError, "^the user's file is shorter than it says$"),
        (unpicklable, TypeError, "pickle"),
        (uneven, ValueError, "length"),
    ],
)
def test_results_when_an_error_is_an_odd_one_then_its_text_comes_all_the_same(channel, function, kind, text):
    with pytest.raises(kind, match=text):
        list(channel.results(function, []))
    assert list(channel.results(counted, [])) == [0]


class Missing:
    """Pickled as something that the other end does not have."""

    def __reduce__(self):
        return (__import__, ("no_such_module",))


def test_results_when_the_function_s_code_is_missing_then_says_which(channel):
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        list(channel.results(Missing(), []))
    assert list(channel.results(counted, [])) == [0]


def test_results_when_the_chunks_raise_then_the_error_is_theirs_though_it_be_an_eof_error(channel):
    def chunks():
        yield [pa.array([1])]
        raise EOFError("Spark has hung up")

    with pytest.raises(EOFError, match="Spark has hung up"):
        list(channel.results(counted, chunks()))


def test_results_when_the_other_end_is_gone_then_says_so():
    ours, theirs = ChunkChannel.pair()
    for descriptor in theirs:
        os.close(descriptor)
    with pytest.raises(HungUpError):
        list(ours.results(counted, []))
    ours.close()
    ours.close()


def test_results_when_the_other_end_goes_in_mid_message_then_says_so():
    ours, (connection, *others) = ChunkChannel.pair()
    with socket.socket(fileno=connection) as theirs:
        theirs.sendall(b"\0\0\0\0\0\0\0\x09half")
    for descriptor in others:
        os.close(descriptor)
    with pytest.raises(HungUpError):
        list(ours.results(counted, []))
    ours.close()


def test_results_when_they_are_endless_then_nothing_is_computed_that_nobody_asks_for(channel):
    asked = []

    def chunks():
        for number in itertools.count():
            asked.append(number)
            yield [pa.array([number])]

    results = channel.results(echoed, chunks())
    assert [next(results)[0].to_pylist() for _ in range(3)] == [[0], [1], [2]]
    assert len(asked) <= 4
    results.close()
