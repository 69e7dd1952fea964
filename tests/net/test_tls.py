"""TLS between two sockets: whom it lets in, what a wire shows, and what a non-blocking caller sees."""

import contextlib
import select
import socket
import ssl
import threading

import numpy as np
import pytest
from proxies import recording_proxy

from elephant.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    NetworkError,
    PeerLostError,
    ProtocolError,
)
from elephant.net import socket_io, tls
from elephant.net.deadline import Deadline
from elephant.net.frames import Message
from elephant.net.stream import Listener, Stream, connect


@pytest.fixture
def token(tokens):
    return tokens["encrypted"]


@pytest.fixture
def ends(token):
    """The two ends of a connection, once the TLS handshake is over."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        raw = socket.create_connection(server.getsockname(), timeout=10), server.accept()[0]
    for sock in raw:
        socket_io.prepare(sock)
    both = [tls.secured(sock, token, is_server=sock is raw[1]) for sock in raw]
    while all(sock.advance_handshake("the other side") for sock in both):
        pass
    assert not any(sock.advance_handshake("the other side") for sock in both)
    yield both
    for sock in both:
        sock.close()


def sent_and_received(ends, data, view):
    """Sends bytes and fills a view with them, in one thread."""
    sent = received = 0
    while received < len(view):
        with contextlib.suppress(BlockingIOError):
            sent += ends[0].send(data[sent:]) if sent < len(data) else 0
        with contextlib.suppress(BlockingIOError):
            received += ends[1].recv_into(view[received:])
    return sent


def test_new_token_without_encryption_has_nothing_but_random_bytes():
    assert len(tls.new_token(encryption=False)) == 32
    assert tls.new_token(encryption=False) != tls.new_token(encryption=False)


def test_new_token_without_cryptography_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    with pytest.raises(ConfigurationError, match=r"expected the package cryptography .* 'elephant-spark\[tls\]'"):
        tls.new_token(encryption=True)


def test_unix_sockets_stay_as_they_are(token):
    one, other = socket.socketpair()
    with one, other:
        assert tls.secured(one, token, is_server=False) is one


@pytest.mark.parametrize("proxied", ["plain", "encrypted"])
def test_a_recording_proxy_sees_neither_token_nor_numbers_where_the_run_is_encrypted(tokens, soon, proxied):
    token, gradient = tokens[proxied], np.random.default_rng(7).normal(size=100_000).astype(np.float32)
    with Listener.bind("127.0.0.1") as listener, recording_proxy(listener.address) as proxy:
        streams = []
        accepting = threading.Thread(target=lambda: streams.append(listener.accept(token, "run", soon())))
        accepting.start()
        with connect(proxy.address, token, "run", soon()) as client:
            accepting.join(20)
            with streams[0] as server:
                client.send(Message(1, {"name": "gradient"}, (gradient,)), soon())
                np.testing.assert_array_equal(server.receive(soon()).arrays[0], gradient)
                server.send(Message(2), soon())
                assert client.receive(soon()).kind == 2
    assert len(proxy.seen) > gradient.nbytes
    visible = proxied == "plain"
    assert (gradient[500:510].tobytes() in proxy.seen) is visible
    assert (b"elephant/auth" in proxy.seen) is visible
    # Not even a proof's plain counterpart, the token itself, is sent without TLS.
    assert token[:16] not in proxy.seen and b"PRIVATE KEY" not in proxy.seen


def test_a_stranger_with_another_certificate_is_turned_away_and_turns_away(token, other_token, soon):
    with Listener.bind("127.0.0.1") as listener:
        accepting = threading.Thread(
            target=lambda: pytest.raises(NetworkError, listener.accept, token, "run", Deadline(5, "Waiting"))
        )
        accepting.start()
        with pytest.raises(AuthenticationError, match="show this run's certificate. Received: another one"):
            connect(listener.address, other_token, "run", soon())
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection(listener.address, timeout=10) as raw,
            trusting.wrap_socket(raw) as stranger,
            pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
        ):
            stranger.recv(1)
        listener.close()
        accepting.join(20)
    assert listener.turned_away == {"127.0.0.1": 2}
    assert "did not return a certificate" in listener.seen


def test_a_stranger_with_the_certificate_and_another_token_is_turned_away(token, soon):
    robbed = b"another run's 32 random bytes..." + token[32:]
    with Listener.bind("127.0.0.1") as listener:
        accepting = threading.Thread(
            target=lambda: pytest.raises(DeadlineExceededError, listener.accept, token, "run", Deadline(2, "Waiting"))
        )
        accepting.start()
        with pytest.raises(AuthenticationError, match="knows this job's token"):
            connect(listener.address, robbed, "run", soon())
        accepting.join(20)
    assert listener.turned_away == {"127.0.0.1": 1}


def test_tls_1_2_is_refused(token):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    with Listener.bind("127.0.0.1") as listener:
        accepting = threading.Thread(
            target=lambda: pytest.raises(DeadlineExceededError, listener.accept, token, "run", Deadline(2, "Waiting"))
        )
        accepting.start()
        with (
            socket.create_connection(listener.address, timeout=10) as raw,
            pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
        ):
            old.wrap_socket(raw)
        accepting.join(20)


def test_connect_to_what_does_not_speak_tls_says_so(token, soon):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                sock.recv(1 << 16)

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(ProtocolError, match="to speak TLS 1.3. Received: .*WRONG_VERSION_NUMBER"):
            connect(server.getsockname(), token, "run", soon())
        answering.join(20)


def test_connect_to_a_silent_listener_ends_at_its_deadline(token):
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(DeadlineExceededError, match="did not answer"):
        connect(server.getsockname(), token, "run", Deadline(0.3, "Connecting"))


def test_recv_without_bytes_is_a_blocking_error_and_at_the_end_is_zero(ends):
    with pytest.raises(BlockingIOError):
        ends[0].recv(10)
    ends[1].shutdown(socket.SHUT_RDWR)
    select.select([ends[0].fileno()], [], [], 10)
    assert ends[0].recv(10) == b""


def test_bytes_that_a_poll_does_not_see_are_told_of(ends):
    ends[0].send(b"0123456789" * 10)
    select.select([ends[1].fileno()], [], [], 10)
    assert ends[1].recv(10) == b"0123456789"
    assert not select.select([ends[1].fileno()], [], [], 0)[0]
    assert ends[1].has_bytes()
    assert ends[1].recv(200) == b"0123456789" * 9
    assert not ends[1].has_bytes()


def test_two_records_that_come_at_once_are_both_told_of(ends):
    for word in (b"first", b"second"):
        ends[0].send(word)
    select.select([ends[1].fileno()], [], [], 10)
    assert ends[1].recv(5) == b"first"
    assert ends[1].has_bytes() and ends[1].has_bytes()
    assert ends[1].recv(20) == b"second"


def test_half_a_record_is_no_bytes(ends, token):
    """The stream must not begin a message with it: a deadline may pass before it is whole."""
    raw = ends[0]._sock
    ends[0]._sock = Taker()
    ends[0].send(b"a message")
    encrypted = ends[0]._sock.taken
    raw.send(encrypted[:-3])
    select.select([ends[1].fileno()], [], [], 10)
    with pytest.raises(BlockingIOError):
        ends[1].recv(20)
    assert not ends[1].has_bytes()
    raw.send(encrypted[-3:])
    select.select([ends[1].fileno()], [], [], 10)
    assert ends[1].recv(20) == b"a message"
    ends[0]._sock = raw


class Taker:
    """Socket that keeps what is sent."""

    taken = b""

    def send(self, data):
        self.taken += bytes(data)
        return len(data)


@pytest.mark.parametrize("size", [1, 16_384, 16_385, 300_000, 5_000_001])
def test_bytes_arrive_as_they_were_sent_however_full_the_connection_is(ends, size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    received = np.empty_like(data)
    assert sent_and_received(ends, memoryview(data), memoryview(received)) == size
    np.testing.assert_array_equal(received, data)


def test_sendmsg_sends_buffers_as_one(ends):
    buffers = [b"head", memoryview(bytes(40_000)), b"", b"tail"]
    assert ends[0].sendmsg(buffers) == 40_008
    received = bytearray(40_008)
    socket_io.receive_into(ends[1], memoryview(received), Deadline(10, "Test"), "peer")
    assert bytes(received) == b"".join(bytes(buffer) for buffer in buffers)


def test_a_changed_byte_on_the_way_ends_the_connection(ends):
    raw = ends[0]._sock
    taker = ends[0]._sock = Taker()
    ends[0].send(b"a message")
    raw.send(taker.taken[:-1] + bytes([taker.taken[-1] ^ 1]))
    ends[0]._sock = raw
    select.select([ends[1].fileno()], [], [], 10)
    with pytest.raises(OSError, match="BAD_RECORD_MAC|bad record mac"):
        ends[1].recv(20)


def test_one_thread_sends_while_another_receives_on_both_sides(ends):
    data = np.random.default_rng(1).integers(0, 256, 8 << 20, np.uint8)
    streams, received = [socket_io.SocketIO(end, "peer") for end in ends], [np.empty_like(data) for _ in ends]
    threads = [threading.Thread(target=stream.send, args=([data.data], lambda: 20.0)) for stream in streams] + [
        threading.Thread(target=stream.receive, args=(array.data, lambda: 20.0))
        for stream, array in zip(streams, received, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for array in received:
        np.testing.assert_array_equal(array, data)


def test_stream_receive_between_messages_that_came_together_does_not_wait(ends, soon):
    """A poll says nothing of the second one: it left the system's buffers with the first."""
    client, server = (Stream(end, "peer") for end in ends)
    for kind in (1, 2, 3):
        client.send(Message(kind), soon())
    with client, server:
        assert [server.receive(Deadline(5, "Test")).kind for _ in range(3)] == [1, 2, 3]


def test_a_connection_ends_before_its_keys_are_worn(ends, soon, monkeypatch):
    monkeypatch.setattr(tls, "_MOST_BYTES", 100_000)
    client, server = (Stream(end, "peer") for end in ends)
    message = Message(1, {}, (np.zeros(80_000, np.uint8),))
    with server:
        for _ in range(2):
            client.send(message, soon())
            server.receive(soon())
        with pytest.raises(PeerLostError, match="after which its keys are worn"):
            client.send(message, soon())
