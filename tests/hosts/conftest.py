"""Hosts that are network namespaces of this machine, where this process may make them, and a cluster over three."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from network_namespaces import Network, NetworkUnavailableError
from spark_daemons import end_with_children, end_with_parent
from standalone_cluster import Place, StandaloneCluster

from elephant.net.addresses import listening_socket, name_of

START_S = 150.0
INTERRUPT_S = 30.0
FOLDER = Path(__file__).parent
SUPPORT = str(FOLDER.parent / "support")


class Driver:
    """A driver's process on one of the hosts, which fits what it is told to; see `fitting_driver`.

    Args:
        cluster: What it runs on.
        place: Where it runs.
    """

    def __init__(self, cluster, place):
        self._process = subprocess.Popen(
            [*place.prefix, sys.executable, str(FOLDER / "fitting_driver.py")],
            env={
                **cluster.environment,
                "PYTHONPATH": os.pathsep.join([str(FOLDER.parent / "support"), cluster.python_path]),
            },
            cwd=cluster.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=end_with_parent,
        )
        self._answers = queue.Queue()
        self._is_fitting = False
        self.said = []
        self._reader = threading.Thread(target=self._read, name="test-driver-output", daemon=True)
        self._reader.start()

    def begin(self, **order):
        """Has it begin a fit."""
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._is_fitting = True

    @property
    def has_answered(self):
        """Whether the fit has ended."""
        return not self._answers.empty()

    def outcome(self, timeout_s):
        """Returns what came of the fit; fails when that takes longer, with what the driver has said."""
        try:
            outcome = self._answers.get(timeout=timeout_s)
            self._is_fitting = False
            return outcome
        except queue.Empty:
            pytest.fail(f"the driver has not answered in {timeout_s:g} s:\n{''.join(self.said[-60:])}")

    def interrupt(self):
        """Ends a fit whose outcome nobody waits for, after a test that failed: the next one needs the driver."""
        if self._is_fitting and not self.has_answered:
            self._process.send_signal(signal.SIGINT)
        if self._is_fitting:
            self.outcome(INTERRUPT_S)

    def _read(self):
        for line in self._process.stdout:
            self.said.append(line)
            if line.startswith("ANSWER "):
                self._answers.put(json.loads(line.removeprefix("ANSWER ")))
        self._answers.put({"error": "the driver has ended:\n" + "".join(self.said[-60:])})

    def close(self):
        """Ends it, and all that it started."""
        end_with_children([self._process])
        self._reader.join(10)
        self._process.stdin.close()
        self._process.stdout.close()


class Hosts:
    """Three hosts: the master and the driver on the first, a worker on each of the others.

    Args:
        network: The hosts.
        cluster: The workers.
        driver: The driver.
        proxy: A listening socket that the environment names as the proxy of everything.
    """

    def __init__(self, network, cluster, driver, proxy):
        self.network, self.cluster, self.driver, self.proxy = network, cluster, driver, proxy

    @property
    def proxy_url(self):
        """What the environment of all processes says of proxies."""
        return _url("socks5", self.proxy)

    @property
    def addresses(self):
        """The hosts' addresses."""
        return [host.address for host in self.network.hosts]


@pytest.fixture(scope="module", params=[4])
def hosts(request):
    """Three hosts with a standalone cluster over them; ``request.param`` is the version of their addresses."""
    try:
        with Network(3, ip_version=request.param) as network:
            yield from _spread(network)
    except NetworkUnavailableError as error:
        pytest.skip(str(error))


def _spread(network):
    places = [Place(host.address, host.prefix) for host in network.hosts]
    with network.hosts[0].entered():
        proxy = listening_socket(places[0].host, 0)
    with proxy, StandaloneCluster(places=places[1:], master=places[0], conf=CONF, variables=_proxies(proxy)) as cluster:
        driver = Driver(cluster, places[0])
        try:
            assert driver.outcome(START_S) == {"ready": True}
            yield Hosts(network, cluster, driver, proxy)
        finally:
            driver.close()


# Spark gives up an executor that it does not hear in seconds; its defaults are made of minutes.
CONF = {
    "spark.executor.heartbeatInterval": "2s",
    "spark.storage.blockManagerHeartbeatTimeoutMs": "12s",
    "spark.network.timeoutInterval": "2s",
}


def _proxies(proxy):
    names = ("http_proxy", "https_proxy", "ftp_proxy", "grpc_proxy")
    chosen = {**dict.fromkeys(names, _url("http", proxy)), "all_proxy": _url("socks5", proxy), "no_proxy": ""}
    return {**chosen, **{name.upper(): value for name, value in chosen.items()}}


def _url(scheme, proxy):
    return f"{scheme}://{name_of(proxy.getsockname())}"
