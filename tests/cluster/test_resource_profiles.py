"""What Spark is told of the tasks, and of the executors, of a training stage."""

import pytest

from elephant.cluster.gpu.plan import TaskProfile


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
