"""The check that a test leaves no thread and no descriptor behind, for folders whose tests open both."""

import os
import threading
import time

import pytest


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
