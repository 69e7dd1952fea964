"""Facts of executors against those of the driver, and the ways between them."""

from dataclasses import replace

import pytest
from tables import every_case

from elephant.cluster.checks.executor_checks import (
    FLOOR_BYTES,
    SCARCE_BYTES,
    check_answer,
    check_arrow,
    check_backend,
    check_chosen_backend,
    check_clocks,
    check_descriptors,
    check_disk,
    check_elephant,
    check_executors,
    check_gpus,
    check_keras,
    check_packages_of_callbacks,
    check_python,
    check_reach,
    check_shared_memory,
    check_trial,
)
from elephant.cluster.checks.executor_facts import ExecutorFacts, ExecutorReport, driver_facts, facts_function

PACKAGES = {"keras": "3.15.1", "pyarrow": "26.0.1", "tensorflow": "2.21.0"}
DRIVER = ExecutorFacts(
    host="driver",
    python="3.11.7",
    executable="/usr/bin/python3",
    elephant="0.1.0",
    packages=PACKAGES,
    folder="/tmp",
    free_bytes=50 << 30,
    backends=("tensorflow",),
)


def executor(number=0, **different):
    return replace(DRIVER, host=f"host{number}", executor=str(number), **different)


def with_package(name, version):
    return {**PACKAGES, name: version} if version else {key: value for key, value in PACKAGES.items() if key != name}


@every_case(("python", "status"), [("3.11.7", "ok"), ("3.11.2", "ok"), ("3.12.7", "failure"), ("3.1.1", "failure")])
def test_python_when_compared_then_its_minor_version_counts(python, status):
    found = check_python([executor(0), executor(1, python=python)], DRIVER)
    assert found.status == status
    if status == "failure":
        assert str(found).startswith(
            f"Python: expected 3.11, the driver's, on every executor. Received: {python} (/usr/bin/python3) on "
            "executor 1 on host1. Ship one environment"
        )


@pytest.mark.parametrize(("version", "status"), [("0.1.0", "ok"), ("0.0.9", "failure"), ("", "failure")])
def test_elephant_when_compared_then_must_be_the_same(version, status):
    found = check_elephant([executor(elephant=version)], DRIVER)
    assert found.status == status
    if not version:
        assert "Received: none on executor 0 on host0. Install elephant-spark==0.1.0 there" in str(found)


@pytest.mark.parametrize(
    ("variables", "status"),
    [({}, "ok"), ({"KERAS_BACKEND": "tensorflow"}, "ok"), ({"KERAS_BACKEND": "jax"}, "warning")],
)
def test_backend_when_the_executors_environment_names_another_one_then_says_which_one_counts(variables, status):
    found = check_chosen_backend([executor(0), executor(1, variables=variables)], "tensorflow")
    assert found.status == status
    if status == "warning":
        said = "expected tensorflow, the model's, on executors that have the variable. Received: jax on executor 1"
        assert said in str(found) and "Workers compute with tensorflow" in str(found)
        assert str(found) in map(
            str,
            check_executors(
                ExecutorReport(facts=[executor(0), executor(1, variables=variables)]), DRIVER, backend="tensorflow"
            ),
        )


def test_package_when_a_callback_needs_it_then_must_be_on_every_executor():
    with_board = executor(0, packages=with_package("tensorboard", "2.20.0"))
    look = ExecutorReport(facts=[with_board, executor(1)])
    failed = [
        one for one in check_executors(look, DRIVER, backend="tensorflow", packages=["tensorboard"]) if one.failed
    ]
    assert [one.name for one in failed] == ["tensorboard"] and "none on executor 1 on host1" in str(failed[0])
    assert not check_packages_of_callbacks([with_board], ["tensorboard"])[0].failed


@pytest.mark.parametrize(("version", "status"), [("3.15.1", "ok"), ("3.15.0", "failure"), ("", "failure")])
def test_keras_when_compared_then_must_be_the_same(version, status):
    assert check_keras([executor(packages=with_package("keras", version))], DRIVER).status == status


