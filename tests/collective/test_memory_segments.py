import logging
import os
import threading

import numpy as np
import pytest

from elephant.collective import shared_memory
from elephant.collective.shared_memory import SharedMemory, memory_bytes


def reduce(collective):
    array = np.full(200_000, collective.rank, "f4")
    collective.allreduce_(array)
    return float(array[0]), float(array[-1])


def open_file(length):
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, length)
    return descriptor


@pytest.mark.parametrize("hosts", [None, "aabb"])
@pytest.mark.parametrize("made", [lambda length: None, lambda length: open_file(length - 1)], ids=["none", "short"])
def test_ranks_that_cannot_share_memory_use_sockets_and_say_so_once(run_world, monkeypatch, caplog, hosts, made):
    monkeypatch.setattr(shared_memory, "_new_file", made)
    with caplog.at_level(logging.WARNING):
        assert run_world(4, reduce, hosts=hosts) == [(6.0, 6.0)] * 4
    assert [record.message for record in caplog.records] == [
        "The ranks of a host cannot share memory on this system: all data goes through sockets."
    ]


def test_one_host_without_memory_makes_all_use_sockets(run_world, monkeypatch, caplog):
    made = shared_memory._new_file

    def for_two_only(length):
        return made(length) if length == memory_bytes(2, 1 << 20) else None

    monkeypatch.setattr(shared_memory, "_new_file", for_two_only)
    with caplog.at_level(logging.WARNING):
        assert run_world(5, reduce, hosts="aabbb") == [(10.0, 10.0)] * 5
    assert len(caplog.records) == 1


def ask_for_memory(collective):
    memory = collective.shared_memory(128, 2)
    if memory is None:
        return None
    memory.blocks(1)[collective.rank][:] = collective.rank + 1
    collective.barrier()
    read = [int(block[-1]) for block in memory.blocks(1)]
    collective.barrier()
    memory.close()
    return read


def test_memory_that_all_ranks_ask_for_is_that_of_all(run_world):
    assert run_world(3, ask_for_memory) == [[1, 2, 3]] * 3
    assert run_world(3, ask_for_memory, hosts="aab") == [None] * 3


def test_memory_that_one_rank_cannot_map_no_rank_has(run_world, monkeypatch):
    class OfMostRanks(SharedMemory):
        def __init__(self, descriptor, size, block_bytes, turns):
            super().__init__(descriptor, size, block_bytes, turns)
            if block_bytes == 128 and threading.current_thread().name == "test-rank-1":
                self.close()
                raise OSError("no room")

    monkeypatch.setattr(shared_memory, "SharedMemory", OfMostRanks)
    assert run_world(3, ask_for_memory) == [None] * 3


def test_a_file_that_has_no_room_is_given_back(monkeypatch):
    def full(descriptor, start, length):
        raise OSError("no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert shared_memory._new_file(1000) is None


def test_a_system_without_such_files_has_none(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert shared_memory._new_file(1000) is None


def test_a_file_of_another_length_is_refused_and_closed():
    with pytest.raises(OSError, match="expected shared memory of 1536 bytes, received 1535"):
        SharedMemory(open_file(1535), 2, 256)


def test_blocks_are_apart_and_come_again_after_three_turns():
    shared = SharedMemory(open_file(memory_bytes(2, 256)), 2, 256)
    for turn in range(3):
        for place in range(2):
            shared.blocks(turn)[place][:] = 10 * turn + place
    for turn in range(6):
        for place, block in enumerate(shared.blocks(turn)):
            assert len(block) == 256 and (block == 10 * (turn % 3) + place).all()
    del block
    shared.close()


def test_memory_that_somebody_still_looks_at_can_be_closed():
    shared = SharedMemory(open_file(memory_bytes(1, 256)), 1, 256)
    block = shared.blocks(0)[0]
    shared.close()
    assert not block.any()
