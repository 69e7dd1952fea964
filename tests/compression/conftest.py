"""Ranks as threads, and a ring without sockets between them whose pieces travel encoded."""

import threading

import numpy as np
import pytest

WAIT_S = 60


class FakeRing:
    """One rank's end of a collective that is arithmetic alone: what a ring of hosts would compute.

    An allreduce with a codec goes segment by segment round the ring. A partial sum is encoded by each rank that
    passes it on, with that rank's codec, and the whole sum once more by its owner, for all ranks.
    """

    def __init__(self, rank, meeting, slots, crosses_hosts):
        self.rank, self.world_size, self.crosses_hosts = rank, len(slots), crosses_hosts
        self._meeting, self._slots = meeting, slots
        self.calls = []

    def _meet(self, value, combine):
        """All ranks bring a value; rank 0 combines them; all get the result."""
        self._slots[self.rank] = value
        self._meeting.wait(WAIT_S)
        if self.rank == 0:
            self._slots[0] = combine(list(self._slots))
        self._meeting.wait(WAIT_S)
        result = self._slots[0]
        self._meeting.wait(WAIT_S)
        return result

    def allreduce_(self, array, op="sum", *, codec=None):
        assert op == "sum" and array.flags.c_contiguous
        self.calls.append(("allreduce", array.size, type(codec).__name__))
        array[:] = self._meet((array.copy(), codec), _plain_sum if codec is None else _encoded_sum)

    def allgather(self, array):
        self.calls.append(("allgather", array.nbytes, "NoneType"))
        return [part.copy() for part in self._meet(array.copy(), list)]


def _plain_sum(brought):
    return np.add.reduce([array for array, _ in brought], axis=0)


def _encoded_sum(brought, piece=3000):
    arrays, codecs = zip(*brought, strict=True)
    world_size, size = len(arrays), len(arrays[0])
    result = np.empty(size, np.float32)
    borders = [size * segment // world_size for segment in range(world_size + 1)]
    for segment in range(world_size):
        for start in range(borders[segment], borders[segment + 1], piece):
            span = slice(start, min(start + piece, borders[segment + 1]))
            total = arrays[segment][span].copy()
            for hop in range(1, world_size):
                total = arrays[(segment + hop) % world_size][span] + _sent(
                    codecs[(segment + hop - 1) % world_size], total, start
                )
            result[span] = _sent(codecs[(segment - 1) % world_size], total, start)
    return result


def _sent(codec, values, offset):
    data = np.empty(codec.encoded_bytes(len(values)), np.uint8)
    codec.encode(values, data, offset=offset)
    received = np.empty(len(values), np.float32)
    codec.decode(data, received)
    return received


@pytest.fixture
def run_ranks():
    """Calls ``function(ring)`` on every rank, each in a thread, and returns the results by rank."""

    def run(world_size, function, *, crosses_hosts=True):
        meeting, slots = threading.Barrier(world_size), [None] * world_size
        outcomes = [None] * world_size

        def live(rank):
            try:
                outcomes[rank] = function(FakeRing(rank, meeting, slots, crosses_hosts))
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                outcomes[rank] = error
                meeting.abort()

        threads = [threading.Thread(target=live, args=(rank,), name=f"test-rank-{rank}") for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    return run