@every_case(
    ("packages", "backends", "status"),
    [
        (PACKAGES, ("tensorflow",), "ok"),
        (with_package("tensorflow", "2.21.1"), ("tensorflow", "jax"), "ok"),
        (with_package("tensorflow", "2.20.0"), ("tensorflow",), "warning"),
        ({**with_package("tensorflow", ""), "tensorflow-cpu": "2.21.0"}, ("tensorflow",), "ok"),
        (with_package("tensorflow", ""), (), "failure"),
    ],
)
def test_backend_when_compared_then_must_be_there_and_should_be_the_same(packages, backends, status):
    assert check_backend([executor(packages=packages, backends=backends)], DRIVER, "tensorflow").status == status


@every_case(
    ("version", "status"),
    [("26.0.1", "ok"), ("26.1.0", "ok"), ("25.0.0", "warning"), ("14.0.0", "failure"), ("", "failure")],
)
def test_arrow_when_compared_then_must_be_new_enough(version, status):
    assert check_arrow([executor(packages=with_package("pyarrow", version))], DRIVER).status == status


@every_case(
    ("free", "rows", "status", "text"),
    [
        (50 << 30, None, "ok", ""),
        (SCARCE_BYTES, None, "ok", ""),
        (SCARCE_BYTES - 1, None, "warning", "1,073.7 MB free in /tmp"),
        (FLOOR_BYTES, None, "warning", ""),
        (FLOOR_BYTES - 1, None, "failure", "expected room on the local disk for the rows, 64 MB at least"),
        (0, None, "failure", "0.0 MB free"),
        # Two executors share the rows.
        (10 << 30, 20 << 30, "ok", ""),
        (10 << 30, 21 << 30, "warning", "by Spark's estimate"),
    ],
)
def test_disk_when_measured_then_a_floor_refuses_and_an_estimate_warns(free, rows, status, text):
    found = check_disk([executor(0), executor(1, free_bytes=free)], rows_bytes=rows)
    assert found.status == status
    assert text in str(found)
    if status != "ok":
        assert "Let spark.local.dir (or SPARK_LOCAL_DIRS) name a larger disk" in found.remedy


def test_disk_when_it_cannot_be_written_to_then_fails():
    found = check_disk([executor(writable=False)])
    assert found.failed
    assert "/tmp, which cannot be written to" in found.received


@every_case(
    ("error", "status", "received"),
    [
        (
            "PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in "
            "driver: 3.11, PySpark cannot run with different minor versions.",
            "failure",
            "Python 3.10",
        ),
        (
            "RuntimeError: Python in worker has different version 3.9 than that in driver 3.11, PySpark cannot run",
            "failure",
            "Python 3.9",
        ),
        (
            'java.io.IOException: Cannot run program "/opt/none/python": error=2, No such file or directory',
            "failure",
            "no program /opt/none/python",
        ),
        ("ModuleNotFoundError: No module named 'pyarrow'", "failure", "No module named 'pyarrow'"),
        (
            "[SPARK_JOB_CANCELLED] Job 3 cancelled part of cancelled job group x",
            "failure",
            "that somebody cancelled it",
        ),
        ("\n\nExecutorLostFailure (executor 1 exited)\nmore", "warning", "ExecutorLostFailure (executor 1 exited)"),
    ],
)
def test_answer_when_spark_gives_an_error_then_it_is_translated(error, status, received):
    found = check_answer(error, DRIVER)
    assert found.status == status
    assert found.received == received


def test_executors_when_several_differ_alike_then_they_are_named_together_and_counted():
    found = check_keras([executor(number, packages=with_package("keras", "3.0.0")) for number in range(9)], DRIVER)
    assert found.received == ("3.0.0 on executor 0 on host0, executor 1 on host1, executor 2 on host2 and 6 more")


