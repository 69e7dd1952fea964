"""Machines, the driver's and those of executors; and what these said of the ways between them."""

import pytest
from tables import every_case

from elephant.cli.cluster_report import check_gpus, check_reach, check_trial
from elephant.cli.setting_checks import (
    check_address,
    check_clocks,
    check_descriptors,
    check_machine,
    check_shared_memory,
    check_temporary_folder,
)


@pytest.mark.parametrize(
    ("writable", "free", "status"),
    [(True, 50e9, "ok"), (True, 500e6, "warning"), (True, 1e6, "failure"), (False, 50e9, "failure")],
)
def test_temporary_folder_when_checked_then_needs_room_and_permission(writable, free, status):
    assert check_temporary_folder("/tmp", writable=writable, free_bytes=int(free)).status == status


@pytest.mark.parametrize(
    ("memory", "workers", "local", "status"),
    [(8e9, 4, True, "ok"), (2e9, 4, True, "warning"), (2e9, 4, False, "ok"), (None, 4, True, "ok")],
)
def test_machine_when_executors_are_on_it_then_carries_their_processes(memory, workers, local, status):
    assert check_machine(2, memory, workers=workers, local=local).status == status


def test_address_when_there_is_none_then_says_why():
    found = check_address("", (), "ClusterError: expected spark.driver.host to be set")
    assert found.failed
    assert "Set spark.driver.host" in found.remedy
    assert check_address("", (), "NetworkError: no route", needed=False).status == "warning"


@every_case(
    ("host", "addresses", "received"),
    [
        ("driver", ("10.0.0.1", "0.0.0.0"), "driver = 10.0.0.1, listening on 0.0.0.0"),
        ("driver", ("10.0.0.1", "10.0.0.1"), "driver = 10.0.0.1"),
        ("10.0.0.1", ("10.0.0.1", "10.0.0.1"), "10.0.0.1"),
        ("[::1]", ("::1", "::"), "::1, listening on ::"),
        ("", ("10.0.0.1", "10.0.0.1"), "10.0.0.1"),
    ],
)
def test_address_when_there_is_one_then_says_each_once(host, addresses, received):
    assert check_address(host, addresses, "").received == received


def test_limits_when_one_host_is_short_then_it_alone_is_named():
    found = check_descriptors({"the driver": -1, "executor 0 on a": 1024, "executor 1 on b": 256})
    assert (found.status, found.received) == ("warning", "256 on executor 1 on b")
    found = check_shared_memory({"a": 1 << 30, "b": 1 << 20})
    assert (found.status, found.received) == ("warning", "1 MB free on b")
    found = check_clocks({"a": 0.0, "b": -61.0, "c": 29.0})
    assert (found.status, found.received) == ("warning", "-61 s on b")


def test_limits_when_all_is_well_then_is_said_in_one_phrase():
    assert check_descriptors({"the driver": 20000, "a": 1024}).received == "1024 or more everywhere"
    assert check_shared_memory({}).received == "none"
    assert check_clocks({"a": 0.0}).status == "ok"


@pytest.mark.parametrize(
    ("unreached", "asked", "needed", "status"),
    [
        ({}, 3, True, "ok"),
        ({"executor 0 on a": "TimeoutError: timed out"}, 3, True, "failure"),
        ({"executor 0 on a": "TimeoutError: timed out"}, 3, False, "warning"),
        ({}, 0, True, "unknown"),
    ],
)
def test_reach_when_executors_knocked_then_all_must_have_come(unreached, asked, needed, status):
    assert check_reach(unreached, asked, "10.0.0.1:4000", needed=needed).status == status


def answer(host, gpus, tensorflow, complaint="", error=""):
    return {"host": host, "gpus": gpus, "tensorflow": tensorflow, "complaint": complaint, "error": error}


@every_case(
    ("said", "status", "text"),
    [
        # Two executors of one host see the same two devices.
        ([answer("a", ["GPU 0", "GPU 1"], 2)] * 2, "ok", "2 by nvidia-smi, 2 by TensorFlow"),
        ([answer("a", ["GPU 0"], 1), answer("b", ["GPU 0"], 1)], "ok", ""),
        ([answer("a", ["GPU 0", "GPU 1"], 0)], "failure", "tensorflow[and-cuda]"),
        ([answer("a", [], 0, "no nvidia-smi")], "failure", "a: no nvidia-smi"),
        ([answer("a", ["GPU 0", "GPU 1"], None, "", "no answer within 60 s")], "failure", "no answer within 60 s"),
    ],
)
def test_gpus_when_counted_then_tensorflow_must_use_as_many_as_workers(said, status, text):
    found = check_gpus(said, wanted=2)
    assert found.status == status
    assert text in str(found)


@pytest.mark.parametrize(
    ("sums", "error", "status"), [([6, 6, 6], "", "ok"), ([6, 6], "", "failure"), ([], "no way", "failure")]
)
def test_trial_when_it_ended_then_all_ranks_have_the_sum(sums, error, status):
    assert check_trial(3, sums, 1.0, error).status == status
