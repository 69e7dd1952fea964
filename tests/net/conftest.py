"""Every test here must leave no thread and no descriptor behind."""

import os
import threading
import time

import pytest

from elephant.net.deadline import Deadline
from elephant.net.stream import Listener, connect

TOKEN = b"0123456789abcdef-right"


def open_descriptors():
    return sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []


@pytest.fixture(autouse=True)
def nothing_left_behind():
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    yield
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if set(threading.enumerate()) <= threads and len(open_descriptors()) <= len(descriptors):
            return
        time.sleep(0.01)
    assert {thread.name for thread in threading.enumerate()} <= {thread.name for thread in threads}
    assert open_descriptors() == descriptors


@pytest.fixture
def token():
    return TOKEN


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
