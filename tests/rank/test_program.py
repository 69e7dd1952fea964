"""What a rank's process makes of what its Spark task sends."""

import platform
import socket
import subprocess
import sys

import pytest

from elephant.config import Timeouts
from elephant.rank import program
from elephant.rank.rank_info import RankInfo


class ReachedError(Exception):
    """The ranks were to be connected."""


@pytest.mark.parametrize("name", ["fit", "function"])
def test_ranks_when_they_are_connected_then_waits_are_those_of_the_fit(monkeypatch, name):
    asked = {}

    class Reporter:
        def __init__(self, address, **options):
            asked["driver"] = (address, options["timeouts"])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    def form_collective(rank, addresses, listener, **options):
        asked.update(rank=rank, addresses=addresses, **options)
        raise ReachedError

    monkeypatch.setattr(program, "ChannelClient", Reporter)
    monkeypatch.setattr(program, "form_collective", form_collective)
    timeouts = Timeouts(connect_s=11.0, collective_s=22.0, heartbeat_s=33.0)
    rank_info = RankInfo(
        rank=1,
        addresses=[("127.0.0.1", 1), ("127.0.0.1", 2)],
        num_rows=[1, 1],
        num_marked=[0, 0],
        row_shapes={},
        listener_fd=socket.create_server(("127.0.0.1", 0)).detach(),
        shard=None,
        driver=("127.0.0.1", 3),
        run_id="run",
        token="ab" * 16,
        host="here",
        device="CPU",
        threads=1,
        timeouts=timeouts,
    )
    with pytest.raises(ReachedError):
        program.PROGRAMS[name].start(None, rank_info.to_bytes(), lambda: None)
    assert asked == {
        "driver": (("127.0.0.1", 3), timeouts),
        "rank": 1,
        "addresses": [("127.0.0.1", 1), ("127.0.0.1", 2)],
        "token": bytes.fromhex("ab" * 16),
        "run_id": "run 0",  # with the generation, so that ranks of two do not meet
        "timeout_s": 11.0,
        "operation_timeout_s": 22.0,
    }


FREED = """
import ctypes, resource
from elephant.rank.job import set_up_process

set_up_process()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array = libc.malloc(64 << 20)
    ctypes.memset(array, 1, 64 << 20)
    libc.free(array)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such setting")
def test_process_when_a_large_array_is_freed_then_keeps_its_memory():
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=120)
    # Pages that the system had to give: 16384 without the setting, or 32 huge ones.
    assert int(done.stdout) < 16, done.stderr
