import os
import socket
import sys
import threading

import pytest

from elephant.errors import AuthenticationError, DeadlineExceededError, NetworkError
from elephant.net import Deadline, Listener, Message, connect
from elephant.net.addresses import local_listening_socket, local_name

TOKEN = b"0123456789abcdef-right"
# A host has each name once, and another process may run these tests at the same time.
NAME = local_name(TOKEN, f"a test {os.getpid()}")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux's alone")


def accept_in_thread(listener, token=TOKEN):
    streams = []

    def accept():
        try:
            streams.append(listener.accept(token, "run", Deadline(10, "Accepting")))
        except NetworkError as error:
            streams.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    return thread, streams


def test_names_depend_on_token_and_purpose_and_are_no_files():
    names = {local_name(TOKEN, "a"), local_name(TOKEN, "b"), local_name(TOKEN + b"!", "a")}
    assert len(names) == 3 and all(name.startswith("\0elephant-") for name in names)
    assert local_name(TOKEN, "a") in names


def test_messages_go_over_a_unix_socket():
    with Listener(local_listening_socket(NAME)) as listener:
        thread, streams = accept_in_thread(listener)
        with connect(NAME, TOKEN, "run", Deadline(10, "Connecting")) as stream:
            thread.join(10)
            with streams[0] as server:
                stream.send(Message("hello"), Deadline(10, "Sending"))
                assert server.receive(Deadline(10, "Receiving")).kind == "hello"
                assert server.peer == stream.peer == "a process of this host"


def test_a_unix_socket_wants_the_token_too():
    with Listener(local_listening_socket(NAME)) as listener:
        thread, streams = accept_in_thread(listener)
        with pytest.raises(AuthenticationError):
            connect(NAME, b"another token, as long", "run", Deadline(10, "Connecting"))
        listener.close()
        thread.join(10)
    assert isinstance(streams[0], NetworkError)


def test_a_name_in_use_raises():
    with local_listening_socket(NAME), pytest.raises(NetworkError, match="Address already in use"):
        local_listening_socket(NAME)


def test_nobody_at_a_name_ends_at_the_deadline():
    with pytest.raises(DeadlineExceededError, match="a process of this host last failed with.*refused"):
        connect(NAME, TOKEN, "run", Deadline(0.2, "Connecting"))


def test_a_full_backlog_is_waited_for():
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as busy:
        busy.bind(NAME)
        busy.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(NAME)
            with pytest.raises(DeadlineExceededError):
                connect(NAME, TOKEN, "run", Deadline(0.3, "Connecting"))
