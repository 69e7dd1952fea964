"""What a session's settings let a fit expect."""

import pytest
from tables import every_case

from elephant.cluster.checks.session_checks import (
    check_authentication,
    check_barrier_settings,
    check_disk_encryption,
    check_dynamic_allocation,
    check_encryption,
    check_idle_timeout,
    check_memory,
    check_python_memory,
    check_speculation,
    check_worker_reuse,
    encrypts,
    overhead_mb,
)

BARRIER = "spark.scheduler.barrier.maxConcurrentTasksCheck."
DYNAMIC = {"spark.dynamicAllocation.enabled": "true"}


@every_case(
    ("conf", "synchronous", "servers", "status", "remedy"),
    [
        ({}, True, 0, "ok", ""),
        ({"spark.dynamicAllocation.enabled": "false"}, True, 0, "ok", ""),
        (DYNAMIC, True, 0, "failure", "spark.executor.instances=4"),
        ({**DYNAMIC, "spark.executor.cores": "4"}, True, 0, "failure", "spark.executor.instances=1"),
        ({**DYNAMIC, "spark.executor.cores": "4", "spark.task.cpus": "2"}, True, 0, "failure", "instances=2"),
        (DYNAMIC, False, 0, "warning", "spark.dynamicAllocation.minExecutors=4"),
        ({**DYNAMIC, "spark.dynamicAllocation.minExecutors": "4"}, False, 0, "ok", ""),
        (
            {**DYNAMIC, "spark.dynamicAllocation.minExecutors": "4", "spark.dynamicAllocation.maxExecutors": "4"},
            False,
            0,
            "ok",
            "",
        ),
        (
            {**DYNAMIC, "spark.dynamicAllocation.minExecutors": "4", "spark.dynamicAllocation.maxExecutors": "4"},
            False,
            1,
            "warning",
            "take turns on 3 task slots",
        ),
        ({**DYNAMIC, "spark.dynamicAllocation.maxExecutors": "2"}, False, 2, "failure", "maxExecutors=6"),
        (
            {
                **DYNAMIC,
                "spark.dynamicAllocation.minExecutors": "4",
                "spark.dynamicAllocation.shuffleTracking.enabled": "false",
            },
            False,
            0,
            "warning",
            "shuffleTracking.enabled=true",
        ),
        (
            {
                **DYNAMIC,
                "spark.dynamicAllocation.minExecutors": "4",
                "spark.dynamicAllocation.shuffleTracking.enabled": "false",
                "spark.shuffle.service.enabled": "true",
            },
            False,
            0,
            "ok",
            "",
        ),
        ({**DYNAMIC, "spark.master": "local[4]"}, True, 0, "ok", ""),
        ({**DYNAMIC, "spark.master": "local-cluster[2,1,1024]"}, True, 0, "failure", "Set it to false"),
    ],
)
def test_dynamic_allocation_when_checked_then_says_what_to_set(conf, synchronous, servers, status, remedy):
    found = check_dynamic_allocation(conf, num_workers=4, synchronous=synchronous, servers=servers)
    assert found.status == status
    assert remedy in found.remedy


def test_dynamic_allocation_when_all_workers_are_needed_at_once_then_must_have_room_for_them():
    conf = {**DYNAMIC, "spark.dynamicAllocation.maxExecutors": "4"}
    about = {"num_workers": 4, "synchronous": False, "together": True}
    assert check_dynamic_allocation(conf, **about).status != "failure"
    found = check_dynamic_allocation(conf, **about, servers=1)
    assert found.status == "failure" and "1 parameter servers and 4 workers at the same time" in found.expected


OF_TASKS = {"spark.authenticate": "true", "spark.network.crypto.enabled": "TRUE"}
SASL = {"spark.authenticate": "true", "spark.authenticate.enableSaslEncryption": "true"}


@every_case(
    ("conf", "wanted", "is_encrypted"),
    [
        ({}, None, False),
        ({}, True, True),
        (OF_TASKS, None, True),
        (OF_TASKS, False, False),
        ({"spark.ssl.enabled": "true"}, None, True),
        ({"spark.ssl.rpc.enabled": "true"}, None, True),
        ({"spark.io.encryption.enabled": "true"}, None, True),
        ({"spark.network.crypto.enabled": "false"}, None, False),
        ({"spark.authenticate": "true"}, None, False),
        ({"spark.authenticate.enableSaslEncryption": "true"}, None, False),
        (SASL, None, True),
    ],
)
def test_connections_are_encrypted_as_a_run_wants_or_else_where_spark_is_told_to(conf, wanted, is_encrypted):
    assert encrypts(wanted, conf) is is_encrypted


