import contextlib
import socket
import struct
import threading
import time

import numpy as np
import pytest
from leaks import no_descriptor_free, open_descriptors

from elephant.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    NetworkError,
    PeerLostError,
    ProtocolError,
)
from elephant.net.deadline import Deadline
from elephant.net.frames import Limits, Message, encode
from elephant.net.handshake import Admissions
from elephant.net.socket_io import send_all
from elephant.net.stream import Listener, Stream, connect


def in_thread(function, *args):
    outcome = []

    def call():
        try:
            outcome.append(function(*args))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=call, name="test-call")
    thread.start()

    def result():
        thread.join(30)
        return outcome[0]

    return result


def test_messages_arrive_in_both_directions_with_their_arrays(pair, soon):
    client, server = pair
    array = np.random.default_rng(0).normal(size=(300, 1000)).astype("f4")
    sending = in_thread(client.send, Message("weights", {"epoch": 1}, (array, np.array([True]))), soon())
    message = server.receive(soon())
    assert sending() is None
    assert (message.kind, message.fields) == ("weights", {"epoch": 1})
    np.testing.assert_array_equal(message.arrays[0], array)
    server.send(Message(5), soon())
    assert client.receive(soon()).kind == 5


def test_stream_over_ipv6(token, soon):
    try:
        listener = Listener.bind("::1")
    except NetworkError:
        pytest.skip("this machine has no IPv6 loopback")
    with listener:
        accepted = in_thread(listener.accept, token, "run", soon())
        with connect(listener.address, token, "run", soon()) as client, accepted() as server:
            client.send(Message(1), soon())
            assert server.receive(soon()).kind == 1
            assert server.peer.startswith("[::1]:")


def test_one_thread_may_send_while_another_receives(pair, soon):
    client, server = pair
    big = Message(1, {}, (np.zeros(4_000_000, np.uint8),))
    sends = [in_thread(stream.send, big, soon()) for stream in pair]
    assert [stream.receive(soon()).kind for stream in (client, server)] == [1, 1]
    assert [send() for send in sends] == [None, None]


def test_messages_of_two_sending_threads_do_not_mix(pair, soon):
    client, server = pair
    arrays = [np.full(500_000, i, np.uint8) for i in range(4)]
    sends = [in_thread(client.send, Message(i + 1, {}, (array,)), soon()) for i, array in enumerate(arrays)]
    for _ in arrays:
        message = server.receive(soon())
        assert (message.arrays[0] == message.kind - 1).all()
    assert [send() for send in sends] == [None] * 4


def test_receive_with_a_deadline_between_messages_leaves_the_stream_usable(pair, soon):
    client, server = pair
    with pytest.raises(DeadlineExceededError, match="Waiting for news did not end"):
        server.receive(Deadline(0.05, "Waiting for news"))
    client.send(Message(1), soon())
    assert server.receive(soon()).kind == 1


def test_receive_with_a_deadline_in_a_message_aborts_the_stream(pair, soon):
    client, server = pair
    frame = b"".join(encode(Message(1, {"a": 1})))
    raw = client.detach()
    raw.send(frame[:-1])
    with pytest.raises(DeadlineExceededError):
        server.receive(Deadline(0.1, "Waiting for news"))
    raw.close()
    with pytest.raises(PeerLostError, match="closed on this side"):
        server.receive(soon())


@pytest.mark.parametrize("covers", ["all of it", "the rest of it"])
def test_receive_when_half_a_frame_comes_and_its_rest_too_late_then_nothing_of_it_is_taken(pair, soon, covers):
    client, server = pair
    frame, again = b"".join(encode(Message(1, {"a": 1}))), b"".join(encode(Message(2)))
    raw = client.detach()
    raw.send(frame[:30])
    # Only a stream that waits for longer than it may sees this.
    late = threading.Timer(3, lambda: send_all(raw, [frame[30:]], Deadline(20, "The rest"), "server"))
    late.start()
    try:
        with pytest.raises(DeadlineExceededError, match="did not end within 0.2 s"):
            if covers == "all of it":
                server.receive(Deadline(0.2, "Waiting for news"))
            else:
                server.receive(soon(), whole_within_s=0.2)
        late.cancel()
        with contextlib.suppress(OSError):
            send_all(raw, [frame[30:], again], soon(), "server")
        with pytest.raises(PeerLostError, match="closed on this side"):
            server.receive(soon())
    finally:
        late.cancel()
        late.join()
        raw.close()


def test_receive_when_a_frame_comes_in_drops_then_the_deadline_is_one_for_all_of_them(pair):
    client, server = pair
    frame = b"".join(encode(Message(1, {"a": 1})))
    raw = client.detach()
    stop = threading.Event()

    def drip():
        for place in range(len(frame)):
            if stop.wait(0.05):
                return
            raw.send(frame[place : place + 1])

    dripping = in_thread(drip)
    began = time.monotonic()
    try:
        with pytest.raises(DeadlineExceededError):
            server.receive(Deadline(0.5, "Waiting for news"))
        assert time.monotonic() - began < 0.05 * len(frame)
    finally:
        stop.set()
        dripping()
        raw.close()


