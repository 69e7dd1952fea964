import select
import socket
from types import SimpleNamespace

import pytest

from elephant.collective.links import ChunkSchedule, SenderThread
from elephant.errors import DeadlineExceededError
from elephant.net import Deadline, socket_io


@pytest.fixture
def sockets():
    pair = socket.socketpair()
    for sock in pair:
        socket_io.prepare(sock)
    yield pair
    for sock in pair:
        sock.close()


def flow_of(pieces, *, free):
    outgoing = [memoryview(bytes([number]) * 1000) for number in range(pieces)]
    incoming = [memoryview(bytearray(1000)) for _ in range(pieces - free)]
    return ChunkSchedule(outgoing, incoming, free=free, lag=free)


def read(sock, count):
    data = bytearray(count)
    socket_io.receive_into(sock, memoryview(data), Deadline(20, "Reading"), "sender")
    return bytes(data)


def finish(sender):
    """Waits as the owner of a sender does, without a deadline of its own: that of the flow ends the sender."""
    assert select.select([sender], [], [], 20)[0] and sender.done
    sender.finish()
    assert not select.select([sender], [], [], 0)[0] and not sender.done


def test_pieces_go_out_when_they_have_come_in(sockets):
    sender = SenderThread(SimpleNamespace(target=sockets[0]), "test-sender")
    for _ in range(2):
        flow, deadline = flow_of(3, free=1), Deadline(20, "Sending")
        sender.begin(flow, deadline)
        assert not sender.done
        assert read(sockets[1], 1000) == bytes(1000)
        for number in (1, 2):
            flow.received(1000)
            sender.piece_arrived()
            assert read(sockets[1], 1000) == bytes([number]) * 1000
        finish(sender)
    sender.stop()


def test_stop_ends_a_sender_that_waits_for_a_piece(sockets):
    sender = SenderThread(SimpleNamespace(target=sockets[0]), "test-sender")
    sender.begin(flow_of(2, free=1), Deadline(20, "Sending"))
    sender.stop()


def test_a_piece_that_never_comes_ends_at_the_deadline(sockets):
    sender, deadline = SenderThread(SimpleNamespace(target=sockets[0]), "test-sender"), Deadline(0.1, "Sending")
    sender.begin(flow_of(2, free=1), deadline)
    with pytest.raises(DeadlineExceededError, match="Sending did not end within 0.1 s"):
        finish(sender)
    sender.stop()


def test_a_peer_that_is_gone_is_an_error(sockets):
    sockets[1].close()
    sender = SenderThread(SimpleNamespace(target=sockets[0]), "test-sender")
    sender.begin(flow_of(1, free=1), Deadline(20, "Sending"))
    with pytest.raises(OSError):
        finish(sender)
    sender.stop()
