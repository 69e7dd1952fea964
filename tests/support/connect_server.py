"""A Spark Connect server in a process of its own, with executors in others, for as long as a test needs it."""

import contextlib
import http.client
import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pyspark
from python_start import python_path
from spark_daemons import Daemons, await_line, end_with_children, end_with_parent, log_settings

from elephant.cluster.local import ensure_java

# Of a machine that does much else at the same time.
START_TIMEOUT_S = 240.0
_PAGES_S = 120.0
_ROOT = Path(__file__).resolve().parents[2]
_CLIENTS = _ROOT / "tests" / "spark_connect" / "connect_clients.py"
_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_STARTED = r"Spark Connect server started at: \S*?:(\d+)"
_NEEDED = ("grpc", "grpc_status", "google.rpc", "zstandard")


def missing_for_connect():
    """Returns why Spark Connect cannot be tried here, or None."""
    if int(pyspark.__version__.split(".")[0]) < 4:
        return f"PySpark {pyspark.__version__}: its wheel has no Connect server"
    for name in _NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{name} is not installed: pip install 'elephant-spark[connect]'"
    return None


def client_command(server):
    """Returns the command, and the environment, of the process that makes clients of the lines that it reads."""
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(_ROOT, _ROOT / "tests" / "support"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    for variable in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "DATABRICKS_RUNTIME_VERSION"):
        environment.pop(variable, None)
    return [sys.executable, str(_CLIENTS), server.url], environment


class ConnectServer(Daemons):
    """A server on ``local-cluster``, from ``with`` to the end of the block.

    Args:
        executors: How many, of one task slot each.
        memory_mb: Of each executor's JVM.
        conf: More Spark settings.

    Attributes:
        url: ``sc://127.0.0.1:port``, once it has started.
        process: The server's.
        folder: Where everything of it lies; removed in the end.
    """

    def __init__(self, executors=2, *, memory_mb=1024, conf=None):
        super().__init__()
        self.url = ""
        self.process = None
        self._executors = executors
        self._memory_mb = memory_mb
        self._conf = dict(conf or {})

    @property
    def local_folder(self):
        """Where executors keep temporary data."""
        return self.folder / "local"

    def _start(self):
        # Before the environment is read, which it adds to.
        ensure_java()
        self.folder = self._make_folder("connect")
        home = self._home()
        command = [str(home / "bin" / "spark-submit"), "--class", _CLASS, "--name", "elephant-connect"]
        for key, value in {**self._settings(), **self._conf}.items():
            command += ["--conf", f"{key}={value}"]
        with (self.folder / "log").open("wb") as log:
            process = self.process = subprocess.Popen(
                command,
                env=self._environment(home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=end_with_parent,
            )
        # Its executors end with it.
        self._closing.callback(end_with_children, [process])
        log = self.folder / "log"
        started = await_line(process, log, _STARTED, what="Connect server", timeout_s=START_TIMEOUT_S)
        self.url = f"sc://127.0.0.1:{started[1]}"

    def pages(self):
        """Returns the address of Spark's pages, and the application's id; of a server that has pages."""
        ports = [one.laddr.port for one in psutil.Process(self.process.pid).net_connections("tcp") if not one.raddr]
        end = time.monotonic() + _PAGES_S
        while time.monotonic() < end:
            for port in ports:
                address = f"http://127.0.0.1:{port}"
                with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                    with urllib.request.urlopen(f"{address}/api/v1/applications", timeout=5) as answer:
                        return address, json.load(answer)[0]["id"]
        raise LookupError(f"expected Spark's pages on one of the ports {ports}")

    def _home(self):
        """Makes a view of the installed Spark in which the server may write."""
        home = self.folder / "home"
        home.mkdir()
        for entry in Path(pyspark.__file__).parent.iterdir():
            if entry.name not in ("conf", "work"):
                (home / entry.name).symlink_to(entry)
        (home / "conf").mkdir()
        (home / "conf" / "log4j2.properties").write_text(log_settings("org.apache.spark.sql.connect.service", "info"))
        (home / "local").mkdir()
        (self.folder / "local").mkdir()
        (self.folder / "tmp").mkdir()
        (self.folder / "events").mkdir()
        return home

    def _environment(self, home):
        return {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_CONF_DIR": str(home / "conf"),
            "SPARK_LOCAL_DIRS": str(self.local_folder),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_CONNECT_MODE": "0",
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": python_path(_ROOT),
            "TMPDIR": str(self.folder / "tmp"),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }

    def _settings(self):
        java = f"-XX:+UseSerialGC -XX:-UsePerfData -Djava.io.tmpdir={self.folder / 'tmp'}"
        return {
            "spark.master": f"local-cluster[{self._executors},1,{self._memory_mb}]",
            "spark.executor.memory": f"{self._memory_mb}m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.extraJavaOptions": java,
            "spark.executor.extraJavaOptions": java,
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": "0",
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            "spark.ui.port": "0",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.rolling.enabled": "false",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": (self.folder / "events").as_uri(),
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "3",
            "spark.sql.shuffle.partitions": str(self._executors),
        }
