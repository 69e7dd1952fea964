"""Which devices the workers of an asynchronous fit compute on: they never meet, so each claims its own on its host.

A claim is an abstract Unix socket that bears the device's name: one process of a host can
have it, no file is left of it, and the kernel gives it back whatever becomes of the process. Workers that
share a host through Spark's own scheduling are so kept apart as well as those that share out its devices.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elephant.cluster.devices import Device, TaskDevices
from elephant.cluster.resources import ResourcePlan
from elephant.cluster.sharing import Placed, collision
from elephant.errors import ClusterError

# A lost attempt at the same task, or a worker that has ended, lets go of its device in this time.
_LET_GO_S = 10.0
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """The devices of one worker's task.

    Args:
        of_task: As the task gets them, one of each process; none for the CPU.
        placed: The same, with what is to be said of each.
    """

    of_task: TaskDevices
    placed: list[Placed]


@contextlib.contextmanager
def claimed_devices(devices: TaskDevices, plan: ResourcePlan, *, run_id: str, host: str) -> Iterator[Claimed]:
    """Claims the devices of one worker's task for as long as the block runs.

    Args:
        devices: Those that it was given, or that its host has.
        plan: Where devices come from.
        run_id: The fit: others may compute on the same devices.
        host: What to call the host.

    Raises:
        ClusterError: Another worker of the fit has a device that Spark gave to this one; or devices are demanded, and
            none is free.
    """
    count = plan.gpus_per_worker
    with contextlib.ExitStack() as closing:
        if devices.assigned:
            for device in devices.assigned:
                if not _claim([device], 1, run_id, closing):
                    raise ClusterError(collision(device.visible, host, "two workers", plan.resource))
            yield Claimed(of_task=devices, placed=[Placed(device=device) for device in devices.assigned])
            return
        chosen = _claim(devices.shareable, count, run_id, closing)
        if chosen:
            placed = [Placed(device=device, shared_out=True) for device in chosen]
            yield Claimed(of_task=TaskDevices(assigned=tuple(chosen)), placed=placed)
            return
        note = devices.note
        if devices.shareable:
            note = (
                f"expected {count} free GPUs on {host}. Received: fewer; other workers of the fit have them, of the "
                f"{len(devices.shareable)} there. Lower numWorkers, or spark.executor.cores."
            )
            if plan.required:
                raise ClusterError(note)
        yield Claimed(of_task=TaskDevices(), placed=[Placed(note=note)] * count)


def _claim(devices: Sequence[Device], count: int, run_id: str, closing: contextlib.ExitStack) -> list[Device]:
    """Claims so many of the devices, waiting for those that are about to be free; returns none of fewer."""
    if len(devices) < count:
        return []
    deadline = time.monotonic() + _LET_GO_S
    while True:
        with contextlib.ExitStack() as trying:
            claimed: list[Device] = []
            for device in devices:
                held = _held(run_id, device)
                if held is not None:
                    trying.enter_context(held)
                    claimed.append(device)
                if len(claimed) == count:
                    closing.push(trying.pop_all())
                    return claimed
        if time.monotonic() > deadline:
            return []
        time.sleep(_POLL_S)


def _held(run_id: str, device: Device) -> socket.socket | None:
    """Returns the socket that stands for a device, or None while another process has it."""
    name = hashlib.sha256(f"{run_id} {device.identity}".encode()).hexdigest()[:40]
    held = socket.socket(socket.AF_UNIX if hasattr(socket, "AF_UNIX") else socket.AF_INET, socket.SOCK_STREAM)
    if not sys.platform.startswith("linux"):
        # Other systems have no such names, and no NVIDIA GPUs either.
        return held
    try:
        held.bind(f"\0elephant-gpu-{name}")
    except OSError:
        held.close()
        return None
    return held
