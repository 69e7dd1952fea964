"""Messages between two ranks: any arrays, in order, of any length, whoever sends first."""

import socket
import threading
import time

import numpy as np
import pytest

from elephant.collective import LocalCommunicator, connector, point_to_point
from elephant.errors import ConfigurationError, DeadlineExceededError, PeerLostError
from elephant.net import socket_io


def odd_arrays():
    generator = np.random.default_rng(0)
    return [
        np.array(7.5),
        np.zeros((0, 3), "f4"),
        generator.normal(size=(4, 5)).T,
        np.array([True, False]),
        np.array([b"ab", b"c"]),
        np.array(["ü", "xyz"]),
        np.arange(3, dtype=">i4"),
        generator.normal(size=7).astype("f2"),
        np.array([1 + 2j]),
    ]


@pytest.mark.parametrize(
    "way", [{}, {"transport": "tcp"}, {"transport": "tcp", "encryption": True}], ids=["host", "tcp", "tls"]
)
def test_message_when_its_arrays_are_of_all_kinds_then_they_arrive_as_they_were(run_world, way):
    def run(world):
        if world.rank == 0:
            world.send(odd_arrays(), 1)
            world.send([], 1)
            return None
        return world.recv(0), world.recv(0)

    received, empty = run_world(2, run, **way)[1]
    assert empty == []
    for array, right in zip(received, odd_arrays(), strict=True):
        assert (array.dtype, array.shape, array.tobytes()) == (right.dtype, right.shape, right.tobytes())
        assert array.flags.writeable


def test_message_when_it_is_of_bfloat16_then_arrives_as_that(run_world):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

    def run(world):
        return world.send([np.arange(4).astype(bfloat16)], 1) if world.rank == 0 else world.recv(0)[0]

    received = run_world(2, run)[1]
    assert received.dtype == bfloat16 and received.astype("f4").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "way", [{}, {"transport": "tcp"}, {"transport": "tcp", "encryption": True}], ids=["host", "tcp", "tls"]
)
def test_sends_when_all_ranks_send_64_megabytes_first_then_none_waits_for_another(run_world, monkeypatch, way):
    prepare = socket_io.prepare

    def prepare_with_tiny_buffers(sock):
        prepare(sock)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 16)

    monkeypatch.setattr(socket_io, "prepare", prepare_with_tiny_buffers)
    count = (64 << 20) // 8

    def run(world):
        others = [rank for rank in range(world.world_size) if rank != world.rank]
        for other in others:
            array = np.full(count, 10.0 * world.rank + other)
            world.send([array], other)
            # It is the caller's again.
            array[:] = -1
        received = [world.recv(other)[0] for other in others]
        return [(float(array.min()), float(array.max())) for array in received]

    assert run_world(2, run, **way) == [[(10.0, 10.0)], [(1.0, 1.0)]]


def test_small_messages_when_nobody_receives_then_leave_at_once_and_keep_their_order(run_world):
    arrived = threading.Event()

    def run(world):
        if world.rank == 0:
            for step in range(200):
                world.send([np.array([step])], 1)
            arrived.set()
            return None
        assert arrived.wait(20)
        return [int(world.recv(0)[0][0]) for _ in range(200)]

    assert run_world(2, run)[1] == list(range(200))


def test_send_when_too_much_waits_then_waits_and_goes_on_once_it_is_received(run_world, monkeypatch):
    monkeypatch.setattr(point_to_point, "_MOST_WAITING_BYTES", 1 << 20)

    def run(world):
        if world.rank == 0:
            for step in range(12):
                world.send([np.full(1 << 20, step, "u1")], 1)
            return None
        time.sleep(0.3)
        return [int(world.recv(0)[0][-1]) for _ in range(12)]

    assert run_world(2, run)[1] == list(range(12))


def test_recv_when_nothing_comes_then_ends_at_the_deadline_and_names_the_rank(run_world):
    def run(world):
        if world.rank == 0:
            world.recv(2)
        elif world.rank == 1:
            world.barrier()

    outcomes = run_world(3, run, operation_timeout_s=1.0)
    assert isinstance(outcomes[0], (DeadlineExceededError, PeerLostError))
    assert "rank 2" in str(outcomes[0]).lower() or "Ranks that did not arrive: 2" in str(outcomes[0])


def test_message_when_its_sender_closes_after_it_then_still_arrives(run_world):
    def run(world):
        if world.rank == 0:
            world.send([np.ones(3_000_000)], 1)
            return None
        time.sleep(0.3)
        received = float(world.recv(0)[0].sum())
        with pytest.raises(PeerLostError, match="Rank 0 closed its collective after operation 0"):
            world.recv(0)
        return received

    assert run_world(2, run)[1] == 3_000_000.0


def test_send_when_the_receiver_takes_nothing_then_its_deadline_breaks_the_collective(run_world):
    def run(world):
        if world.rank == 0:
            world.send([np.ones(3_000_000)], 1)
        time.sleep(1.5)
        world.barrier()

    outcomes = run_world(2, run, operation_timeout_s=0.5)
    assert "The send to rank 1 on rank 0 did not end within 0.5 s. Rank 1 has not taken it." in str(outcomes[0])
    assert "The send to rank 1 on rank 0 did not end within 0.5 s" in str(outcomes[1])


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda one: one.send([np.ones(1)], 0), "dst: expected another rank than 0, from 0 to 0. Received: 0"),
        (lambda one: one.recv(3), "src: expected another rank than 0, from 0 to 0. Received: 3"),
        (lambda one: one.send(np.ones(1), 1), "expected a list of arrays. Received: one array"),
        (lambda one: one.send([np.array([object()])], 1), "a dtype without Python objects"),
        (lambda one: one.send([np.zeros(1, "i4, f4")], 1), "expected a dtype without fields"),
    ],
)
def test_message_when_it_cannot_travel_then_raises_what_was_expected(call, text):
    with pytest.raises(ConfigurationError, match=text):
        call(LocalCommunicator())


def test_door_when_the_collective_stands_then_holds_strangers_and_closes_with_it(run_world):
    doors = []

    def run(world):
        address = world._generation.connector._addresses[1]
        if world.rank == 0:
            for _ in range(5):
                stranger = socket.create_connection(address, timeout=10)
                stranger.sendall(b"\xff" * 100)
                doors.append(stranger)
            world.send([np.ones(2)], 1)
            return address
        return world.recv(0)[0].tolist()

    address, received = run_world(2, run)
    assert received == [1.0, 1.0]
    for stranger in doors:
        stranger.close()
    with pytest.raises(OSError):
        socket.create_connection(address, timeout=1).close()


def test_seal_when_bytes_or_their_use_are_others_then_is_another():
    one = object.__new__(connector.PeerConnector)
    one._token, one._run_id = b"0123456789abcdef", "run"
    other = object.__new__(connector.PeerConnector)
    other._token, other._run_id = b"another token, too", "run"
    seals = {
        one.seal("object 1 of rank 0", b"x"),
        one.seal("object 2 of rank 0", b"x"),
        one.seal("object 1 of rank 0", b"y"),
    }
    assert len(seals) == 3 and other.seal("object 1 of rank 0", b"x") not in seals
