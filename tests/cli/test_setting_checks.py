"""Settings and variables that a fit bears, or suffers from."""

import pytest
from tables import every_case

from elephant.cli.setting_checks import (
    check_barrier_settings,
    check_memory,
    check_proxies,
    check_python_memory,
    check_speculation,
    check_worker_reuse,
    overhead_mb,
)

BARRIER = "spark.scheduler.barrier.maxConcurrentTasksCheck."


@pytest.mark.parametrize(
    ("conf", "synchronous", "status"),
    [
        ({}, False, "ok"),
        ({"spark.speculation": "true"}, True, "ok"),
        ({"spark.speculation": "true"}, False, "warning"),
    ],
)
def test_speculation_when_on_then_matters_without_a_barrier_alone(conf, synchronous, status):
    assert check_speculation(conf, synchronous=synchronous).status == status


def test_python_workers_when_they_are_not_kept_then_warns():
    assert check_worker_reuse({}).status == "ok"
    assert check_worker_reuse({"spark.python.worker.reuse": "False"}).status == "warning"


@pytest.mark.parametrize(
    ("conf", "counted", "status", "received"),
    [
        ({}, True, "ok", "after 600 s, which is never waited for"),
        ({}, False, "warning", "after 600 s"),
        ({f"{BARRIER}interval": "1s", f"{BARRIER}maxFailures": "3"}, False, "ok", "after 3 s"),
        ({f"{BARRIER}interval": "500ms"}, False, "ok", "after 20 s"),
    ],
)
def test_barrier_check_when_slots_cannot_be_counted_then_its_patience_matters(conf, counted, status, received):
    found = check_barrier_settings(conf, counted=counted)
    assert found.status == status
    assert received in found.received


@every_case(
    ("conf", "megabytes"),
    [
        ({}, 384),
        ({"spark.executor.memory": "8g"}, 819),
        ({"spark.executor.memory": "8g", "spark.executor.memoryOverheadFactor": "0.5"}, 4096),
        ({"spark.master": "k8s://https://host", "spark.executor.memory": "4g"}, 1638),
        ({"spark.executor.memory": "8g", "spark.executor.memoryOverhead": "1500"}, 1500),
    ],
)
def test_overhead_when_reckoned_then_is_sparks(conf, megabytes):
    assert overhead_mb(conf) == megabytes


@every_case(
    ("conf", "status"),
    [
        ({"spark.master": "spark://host:7077"}, "ok"),
        ({"spark.master": "yarn"}, "warning"),
        ({"spark.master": "yarn", "spark.executor.memoryOverhead": "750m"}, "ok"),
        ({"spark.master": "yarn", "spark.executor.memoryOverhead": "750m", "spark.executor.cores": "2"}, "warning"),
        (
            {
                "spark.master": "yarn",
                "spark.executor.memoryOverhead": "750m",
                "spark.executor.cores": "2",
                "spark.task.cpus": "2",
            },
            "ok",
        ),
        ({"spark.master": "k8s://https://host", "spark.executor.memory": "4g"}, "ok"),
    ],
)
def test_memory_when_a_manager_limits_it_then_training_processes_must_fit(conf, status):
    assert check_memory(conf).status == status


def test_memory_of_python_when_limited_then_warns():
    assert check_python_memory({}).status == "ok"
    assert check_python_memory({"spark.executor.pyspark.memory": "2g"}).status == "warning"


@every_case(
    ("variables", "remote", "status"),
    [
        ({}, "sc://spark.example:15002", "ok"),
        ({"http_proxy": "http://proxy:3128"}, "", "ok"),
        ({"http_proxy": "http://proxy:3128"}, "sc://spark.example:15002", "warning"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "a, spark.example"}, "sc://spark.example:15002/;x=y", "ok"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": ".example"}, "sc://spark.example:15002", "ok"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "k.example"}, "sc://spark.example:15002", "warning"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "*"}, "sc://[fd00::2]:15002", "ok"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "fd00::2"}, "sc://[fd00::2]:15002", "ok"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": ""}, "sc://[fd00::2]:15002", "warning"),
    ],
)
def test_proxies_when_set_then_matter_to_spark_connect_alone(variables, remote, status):
    assert check_proxies(variables, remote=remote).status == status
