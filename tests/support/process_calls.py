"""A training process whose inside is looked at by calling functions in it, and what they look at."""

import contextlib
import functools
import json
import os
import pickle
import random
import resource
import signal
import sys
import threading

from elephant.backends.process_environment import process_environment
from elephant.cluster.warm_workers import COLD
from elephant.rank.chunks import ChunkChannel, HungUpError
from elephant.task.process import RankProcess

# Known before the test: the process' own name, and whether it was forked.
_OWN = ("ELEPHANT_WORK_FOLDER", "ELEPHANT_FORKED", "LC_CTYPE")
# It differs between a fixture and its test.
_PHASE = "PYTEST_CURRENT_TEST"
_PROBE_DEADLINE_S = 60


class Recorded:
    """Takes the lines that the process prints."""

    def __init__(self):
        self.lines = []

    def add(self, line):
        self.lines.append(line)

    def close(self):
        pass


class Calls:
    """A process of the program ``chunks``, forked where it can be; calling this calls a function there."""

    def __init__(self, warm=COLD, *, backend=None, job=None, waits=True, **variables):
        self.recorded = Recorded()
        environment = process_environment(threads=1, devices=(), backend=backend, more={_PHASE: "", **variables})
        self.channel, self._theirs = ChunkChannel.pair()
        self.channel._connection.settimeout(_PROBE_DEADLINE_S)
        try:
            self.process = RankProcess("chunks", environment, more_fds=self._theirs, lines=self.recorded, warm=warm)
        except BaseException:
            self._close()
            raise
        for block in (pickle.dumps(job), b"{}", json.dumps(self._theirs).encode()):
            self.process.send(block)
        if waits:
            self.started()

    def started(self):
        """Waits until the process is there."""
        self.process.await_start()
        self._close_theirs()

    def __call__(self, function, *arguments):
        (result,) = self.channel.results(functools.partial(_called, function, arguments), [])
        return result

    def finish(self):
        """Lets the process end by itself; returns what its task hears of it."""
        with contextlib.suppress(HungUpError):
            self(_succeed)
        return self.process.wait()

    def _close_theirs(self):
        while self._theirs:
            os.close(self._theirs.pop())

    def _close(self):
        self.channel.close()
        self._close_theirs()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.__exit__(*error)
        self._close()


def _succeed():
    with open(os.path.join(os.environ["ELEPHANT_WORK_FOLDER"], "result"), "wb"):
        os._exit(0)


def _called(function, arguments, chunks):
    yield function(*arguments)


def state():
    """Returns what a fresh process and a forked one must have alike."""
    here = os.getcwd()
    return {
        "environment": {name: value for name, value in os.environ.items() if name not in _OWN},
        "of the kernel's": {name: value for name, value in _kernel_environment().items() if name not in _OWN},
        "folder": here,
        "import path": sys.path,
        "arguments": sys.argv[1:2],
        "input": os.read(0, 10),
        "terminals": [os.isatty(number) for number in range(3)],
        "encodings": [(stream.encoding, stream.errors, stream.write_through) for stream in (sys.stdout, sys.stderr)],
        "signals": {name.name: str(signal.getsignal(name)).split(" at ")[0] for name in signal.Signals},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "limits": [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)],
        "umask": os.umask(os.umask(0o77)),
        "processors": os.sched_getaffinity(0),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": sorted(_kind(link) for link in open_files().values()),
    }


def _kernel_environment():
    """Returns the environment as a program sees it that this process starts."""
    import subprocess

    block = subprocess.run(["/usr/bin/env", "-0"], stdout=subprocess.PIPE, check=True).stdout
    variables = dict(os.fsdecode(line).partition("=")[::2] for line in block.split(b"\0") if line)
    variables.pop("_", None)
    return variables


def open_files():
    """Returns what each descriptor of this process is."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            # That of the listing itself.
            continue
    return found


def _kind(link):
    return os.path.basename(link).partition(":[")[0].replace(" (deleted)", "")


def is_forked():
    return "ELEPHANT_FORKED" in os.environ


def variable(name):
    return os.environ.get(name)


def parent():
    return os.getppid()


def random_numbers():
    import numpy as np

    return random.random(), float(np.random.random())


def attribute(module, name):
    return getattr(__import__(module), name)


def write(text):
    print(text)
    print(text, file=sys.stderr)
    return os.system("echo from a program")


def ends(how):
    """Ends the process in some way."""
    print("about to end")
    if how == "exits":
        os._exit(3)
    elif how == "sys.exit":
        sys.exit("enough")
    elif how == "interrupted":
        raise KeyboardInterrupt("by somebody")
    os.kill(os.getpid(), signal.Signals[how])
    signal.pause()


def signal_group():
    """Ends all processes of the group, except this one."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    return True