def test_send_with_a_deadline_aborts_the_stream(pair, soon):
    client, _ = pair
    with pytest.raises(DeadlineExceededError):
        client.send(Message(1, {}, (np.zeros(1 << 26, np.uint8),)), Deadline(0.1, "Sending"))
    with pytest.raises(PeerLostError, match="closed on this side"):
        client.send(Message(1), soon())


def test_receive_of_half_a_frame_and_the_end_raises(pair, soon):
    client, server = pair
    raw = client.detach()
    raw.send(b"".join(encode(Message(1, {"a": 1})))[:30])
    raw.close()
    with pytest.raises(PeerLostError, match="closed the connection"):
        server.receive(soon())


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", struct.pack("<4sBBHIQI", b"ELPH", 1, 1, 0, 9, 9, 9)]
)
def test_receive_of_garbage_raises_and_aborts(pair, soon, data):
    client, server = pair
    raw = client.detach()
    raw.send(data)
    with pytest.raises(ProtocolError, match="Received"):
        server.receive(soon())
    with pytest.raises(PeerLostError):
        server.receive(soon())
    raw.close()


def test_receive_of_more_than_the_limits_raises(pair, soon):
    client, server = pair
    client.send(Message(1, {}, (np.zeros(1000),)), soon())
    with pytest.raises(ProtocolError, match="payload of at most 7999 bytes. Received: 8000"):
        server.receive(soon(), Limits(max_payload_bytes=7999))


def test_send_of_what_cannot_travel_leaves_the_stream_usable(pair, soon):
    client, server = pair
    with pytest.raises(ConfigurationError):
        client.send(Message(1, {"x": object()}), soon())
    client.send(Message(2), soon())
    assert server.receive(soon()).kind == 2


def test_close_delivers_what_was_sent_and_then_ends(pair, soon):
    client, server = pair
    client.send(Message(1, {}, (np.zeros(50_000, np.uint8),)), soon())
    client.close()
    assert server.receive(soon()).kind == 1
    with pytest.raises(PeerLostError):
        server.receive(soon())
    client.close()


def test_abort_from_another_thread_wakes_both_sides(pair, soon):
    client, server = pair
    here, there = in_thread(client.receive, soon()), in_thread(server.receive, soon())
    time.sleep(0.05)
    client.abort()
    assert isinstance(here(), PeerLostError) and "closed on this side" in str(here())
    assert isinstance(there(), PeerLostError)


def test_exit_with_an_error_aborts(pair, soon):
    client, server = pair
    with pytest.raises(KeyError), client:
        raise KeyError
    with pytest.raises(PeerLostError):
        server.receive(soon())


def test_connect_before_the_listener_is_there_waits_for_it(token, soon):
    with Listener.bind("127.0.0.1") as reserved:
        address = reserved.address
    connecting = in_thread(connect, address, token, "run", soon())
    time.sleep(0.1)
    with Listener.bind(*address) as listener, listener.accept(token, "run", soon()), connecting() as client:
        assert isinstance(client, Stream)


def test_connect_where_nobody_listens_names_address_and_reason(token):
    with Listener.bind("127.0.0.1") as reserved:
        address = reserved.address
    with pytest.raises(DeadlineExceededError, match=rf"^Calling did not .* 127.0.0.1:{address[1]} last .*refused"):
        connect(address, token, "run", Deadline(0.2, "Calling"))


def test_connect_to_one_who_does_not_answer_ends_at_the_deadline(token, listener):
    with pytest.raises(DeadlineExceededError, match="took the connection and did not answer"):
        connect(listener.address, token, "run", Deadline(0.1, "Calling"))


def test_connect_to_an_unknown_host_raises_at_once(token, soon):
    with pytest.raises(NetworkError, match="Cannot connect to no-such-host.invalid:1"):
        connect(("no-such-host.invalid", 1), token, "run", soon())


def test_connect_with_a_wrong_token_raises_and_the_listener_serves_on(listener, accepting, token, other_token, soon):
    with pytest.raises(AuthenticationError):
        connect(listener.address, other_token, "run", soon())
    with pytest.raises(AuthenticationError, match="for 'another run'"):
        connect(listener.address, token, "another run", soon())
    with connect(listener.address, token, "run", soon()), accepting() as server:
        assert isinstance(server, Stream)


def test_accept_among_strangers_serves_the_right_client(token, soon):
    with Listener.bind("127.0.0.1", max_pending=8) as listener:
        idle = [socket.create_connection(listener.address, timeout=10) for _ in range(64)]
        garbage = [socket.create_connection(listener.address, timeout=10) for _ in range(5)]
        for sock in garbage:
            sock.sendall(b"\0\xff" * 500)
        half = socket.create_connection(listener.address, timeout=10)
        half.sendall(b"elephant/auth/1\n1234")
        accepted = in_thread(listener.accept, token, "run", soon())
        with connect(listener.address, token, "run", soon()) as client, accepted() as server:
            client.send(Message(1), soon())
            assert server.receive(soon()).kind == 1
        for sock in (*idle, *garbage, half):
            sock.close()


