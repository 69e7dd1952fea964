"""Jars of Maven Central that tests need, fetched by Spark's own resolver, kept between runs, and checked.

They lie in ``$XDG_CACHE_HOME/elephant-test-jars`` (``~/.cache``). What was fetched has the checksum that is written
here, or is an error: nothing unknown runs.
"""

import hashlib
import os
import subprocess
from pathlib import Path

import pyspark
from spark_applications import find_java

# Groups of artifacts that are fetched together, each with its SHA-256. All that an artifact needs and Spark does not
# have is named.
HADOOP = {
    "org.apache.hadoop:hadoop-client-minicluster:3.5.0": (
        "06772d24529e59939915979b3edba204d367750ef7dc5120411f35221dd4818c"
    ),
    # The ResourceManager's proxy makes certificates.
    "org.bouncycastle:bcprov-jdk18on:1.82": "14cde2fdfaa8890480a8e5b67aceef0c90f96682c1e23c133bafdc9e0b3255ce",
    "org.bouncycastle:bcutil-jdk18on:1.82": "4420691958ad1c0ba275a6d6d8a6317adbdbdc9277055b6a72aa89c88cda8c7d",
    "org.bouncycastle:bcpkix-jdk18on:1.82": "bdc723e20834832ac6af136cb5b5ff05e43b71d4fa151cc6510d9212ee086e63",
}
# The mock server of the Kubernetes client that Spark 4.3 has. Of Vert.x it needs more than the client does.
KUBERNETES = {
    "io.fabric8:kubernetes-server-mock:7.6.1": "2c76a300c19e2d359a1b465d3cbbc90428470a74822282f05830185faa346fb2",
    "io.fabric8:mockwebserver:7.6.1": "e160c151c605f1be87c60c3d93711e2a4621ce0491ce02a437ccf57fa83d266d",
    "io.vertx:vertx-web:4.5.26": "2f01d04fd07a7b08d63f3680ff9d05c4f7b4880f1bae10a8d2f30c6c2f407687",
    "io.vertx:vertx-bridge-common:4.5.26": "175fc6af72dbecae11019f562e40892094d4d3c1172c40315f855593cb562067",
}
# What artifacts depend on that is not fetched: Spark has it, or tests name its parts (AWS' bundle is 686 MB).
_EXCLUDED = (
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "software.amazon.awssdk:bundle",
)
_FETCH_TIMEOUT_S = 300.0
# Spark resolves packages before it starts a class; this one prints a version.
_ANY_CLASS = ("--class", "org.apache.hadoop.util.VersionInfo", "spark-internal")


class JarsUnavailableError(Exception):
    """This machine reaches no repository that has the jars; the text says what was tried."""


def fetch_jars(checksums):
    """Returns the paths of jars.

    Args:
        checksums: SHA-256 of each, by its coordinate ``group:name:version``.

    Raises:
        JarsUnavailableError: They could not be fetched.
        RuntimeError: One of them is another one than was expected.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elephant-test-jars"
    jars = {coordinate: folder / "jars" / _file_of(coordinate) for coordinate in checksums}
    if not all(jar.exists() for jar in jars.values()):
        _fetch(checksums, folder)
    for coordinate, jar in jars.items():
        found = hashlib.sha256(jar.read_bytes()).hexdigest()
        if found != checksums[coordinate]:
            raise RuntimeError(
                f"{jar}: expected SHA-256 {checksums[coordinate]}, received {found}. Remove the file, or change the "
                f"checksum in {Path(__file__).name} if another version is meant."
            )
    return list(jars.values())


def _file_of(coordinate):
    group, name, version = coordinate.split(":")
    return f"{group}_{name}-{version}.jar"


def _fetch(coordinates, folder):
    command = [
        str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
        *("--conf", f"spark.jars.ivy={folder}"),
        *("--packages", ",".join(coordinates)),
        *("--exclude-packages", ",".join(_EXCLUDED)),
        *_ANY_CLASS,
    ]
    environment = {**os.environ, "JAVA_HOME": str(find_java())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S)
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        cause = next((line for line in said if "Exception" in line), said[-1] if said else "nothing was said")
        raise JarsUnavailableError(f"{', '.join(coordinates)} cannot be fetched here: {cause}")