def test_executors_when_keras_is_not_needed_then_it_is_not_compared():
    bare = ExecutorReport(facts=[executor(packages={"pyarrow": "26.0.1"}, backends=())])
    assert not any(found.failed for found in check_executors(bare, DRIVER, backend=None, keras=False))
    failed = [found.name for found in check_executors(bare, DRIVER, backend="tensorflow") if found.failed]
    assert failed == ["Keras", "tensorflow"]


def test_executors_when_some_did_not_answer_then_this_is_said_and_no_failure():
    found = check_executors(ExecutorReport(facts=[executor()], missing=2), DRIVER, backend="tensorflow")[-1]
    assert (found.status, found.received) == ("unknown", "none of 2, whose task slots are busy")


def test_facts_when_read_here_then_are_those_of_this_process(tmp_path, monkeypatch):
    import platform

    import keras

    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"/nowhere,{tmp_path}")
    facts = driver_facts()
    assert facts.python == platform.python_version()
    assert facts.packages["keras"] == keras.__version__
    assert facts.folder == str(tmp_path)
    assert facts.free_bytes > 0
    assert facts.backends[0] == "tensorflow"


def test_facts_when_their_function_travels_then_needs_no_elephant_where_it_is_called():
    import subprocess
    import sys

    from pyspark import cloudpickle

    code = (
        "import pickle, sys; sys.modules['elephant'] = None; "
        "print(pickle.loads(sys.stdin.buffer.read())()['elephant'] == '')"
    )
    sent = cloudpickle.dumps(facts_function(["keras"], ["tensorflow"]))
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, timeout=60, check=True)
    assert done.stdout.strip() == b"True"


def test_backend_when_its_version_cannot_be_told_then_says_so():
    found = check_backend([executor(packages={}, backends=("tensorflow",))], DRIVER, "tensorflow")
    assert found.status == "warning" and found.received.startswith("an unknown version on ")


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


@every_case(
    ("unreached", "asked", "needed", "status"),
    [
        ({}, 3, True, "ok"),
        ({"executor 0 on a": "TimeoutError: timed out"}, 3, True, "failure"),
        ({"executor 0 on a": "TimeoutError: timed out"}, 3, False, "warning"),
        ({}, 0, True, "unknown"),
    ],
)
def test_reach_when_executors_connected_then_all_must_have_come(unreached, asked, needed, status):
    assert check_reach(unreached, asked, "10.0.0.1:4000", needed=needed).status == status


def answer(host, gpus, usable, complaint="", error=""):
    return {"host": host, "gpus": gpus, "usable": usable, "complaint": complaint, "error": error}


@every_case(
    ("said", "status", "text"),
    [
        # Two executors of one host see the same two devices.
        ([answer("a", ["GPU 0", "GPU 1"], 2)] * 2, "ok", "2 by nvidia-smi, 2 by tensorflow"),
        ([answer("a", ["GPU 0"], 1), answer("b", ["GPU 0"], 1)], "ok", ""),
        ([answer("a", ["GPU 0", "GPU 1"], 0)], "failure", "tensorflow[and-cuda]"),
        ([answer("a", [], 0, "no nvidia-smi")], "failure", "a: no nvidia-smi"),
        ([answer("a", ["GPU 0", "GPU 1"], None, "", "no answer within 60 s")], "failure", "no answer within 60 s"),
    ],
)
def test_gpus_when_counted_then_the_backend_must_use_as_many_as_workers(said, status, text):
    found = check_gpus(said, wanted=2, backend="tensorflow")
    assert found.status == status
    assert text in str(found)


@pytest.mark.parametrize(
    ("sums", "error", "status"), [([6, 6, 6], "", "ok"), ([6, 6], "", "failure"), ([], "no way", "failure")]
)
def test_trial_when_it_ended_then_all_ranks_have_the_sum(sums, error, status):
    assert check_trial(3, sums, 1.0, error).status == status
