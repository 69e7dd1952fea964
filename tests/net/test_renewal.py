"""Streams whose keys are worn again and again: every message arrives once, in order, and nobody else gets in."""

import contextlib
import threading
import time

import numpy as np
import pytest

from elephant.errors import AuthenticationError, NetworkError, PeerLostError, ProtocolError
from elephant.net import renewal, stream, tls
from elephant.net.deadline import Deadline
from elephant.net.frames import Message
from elephant.net.server import Server
from elephant.net.stream import Listener, connect

COUNT = 60


@pytest.fixture
def token(tokens):
    return tokens["encrypted"]


@pytest.fixture
def dialled(monkeypatch):
    """Connections that were made, each of which is worn at once."""
    monkeypatch.setattr(tls, "RENEW_BYTES", 1)
    made, dial = [], stream.dial
    monkeypatch.setattr(stream, "dial", lambda *args, **options: made.append(args) or dial(*args, **options))
    return made


def message(number):
    """Returns a message that fills many records, or none at all, by its number."""
    values = np.random.default_rng(number).normal(size=(number % 7) * 20_000)
    return Message("Values", {"number": number}, (values,) if number % 7 else ())


def check(received, number):
    assert received.fields == {"number": number}
    for array, expected in zip(received.arrays, message(number).arrays, strict=True):
        np.testing.assert_array_equal(array, expected)


def receive_all(one, soon, room=None):
    for number in range(COUNT):
        check(one.receive(soon()), number)
        if room is not None:
            room.release()


def send_all(one, soon, room=None):
    for number in range(COUNT):
        if room is not None:
            assert room.acquire(timeout=20)
        one.send(message(number), soon())


@pytest.mark.parametrize(("limit", "on_the_way", "least"), [(1, 2, 15), (400_000, COUNT, 3)])
def test_both_sides_when_they_send_and_receive_at_once_then_get_every_message_once_and_in_order(
    listener, token, soon, dialled, monkeypatch, limit, on_the_way, least
):
    monkeypatch.setattr(tls, "RENEW_BYTES", limit)
    served = []

    def both_ways(one):
        room = threading.Semaphore(on_the_way)
        sending = threading.Thread(target=send_all, args=(one, soon, room))
        sending.start()
        try:
            receive_all(one, soon, room)
        finally:
            sending.join(20)

    def serve(one):
        one.receive(soon())
        both_ways(one)
        one.send(Message("End"), soon())
        served.append(one)

    with Server(listener, token, "run", serve) as server, connect(server.address, token, "run", soon()) as client:
        client.send(Message("Begin"), soon())
        both_ways(client)
        assert client.receive(soon()).kind == "End"
    assert len(served) == 1 and len(dialled) >= least


def test_client_when_it_says_something_last_and_hangs_up_then_that_arrives_over_the_new_connection(
    listener, token, soon, dialled
):
    heard, ended = [], threading.Event()

    def serve(one):
        said = []
        try:
            while True:
                said.append(one.receive(soon()).fields)
        except PeerLostError:
            # Those that it went on over have said nothing of their own.
            if said:
                heard.extend(said)
                ended.set()

    with Server(listener, token, "run", serve) as server:
        with connect(server.address, token, "run", soon()) as client:
            for number in range(3):
                client.send(Message("Say", {"number": number}), soon())
        assert ended.wait(20)
    assert heard == [{"number": number} for number in range(3)] and len(dialled) == 4


def test_plain_streams_when_they_carry_any_number_of_bytes_then_stay_as_they_are(listener, tokens, soon, dialled):
    with Server(listener, tokens["plain"], "run", lambda one: receive_all(one, soon)) as server:
        with connect(server.address, tokens["plain"], "run", soon()) as client:
            send_all(client, soon)
            with pytest.raises(PeerLostError):
                client.receive(soon())
    assert len(dialled) == 1


