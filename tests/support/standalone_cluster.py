"""A standalone Spark cluster on this machine: a master and workers as child processes, while a test needs them.

Unlike ``local-cluster`` it is what users run: its master and workers are processes of
their own, applications come and go by ``spark-submit``, and a worker has resources. Each process
can be given an address and a command that starts it, so that the cluster spreads over network namespaces.
"""

import contextlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

from spark_applications import SparkApplications, find_java, properties, spark_environment
from spark_daemons import await_line, end_with_children, end_with_parent, log_settings

START_TIMEOUT_S = 150.0
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"


@dataclass(frozen=True)
class Place:
    """Where a process of the cluster runs.

    Args:
        host: Its own address, which it listens on and which the others are told.
        prefix: What stands before its command, such as ``("ip", "netns", "exec", "name")``.
    """

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()

    @property
    def url_host(self):
        """The address as Spark writes it: one of IPv6 in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host


class StandaloneCluster(SparkApplications):
    """A master and its workers, from ``with`` to the end of the block.

    Args:
        workers: How many, where ``places`` does not say.
        cores: Of each worker; its executor has as many task slots.
        memory_mb: Of each worker, all for its one executor.
        conf: Settings for applications, over those that the cluster makes.
        worker_properties: Settings of the workers, such as ``spark.worker.resource.gpu.amount``.
        places: Where the workers run, one each; None puts all of them on this host's loopback.
        master: Where the master runs.
        variables: Environment for all processes, over what the cluster makes.

    Attributes:
        url: ``spark://host:port``.
        folder: Where everything of the cluster lies: logs, work, conf; removed in the end.
        worker_processes: The workers' processes (`subprocess.Popen`), in the order of their places.
    """

    def __init__(
        self,
        workers=2,
        *,
        cores=1,
        memory_mb=1024,
        conf=None,
        worker_properties=None,
        places=None,
        master=None,
        variables=None,
    ):
        super().__init__()
        self.url = ""
        self.worker_processes = []
        self._places = list(places or [Place()] * workers)
        self._master = master or Place()
        self._cores, self._memory_mb = cores, memory_mb
        self._conf, self._worker_properties = dict(conf or {}), dict(worker_properties or {})
        self._variables = dict(variables or {})
        self._processes = []

    @property
    def environment(self):
        """The environment of an application: ``spark-submit`` and sessions started with it use the cluster."""
        return {
            **self._environment,
            "SPARK_CONF_DIR": str(self.folder / "conf"),
            "SPARK_LOCAL_IP": self._master.host,
        }

    @property
    def _java_options(self):
        options = f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData -Djava.io.tmpdir={self.folder / 'tmp'}"
        return f"{options} -Djava.net.preferIPv6Addresses=true" if ":" in self._master.host else options

    @property
    def conf(self):
        """The settings of applications, as ``conf/spark-defaults.conf`` of the cluster has them."""
        return {
            "spark.master": self.url,
            "spark.driver.host": self._master.url_host,
            "spark.driver.bindAddress": self._master.url_host,
            "spark.executor.cores": str(self._cores),
            "spark.executor.memory": f"{self._memory_mb}m",
            "spark.driver.extraJavaOptions": self._java_options,
            "spark.executor.extraJavaOptions": self._java_options,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.cores.max": str(self._cores * len(self._places)),
            # Otherwise the first barrier job meets fewer slots than there will be.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "5",
            "spark.sql.shuffle.partitions": str(len(self._places)),
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            **self._conf,
        }

    @contextlib.contextmanager
    def started(self, script, *arguments, options=(), place=None, variables=None):
        """Starts ``spark-submit``, see `SparkApplications.started`.

        Args:
            place: Where the driver runs; None puts it beside the master.
        """
        place = place or self._master
        driver = [f"spark.driver.host={place.url_host}", f"spark.driver.bindAddress={place.url_host}"]
        settings = [word for setting in driver for word in ("--conf", setting)]
        with super().started(
            script,
            *arguments,
            options=(*settings, *options),
            prefix=place.prefix,
            variables={"SPARK_LOCAL_IP": place.host, **(variables or {})},
        ) as process:
            yield process

    def executor_logs(self):
        """Returns what the executors have printed, by the folder of each."""
        return {
            str(path.parent.relative_to(self.folder)): path.read_text(errors="replace")
            for path in sorted(self.folder.glob("worker-*/app-*/*/stderr"))
        }

    def _start(self):
        import pyspark

        self.spark = Path(pyspark.__file__).parent
        self.folder = self._make_folder("standalone")
        self._environment = self._make_environment(find_java())
        self._closing.callback(self._end)
        self._write_daemon_conf()
        self._run_daemon("master", self._master, _MASTER, "--port", "0", "--webui-port", "0")
        self.url = self._await_line("master", r"Starting Spark master at (spark://\S+)")[0]
        for index, place in enumerate(self._places):
            self.worker_processes.append(self._run_worker(index, place))
        for index in range(len(self._places)):
            self._await_line(f"worker-{index}", r"Successfully registered with master")
        (self.folder / "conf").mkdir()
        (self.folder / "conf" / "log4j2.properties").write_text(log_settings("org.apache.spark.deploy", "warn"))
        (self.folder / "conf" / "spark-defaults.conf").write_text(properties(self.conf))

    def _run_worker(self, index, place):
        size = ("--cores", str(self._cores), "--memory", f"{self._memory_mb}M")
        folder = ("--work-dir", str(self.folder / f"worker-{index}"))
        return self._run_daemon(
            f"worker-{index}", place, _WORKER, "--port", "0", "--webui-port", "0", *size, *folder, self.url
        )

    def _make_environment(self, java):
        variables = {"SPARK_PREFER_IPV6": str(":" in self._master.host), **self._variables}
        return spark_environment(self.spark, java, self.folder, variables)

    def _write_daemon_conf(self):
        for name in ("daemons", "local", "tmp"):
            (self.folder / name).mkdir()
        (self.folder / "daemons" / "log4j2.properties").write_text(log_settings("org.apache.spark.deploy", "info"))
        settings = {"spark.master.rest.enabled": "false", **self._worker_properties}
        (self.folder / "daemons" / "spark-defaults.conf").write_text(properties(settings))

    def _run_daemon(self, name, place, main, *arguments):
        environment = {
            **self._environment,
            "SPARK_CONF_DIR": str(self.folder / "daemons"),
            # The address of the web page, too, which else would be all.
            "SPARK_LOCAL_IP": place.host,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{self._java_options} {self._variables.get('SPARK_DAEMON_JAVA_OPTS', '')}",
        }
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [*place.prefix, str(self.spark / "bin" / "spark-class"), main, "--host", place.url_host, *arguments],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
        self._processes.append(process)
        return process

    def _await_line(self, name, pattern):
        """Returns the groups of the first line that a process prints with this pattern."""
        process = self._processes[0 if name == "master" else 1 + int(name.split("-")[1])]
        what = f"{name} of the standalone cluster"
        return await_line(process, self.folder / f"{name}.log", pattern, what=what, timeout_s=START_TIMEOUT_S).groups()

    def _end(self):
        # Workers first: one that has lost its master tries to find it again, and says so at length.
        end_with_children([*self._processes[1:], *self._processes[:1]])