@every_case(
    ("conf", "wanted", "status", "named"),
    [
        ({}, None, "ok", "a session that does not encrypt"),
        (OF_TASKS, None, "ok", "spark.network.crypto.enabled=true"),
        (OF_TASKS, True, "ok", "spark.network.crypto.enabled=true, and encryption=True"),
        ({"spark.ssl.rpc.enabled": "true"}, None, "ok", "spark.ssl.rpc.enabled=true"),
        (SASL, None, "ok", "spark.authenticate.enableSaslEncryption=true"),
        ({"spark.master": "local[2]"}, True, "ok", "encryption=True"),
        # What is encrypted there does not carry the key.
        ({"spark.ssl.enabled": "true"}, None, "warning", "spark.ssl.enabled=true"),
        ({"spark.io.encryption.enabled": "true"}, None, "warning", "spark.io.encryption.enabled=true"),
        ({"spark.master": "yarn"}, True, "warning", "a session that does not encrypt, and encryption=True"),
        (OF_TASKS, False, "warning", "spark.network.crypto.enabled=true, and encryption=False"),
        ({}, False, "ok", "encryption=False"),
    ],
)
def test_encryption_when_its_key_or_the_data_would_travel_in_the_clear_then_warns(conf, wanted, status, named):
    found = check_encryption(conf, wanted, cryptography=True)
    assert (found.status, named in found.received) == (status, True)
    clear = "leave encryption out" if wanted is False else "set spark.authenticate and"
    assert (clear in found.remedy) is (status == "warning")


@every_case(("conf", "wanted"), [({}, True), (OF_TASKS, None)])
def test_encryption_without_the_package_that_makes_keys_then_names_the_extra(conf, wanted):
    found = check_encryption(conf, wanted, cryptography=False)
    assert found.status == "failure" and "'elephant-spark[tls]'" in found.remedy


def test_encryption_without_that_package_when_nothing_is_encrypted_then_is_fine():
    assert check_encryption({}, None, cryptography=False).status == "ok"


def test_local_files_when_their_encryption_is_asked_for_then_warns():
    assert check_disk_encryption({"spark.io.encryption.enabled": "true"}).status == "warning"
    assert check_disk_encryption({}).status == "ok"


@pytest.mark.parametrize(
    ("conf", "status"),
    [
        ({"spark.master": "local[2]"}, "ok"),
        ({}, "ok"),
        ({"spark.master": "local-cluster[2,1,1024]"}, "warning"),
        ({"spark.master": "spark://host:7077", "spark.authenticate": "false"}, "warning"),
        ({"spark.master": "yarn"}, "warning"),
        ({"spark.master": "yarn", "spark.authenticate": "true"}, "ok"),
    ],
)
def test_authentication_when_executors_need_no_secret_then_warns(conf, status):
    found = check_authentication(conf)
    assert found.status == status
    assert status == "ok" or "Set spark.authenticate=true" in found.remedy


KILLS = "spark.python.worker.killOnIdleTimeout"
AFTER = "spark.python.worker.idleTimeoutSeconds"
SQL_KILLS = "spark.sql.execution.pyspark.udf.killOnIdleTimeout"


@every_case(
    ("conf", "received"),
    [
        ({}, "false"),
        ({KILLS: "true"}, "false"),
        ({AFTER: "600"}, "false"),
        ({KILLS: "true", AFTER: "0s"}, "false"),
        ({KILLS: "true", AFTER: "600s"}, "with 600 s, which ends fits on DataFrames and files; "),
        ({KILLS: "true", AFTER: "600", SQL_KILLS: "false"}, "spark.python.worker.killOnIdleTimeout=true with 600 s"),
    ],
)
def test_python_workers_when_spark_ends_idle_ones_then_warns_of_long_fits(conf, received):
    found = check_idle_timeout(conf)
    assert received in found.received
    assert found.status == ("ok" if received == "false" else "warning")


@every_case(
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


@every_case(
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
        # As Spark asks for pods, see tests/kubernetes: the second one for a driver in a pod.
        ({"spark.master": "k8s://https://host", "spark.executor.memory": "2g"}, 384),
        ({"spark.executor.memory": "4g", "spark.kubernetes.memoryOverheadFactor": "0.4"}, 1638),
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
        ({"spark.master": "k8s://https://host", "spark.executor.memory": "4g"}, "warning"),
        ({"spark.master": "k8s://https://host", "spark.executor.memoryOverhead": "750m"}, "ok"),
    ],
)
def test_memory_when_a_manager_limits_it_then_training_processes_must_fit(conf, status):
    assert check_memory(conf).status == status


def test_memory_of_python_when_limited_then_warns():
    assert check_python_memory({}).status == "ok"
    assert check_python_memory({"spark.executor.pyspark.memory": "2g"}).status == "warning"
