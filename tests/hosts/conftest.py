"""Hosts that are network namespaces of this machine, where this process may make them, and a cluster over three."""

import pytest
from driver_process import DriverProcess
from network_namespaces import Network, NetworkUnavailableError
from standalone_cluster import Place, StandaloneCluster

from elephant.net.addresses import listening_socket, name_of

START_S = 400.0


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


@pytest.fixture(scope="module")
def hosts():
    """Three hosts with a standalone cluster over them. They have addresses of IPv6 alone; other tests have IPv4."""
    try:
        with Network(3, ip_version=6) as network:
            yield from _spread(network)
    except NetworkUnavailableError as error:
        pytest.skip(str(error))


def _spread(network):
    places = [Place(host.address, host.prefix) for host in network.hosts]
    with network.hosts[0].entered():
        proxy = listening_socket(places[0].host, 0)
    with proxy, StandaloneCluster(places=places[1:], master=places[0], conf=CONF, variables=_proxies(proxy)) as cluster:
        driver = DriverProcess(cluster, places[0].prefix)
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
