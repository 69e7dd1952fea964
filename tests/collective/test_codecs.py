"""What goes from host to host encoded: who encodes what, and that all ranks hold the same bits."""

import threading

import numpy as np
import pytest

from elephant.collective.operation import AlgorithmThresholds
from elephant.compression import Codec

COUNT = 50_003


class Rounded(Codec):
    """Whole numbers from -128 to 127, each in a byte; keeps a record of what it was asked for."""

    def __init__(self):
        self.encoded = np.zeros(COUNT, int)
        self._encoding, self._decoding = threading.Lock(), threading.Lock()

    def encoded_bytes(self, count):
        return count

    def encode(self, values, out, *, offset):
        with exclusive(self._encoding):
            self.encoded[offset : offset + len(values)] += 1
            out[...] = np.rint(values).astype(np.int8).view(np.uint8)

    def decode(self, data, out):
        with exclusive(self._decoding):
            out[...] = data.view(np.int8)


class exclusive:  # noqa: N801  (reads as a statement)
    """Fails where a second thread comes in."""

    def __init__(self, lock):
        self._lock = lock

    def __enter__(self):
        assert self._lock.acquire(blocking=False), "two threads at a time"

    def __exit__(self, *_):
        self._lock.release()


def values(rank):
    return np.random.default_rng(rank).integers(-9, 9, COUNT).astype(np.float32)


@pytest.mark.parametrize(
    "way, leaders",
    [
        ({"transport": "tcp"}, [0, 1, 2, 3]),
        ({"hosts": "abab"}, [0, 1]),
        ({"hosts": "aabc"}, [0, 2, 3]),
        ({"hosts": "aaaa"}, []),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_one_rank_of_each_host_encodes_each_index_once(run_world, way, leaders, op):
    codecs = [Rounded() for _ in range(4)]

    def reduce(collective):
        array = values(collective.rank)
        collective.allreduce_(array, op, codec=codecs[collective.rank])
        return array

    results = run_world(4, reduce, sizes=AlgorithmThresholds(small_bytes=1024, piece_bytes=4096), **way)
    expected = sum(values(rank) for rank in range(4)) / (4 if op == "mean" else 1)
    if leaders:
        expected = np.rint(expected)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, expected)
        assert (codecs[rank].encoded == (1 if rank in leaders else 0)).all()


@pytest.mark.parametrize("dtype, op", [("f4", "max"), ("f8", "sum"), ("f2", "sum"), ("i4", "sum")])
def test_other_dtypes_and_operations_go_as_they_are(run_world, dtype, op):
    codec = Rounded()

    def reduce(collective):
        return collective.allreduce(np.full(COUNT, 0.25 + collective.rank).astype(dtype), op, codec=codec)

    expected = np.full(COUNT, 1.25 if op == "max" else 1.5).astype(dtype) if dtype != "i4" else np.ones(COUNT)
    for result in run_world(2, reduce, transport="tcp"):
        np.testing.assert_array_equal(result, expected)
    assert not codec.encoded.any()


def test_a_codec_that_fails_is_named_to_all_ranks_at_once(run_world):
    class Failing(Rounded):
        def encode(self, values, out, *, offset):
            raise ZeroDivisionError("a bug of the codec's")

    def reduce(collective):
        collective.allreduce_(values(collective.rank), codec=Failing() if collective.rank == 1 else Rounded())

    errors = run_world(3, reduce, transport="tcp", sizes=AlgorithmThresholds(small_bytes=0))
    # The codec's class is part of what the ranks agree on.
    assert all("by Failing" in str(error) and "by Rounded" in str(error) for error in errors)
    Failing.__name__ = "Rounded"
    errors = run_world(3, reduce, transport="tcp", sizes=AlgorithmThresholds(small_bytes=0))
    assert type(errors[1]) is ZeroDivisionError
    for rank in (0, 2):
        assert "Rank 1 left the allreduce" in str(errors[rank]) and "a bug of the codec's" in str(errors[rank])
