import contextlib
import socket
import threading

import pytest
from leaks import open_descriptors

from elephant.errors import AuthenticationError, DeadlineExceededError, NetworkError, PeerLostError
from elephant.net.frames import Message
from elephant.net.server import Server
from elephant.net.stream import connect


def echo(soon):
    def serve(stream):
        while True:
            message = stream.receive(soon())
            stream.send(message, soon())

    return serve


def test_server_serves_many_clients_at_once(listener, token, soon):
    with Server(listener, token, "run", echo(soon)) as server:
        clients = [connect(server.address, token, "run", soon()) for _ in range(10)]
        for number, client in enumerate(clients):
            client.send(Message(number + 1), soon())
        assert [client.receive(soon()).kind for client in clients] == list(range(1, 11))
        for client in clients:
            client.close()


def test_close_aborts_open_streams_and_joins_all_threads(listener, token, soon):
    server = Server(listener, token, "run", echo(soon), name="test-server")
    client = connect(server.address, token, "run", soon())
    client.send(Message(1), soon())
    client.receive(soon())
    server.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-server")]
    with pytest.raises(PeerLostError):
        client.receive(soon())
    client.close()
    server.close()


def test_an_error_in_on_connect_ends_that_connection_alone(listener, token, soon, caplog):
    def serve(stream):
        if stream.receive(soon()).kind == 1:
            raise ValueError("broken on purpose")
        stream.send(Message(2), soon())

    with Server(listener, token, "run", serve) as server:
        with (
            connect(server.address, token, "run", soon()) as bad,
            connect(server.address, token, "run", soon()) as good,
        ):
            bad.send(Message(1), soon())
            with pytest.raises(PeerLostError):
                bad.receive(soon())
            good.send(Message(2), soon())
            assert good.receive(soon()).kind == 2
    assert "broken on purpose" in caplog.text


def test_strangers_do_not_disturb_the_server(listener, token, other_token, soon):
    with Server(listener, token, "run", echo(soon)) as server:
        idle = [socket.create_connection(server.address, timeout=10) for _ in range(64)]
        idle[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with pytest.raises(AuthenticationError):
            connect(server.address, other_token, "run", soon())
        with connect(server.address, token, "run", soon()) as client:
            client.send(Message(3), soon())
            assert client.receive(soon()).kind == 3
        for sock in idle:
            sock.close()


def test_close_with_a_thread_that_does_not_return_names_it(listener, token, soon):
    release, entered = threading.Event(), threading.Event()

    def serve(stream):
        entered.set()
        release.wait(20)

    server = Server(listener, token, "run", serve, name="test-stuck")
    with connect(server.address, token, "run", soon()):
        entered.wait(20)
        with pytest.raises(DeadlineExceededError, match="Still running: test-stuck-127.0.0.1"):
            server.close(timeout_s=0.1)
        release.set()
        server.close()


def test_server_when_many_strangers_wait_then_holds_a_few_of_them_and_serves_on(listener, token, soon):
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(Server(listener, token, "run", echo(soon)))
        before = len(open_descriptors())
        for _ in range(100):
            opened.enter_context(socket.create_connection(server.address, timeout=10))
        client = opened.enter_context(connect(server.address, token, "run", soon()))
        client.send(Message(3), soon())
        assert client.receive(soon()).kind == 3
        # Of this process are the other ends too: a hundred, two of the client, and 64 at most that the server holds.
        assert len(open_descriptors()) <= before + 100 + 2 + 64


def test_server_when_no_thread_can_be_had_for_a_client_then_says_so_and_serves_the_next(
    listener, token, soon, monkeypatch
):
    told, start = [], threading.Thread.start

    def start_but_one(thread):
        if "no-room" in thread.name and "accept" not in thread.name and not told:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_but_one)
    with Server(listener, token, "run", echo(soon), on_exhausted=told.append, name="no-room") as server:
        with connect(server.address, token, "run", soon()) as client, pytest.raises(NetworkError):
            client.send(Message(1), soon())
            client.receive(soon())
        with connect(server.address, token, "run", soon()) as client:
            client.send(Message(2), soon())
            assert client.receive(soon()).kind == 2
    assert "can't start new thread" in str(told[0])