def test_client_when_another_run_listens_at_its_address_then_tells_it_nothing(token, other_token, soon, monkeypatch):
    with contextlib.ExitStack() as opened:
        listener = Listener.bind("127.0.0.1")
        server = opened.enter_context(Server(listener, token, "run", lambda one: one.receive(soon())))
        client = opened.enter_context(connect(server.address, token, "run", soon()))
        listener.close()
        heard = []
        other = Server(
            Listener.bind(*server.address), other_token, "run", lambda one: heard.append(one.receive(soon()))
        )
        opened.enter_context(other)
        monkeypatch.setattr(tls, "RENEW_BYTES", 1)
        with pytest.raises(AuthenticationError, match="show this run's certificate"):
            client.send(Message(2), soon())
    assert heard == []


def test_client_when_nobody_listens_any_more_then_goes_on_over_what_it_has(token, soon, dialled, monkeypatch):
    monkeypatch.setattr(stream, "_SENDS_BETWEEN", 1)
    listener, served = Listener.bind("127.0.0.1"), []

    def serve(one):
        served.append(one)
        receive_all(one, soon)

    with Server(listener, token, "run", serve) as server, connect(server.address, token, "run", soon()) as client:
        listener.close()
        # None of them waits as long as its deadline has it.
        for number in range(3):
            client.send(message(number), Deadline(600, "A message"))
        assert len(dialled) == 3
        monkeypatch.setattr(tls, "RENEW_BYTES", 1 << 37)
        for number in range(3, COUNT):
            client.send(message(number), soon())
    assert len(served) == 1


def test_stranger_when_it_wants_to_go_on_for_another_then_is_refused_and_that_one_goes_on(
    listener, token, other_token, soon, dialled
):
    def serve(one):
        while True:
            one.send(one.receive(soon()), soon())

    with Server(listener, token, "run", serve) as server, connect(server.address, token, "run", soon()) as client:
        for number in range(4):
            with pytest.raises(AuthenticationError):
                connect(server.address, other_token, "run", soon())
            client.send(message(number), soon())
            check(client.receive(soon()), number)
    assert listener.turned_away == {"127.0.0.1": 4}


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (Message(renewal.GOES_ON), "expected the fields of"),
        (Message(renewal.GOES_ON, {"number": 1}), "with number as str"),
        (Message(renewal.GOES_ON, {"number": "of nobody"}), "goes on with another stream"),
        (Message(renewal.HAS_MOVED), "expected the fields of"),
        (Message(renewal.HAS_MOVED, {"number": "of nobody"}), "to go on over a new connection. Received: none"),
    ],
)
def test_server_when_a_client_moves_to_nowhere_or_from_nowhere_then_hangs_up(
    listener, token, soon, monkeypatch, sent, error
):
    monkeypatch.setattr(renewal, "_THERE_WITHIN_S", 0.3)
    monkeypatch.setattr(renewal, "MOVED_WITHIN_S", 0.3)
    said = []

    def serve(one):
        with pytest.raises(NetworkError) as caught:
            one.receive(soon())
        said.append(str(caught.value))

    with Server(listener, token, "run", serve) as server:
        with connect(server.address, token, "run", soon()) as client:
            client.send(sent, soon())
            with pytest.raises(PeerLostError):
                client.receive(soon())
    assert error in said[0]


def test_client_when_the_server_moves_then_hangs_up(listener, token, soon):
    with Server(listener, token, "run", lambda one: one.send(Message(renewal.HAS_MOVED), soon())) as server:
        with connect(server.address, token, "run", soon()) as client:
            with pytest.raises(ProtocolError, match="to go on over a new connection"):
                client.receive(soon())


def test_server_when_it_closes_while_a_connection_waits_for_its_stream_then_waits_for_nobody(listener, token, soon):
    server = Server(listener, token, "run", lambda one: one.receive(soon()), name="test-server")
    with connect(server.address, token, "run", soon()) as client:
        client.send(Message(renewal.GOES_ON, {"number": "of nobody"}), soon())
        while not server._renewals._socks:
            time.sleep(0.01)
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 5
