"""Processes with many connections raise their limit of open files, and never above what the system allows."""

import subprocess
import sys

import pytest

# In a process of its own: a limit stays.
PROGRAM = """
import resource, sys
from elephant.net.deadline import Deadline
from elephant.net.descriptors import allow_descriptors
from elephant.net.server import Server
from elephant.net.stream import Listener, connect

soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
token, deadline = b"0123456789abcdef", Deadline(30, "connecting")
with Server(Listener.bind("127.0.0.1"), token, "run", lambda stream: stream.receive(deadline)) as server:
    streams = [connect(server.address, token, "run", deadline) for _ in range(60)]
    print(len(streams), *resource.getrlimit(resource.RLIMIT_NOFILE))
    for stream in streams:
        stream.abort()
"""


@pytest.mark.parametrize(("soft", "hard", "after"), [(64, 4096, 512), (64, 300, 300), (2000, 4096, 2000)])
def test_server_when_it_has_more_connections_than_files_may_be_open_then_raises_the_limit(soft, hard, after):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(soft), str(hard)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    served, now_soft, now_hard = map(int, done.stdout.split())
    assert (served, now_hard) == (60, hard)
    assert now_soft == after or after == 512 < now_soft < 1024
