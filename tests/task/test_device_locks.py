"""How workers that never meet keep off each other's devices."""

import multiprocessing
import os
import sys
import time

import pytest

from elephant.cluster.gpu_plan import HOSTS, SPARK, ResourcePlan
from elephant.errors import ClusterError
from elephant.task import gpu_assignment as assignment
from elephant.task.gpu_assignment import locked_devices
from elephant.task.gpu_devices import Device, TaskDevices

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have no names that only live processes bear"
)

DEVICES = tuple(Device(name, f"GPU-{name}") for name in "01")
SHARED = TaskDevices(shareable=DEVICES)
PLAN = ResourcePlan(devices=HOSTS)
# Claims are the machine's: another process of the suite makes some at the same time.
FIT = f"claims-{os.getpid()}"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(assignment, "_LET_GO_S", 0.3)


def claim(devices=SHARED, plan=PLAN, run_id=FIT):
    return locked_devices(devices, plan, run_id=run_id, host="h")


def test_workers_of_a_host_get_its_devices_one_each():
    with claim() as first, claim() as second:
        assert [first.assigned_devices[0].text, second.assigned_devices[0].text] == [
            "GPU 0 (shared out)",
            "GPU 1 (shared out)",
        ]
        assert second.of_task.assigned == DEVICES[1:]
        with claim() as third:
            assert third.assigned_devices[0].text == "CPU"
            assert "expected 1 free GPUs on h" in third.assigned_devices[0].note
        with (
            pytest.raises(ClusterError, match="expected 1 free GPUs on h"),
            claim(plan=ResourcePlan(devices=HOSTS, required=True)),
        ):
            pass
        with claim(run_id="another-fit") as other:
            assert other.assigned_devices[0].text == "GPU 0 (shared out)"
    with claim() as again:
        assert again.assigned_devices[0].text == "GPU 0 (shared out)"


def test_worker_of_several_devices_gets_all_of_them_or_none():
    plan = ResourcePlan(devices=HOSTS, gpus_per_worker=2)
    with claim(plan=plan) as both:
        assert [place.visible for place in both.assigned_devices] == [["0"], ["1"]]
        with claim(plan=plan) as none:
            assert [place.text for place in none.assigned_devices] == ["CPU", "CPU"]
    with claim(), claim(plan=plan) as none:
        assert none.of_task.assigned == ()


def test_workers_to_which_spark_gave_the_same_device_are_refused():
    given = TaskDevices(assigned=DEVICES[:1])
    plan = ResourcePlan(devices=SPARK)
    with claim(given, plan) as first:
        assert first.assigned_devices[0].text == "GPU 0"
        with pytest.raises(ClusterError, match="GPU 0 of h for two workers"), claim(given, plan):
            pass


def test_worker_without_devices_computes_on_the_cpu():
    with claim(TaskDevices(note="why")) as own:
        assert (own.assigned_devices[0].text, own.assigned_devices[0].note) == ("CPU", "why")


def hold(run_id, ready):
    with claim(run_id=run_id):
        ready.set()
        time.sleep(60)


def test_claim_of_a_process_that_was_killed_is_free_again():
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold, args=(FIT, ready))
    holder.start()
    try:
        assert ready.wait(60)
        with claim() as second:
            assert second.assigned_devices[0].visible == ["1"]
    finally:
        holder.kill()
        holder.join(30)
        holder.close()
    with claim() as again:
        assert again.assigned_devices[0].visible == ["0"]
