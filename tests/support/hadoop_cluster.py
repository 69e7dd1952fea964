"""Hadoop on this machine, while a test needs it: YARN with several NodeManagers, and HDFS, each a process of its own.

They are Hadoop's own programs out of ``hadoop-client-minicluster``, in the version whose client PySpark ships. All
listen on loopback, where every NodeManager has an address of its own (127.0.0.2 and so on: Linux has them all), so
that its executors are on a host of their own to Spark and to elephant.
"""

import contextlib
import getpass
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from xml.sax.saxutils import escape

import psutil
from maven_jars import HADOOP, fetch_jars
from spark_applications import SparkApplications, find_java, properties, spark_environment
from spark_daemons import await_line, end_with_children, end_with_parent, log_settings

START_TIMEOUT_S = 300.0
_POLL_S = 0.2
_ANSWER_S = 60.0
_MASTER = "127.0.0.1"
_SERVER = "org.apache.hadoop"
_NAME_NODE = f"{_SERVER}.hdfs.server.namenode.NameNode"
_DATA_NODE = f"{_SERVER}.hdfs.server.datanode.DataNode"
_RESOURCE_MANAGER = f"{_SERVER}.yarn.server.resourcemanager.ResourceManager"
_NODE_MANAGER = f"{_SERVER}.yarn.server.nodemanager.NodeManager"


