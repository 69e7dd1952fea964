"""Worlds of threads for fast tests, worlds of processes for those about death, and a check for what is left behind."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from leaks import nothing_left_behind  # noqa: F401  (a fixture that every test here uses)
from rank_threads import outcomes_of_threads

from elephant.collective import connector
from elephant.collective.operation import AlgorithmThresholds
from elephant.collective.topology import host_key
from elephant.net.tls import new_token

SMALL = AlgorithmThresholds(
    small_bytes=64, rounds_bytes=4096, piece_bytes=64, threaded_bytes=2000, block_bytes=64, staged_bytes=128
)
TOKENS = {encryption: new_token(encryption=encryption) for encryption in (False, True)}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small_sizes():
    """Limits so small that small arrays take every path."""
    return SMALL


@pytest.fixture
def run_world(monkeypatch):
    """Calls ``function(collective)`` on every rank, each in a thread; returns results and errors by rank.

    ``hosts`` has a letter for each rank's host: ranks of one letter share memory, the others meet over TCP.
    """

    def run(
        world_size, function, *, hosts=None, transport="auto", sizes=None, operation_timeout_s=30.0, encryption=False
    ):
        def key_of_this_rank():
            return hosts[int(threading.current_thread().name.split("-")[-1])]

        monkeypatch.setattr(connector, "host_key", host_key if hosts is None else key_of_this_rank)
        return outcomes_of_threads(
            world_size,
            function,
            token=TOKENS[encryption],
            operation_timeout_s=operation_timeout_s,
            transport=transport,
            thresholds=sizes,
        )

    return run


class RankProcess:
    """One rank in a process of its own, driven line by line over its standard streams."""

    def __init__(self, rank, prefix, **orders):
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(Path(__file__).with_name("rank_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self.tell({"rank": rank, **orders})

    def tell(self, value):
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def hear(self):
        return json.loads(self._process.stdout.readline())

    def signal(self, number):
        self._process.send_signal(number)

    def end(self):
        self._process.kill()
        self._process.wait(20)
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def start_processes():
    """Starts one process per rank and connects them."""
    processes = []

    def start(world_size, scenario, *, timeout_s=60.0, transport="auto", network=None, encryption=False):
        """With a network, the ranks take turns in its namespaces."""
        for rank in range(world_size):
            prefix, host = ([], "127.0.0.1")
            if network is not None:
                prefix, host = (
                    network.hosts[rank % len(network.hosts)].prefix,
                    network.hosts[rank % len(network.hosts)].address,
                )
            orders = {"host": host, "scenario": scenario, "timeout_s": timeout_s, "transport": transport}
            processes.append(RankProcess(rank, prefix, token=TOKENS[encryption].hex(), **orders))
        addresses = [process.hear() for process in processes]
        for process in processes:
            process.tell(addresses)
        assert [process.hear() for process in processes] == ["formed"] * world_size
        for process in processes:
            process.tell("begin")
        return processes

    yield start
    for process in processes:
        process.end()