def test_accept_without_anybody_tells_of_those_turned_away(listener, token):
    with socket.create_connection(listener.address, timeout=10) as stranger:
        stranger.sendall(b"x" * 48)
        with pytest.raises(
            DeadlineExceededError, match="Connections turned away: 1; the last was .*(greets with|speak TLS)"
        ):
            listener.accept(token, "run", Deadline(0.3, "Waiting"))
    assert listener.turned_away == {"127.0.0.1": 1}


def test_those_turned_away_when_they_are_of_many_hosts_then_are_counted_in_bounded_memory():
    admissions = Admissions(max_pending=1, handshake_timeout_s=5)
    admissions.set_terms(b"t" * 32, "run")
    for number in range(100):
        sock, other = socket.socketpair()
        with other:
            # Each closes the one before it.
            admissions.add(sock, f"[fd00::{number:x}]:4000")
    admissions.close()
    counts = admissions.turned_away
    assert len(counts) == 33 and counts["fd00::0"] == 1 and counts["other hosts"] == 99 - 32


def is_closed(sock):
    """Returns whether the other side has closed a connection on which it has sent nothing."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_strangers_when_more_come_than_may_be_pending_then_the_oldest_are_closed(token):
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(Listener.bind("127.0.0.1", max_pending=4))
        before = len(open_descriptors())
        strangers = []
        for _ in range(10):
            strangers.append(opened.enter_context(socket.create_connection(listener.address, timeout=10)))
        with pytest.raises(DeadlineExceededError, match=r"turned away: 6; .* more than 4 connections at a time"):
            listener.accept(token, "run", Deadline(1.5, "Waiting"))
        assert [is_closed(sock) for sock in strangers] == [True] * 6 + [False] * 4
        # Both ends are of this process: ten here, and four that the listener holds.
        assert len(open_descriptors()) == before + 10 + 4


def test_accept_closes_a_connection_that_says_nothing(token):
    with Listener.bind("127.0.0.1", handshake_timeout_s=0.05) as listener:
        with socket.create_connection(listener.address, timeout=10) as stranger:
            with pytest.raises(DeadlineExceededError, match="no proof within 0.05 s"):
                listener.accept(token, "run", Deadline(0.5, "Waiting"))
            assert stranger.recv(1) == b""


def test_accept_when_no_descriptor_is_free_then_says_in_a_second_which_limit_it_is(listener, accepting):
    with socket.socket() as client, no_descriptor_free():
        client.connect(listener.address)
        with pytest.raises(NetworkError, match=r"Cannot take a connection on 127.*Too many open files.*ulimit -n"):
            accepting()


def test_accept_when_a_descriptor_is_free_again_in_time_then_takes_the_connection(listener, accepting, token, soon):
    with socket.socket() as stranger:
        with no_descriptor_free():
            stranger.connect(listener.address)
            time.sleep(0.3)
        with connect(listener.address, token, "run", soon()), accepting():
            pass


def test_connect_when_no_descriptor_is_free_then_says_so_at_once(listener, token):
    with no_descriptor_free(), pytest.raises(NetworkError, match=r"Cannot connect to 127.*ulimit -n"):
        connect(listener.address, token, "run", Deadline(600, "Connecting in a test"))


def test_handshakes_go_on_from_one_accept_to_the_next(listener, token, soon):
    clients = [in_thread(connect, listener.address, token, "run", soon()) for _ in range(5)]
    servers = [listener.accept(token, "run", soon()) for _ in range(5)]
    for stream in (*(client() for client in clients), *servers):
        stream.close()


def test_accept_on_other_terms_gives_up_older_handshakes(listener, token, soon):
    late = in_thread(connect, listener.address, token, "second", soon())
    with pytest.raises(DeadlineExceededError):
        listener.accept(token, "first", Deadline(0.2, "Waiting"))
    assert isinstance(late(), AuthenticationError)
    again = in_thread(connect, listener.address, token, "second", soon())
    with listener.accept(token, "second", soon()), again() as client:
        assert isinstance(client, Stream)


def test_close_of_a_listener_wakes_accept(listener, token, soon):
    accepted = in_thread(listener.accept, token, "run", soon())
    time.sleep(0.05)
    listener.close()
    assert isinstance(accepted(), NetworkError) and "The listener was closed" in str(accepted())
    with pytest.raises(NetworkError, match="closed"):
        listener.accept(token, "run", soon())


def test_listener_adopts_a_listening_descriptor(token, soon):
    parent = socket.create_server(("127.0.0.1", 0))
    with Listener(socket.socket(fileno=parent.detach())) as listener:
        accepted = in_thread(listener.accept, token, "run", soon())
        with connect(listener.address, token, "run", soon()), accepted() as server:
            assert isinstance(server, Stream)


def test_listener_when_some_ports_are_open_then_takes_free_ones_among_them_and_no_other():
    with Listener.bind("127.0.0.1") as taken:
        port = taken.address[1]
        with Listener.bind("127.0.0.1", ports=(port, port + 50)) as listener:
            assert port < listener.address[1] <= port + 50
        with pytest.raises(NetworkError, match=rf"expected a free port from {port} to {port}.*all are taken"):
            Listener.bind("127.0.0.1", ports=(port, port))
