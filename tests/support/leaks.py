"""The check that a test leaves no thread and no descriptor behind, for folders whose tests open both."""

import contextlib
import os
import resource
import threading
import time

import pytest


def open_descriptors():
    return sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []


def _targets():
    """Returns what each open descriptor leads to, by its number."""
    targets = {}
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError):  # the listing's own
            targets[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
    return targets


@contextlib.contextmanager
def no_descriptor_free():
    """Has this process open nothing more meanwhile."""
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, open_descriptors())) + 1, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    threads, descriptors = set(threading.enumerate()), _targets()
    yield
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if set(threading.enumerate()) <= threads and len(_targets()) <= len(descriptors):
            return
        time.sleep(0.01)
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    opened = {number: target for number, target in _targets().items() if descriptors.get(number) != target}
    pytest.fail(f"It left the threads {left} and the descriptors {opened}; before it were {descriptors}.")
