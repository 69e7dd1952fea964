"""Every test here must leave no thread and no descriptor behind."""

import threading

import pytest
from leaks import nothing_left_behind  # noqa: F401  (a fixture that every test here uses)

from elephant.net.deadline import Deadline
from elephant.net.stream import Listener, connect
from elephant.net.tls import is_encrypted, new_token

TOKEN = b"0123456789abcdef-right"


@pytest.fixture(scope="session")
def tokens():
    """Tokens of two runs: one whose connections are plain, and one whose connections are encrypted."""
    return {"plain": TOKEN, "encrypted": new_token(encryption=True)}


@pytest.fixture(params=["plain", "encrypted"])
def token(request, tokens):
    """Every test that connects does so without and with TLS."""
    return tokens[request.param]


@pytest.fixture
def other_token(token):
    """Token of another run of the same kind."""
    return new_token(encryption=is_encrypted(token))


@pytest.fixture
def soon():
    """Makes a deadline that only a hanging test reaches."""
    return lambda: Deadline(20, "A step of a test")


@pytest.fixture
def listener():
    with Listener.bind("127.0.0.1") as listener:
        yield listener


@pytest.fixture
def accepting(listener, token, soon):
    """Accepts one stream in a thread; calling the fixture returns it, or raises what went wrong."""
    outcome = []

    def accept():
        try:
            outcome.append(listener.accept(token, "run", soon()))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=accept, name="test-accept")
    thread.start()

    def result():
        thread.join(30)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    yield result
    listener.close()
    thread.join(30)


@pytest.fixture
def pair(listener, accepting, token, soon):
    """Two connected streams: the client's and the server's."""
    with connect(listener.address, token, "run", soon()) as client, accepting() as server:
        yield client, server
