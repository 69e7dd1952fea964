"""The GPUs of a Spark task: which ones Spark gave it, what CUDA calls them, and which ones its host has besides."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elephant.backends.process_environment import VISIBLE
from elephant.cluster.gpu_plan import NONE, ResourcePlan
from elephant.errors import ClusterError

_LIST_TIMEOUT_S = 10.0
_GPU = re.compile(r"GPU (\d+): .*\(UUID: ([^)]+)\)")
_MIG = re.compile(r"\s+MIG .*\(UUID: ([^)]+)\)")


@dataclass(frozen=True)
class Device:
    """One GPU, or one part of one."""

    visible: str  # what CUDA_VISIBLE_DEVICES names it by
    identity: str  # what tells it apart from others of its host: its UUID, where nvidia-smi says it


@dataclass(frozen=True, kw_only=True)
class TaskDevices:
    """The devices of one Spark task."""

    assigned: tuple[Device, ...] = ()  # one of each of its ranks; empty where Spark gave none
    # those of the host that its ranks may share out with other tasks there; empty where Spark gave some
    shareable: tuple[Device, ...] = ()
    note: str = ""


def host_gpus() -> str:
    """Returns the output of ``nvidia-smi -L``; nothing where there is no such command, or it fails or hangs."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIST_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return listed.stdout.decode(errors="replace") if listed.returncode == 0 else ""


def devices_of_task(
    plan: ResourcePlan,
    addresses: Sequence[str],
    environment: Mapping[str, str],
    listing: Callable[[], str] = host_gpus,
) -> TaskDevices:
    """Returns the devices of a task, by what ``nvidia-smi -L`` prints.

    Raises:
        ClusterError: Devices are demanded, and there are none; or Spark's addresses are none of the platform's.
    """
    if plan.devices == NONE:
        return TaskDevices()
    platform = platform_devices(environment)
    if platform is not None and not platform:
        if not plan.required:
            note = f"{VISIBLE}={environment[VISIBLE]!r} on an executor hides its GPUs: it computes on the CPU"
            return TaskDevices(note=note if addresses else "")
        raise ClusterError(
            f"useGpu=True: expected GPUs. Received: {VISIBLE}={environment[VISIBLE]!r}, which hides them, in an "
            "executor's environment. Take it out (spark.executorEnv, or the service that starts executors).",
            topic="gpus",
        )
    listed = listed_devices(listing())
    if addresses:
        if len(addresses) < plan.gpus_per_worker:
            raise ClusterError(
                f"gpusPerWorker={plan.gpus_per_worker}: expected as many addresses of {plan.resource} for each task. "
                f"Received: {', '.join(addresses)}. Set spark.task.resource.{plan.resource}.amount to "
                f"{plan.gpus_per_worker}.",
                topic="gpus",
            )
        names = visible_names(list(addresses)[: plan.gpus_per_worker], platform)
        return TaskDevices(assigned=tuple(_identified(name, listed) for name in names))
    if platform is not None:
        return TaskDevices(shareable=tuple(_identified(name, listed) for name in platform))
    if not listed and plan.required:
        raise ClusterError(no_gpus(plan), topic="gpus")
    return TaskDevices(shareable=tuple(listed))


def no_gpus(plan: ResourcePlan) -> str:
    """Returns the error for a host without GPUs where they are demanded."""
    return (
        "useGpu=True: expected GPUs on every host that runs a worker. Received: none from Spark, and none from "
        f"nvidia-smi. Set spark.executor.resource.{plan.resource}.amount and its discoveryScript for a cluster whose "
        "GPUs Spark schedules, install the driver of the GPUs, or leave useGpu out."
    )


def platform_devices(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the devices that the platform shows to a process; none where it hides them, None where it says nothing.

    >>> platform_devices({"CUDA_VISIBLE_DEVICES": "2, 3"}), platform_devices({"CUDA_VISIBLE_DEVICES": "-1"})
    (['2', '3'], [])
    >>> platform_devices({}) is None
    True
    """
    if VISIBLE not in environment:
        return None
    names: list[str] = []
    for name in environment[VISIBLE].split(","):
        # As CUDA reads it: what comes after something that is no device does not count.
        if not name.strip() or name.strip() in ("-1", "none", "void", "NoDevFiles"):
            break
        names.append(name.strip())
    return names


def visible_names(addresses: Sequence[str], platform: Sequence[str] | None) -> list[str]:
    """Returns CUDA's names of devices that Spark has given by their addresses.

    Where the platform has chosen devices itself, addresses are places in its list, as CUDA
    counts them: ``0`` is the first one of it. Addresses that are no such places may name the devices of the
    list themselves.

    Raises:
        ClusterError: The addresses are neither.

    >>> visible_names(["1", "0"], ["2", "3"]), visible_names(["3"], ["2", "3"]), visible_names(["1"], None)
    (['3', '2'], ['3'], ['1'])
    """
    if platform is None:
        return list(addresses)
    if all(address.isdecimal() and int(address) < len(platform) for address in addresses):
        return [platform[int(address)] for address in addresses]
    if all(address in platform for address in addresses):
        return list(addresses)
    raise ClusterError(
        f"expected Spark's addresses of GPUs to be places in {VISIBLE}={','.join(platform)}, or devices of it, which "
        f"the executor's environment has. Received: {', '.join(addresses)}. Let the discovery script print the "
        f"addresses 0 to {len(platform) - 1}, or take {VISIBLE} out of the environment.",
        topic="gpus",
    )


def given_names(addresses: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Returns CUDA's names of the devices that Spark has given to a task; none where the platform hides them.

    Raises:
        ClusterError: The addresses are none of the platform's.

    >>> given_names(["1"], {"CUDA_VISIBLE_DEVICES": "4,5"}), given_names(["1"], {}), given_names([], {})
    (['5'], ['1'], [])
    >>> given_names(["1"], {"CUDA_VISIBLE_DEVICES": ""})
    []
    """
    platform = platform_devices(environment)
    return [] if platform is not None and not platform else visible_names(addresses, platform)


def listed_devices(listing: str) -> list[Device]:
    """Returns the devices that ``nvidia-smi -L`` prints: GPUs by their numbers, or the parts of divided ones (MIG).

    >>> listed_devices("GPU 0: A (UUID: GPU-1)\\n  MIG 1g.10gb Device 0: (UUID: MIG-2)\\nGPU 1: A (UUID: GPU-3)")
    [Device(visible='MIG-2', identity='MIG-2'), Device(visible='1', identity='GPU-3')]
    """
    devices: list[Device] = []
    whole_device: Device | None = None
    for line in listing.splitlines():
        gpu, part = _GPU.match(line), _MIG.match(line)
        if gpu is not None:
            whole_device = Device(gpu[1], gpu[2])
            devices.append(whole_device)
        elif part is not None:
            if whole_device is not None and devices[-1] is whole_device:
                devices.pop()
            devices.append(Device(part[1], part[1]))
    return devices


def _identified(name: str, listed_devices: Sequence[Device]) -> Device:
    """Returns a device with the identity that the host's list gives to its name, which may be the start of a UUID."""
    for device in listed_devices:
        if name in (device.visible, device.identity):
            return Device(name, device.identity)
    begun = [device for device in listed_devices if not name.isdecimal() and device.identity.startswith(name)]
    if len(begun) == 1:
        return Device(name, begun[0].identity)
    return Device(name, name)
