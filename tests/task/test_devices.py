"""Which GPUs a task has: what Spark gave it, what the platform calls these, and what nvidia-smi lists."""

import os
import stat

import pytest
from tables import every_case

from elephant.backends.process_environment import device_environment, process_environment
from elephant.cluster.gpu_plan import HOSTS, NONE, SPARK, ResourcePlan
from elephant.errors import ClusterError
from elephant.task.gpu_devices import (
    Device,
    TaskDevices,
    devices_of_task,
    host_gpus,
    listed_devices,
    platform_devices,
    visible_names,
)

TWO = "GPU 0: NVIDIA A (UUID: GPU-aa)\nGPU 1: NVIDIA A (UUID: GPU-bb)\n"
DIVIDED = (
    "GPU 0: NVIDIA H100 (UUID: GPU-aa)\n"
    "  MIG 1g.10gb     Device  0: (UUID: MIG-11)\n"
    "  MIG 1g.10gb     Device  1: (UUID: MIG-22)\n"
    "GPU 1: NVIDIA H100 (UUID: GPU-bb)\n"
)


def devices(source, addresses=(), environment=None, listing="", **plan):
    return devices_of_task(ResourcePlan(devices=source, **plan), list(addresses), environment or {}, lambda: listing)


def assigned(*pairs):
    return TaskDevices(assigned=tuple(Device(*pair) for pair in pairs))


def shareable(*pairs):
    return TaskDevices(shareable=tuple(Device(*pair) for pair in pairs))


@every_case(
    ("addresses", "platform", "names"),
    [
        (["1"], None, ["1"]),
        (["1", "0"], None, ["1", "0"]),
        (["GPU-aa"], None, ["GPU-aa"]),
        (["0"], ["2", "3"], ["2"]),
        (["1"], ["2", "3"], ["3"]),
        (["1", "0"], ["GPU-aa", "GPU-bb"], ["GPU-bb", "GPU-aa"]),
        (["0"], ["MIG-GPU-aa/1/0"], ["MIG-GPU-aa/1/0"]),
        (["3"], ["2", "3"], ["3"]),
        (["2"], ["2"], ["2"]),
        (["GPU-bb"], ["GPU-aa", "GPU-bb"], ["GPU-bb"]),
        # A place in the list wins over a device of the same name.
        (["1"], ["1", "2"], ["2"]),
    ],
)
def test_visible_names_when_the_platform_has_chosen_then_index_its_list(addresses, platform, names):
    assert visible_names(addresses, platform) == names


@pytest.mark.parametrize(("addresses", "platform"), [(["4"], ["2", "3"]), (["0", "5"], ["2", "3"]), (["x"], ["0"])])
def test_visible_names_when_addresses_are_no_places_of_the_list_then_are_refused(addresses, platform):
    with pytest.raises(ClusterError, match=f"places in CUDA_VISIBLE_DEVICES={','.join(platform)}.*Received: "):
        visible_names(addresses, platform)


@every_case(
    ("value", "expected"),
    [("", []), ("-1", []), ("none", []), ("NoDevFiles", []), ("0", ["0"]), (" 2 , 3", ["2", "3"]), ("0,-1,1", ["0"])],
)
def test_platform_devices_are_read_as_cuda_reads_them(value, expected):
    assert platform_devices({"CUDA_VISIBLE_DEVICES": value}) == expected


def test_listed_devices_when_a_gpu_is_divided_are_its_parts():
    assert listed_devices(TWO) == [Device("0", "GPU-aa"), Device("1", "GPU-bb")]
    assert [device.visible for device in listed_devices(DIVIDED)] == ["MIG-11", "MIG-22", "1"]
    assert listed_devices("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") == []


def test_devices_of_task_are_those_that_spark_gave_in_its_order():
    assert devices(SPARK, ["1"]) == assigned(("1", "1"))
    assert devices(SPARK, ["1", "0"], gpus_per_worker=2) == assigned(("1", "1"), ("0", "0"))
    assert devices(SPARK, ["1", "0"], gpus_per_worker=1) == assigned(("1", "1"))
    assert devices(SPARK, ["1"], listing=TWO) == assigned(("1", "GPU-bb"))
    assert devices(SPARK, ["GPU-bb"], listing=TWO) == assigned(("GPU-bb", "GPU-bb"))
    assert devices(SPARK, ["1"], {"CUDA_VISIBLE_DEVICES": "1,0"}, TWO) == assigned(("0", "GPU-aa"))
    assert devices(HOSTS, ["1"], listing=TWO) == assigned(("1", "GPU-bb"))
    # As CUDA takes it: the start of a UUID, as long as it is that of one device only.
    assert devices(SPARK, ["GPU-b"], listing=TWO) == assigned(("GPU-b", "GPU-bb"))
    assert devices(SPARK, ["GPU-"], listing=TWO) == assigned(("GPU-", "GPU-"))


