"""Kubernetes' API on this machine, while a test needs it: the mock server of the client that Spark has, and requests.

The server keeps every object that is written to it, tells those who watch, and does nothing else: what a scheduler and
a kubelet do is `kubelet.Kubelet`. It is a class without a program of its own, and so py4j, which Spark has too, starts
it; nothing has to be compiled.
"""

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request

from kubernetes_relay import KubernetesRelay
from maven_jars import KUBERNETES, JarsUnavailableError, fetch_jars
from py4j.java_gateway import GatewayParameters, JavaGateway
from spark_daemons import Daemons, end_with_children, end_with_parent

_TIMEOUT_S = 60.0
# Both share their classes.
_CLIENT = "kubernetes-client-7.6.1.jar"


class KubernetesApi(Daemons):
    """The server, in a process of its own on one host, from ``with`` to the end of the block.

    Args:
        host: A `network_namespaces.Host`: where it runs.
        java: The folder of Java.
        spark: The folder of Spark.
        log: The file that it prints to.

    Attributes:
        url: ``http://address:port``, for Spark.

    Raises:
        JarsUnavailableError: On entering: the server cannot be had here.
    """

    def __init__(self, host, *, java, spark, log):
        super().__init__()
        self.url = self._server = ""
        self._host, self._java, self._spark, self._log = host, java, spark, log

    def list(self, kind, labels=None):
        """Returns the objects of a kind, of all namespaces.

        Args:
            kind: As the API names several of it: ``pods``.
            labels: What they must have, by name.
        """
        chosen = ",".join(f"{name}={value}" for name, value in (labels or {}).items())
        query = f"?{urllib.parse.urlencode({'labelSelector': chosen})}" if chosen else ""
        return self._request("GET", f"/api/v1/{kind}{query}")["items"]

    def get(self, kind, namespace, name):
        """Returns an object; None where there is none of that name."""
        return self._request("GET", _path(kind, namespace, name))

    def create(self, kind, body):
        """Creates an object, as ``kubectl create`` does; a pod is pending then."""
        meta = {"apiVersion": "v1", "kind": kind.removesuffix("s").title(), "status": {"phase": "Pending"}}
        self._request("POST", f"/api/v1/namespaces/{body['metadata']['namespace']}/{kind}", {**meta, **body})

    def set_status(self, kind, namespace, name, status):
        """Sets the status of an object that may be gone by now."""
        # What the server makes of a patch is other than what Kubernetes does: it makes lists longer.
        if (body := self.get(kind, namespace, name)) is not None:
            self._request("PUT", f"{_path(kind, namespace, name)}/status", {**body, "status": status})

    def delete(self, kind, namespace, name):
        """Deletes an object that may be gone by now, as ``kubectl delete`` does."""
        self._request("DELETE", _path(kind, namespace, name))

    def _request(self, method, path, body=None):
        request = urllib.request.Request(
            f"{self._server}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        # Not the proxies that the environment may name.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with self._host.entered(), opener.open(request, timeout=_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def _start(self):
        if not (self._spark / "jars" / _CLIENT).exists():
            raise JarsUnavailableError(
                f"expected {_CLIENT} in {self._spark / 'jars'}, which the API's server is made for"
            )
        jars = [*map(str, fetch_jars(KUBERNETES)), f"{self._spark / 'jars'}/*"]
        with open(self._log, "wb") as log:
            process = subprocess.Popen(
                [
                    *self._host.prefix,
                    *(str(self._java / "bin" / "java"), "-Xmx256m", "-XX:+UseSerialGC", "-XX:-UsePerfData"),
                    *("-cp", ":".join(jars), "py4j.GatewayServer", "--die-on-broken-pipe", "0"),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=end_with_parent,
            )
        self._closing.callback(process.stdout.close)
        self._closing.callback(process.stdin.close)
        self._closing.callback(end_with_children, [process])
        with self._host.entered():
            address = ("127.0.0.1", _serve(int(process.stdout.readline()), "127.0.0.1"))
        self._server = "http://{}:{}".format(*address)
        relay = KubernetesRelay(self._host, address, lambda path: self._request("GET", path) is not None)
        self.url = self._closing.enter_context(relay).url


def _serve(gateway_port, address):
    """Has the Java process behind a gateway serve the API; returns the port that it listens on."""
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=gateway_port))
    java, fabric8 = gateway.jvm.java, gateway.jvm.io.fabric8
    # A line for each request otherwise.
    java.util.logging.LogManager.getLogManager().getLogger("").setLevel(java.util.logging.Level.WARNING)
    server = fabric8.kubernetes.client.server.mock.KubernetesMockServer(
        fabric8.mockwebserver.Context(fabric8.kubernetes.client.utils.Serialization.jsonMapper()),
        fabric8.mockwebserver.MockWebServer(),
        java.util.HashMap(),
        fabric8.kubernetes.client.server.mock.KubernetesCrudDispatcher(),
        False,
    )
    server.init(java.net.InetAddress.getByName(address), 0)
    port = server.getPort()
    # The server's threads keep the process; the gateway has done its work.
    gateway.shutdown()
    return port


def _path(kind, namespace, name):
    return f"/api/v1/namespaces/{namespace}/{kind}/{name}"
