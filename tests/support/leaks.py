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


def _opened():
    """Returns this process' threads, and what its open descriptors lead to, by number.

    Not those on which a Spark session, which an earlier test began, hears its JVM: that connects when it likes, for
    instance to say that it has collected an object of Python's.
    """
    threads, targets = set(threading.enumerate()), _targets()
    for thread in list(threads):
        connection = getattr(getattr(thread, "_target", None), "__self__", None)
        if type(connection).__module__.startswith("py4j."):
            threads.remove(thread)
            if getattr(connection, "socket", None) is not None:
                targets.pop(str(connection.socket.fileno()), None)
    return threads, targets


@pytest.fixture(autouse=True)
def nothing_left_behind():
    threads, descriptors = _opened()
    yield
    end = time.monotonic() + 5
    while time.monotonic() < end:
        now, open_now = _opened()
        if now <= threads and len(open_now) <= len(descriptors):
            return
        time.sleep(0.01)
    left = [thread.name for thread in now - threads]
    opened = {number: target for number, target in open_now.items() if descriptors.get(number) != target}
    pytest.fail(f"It left the threads {left} and the descriptors {opened}.")
