import socket
import threading

import pytest

from elephant.errors import DeadlineExceededError, PeerLostError
from elephant.net import socket_io
from elephant.net.deadline import Deadline


@pytest.fixture
def sockets():
    pair = socket.socketpair()
    for sock in pair:
        socket_io.prepare(sock)
    yield pair
    for sock in pair:
        sock.close()


def test_send_all_of_many_large_buffers_arrives_in_order(sockets, soon):
    buffers = [bytes([i % 251]) * (i * 1000) for i in range(150)]
    expected = b"".join(buffers)
    received = bytearray(len(expected))
    reader = threading.Thread(
        target=socket_io.receive_into, args=(sockets[1], memoryview(received), soon(), "sender"), name="test-reader"
    )
    reader.start()
    socket_io.send_all(sockets[0], buffers, soon(), "reader")
    reader.join(20)
    assert bytes(received) == expected


def test_send_all_to_one_who_does_not_read_ends_at_the_deadline(sockets):
    with pytest.raises(DeadlineExceededError, match="Sending did not end within 0.05 s"):
        socket_io.send_all(sockets[0], [bytes(1 << 24)], Deadline(0.05, "Sending"), "peer")


def test_send_all_to_a_closed_peer_raises(sockets, soon):
    sockets[1].close()
    with pytest.raises(PeerLostError, match="The connection to rank 3 was lost while sending"):
        socket_io.send_all(sockets[0], [bytes(1 << 20)], soon(), "rank 3")


def test_receive_into_when_the_peer_closes_in_the_middle_raises(sockets, soon):
    sockets[1].send(b"half")
    sockets[1].close()
    with pytest.raises(PeerLostError, match="rank 3 closed the connection"):
        socket_io.receive_into(sockets[0], memoryview(bytearray(8)), soon(), "rank 3")
