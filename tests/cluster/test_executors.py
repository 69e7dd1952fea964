"""An application that has lost all of its executors, and what Spark is told of the tasks of a training stage."""

import pytest

from elephant.cluster import executors
from elephant.cluster.executors import ExecutorAbsence, TaskProfile
from elephant.errors import ClusterError


@pytest.fixture
def cluster(monkeypatch):
    """An application whose number of executors, way of having them, and clock, are the test's to say."""
    state = {"lost": False, "dynamic": False, "now": 100.0}
    monkeypatch.setattr(executors, "has_no_executor", lambda session: state["lost"])
    monkeypatch.setattr(executors, "allocates_dynamically", lambda session: state["dynamic"])
    monkeypatch.setattr(executors.time, "monotonic", lambda: state["now"])
    return state


def checked(absence, cluster, *, until):
    """Checks four times a second, up to a time."""
    while cluster["now"] < until:
        cluster["now"] += 0.25
        absence.check()


def test_absence_when_all_executors_are_lost_for_too_long_then_raises_and_names_the_deadline(cluster):
    absence = ExecutorAbsence(None, 60.0)
    checked(absence, cluster, until=150)
    cluster["lost"] = True
    checked(absence, cluster, until=200)
    with pytest.raises(ClusterError, match="none for 60 s.*timeouts.executors_s"):
        checked(absence, cluster, until=230)


def test_absence_when_one_comes_back_in_time_then_the_wait_begins_anew(cluster):
    absence = ExecutorAbsence(None, 60.0)
    for start in (100, 200, 300):
        cluster["lost"] = True
        checked(absence, cluster, until=start + 50)
        cluster["lost"] = False
        checked(absence, cluster, until=start + 100)


def test_absence_when_spark_starts_executors_as_needed_then_waits(cluster):
    cluster.update(lost=True, dynamic=True)
    checked(ExecutorAbsence(None, 60.0), cluster, until=400)


def told(requests):
    return {name: (request.amount, *more(request)) for name, request in requests.items()}


def more(request):
    return (request.discoveryScript, request.vendor) if hasattr(request, "vendor") else ()


@pytest.mark.parametrize("amount", [1, 2])
def test_build_of_tasks_alone_asks_for_no_executors(amount):
    built = TaskProfile(cpus=2, resource="gpu", amount=amount).build()
    assert told(built.taskResources) == {"cpus": (2.0,), "gpu": (float(amount),)}
    assert told(built.executorResources) == {}


def test_build_with_executors_asks_for_their_devices_and_leaves_cores_and_memory_alone():
    profile = TaskProfile(cpus=1, resource="gpu", amount=1, held=4, script="/find", vendor="nvidia.com")
    built = profile.build()
    assert told(built.taskResources) == {"cpus": (1.0,), "gpu": (1.0,)}
    assert told(built.executorResources) == {"gpu": (4, "/find", "nvidia.com")}
