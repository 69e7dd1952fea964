"""What a task's function holds of a large value: nothing that PySpark would write to a file with the function."""

import types

import pytest
from pyspark import cloudpickle

from elephant.cluster import broadcast
from elephant.cluster.broadcast import for_tasks, in_task


@pytest.mark.parametrize(
    ("num_bytes", "has_context", "stands_apart"),
    [(100, True, False), (1 << 20, True, True), (1 << 20, False, False)],
)
def test_value_when_it_is_large_and_there_is_a_context_then_is_a_broadcast(
    monkeypatch, num_bytes, has_context, stands_apart
):
    value, made = bytes(num_bytes), []
    context = types.SimpleNamespace(broadcast=lambda given: made.append(given) or "a broadcast")
    monkeypatch.setattr(broadcast, "jvm_context", lambda session: context if has_context else None)
    held = for_tasks(None, value, num_bytes)
    assert made == [value] * stands_apart
    assert held == ("a broadcast" if stands_apart else value)
    # PySpark writes functions of more than a MiB to files.
    assert not has_context or len(cloudpickle.dumps(held)) < 1 << 18


def test_value_when_a_task_has_it_as_it_is_then_is_given_back():
    assert in_task(b"job") == b"job"
