"""How much memory a parameter server takes while clients pull and push as fast as they can."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from report import Measurement, report
from servers import MB, Place, running, serve_client, vector_of
from team import ANYWHERE, Team

from elephant.parameter_server.layout import Layout

WEIGHT_BYTES = 100 * MB
# At most so many times the weights, by the number of clients.
TARGETS = {1: 2.5, 8: 5.0}
_SAMPLE_S = 0.1
# Pulls and pushes of each client.
_CYCLES = {1: 30, 8: 12}


@dataclass
class Memory:
    """A process' memory in bytes, the most that was seen of each.

    Args:
        resident: What the kernel says was resident at most, since the process began.
        proportional: The same with shared pages divided over those who share them.
        unique: Without shared pages.
    """

    resident: int = 0
    proportional: int = 0
    unique: int = 0

    def sample(self, process: psutil.Process) -> None:
        """Looks once."""
        full = process.memory_full_info()
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
        self.resident = max(self.resident, peak)
        self.proportional = max(self.proportional, full.pss)
        self.unique = max(self.unique, full.uss)


@contextlib.contextmanager
def watched_server(layout: Layout, rule: str, clients: int) -> Iterator[tuple[Place, psutil.Process]]:
    """Runs a server as `running` does, and yields its process besides."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with running(layout, rule, clients=clients) as place:
        (server,) = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        yield place, server


def idle_memory() -> Memory:
    """Returns the memory of a server of next to no weights to which one client has talked."""
    memory = Memory()
    with watched_server(Layout([("scalar", (1,))]), "sgd", 1) as (place, process):
        with Team(serve_client, [ANYWHERE], place) as team:
            team.replies()
            memory.sample(process)
    return memory


def busy_memory(clients: int, repetitions: int) -> list[Memory]:
    """Returns the most memory that a server of `WEIGHT_BYTES` took, for every one of so many servers."""
    found = []
    for _ in range(repetitions):
        memory = Memory()
        with (
            watched_server(vector_of(WEIGHT_BYTES), "sgd", clients) as (place, process),
            Team(serve_client, [ANYWHERE] * clients, place, None, False) as team,
        ):
            team.replies()
            team.ask(("cycle", _CYCLES[clients], False))
            # Each says that it is ready, and is told when to begin; then each replies when it is done.
            team.replies()
            team.ask(time.monotonic())
            while not team.all_answered():
                memory.sample(process)
                time.sleep(_SAMPLE_S)
            team.replies()
            memory.sample(process)
        found.append(memory)
    return found


def measure_memory(options: argparse.Namespace) -> None:
    """Memory of a server above that of an idle one, over the bytes of its weights."""
    # A peak needs no median; three servers show that it is one.
    repetitions = options.repetitions or 3
    idle = idle_memory()
    for clients, target in TARGETS.items():
        busy = busy_memory(clients, repetitions)
        ratios = {
            name: [(getattr(each, name) - getattr(idle, name)) / WEIGHT_BYTES for each in busy] for name in vars(idle)
        }
        report(
            Measurement(
                measure="server_memory_above_idle",
                case={"bytes": WEIGHT_BYTES, "clients": clients, "rule": "sgd", "cores": os.cpu_count()},
                # The worst one.
                ratio=max(ratios["resident"]),
                target=target,
                at_least=False,
                medians={
                    **{f"{name}_over_weights": statistics.median(values) for name, values in ratios.items()},
                    **{f"idle_{name}_mb": value / 1e6 for name, value in vars(idle).items()},
                },
                repetitions=repetitions,
            )
        )
