"""Assignment of GPUs to ranks, and locks on GPUs that tasks of one host share.

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
from dataclasses import dataclass, replace

from elephant.cluster.gpu_plan import ResourcePlan
from elephant.errors import ClusterError
from elephant.task.gpu_devices import Device, TaskDevices, no_gpus
from elephant.task.rendezvous import RankReport

# A lost attempt at the same task, or a worker that has ended, lets go of its device in this time.
_LET_GO_S = 10.0
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class AssignedDevice:
    """Device of one rank."""

    device: Device | None = None
    shared_out: bool = False  # whether the ranks have chosen it among those of the host, and Spark knows nothing of it
    note: str = ""

    @property
    def visible(self) -> list[str]:
        """The device, as ``CUDA_VISIBLE_DEVICES`` names it; none for the CPU."""
        return [] if self.device is None else [self.device.visible]

    @property
    def text(self) -> str:
        """Name of the device in the plan.

        >>> AssignedDevice(device=Device("0", "GPU-1"), shared_out=True).text, AssignedDevice().text
        ('GPU 0 (shared out)', 'CPU')
        """
        if self.device is None:
            return "CPU"
        return f"GPU {self.device.visible}{' (shared out)' if self.shared_out else ''}"


def assign_devices(reports: Sequence[RankReport], plan: ResourcePlan) -> list[AssignedDevice]:
    """Returns the device of every rank.

    A rank keeps what Spark gave it. The others of a host take its devices in turn, by rank. Ranks that
    take every step together go at the pace of the slowest: either all have a device, or all compute on the CPU.

    Raises:
        ClusterError: Two ranks have the same device; or devices are demanded, and a rank has none.
    """
    taken = {(report.host, report.assigned.identity) for report in reports if report.assigned is not None}
    assigned_devices: list[AssignedDevice] = []
    for report in reports:
        free = [device for device in report.shareable if (report.host, device.identity) not in taken]
        device = report.assigned or (free[0] if free else None)
        if device is not None:
            taken.add((report.host, device.identity))
        assigned_devices.append(
            AssignedDevice(device=device, shared_out=device is not None and report.assigned is None)
        )
    refuse_collisions(reports, assigned_devices, plan)
    without = [report for report, assigned in zip(reports, assigned_devices, strict=True) if assigned.device is None]
    if not without:
        return assigned_devices
    if plan.required:
        raise ClusterError(_too_few(reports, without[0], plan), topic="gpus")
    if len(without) == len(reports):
        return assigned_devices
    # Ranks that have a device of Spark's have begun with it.
    kept = [assigned for assigned in assigned_devices if assigned.device is not None and not assigned.shared_out]
    whose = "some" if kept else "all"
    note = f"useGpu='auto': {whose} ranks compute on the CPU: {_too_few(reports, without[0], plan)}"
    return [
        replace(assigned, note=note)
        if assigned.device is not None and not assigned.shared_out
        else AssignedDevice(note=note)
        for assigned in assigned_devices
    ]


def refuse_collisions(
    reports: Sequence[RankReport], assigned_devices: Sequence[AssignedDevice], plan: ResourcePlan
) -> None:
    """Raises ClusterError where two ranks would compute on the same device of the same host."""
    owners: dict[tuple[str, str], RankReport] = {}
    for report, assigned in zip(reports, assigned_devices, strict=True):
        if assigned.device is None:
            continue
        other = owners.setdefault((report.host, assigned.device.identity), report)
        if other is not report:
            ranks = f"ranks {other.rank} and {report.rank} (executors {other.executor} and {report.executor})"
            raise ClusterError(collision(assigned.device.visible, report.host, ranks, plan.resource), topic="gpus")


def collision(device: str, host: str, ranks: str, resource: str) -> str:
    """Returns the error for a device that Spark has given to two ranks of a fit."""
    return (
        f"expected a GPU of its own for every rank. Received: GPU {device} of {host} for {ranks}. "
        "Executors of one host must be told of different GPUs: on a standalone cluster start one worker on a host, "
        f"with spark.worker.resource.{resource}.amount GPUs, and let it start several executors (spark.executor.cores "
        f"and spark.executor.resource.{resource}.amount), or give each worker a discovery script of its own; "
        f"local-cluster runs one script for all of its workers: let it have one. "
        f"Where one executor runs several tasks, set spark.task.resource.{resource}.amount to a whole number."
    )


def _too_few(reports: Sequence[RankReport], report: RankReport, plan: ResourcePlan) -> str:
    if not report.shareable:
        return no_gpus(plan).replace("useGpu=True: ", "")
    here = [card.rank for card in reports if card.host == report.host]
    return (
        f"expected a GPU for each of the {len(here)} ranks on {report.host}. Received: {len(report.shareable)}. "
        "Lower numWorkers, give the fit more hosts, or set useGpu=False."
    )


@dataclass(frozen=True, kw_only=True)
class LockedDevices:
    """The devices of one worker's task."""

    of_task: TaskDevices  # as the task gets them, one of each process; none for the CPU
    assigned_devices: list[AssignedDevice]  # the same, with what is to be said of each


@contextlib.contextmanager
def locked_devices(devices: TaskDevices, plan: ResourcePlan, *, run_id: str, host: str) -> Iterator[LockedDevices]:
    """Claims the devices of one worker's task for as long as the block runs.

    Raises:
        ClusterError: Another worker of the fit has a device that Spark gave to this one; or devices are demanded, and
            none is free.
    """
    count = plan.gpus_per_worker
    with contextlib.ExitStack() as closing:
        if devices.assigned:
            for device in devices.assigned:
                if not _lock_device([device], 1, run_id, closing):
                    raise ClusterError(collision(device.visible, host, "two workers", plan.resource))
            yield LockedDevices(
                of_task=devices, assigned_devices=[AssignedDevice(device=device) for device in devices.assigned]
            )
            return
        chosen = _lock_device(devices.shareable, count, run_id, closing)
        if chosen:
            assigned_devices = [AssignedDevice(device=device, shared_out=True) for device in chosen]
            yield LockedDevices(of_task=TaskDevices(assigned=tuple(chosen)), assigned_devices=assigned_devices)
            return
        note = devices.note
        if devices.shareable:
            note = (
                f"expected {count} free GPUs on {host}. Received: fewer; other workers of the fit have them, of the "
                f"{len(devices.shareable)} there. Lower numWorkers, or spark.executor.cores."
            )
            if plan.required:
                raise ClusterError(note, topic="gpus")
        yield LockedDevices(of_task=TaskDevices(), assigned_devices=[AssignedDevice(note=note)] * count)


def _lock_device(devices: Sequence[Device], count: int, run_id: str, closing: contextlib.ExitStack) -> list[Device]:
    """Claims so many of the devices, waiting for those that are about to be free; returns none of fewer."""
    if len(devices) < count:
        return []
    deadline = time.monotonic() + _LET_GO_S
    while True:
        with contextlib.ExitStack() as trying:
            locked_devices: list[Device] = []
            for device in devices:
                held = _held(run_id, device)
                if held is not None:
                    trying.enter_context(held)
                    locked_devices.append(device)
                if len(locked_devices) == count:
                    closing.push(trying.pop_all())
                    return locked_devices
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
