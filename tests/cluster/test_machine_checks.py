"""What is installed and set on the driver's machine, its room, and its addresses."""

from tables import every_case

from elephant.cluster.checks.machine_checks import (
    check_address,
    check_driver_python,
    check_java,
    check_machine,
    check_minimums,
    check_packages,
    check_proxies,
    check_python_program,
    check_spark_home,
    check_temporary_folder,
)

GOOD = {
    "pyspark": "4.3.0",
    "keras": "3.15.1",
    "numpy": "2.4.6",
    "pyarrow": "26.0.1",
    "pandas": "2.3.3",
    "tensorflow": "2.21.0",
}


def statuses(check_results):
    return {found.name: found.status for found in check_results if found.status != "ok"}


@every_case(
    ("python", "spark", "has_distutils", "status"),
    [
        ("3.11.7", "4.3.0", True, "ok"),
        ("3.13.1", "4.0.0", False, "ok"),
        ("3.12.1", "3.5.9", False, "failure"),
        ("3.12.1", "3.5.9", True, "ok"),
        ("3.9.18", "3.5.9", True, "failure"),
        ("3.12.1", "", False, "ok"),
    ],
)
def test_python_when_checked_then_fits_elephant_and_pyspark(python, spark, has_distutils, status):
    assert check_driver_python(python, spark, has_distutils=has_distutils).status == status


@every_case(
    ("change", "backend", "expected"),
    [
        ({}, "tensorflow", {}),
        ({"pyspark": ""}, "tensorflow", {"pyspark": "failure"}),
        ({"pyspark": "3.4.1"}, "tensorflow", {"pyspark": "failure"}),
        ({"keras": "3.4.0"}, "tensorflow", {"keras": "failure"}),
        ({"keras": "2.15.0"}, "tensorflow", {"keras": "failure"}),
        ({"keras": "3.12.4"}, "tensorflow", {}),
        ({"keras": "3.14.1"}, "tensorflow", {"keras": "failure"}),
        ({"keras": "3.15.0"}, "tensorflow", {"keras": "failure"}),
        ({"tensorflow": "2.16.1"}, "tensorflow", {}),
        ({"tensorflow": "2.15.1"}, "tensorflow", {"tensorflow": "failure"}),
        ({"tensorflow": "", "jax": "0.10.2"}, "jax", {}),
        ({"tensorflow": "", "jax": ""}, "jax", {"jax": "failure"}),
        ({"torch": "2.3.1"}, "torch", {"torch": "failure"}),
        ({}, "openvino", {"Keras backend": "failure"}),
        ({"numpy": "1.22.4"}, "tensorflow", {"numpy": "failure"}),
        ({"pyarrow": "14.0.1", "pyspark": "3.5.0"}, "tensorflow", {}),
        ({"pyarrow": "14.0.0", "pyspark": "3.5.0"}, "tensorflow", {"pyarrow": "failure"}),
        ({"pyarrow": "17.0.0", "pyspark": "4.2.0"}, "tensorflow", {"pyarrow": "failure"}),
        ({"pyarrow": "17.0.0", "pyspark": "4.1.1"}, "tensorflow", {}),
        ({"pandas": "1.5.3"}, "tensorflow", {}),
        ({"pandas": "1.4.4"}, "tensorflow", {"pandas": "warning"}),
        ({"pandas": "3.0.1"}, "tensorflow", {"pandas": "warning"}),
        ({"pandas": ""}, "tensorflow", {"pandas": "warning"}),
    ],
)
def test_packages_when_checked_then_must_be_there_and_new_enough(change, backend, expected):
    versions = {name: version for name, version in {**GOOD, **change}.items() if version}
    found = check_packages(versions, backend)
    assert statuses(found) == expected
    assert all(one.remedy for one in found if one.status != "ok")


def test_minimum_when_pyspark_complains_then_its_words_are_shown():
    complaint = "Pandas >= 2.2.0 must be installed; however, it was not found."
    content, found = check_minimums({"pyarrow": "", "pandas": complaint})
    assert content.status == "ok"
    assert found.failed
    assert "Pandas >= 2.2.0 must be installed" in found.received


def test_java_when_there_is_none_then_the_remedy_brings_one():
    assert check_java("", 17, "/usr/lib/jvm/17 (PATH)", wanted="Java 17").received == "17 in /usr/lib/jvm/17 (PATH)"
    found = check_java("Spark needs Java 17 or newer, but there is none here.", None, "", wanted="Java 17 or newer")
    assert found.failed
    assert "pip install 'elephant-spark[local]'" in found.remedy


@every_case(
    ("home", "version", "complete", "status"),
    [
        ("", "", False, "ok"),
        ("/opt/spark", "4.3.0", True, "ok"),
        ("/opt/spark", "4.3.1", True, "ok"),
        ("/opt/spark", "", True, "ok"),
        ("/opt/spark", "4.2.0", True, "failure"),
        ("/opt/spark", "3.5.1", True, "failure"),
        ("/opt/empty", "", False, "failure"),
    ],
)
def test_spark_home_when_set_then_has_the_version_of_pyspark(home, version, complete, status):
    assert check_spark_home(home, version, "4.3.0", complete=complete).status == status


@every_case(
    ("value", "found", "local", "status"),
    [
        ("", "/venv/bin/python", True, "ok"),
        ("", "/usr/bin/python3", True, "warning"),
        ("", "", True, "failure"),
        ("python9", "", True, "failure"),
        ("./environment/bin/python", "", False, "ok"),
    ],
)
def test_python_of_executors_when_they_are_on_this_machine_then_is_this_one(value, found, local, status):
    assert check_python_program(value, found, "/venv/bin/python", local=local).status == status


@every_case(
    ("writable", "free", "status"),
    [(True, 50e9, "ok"), (True, 500e6, "warning"), (True, 1e6, "failure"), (False, 50e9, "failure")],
)
def test_temporary_folder_when_checked_then_needs_room_and_permission(writable, free, status):
    assert check_temporary_folder("/tmp", writable=writable, free_bytes=int(free)).status == status


@every_case(
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
