"""The part of doctor that looks at the driver's machine; nothing of it needs a Spark session."""

from __future__ import annotations

import os

from elephant.cli import driver_facts as facts
from elephant.cli.driver_checks import (
    check_java,
    check_minimum,
    check_packages,
    check_python,
    check_python_program,
    check_spark_home,
)
from elephant.cli.host_checks import check_temporary_folder
from elephant.cli.setting_checks import check_proxies
from elephant.cluster.finding import Finding


def examine_packages(*, alone: bool = False) -> list[Finding]:
    """Returns whether Python and its packages fit each other.

    Args:
        alone: Whether the fit has one worker, and is synchronous.
    """
    versions = facts.package_versions()
    spark = versions.get("pyspark", "")
    findings = [check_python(facts.python_version(), spark, has_distutils=facts.has_distutils())]
    findings += check_packages(versions, facts.keras_backend(), alone=alone)
    if spark:
        findings += [check_minimum(name, said) for name, said in facts.complaints_of_pyspark().items()]
    return findings


def examine_spark(*, master: str, own: bool) -> list[Finding]:
    """Returns whether Java, and what names Spark and its Python, are as PySpark needs them.

    Args:
        master: The Spark master; empty when it is not known yet.
        own: Whether the session will be one of `elephant.cluster.local.local_session`, whose executors run on
            the Python of this process.
    """
    spark = facts.package_versions().get("pyspark", "")
    java = facts.find_java(spark)
    home, program = os.environ.get("SPARK_HOME", ""), os.environ.get("PYSPARK_PYTHON", "")
    complete, version = facts.spark_at(home) if home else (False, "")
    findings = [
        check_java(java.error, java.version, java.place, wanted=java.wanted),
        check_spark_home(home, version, spark, complete=complete),
    ]
    if own:
        return findings
    found, local = facts.program_of(program or "python3"), master.startswith("local")
    return [*findings, check_python_program(program, found, facts.this_python(), local=local)]


def examine_machine(*, remote: str) -> list[Finding]:
    """Returns whether the driver's machine has room, and no proxy is in the way.

    Args:
        remote: The Spark Connect server; empty without one.
    """
    folder, writable, free = facts.temporary_folder()
    return [
        check_temporary_folder(folder, writable=writable, free_bytes=free),
        check_proxies(os.environ, remote=remote),
    ]