def test_devices_of_task_when_spark_gave_none_are_those_of_the_host():
    assert devices(HOSTS, listing=TWO) == shareable(("0", "GPU-aa"), ("1", "GPU-bb"))
    assert devices(HOSTS, environment={"CUDA_VISIBLE_DEVICES": "1"}, listing=TWO) == shareable(("1", "GPU-bb"))
    assert devices(HOSTS, environment={"CUDA_VISIBLE_DEVICES": "-1"}, listing=TWO) == TaskDevices()
    assert devices(HOSTS) == TaskDevices()


def test_devices_of_task_without_gpus_looks_for_none():
    def listing():
        raise RuntimeError

    assert devices_of_task(ResourcePlan(devices=NONE), ["0"], {}, listing) == TaskDevices()


def test_devices_of_task_when_the_platform_hides_what_spark_gave_then_says_so():
    hidden = devices(SPARK, ["0"], {"CUDA_VISIBLE_DEVICES": "-1"})
    assert hidden.assigned == ()
    assert "CUDA_VISIBLE_DEVICES='-1'" in hidden.note
    with pytest.raises(ClusterError, match=r"useGpu=True: expected GPUs.*'-1', which hides them"):
        devices(SPARK, ["0"], {"CUDA_VISIBLE_DEVICES": "-1"}, required=True)


def test_devices_of_task_when_gpus_are_demanded_and_there_are_none_then_names_the_setting():
    with pytest.raises(ClusterError, match=r"Received: none from Spark.*Set spark\.executor\.resource\.fpga\.amount"):
        devices(HOSTS, required=True, resource="fpga")


def test_devices_of_task_with_fewer_addresses_than_wanted_names_the_setting():
    with pytest.raises(
        ClusterError, match=r"gpusPerWorker=2.*Received: 0\. Set spark\.task\.resource\.gpu\.amount to 2"
    ):
        devices(SPARK, ["0"], gpus_per_worker=2)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("#!/bin/sh\ntest \"$1\" = -L && printf 'GPU 0: A (UUID: GPU-aa)\\n'", "GPU 0: A (UUID: GPU-aa)\n"),
        ("#!/bin/sh\necho 'GPU 0: A (UUID: GPU-aa)'; exit 9", ""),
        (None, ""),
    ],
)
def test_host_gpus_are_what_nvidia_smi_lists_when_it_works(tmp_path, monkeypatch, script, expected):
    if script is not None:
        command = tmp_path / "nvidia-smi"
        command.write_text(script)
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    path = os.pathsep.join([str(tmp_path), "/bin"]) if script is not None else str(tmp_path)
    monkeypatch.setenv("PATH", path)
    assert host_gpus() == expected


def test_host_gpus_when_nvidia_smi_hangs_are_none_in_time(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nexec sleep 60")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), "/bin"]))
    monkeypatch.setattr("elephant.task.gpu_devices._LIST_TIMEOUT_S", 0.2)
    assert host_gpus() == ""


def test_environment_of_devices_shows_them_alone_and_lets_memory_grow(monkeypatch):
    for name in ("TF_FORCE_GPU_ALLOW_GROWTH", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    shown = device_environment(["GPU-aa"])
    assert shown["CUDA_VISIBLE_DEVICES"] == "GPU-aa"
    assert (shown["TF_FORCE_GPU_ALLOW_GROWTH"], shown["CUDA_DEVICE_ORDER"]) == ("true", "PCI_BUS_ID")
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    assert device_environment(["0"])["TF_FORCE_GPU_ALLOW_GROWTH"] == "false"
    assert device_environment([]) == {"CUDA_VISIBLE_DEVICES": "-1"}


def test_environment_of_a_process_gives_the_users_variables_the_last_word(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    own = {"CUDA_VISIBLE_DEVICES": "5"}
    assert process_environment(threads=1, devices=[], backend=None)["CUDA_VISIBLE_DEVICES"] == "-1"
    assert process_environment(threads=1, devices=["1"], backend=None, more=own)["CUDA_VISIBLE_DEVICES"] == "5"
