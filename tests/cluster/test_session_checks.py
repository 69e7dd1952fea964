"""What a session's settings let a fit expect."""

from tables import every_case

from elephant.cluster.checks.checks import (
    check_disk_encryption,
    check_dynamic_allocation,
    check_encryption,
    check_idle_timeout,
)

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


@every_case(
    ("conf", "status", "named"),
    [
        ({}, "ok", "a network that Spark does not encrypt either"),
        ({"spark.ssl.enabled": "true"}, "failure", "spark.ssl.enabled=true"),
        ({"spark.ssl.rpc.enabled": "true"}, "failure", "spark.ssl.rpc.enabled=true"),
        ({"spark.network.crypto.enabled": "TRUE"}, "failure", "spark.network.crypto.enabled=true"),
        ({"spark.authenticate": "true"}, "ok", "a network"),
        ({"spark.authenticate.enableSaslEncryption": "true"}, "ok", "a network"),
        (
            {"spark.authenticate": "true", "spark.authenticate.enableSaslEncryption": "true"},
            "failure",
            "spark.authenticate.enableSaslEncryption=true",
        ),
        (
            {"spark.ssl.enabled": "true", "spark.elephant.allowPlaintext": "true"},
            "warning",
            "spark.elephant.allowPlaintext=true",
        ),
        ({"spark.ssl.enabled": "true", "spark.elephant.allowPlaintext": "yes"}, "failure", "spark.ssl.enabled=true"),
    ],
)
def test_encryption_when_asked_for_then_is_refused_unless_plain_sockets_are_allowed(conf, status, named):
    found = check_encryption(conf)
    assert found.status == status
    assert named in found.received
    if status == "failure":
        assert "Set spark.elephant.allowPlaintext=true" in found.remedy


def test_local_files_when_their_encryption_is_asked_for_then_warns():
    assert check_disk_encryption({"spark.io.encryption.enabled": "true"}).status == "warning"
    assert check_disk_encryption({}).status == "ok"


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
