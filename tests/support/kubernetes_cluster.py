"""Kubernetes on this machine, as far as Spark's own back end sees it, while a test needs it.

Real are Spark's back end and the objects of the API that it writes. The API's server is the mock server of the client
that Spark has (`kubernetes_api`); what a scheduler, a kubelet and images do stands in `kubelet` and `pod_sandbox`.
"""

import contextlib
import sys
from pathlib import Path

from kubelet import Image, Kubelet
from kubernetes_api import KubernetesApi
from network_namespaces import Network
from spark_applications import ROOT, SparkApplications, find_java, properties, spark_environment
from spark_daemons import log_settings

ENTRY_POINT = Path(__file__).with_name("pod_entrypoint.sh")
NAMESPACE = "spark"
_IN_IMAGE = "/opt/spark"


class KubernetesCluster(SparkApplications):
    """An API server and addresses for pods, from ``with`` to the end of the block.

    Args:
        pods: How many can run at a time.
        conf: Settings for applications, over those that the cluster makes.

    Attributes:
        folder: Where everything of the cluster lies; removed in the end.
        shared: The one folder below it that all pods have in common, at the same path.
        outside: The `network_namespaces.Host` of the API's server, from where applications are submitted.
        api: `kubernetes_api.KubernetesApi`.
        kubelet: `kubelet.Kubelet`.

    Raises:
        NetworkUnavailableError: On entering: no network namespaces can be made here.
        JarsUnavailableError: On entering: the API's server cannot be had here.
    """

    def __init__(self, pods=5, *, conf=None):
        super().__init__()
        self._count, self._conf = pods, dict(conf or {})

    @property
    def environment(self):
        """The environment of an application: ``spark-submit`` and sessions started with it use the cluster."""
        # Spark would have pods use the same local folders.
        kept = {name: value for name, value in self._environment.items() if name != "SPARK_LOCAL_DIRS"}
        return {
            **kept,
            "SPARK_CONF_DIR": str(self.folder / "conf"),
            "SPARK_LOCAL_IP": self.outside.address,
            # Not the cluster that the machine may be set up for.
            "KUBECONFIG": str(self.folder / "no-kubeconfig"),
        }

    @property
    def conf(self):
        """The settings of applications, as ``spark-defaults.conf`` of the cluster has them."""
        java = f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData -Djava.io.tmpdir={self.folder / 'tmp'}"
        master = f"k8s://{self.api.url}"
        return {
            "spark.master": master,
            # In a pod, the driver would look for https://kubernetes.default.svc, and a certificate for it.
            "spark.kubernetes.driver.master": self.api.url,
            "spark.kubernetes.namespace": NAMESPACE,
            "spark.kubernetes.container.image": "elephant:tests",
            "spark.executor.instances": "2",
            "spark.executor.cores": "1",
            "spark.executor.memory": "2g",
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": java,
            "spark.executor.extraJavaOptions": java,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            # Otherwise the first barrier job meets fewer slots than there will be.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
            "spark.sql.shuffle.partitions": "2",
            "spark.kubernetes.allocation.batch.delay": "200ms",
            **self._conf,
        }

    @contextlib.contextmanager
    def started(self, script, *arguments, options=(), prefix=(), variables=None):
        """Starts ``spark-submit`` outside the pods, see `SparkApplications.started`."""
        prefix = (*self.outside.prefix, *prefix)
        with super().started(script, *arguments, options=options, prefix=prefix, variables=variables) as process:
            yield process

    def pods(self, role):
        """Returns the pods of a role that the API has: ``driver`` or ``executor``."""
        return self.api.list("pods", {"spark-role": role})

    def delete_pod(self, name):
        """Deletes a pod, as ``kubectl delete pod`` does."""
        self.api.delete("pods", NAMESPACE, name)

    def _start(self):
        import pyspark

        self.spark, java = Path(pyspark.__file__).parent, find_java()
        self.folder = self._make_folder("kubernetes")
        self.shared = self.folder / "shared"
        for folder in (self.shared, *(self.folder / name for name in ("conf", "local", "tmp"))):
            folder.mkdir()
        self._environment = spark_environment(self.spark, java, self.folder, {})
        network = self._closing.enter_context(Network(self._count + 1))
        self.outside = network.hosts[0]
        server = KubernetesApi(self.outside, java=java, spark=self.spark, log=self.folder / "api.log")
        self.api = self._closing.enter_context(server)
        pods = Kubelet(self.api, network.hosts[1:], self._image(), self.folder / "pods")
        self.kubelet = self._closing.enter_context(pods)
        (self.folder / "conf" / "log4j2.properties").write_text(log_settings("org.apache.spark.deploy.k8s", "warn"))
        (self.folder / "conf" / "spark-defaults.conf").write_text(properties(self.conf))

    def _image(self):
        """Returns what stands for an image: Spark, Python with all packages, elephant and its jobs."""
        of_pods = {name: value for name, value in self._environment.items() if name != "SPARK_LOCAL_DIRS"}
        mounts = {
            _IN_IMAGE: str(self.spark),
            "/opt/entrypoint.sh": str(ENTRY_POINT),
            "/opt/elephant/spark_jobs": str(ROOT / "spark_jobs"),
            "/opt/elephant/environment": sys.prefix,
            str(self.shared): str(self.shared),
        }
        return Image({**of_pods, "SPARK_HOME": _IN_IMAGE}, mounts, ("/opt/entrypoint.sh",))
