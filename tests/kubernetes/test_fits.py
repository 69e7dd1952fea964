"""Fits on executors that are pods, and what becomes of a fit when a pod goes; the driver is outside, in client mode."""

import time

import pytest
from driver_process import BATCH, ROWS, DriverProcess, Training, assert_counted, assert_equals_one_process

START_S = 150.0
PATIENT = {"heartbeat_s": 60.0, "collective_s": 60.0}
# Longer than a fit waits elsewhere for an executor, and then for slots to start again.
MACHINE_S = 90.0

# The cluster's start has deadlines of its own, and would count against whichever test comes first.
pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(170, func_only=True),
    pytest.mark.slow("a cluster of pods; tests/spark loses executors of a local cluster"),
]


@pytest.fixture(scope="module")
def driver(cluster):
    """A driver outside the pods with two executors."""
    driver = DriverProcess(cluster, cluster.outside.prefix)
    try:
        assert driver.outcome(START_S) == {"ready": True}
        yield driver
    finally:
        driver.close()


@pytest.fixture
def begin(driver, folder):
    """Begins a fit."""

    def fit(**options):
        made = {"data": "regression", "rows": ROWS, "batchSize": BATCH, "shuffle": False, "timeouts": PATIENT}
        driver.begin(marker=str(folder), **{**made, **options})
        return Training(driver, folder)

    yield fit
    driver.interrupt()


def executors(cluster):
    """Returns the names of the pods that run, by address."""
    pods = cluster.pods("executor")
    return {pod["status"]["podIP"]: pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"}


def await_steps(training, addresses, count):
    """Waits until so many steps were made at each of some addresses."""
    training.await_(lambda: all(training.steps_at(address) >= count for address in addresses))


def test_pods_when_a_driver_outside_asks_for_them_then_have_a_tenth_of_the_heap_beside_it_and_no_less_than_384_mb(
    cluster, driver
):
    resources = [pod["spec"]["containers"][0]["resources"] for pod in cluster.pods("executor")]
    memory = f"{2048 + 384}Mi"
    asked = {"requests": {"memory": memory, "cpu": "1"}, "limits": {"memory": memory}}
    assert resources == [asked, asked]


def test_fits_when_executors_are_pods_then_both_modes_equal_one_process(cluster, begin):
    assert_equals_one_process(begin(epochs=2, pause_s=0.0).outcome(), epochs=2)
    training = begin(data="counting", mode="asynchronous", epochs=2, pause_s=0.0)
    assert_counted(training.outcome(), epochs=2)
    assert [training.steps_at(address) for address in executors(cluster)] == [8, 8]


@pytest.mark.timeout(170 + MACHINE_S, func_only=True)
def test_synchronous_fit_when_a_pod_is_deleted_then_waits_for_a_machine_restarts_on_another_pod_and_equals_one_process(
    cluster, begin, folder
):
    before = executors(cluster)
    training = begin(epochs=8, pause_s=0.3, checkpointPath=str(folder / "checkpoints"), maxRestarts=3)
    await_steps(training, before, 5)
    cluster.kubelet.next_machine_at = time.monotonic() + MACHINE_S
    cluster.delete_pod(next(iter(before.values())))
    training.await_line("the fit failed and starts again (1 of 3): ")
    training.await_line("going on after epoch", MACHINE_S + START_S)
    assert_equals_one_process(training.outcome(), epochs=8)
    after = executors(cluster)
    assert len(after) == 2 and len(after.keys() - before.keys()) == 1


def test_asynchronous_fit_when_a_pod_is_killed_for_its_memory_then_another_one_does_its_work(cluster, begin, driver):
    before = executors(cluster)
    training = begin(data="counting", mode="asynchronous", epochs=10, pause_s=0.2)
    await_steps(training, before, 3)
    lost = next(iter(before))
    cluster.kubelet.kill(before[lost])
    assert_counted(training.outcome(), epochs=10)
    assert training.steps_at(lost) < 20


def test_synchronous_fit_when_a_pod_is_killed_for_its_memory_then_the_error_says_so_and_what_to_raise(cluster, begin):
    before = executors(cluster)
    training = begin(epochs=100_000, pause_s=0.1)
    await_steps(training, before, 3)
    lost = next(iter(before))
    cluster.kubelet.kill(before[lost])
    outcome = training.outcome()
    assert outcome["host"] == lost, outcome
    assert "termination reason: OOMKilled\nRaise spark.executor.memoryOverhead" in outcome["error"]