class HadoopCluster(SparkApplications):
    """YARN and HDFS, from ``with`` to the end of the block.

    Args:
        nodes: NodeManagers.
        data_nodes: Of HDFS.
        memory_mb: Of each NodeManager, for containers.
        conf: Settings for applications, over those that the cluster makes.
        yarn: Settings of YARN's daemons, over those that the cluster makes.
        queues: Of the capacity scheduler: the share of each in percent.

    Attributes:
        folder: Where everything of the cluster lies: logs, local folders, HDFS; removed in the end.
        hdfs: ``hdfs://host:port``.
        node_managers: Their processes (`subprocess.Popen`), in the order of their addresses.

    Raises:
        JarsUnavailableError: On entering: Hadoop's programs cannot be had here.
    """

    def __init__(self, nodes=3, *, data_nodes=2, memory_mb=6144, conf=None, yarn=None, queues=None):
        super().__init__()
        self.hdfs = ""
        self.node_managers = []
        self._nodes, self._data_nodes, self._memory_mb = nodes, data_nodes, memory_mb
        self._conf, self._yarn = dict(conf or {}), dict(yarn or {})
        self._queues = dict(queues or {"default": 100})
        self._processes = []

    @property
    def environment(self):
        """The environment of an application: ``spark-submit`` uses the cluster."""
        return {
            **self._environment,
            "HADOOP_CONF_DIR": str(self.folder / "conf"),
            "SPARK_CONF_DIR": str(self.folder / "spark"),
            "SPARK_LOCAL_IP": _MASTER,
        }

    @property
    def conf(self):
        """The settings of applications, as ``spark-defaults.conf`` of the cluster has them."""
        return {
            "spark.master": "yarn",
            "spark.yarn.jars": f"local:{self.spark}/jars/*",
            "spark.yarn.am.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.driver.memoryOverhead": "1536m",
            "spark.executor.memory": "512m",
            "spark.executor.memoryOverhead": "1536m",
            "spark.executor.instances": "2",
            "spark.driver.extraJavaOptions": _java_options(self.folder),
            "spark.executor.extraJavaOptions": _java_options(self.folder),
            "spark.yarn.am.extraJavaOptions": _java_options(self.folder),
            # What the machine's own name would lead to otherwise.
            "spark.yarn.appMasterEnv.SPARK_LOCAL_IP": _MASTER,
            "spark.yarn.maxAppAttempts": "1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            # Otherwise the first barrier job meets fewer slots than there will be.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "5",
            "spark.sql.shuffle.partitions": "2",
            "spark.yarn.submit.waitAppCompletion": "true",
            "spark.yarn.report.interval": "500ms",
            "spark.yarn.scheduler.heartbeat.interval-ms": "500",
            **self._conf,
        }

    def applications(self):
        """Returns what the ResourceManager tells of each application, as its own REST interface has it."""
        return (json.loads(_sent("GET", f"http://{self._web}/ws/v1/cluster/apps"))["apps"] or {}).get("app", [])

    def container_logs(self, application):
        """Returns what the containers of an application have printed, by container and file.

        Args:
            application: Its name, ``application_...``.
        """
        return {
            f"{path.parent.name}/{path.name}": path.read_text(errors="replace")
            for path in sorted(self.folder.glob(f"logs-*/{application}/container_*/std*"))
        }

    def put(self, path, *files):
        """Copies files of this machine into a folder of HDFS, which is made."""
        for file in files:
            place = f"{path}/{file.name}?op=CREATE&overwrite=true&noredirect=true&user.name={getpass.getuser()}"
            # A program of Hadoop's would take seconds to start.
            data_node = json.loads(_sent("PUT", f"http://{self._files}/webhdfs/v1{place}"))["Location"]
            _sent("PUT", data_node, file.read_bytes())

    def names(self, path):
        """Returns the names in a folder of HDFS; none where there is no such folder."""
        try:
            found = json.loads(_sent("GET", f"http://{self._files}/webhdfs/v1{path}?op=LISTSTATUS"))
            return [one["pathSuffix"] for one in found["FileStatuses"]["FileStatus"]]
        except urllib.error.HTTPError:
            return []

    def containers(self, application):
        """Returns the process of each container of an application that runs on this machine, by its name.

        Args:
            application: Its name, ``application_...``.
        """
        own = {}
        for process in psutil.process_iter(["cmdline", "environ"]):
            with contextlib.suppress(psutil.Error):
                name = (process.info["environ"] or {}).get("CONTAINER_ID", "")
                # The first of a session is what the NodeManager has started.
                if application.removeprefix("application_") in name and os.getsid(process.pid) == process.pid:
                    own[name] = process
        return own

    def kill_application(self, application):
        """Kills an application, as ``yarn application -kill`` does.

        Args:
            application: Its name, ``application_...``.
        """
        self.run_tool("org.apache.hadoop.yarn.client.cli.ApplicationCLI", "application", "-kill", application)

    def run_tool(self, main, *arguments):
        """Runs one of Hadoop's command line tools to its end, and returns what it printed.

        Args:
            main: Its class.
            arguments: Of the tool.
        """
        return subprocess.run(
            self._java("tool", main, *arguments, conf=self.folder / "conf"),
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        ).stdout

    def _start(self):
        import pyspark

        self.spark = Path(pyspark.__file__).parent
        self._java_home = find_java()
        self._jars = fetch_jars(HADOOP)
        self.folder = self._make_folder("hadoop")
        for name in ("local", "tmp", "spark"):
            (self.folder / name).mkdir()
        self._environment = spark_environment(self.spark, self._java_home, self.folder, {})
        ports = _free_ports(7)
        self.hdfs, self._web = f"hdfs://{_MASTER}:{ports[0]}", f"{_MASTER}:{ports[1]}"
        self._files = f"{_MASTER}:{ports[6]}"
        self._addresses = {
            "yarn.resourcemanager.address": ports[2],
            "yarn.resourcemanager.scheduler.address": ports[3],
            "yarn.resourcemanager.resource-tracker.address": ports[4],
            "yarn.resourcemanager.admin.address": ports[5],
        }
        self._write_conf(self.folder / "conf", {}, {})
        (self.folder / "spark" / "log4j2.properties").write_text(log_settings("org.apache.spark.deploy", "warn"))
        (self.folder / "spark" / "spark-defaults.conf").write_text(properties(self.conf))
        # All at once: each takes its time to end. NodeManagers end their containers.
        self._closing.callback(lambda: end_with_children(self._processes))
        started = self._start_hdfs() + self._start_yarn()
        for name, process, pattern in started:
            await_line(process, self.folder / f"{name}.log", pattern, what=name, timeout_s=START_TIMEOUT_S)

    def _start_hdfs(self):
        self.run_tool(_NAME_NODE, "-format", "-nonInteractive")
        started = [("name-node", self._run_daemon("name-node", _NAME_NODE), r"NameNode RPC up at")]
        for index in range(self._data_nodes):
            name = f"data-node-{index}"
            hdfs = {"dfs.datanode.data.dir": f"file://{self.folder}/{name}"}
            process = self._run_daemon(name, _DATA_NODE, hdfs=hdfs)
            started.append((name, process, r"Successfully sent block report"))
        return started

    def _start_yarn(self):
        manager = self._run_daemon("resource-manager", _RESOURCE_MANAGER)
        started = [("resource-manager", manager, r"Transitioned to active state")]
        for index in range(self._nodes):
            name, host = f"node-manager-{index}", f"127.0.0.{index + 2}"
            yarn = {
                "yarn.nodemanager.hostname": host,
                "yarn.nodemanager.address": f"{host}:0",
                "yarn.nodemanager.localizer.address": f"{host}:0",
                "yarn.nodemanager.webapp.address": f"{host}:0",
                "yarn.nodemanager.local-dirs": str(self.folder / f"local-{index}"),
                "yarn.nodemanager.log-dirs": str(self.folder / f"logs-{index}"),
            }
            process = self._run_daemon(name, _NODE_MANAGER, yarn=yarn)
            self.node_managers.append(process)
            started.append((name, process, r"Registered with ResourceManager as"))
        return started

    def _write_conf(self, folder, hdfs, yarn):
        folder.mkdir()
        core = {
            "fs.defaultFS": self.hdfs,
            "hadoop.tmp.dir": str(self.folder / "tmp"),
            "ipc.client.connect.max.retries": "50",
        }
        hdfs = {
            "dfs.replication": str(self._data_nodes),
            "dfs.namenode.name.dir": f"file://{self.folder}/name-node",
            "dfs.namenode.http-address": self._files,
            "dfs.datanode.address": f"{_MASTER}:0",
            "dfs.datanode.http.address": f"{_MASTER}:0",
            "dfs.datanode.ipc.address": f"{_MASTER}:0",
            "dfs.datanode.hostname": _MASTER,
            "dfs.namenode.safemode.threshold-pct": "0",
            "dfs.namenode.edits.noeditlogchannelflush": "true",
            "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
            **hdfs,
        }
        yarn = {
            "yarn.resourcemanager.hostname": _MASTER,
            **{name: f"{_MASTER}:{port}" for name, port in self._addresses.items()},
            "yarn.resourcemanager.webapp.address": self._web,
            "yarn.scheduler.minimum-allocation-mb": "128",
            "yarn.scheduler.maximum-allocation-mb": str(self._memory_mb),
            "yarn.nodemanager.resource.memory-mb": str(self._memory_mb),
            "yarn.nodemanager.resource.cpu-vcores": "8",
            "yarn.nodemanager.vmem-check-enabled": "false",
            "yarn.nodemanager.pmem-check-enabled": "true",
            # Otherwise the NodeManager leaves it to the kernel's control groups, which it has not set up here.
            "yarn.nodemanager.resource.memory.enforced": "false",
            "yarn.nodemanager.container-monitor.interval-ms": "500",
            "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "99.9",
            "yarn.nodemanager.delete.debug-delay-sec": "0",
            "yarn.nodemanager.sleep-delay-before-sigkill.ms": "250",
            "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "200",
            "yarn.resourcemanager.scheduler.monitor.enable": "true",
            "yarn.resourcemanager.monitor.capacity.preemption.monitoring_interval": "1000",
            "yarn.resourcemanager.monitor.capacity.preemption.max_wait_before_kill": "1000",
            "yarn.resourcemanager.monitor.capacity.preemption.total_preemption_per_round": "1.0",
            "yarn.resourcemanager.monitor.capacity.preemption.natural_termination_factor": "1.0",
            # No test loses a NodeManager; one that a busy machine keeps from its heartbeats is none that is lost.
            "yarn.nm.liveness-monitor.expiry-interval-ms": "120000",
            "yarn.resourcemanager.rm.container-allocation.expiry-interval-ms": "60000",
            **self._yarn,
            **yarn,
        }
        root = "yarn.scheduler.capacity"
        scheduler = {
            f"{root}.root.queues": ",".join(self._queues),
            f"{root}.maximum-am-resource-percent": "0.9",
            f"{root}.node-locality-delay": "0",
            **{f"{root}.root.{queue}.capacity": str(share) for queue, share in self._queues.items()},
            **{f"{root}.root.{queue}.maximum-capacity": "100" for queue in self._queues},
            **{f"{root}.root.{queue}.user-limit-factor": "10" for queue in self._queues},
        }
        for name, settings in (("core", core), ("hdfs", hdfs), ("yarn", yarn)):
            (folder / f"{name}-site.xml").write_text(_xml(settings))
        (folder / "capacity-scheduler.xml").write_text(_xml(scheduler))
        (folder / "log4j2.properties").write_text(log_settings(_SERVER, "info"))

    def _java(self, name, main, *arguments, conf):
        jars = self.spark / "jars"
        classes = [conf, *self._jars]
        return [
            str(self._java_home / "bin" / "java"),
            *("-Xmx256m", *_java_options(self.folder).split(" "), f"-Dname={name}"),
            *("-cp", ":".join([*map(str, classes), f"{jars}/*"])),
            main,
            *arguments,
        ]

    def _run_daemon(self, name, main, *, hdfs=None, yarn=None):
        conf = self.folder / f"conf-{name}"
        self._write_conf(conf, hdfs or {}, yarn or {})
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                self._java(name, main, conf=conf),
                env={**self._environment, "HADOOP_CONF_DIR": str(conf), "HADOOP_LOG_DIR": str(self.folder)},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
        self._processes.append(process)
        return process


def await_state(read, wanted, *, timeout_s=START_TIMEOUT_S):
    """Returns what a function returns as soon as it is wanted.

    Args:
        read: Called again and again.
        wanted: Whether it is.
        timeout_s: How long to wait.

    Raises:
        AssertionError: It was not in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        state = read()
        if wanted(state):
            return state
        assert time.monotonic() < deadline, f"after {timeout_s:.0f} s: {state}"
        time.sleep(_POLL_S)


def _sent(method, url, body=None):
    """Returns the answer to a request."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/octet-stream"}, method=method)
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        return answer.read()


def _java_options(folder):
    return f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData -Djava.io.tmpdir={folder / 'tmp'}"


def _free_ports(count):
    with contextlib.ExitStack() as closing:
        sockets = [closing.enter_context(socket.create_server((_MASTER, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _xml(settings):
    lines = (f"<property><name>{n}</name><value>{escape(v)}</value></property>" for n, v in settings.items())
    return "<configuration>\n" + "\n".join(lines) + "\n</configuration>\n"
