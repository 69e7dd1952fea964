"""Addresses at which executors reach the driver.

``spark.driver.host`` is of no use here: it is where the Connect server runs. The client
takes the address from which it reaches that server, because the executors are near it.

A name of the driver's may mean nothing on an executor, or something else, and so may the
name of an executor on the driver. So each machine resolves its own names, and only
addresses travel. A name that its own machine knows by its loopback alone (``127.0.1.1``
in many an ``/etc/hosts``) is of no use to others: the address from which that machine
reaches the cluster then takes its place.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from elephant.cluster.session import is_remote, jvm_context, setting
from elephant.cluster.spark_private import connect_client, java_context
from elephant.errors import ClusterError, NetworkError
from elephant.net.addresses import Address, address_towards, is_own_address, numeric_addresses

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTING = "spark.elephant.driver.host"
# No packet is sent to find an address, so that the number has no part in it.
_ANY_PORT = 15002
# Hadoop's default (yarn-default.xml).
_RESOURCE_MANAGER_PORT = 8032
_MANAGER = "yarn.resourcemanager"

Resolve = Callable[[str], Sequence[str]]
Towards = Callable[[Address], str]
_THIS_MACHINE = re.compile(r"local(\[.*\]|-cluster\[.*\])?$")


def client_addresses(session: SparkSession) -> tuple[str, str]:
    """Returns the address that executors reach this client at, and the one that it listens on.

    Args:
        session: A session of Spark Connect. ``spark.elephant.driver.host`` replaces the first of the two, for
            a client that others know by another address.

    Raises:
        ClusterError: The session does not tell where its server is.
        NetworkError: There is no way to the server that this machine knows of, such as behind a proxy.
    """
    host = _server_host(session)
    own = address_towards((host, _ANY_PORT))
    return setting(session, SETTING) or own, own


def _server_host(session: SparkSession) -> str:
    host = getattr(connect_client(session), "host", None)
    if not host:
        raise ClusterError(
            "expected a Spark Connect session that tells the host of its server. Received: "
            f"{type(session).__module__}.{type(session).__qualname__}, which does not. "
            "Set spark.elephant.coordinator to executors.",
            topic="addresses",
        )
    return str(host).strip("[]")


def driver_addresses(session: SparkSession) -> tuple[str, str]:
    """Returns the address that executors reach the driver at, and the one that it listens on; both are numeric.

    Args:
        session: The Spark session, whose ``spark.driver.host`` and ``spark.driver.bindAddress`` are followed;
            of Spark Connect see `elephant.cluster.addresses`.

    Raises:
        ClusterError: There is no address that executors could reach; the text says what to set.
    """
    if is_remote(session):
        known_as, listening = client_addresses(session)
        return _preferred(_numeric(known_as, SETTING, numeric_addresses), listening), listening
    host = session.conf.get("spark.driver.host", None)
    if not host:
        raise ClusterError("expected spark.driver.host to be set. Received: nothing.", topic="addresses")
    master = session.conf.get("spark.master", None) or "local"
    return choose_driver_addresses(
        host,
        session.conf.get("spark.driver.bindAddress", None),
        master=master,
        resource_managers=lambda: resource_managers(session),
    )


def choose_driver_addresses(
    host: str,
    bind: str | None,
    *,
    master: str,
    resource_managers: Callable[[], Sequence[Address]] = tuple,
    resolve: Resolve = numeric_addresses,
    towards: Towards = address_towards,
) -> tuple[str, str]:
    """Returns the address that executors reach the driver at, and the one that it listens on.

    Args:
        host: ``spark.driver.host``: a name, or an address, an IPv6 one with or without brackets.
        bind: ``spark.driver.bindAddress``; None or nothing means the address of ``host``.
        master: ``spark.master``.
        resource_managers: Returns the addresses of YARN's ResourceManagers, where the master is YARN.

    Raises:
        ClusterError: There is none.

    >>> choose_driver_addresses("[::1]", "::", master="local[2]")
    ('::1', '::')
    """
    listening = None if not bind else _numeric(bind, "spark.driver.bindAddress", resolve)[0]
    given = _numeric(host, "spark.driver.host", resolve)
    advertised = _preferred(given, listening)
    if _is_loopback(advertised) and not _is_address(host) and not _THIS_MACHINE.match(master):
        masters = resource_managers() if master == "yarn" else master_addresses(master)
        advertised = _seen_from(masters, (host, advertised, master), listening, towards)
    if listening is None:
        return advertised, advertised
    _require_one_family(advertised, listening)
    return advertised, listening


def own_address(
    host: str,
    *,
    hosts: Collection[str],
    driver: Address,
    resolve: Resolve = numeric_addresses,
    towards: Towards = address_towards,
    is_own: Callable[[str], bool] = is_own_address,
) -> str:
    """Returns the address of this machine that the other ranks of a run reach it at, as well as can be known here.

    Nothing is raised: the ranks meet first, and refuse together what is of no use to them.
    """
    named = _without_error(lambda: [address for address in resolve(_bare(host)) if is_own(address)])
    several = len(set(hosts)) > 1
    useful = [address for address in named if not (several and _is_loopback(address))]
    if useful:
        return _preferred(useful, driver[0])
    # From where it reaches the driver, it mostly reaches the driver's other neighbors too.
    return next(iter([*_without_error(lambda: [towards(driver)]), *named]), "127.0.0.1")


def _without_error(found: Callable[[], list[str]]) -> list[str]:
    try:
        return found()
    except NetworkError:
        return []


def master_addresses(master: str) -> list[Address]:
    """Returns the addresses that a master listens on, as far as its URL gives them.

    >>> master_addresses("spark://a:7077,[fd00::2]:7077")
    [('a', 7077), ('fd00::2', 7077)]
    >>> master_addresses("k8s://https://api"), master_addresses("yarn")
    ([('api', 443)], [])
    """
    if master.startswith("spark://"):
        return [_split(f"//{place}", 7077) for place in master.removeprefix("spark://").split(",")]
    if master.startswith("k8s://"):
        url = master.removeprefix("k8s://")
        return [_split(url if "://" in url else f"https://{url}", 80 if url.startswith("http://") else 443)]
    return []


def resource_managers(session: SparkSession) -> list[Address]:
    """Returns where YARN's ResourceManagers take applications, as Hadoop's settings on the driver say.

    Args:
        session: A session with a JVM; nothing is returned for another one.
    """
    context = jvm_context(session)
    if context is None:
        return []
    settings = java_context(context).hadoopConfiguration()
    ids = filter(None, str(settings.get(f"{_MANAGER}.ha.rm-ids") or "").split(","))
    suffixes = [f".{one.strip()}" for one in ids] or [""]
    # Of several, many clusters name the hosts alone; of a single one, Hadoop's defaults make an address of its name.
    known = (settings.get(f"{_MANAGER}.address{one}") or settings.get(f"{_MANAGER}.hostname{one}") for one in suffixes)
    places = [_split(f"//{place}", _RESOURCE_MANAGER_PORT) for place in known if place]
    return [(host, port) for host, port in places if not _is_address(host) or not _is_unspecified(host)]


def _split(url: str, default_port: int) -> Address:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or default_port


def _numeric(host: str, setting: str, resolve: Resolve) -> list[str]:
    """Returns the addresses of what a setting names; raises ClusterError where that is nothing to this machine."""
    try:
        return list(resolve(_bare(host)))
    except NetworkError as error:
        raise ClusterError(
            f"{setting}: expected a name that the driver's machine can resolve, because executors get the address. "
            f"Received: {host!r}. {error} Set {setting} to the address itself.",
            topic="addresses",
        ) from error


def _preferred(addresses: Sequence[str], like: str | None) -> str:
    """Returns the address that others reach best: the one in use, else no loopback, and IPv4 before IPv6 as in Java."""

    def drawbacks(address: str) -> tuple[bool, bool, bool, bool, bool]:
        version = _version(address)
        other_family = like is not None and version != _version(like)
        is_link_local = ipaddress.ip_address(address).is_link_local
        return address != like, _is_loopback(address), is_link_local, other_family, version == 6

    return min(addresses, key=drawbacks)


def _seen_from(
    masters: Sequence[Address], received: tuple[str, str, str], listening: str | None, towards: Towards
) -> str:
    """Returns the driver's address as the master sees it, because its name only leads back to this machine."""
    host, loopback, master = received
    problem = "Nothing says where the master is."
    for place in masters:
        try:
            address = towards(place)
        except NetworkError as error:
            problem = str(error)
            continue
        if listening is None or _is_unspecified(listening) or listening == address:
            return address
        problem = f"The driver listens on {listening} alone, and reaches the master from {address}."
    raise ClusterError(
        f"spark.driver.host: expected an address of the driver that executors reach. Received: {host!r}, which is "
        f"{loopback} on the driver, with master {master!r}. {problem} Set spark.driver.host to the driver's address.",
        topic="addresses",
    )


def _require_one_family(advertised: str, listening: str) -> None:
    # A socket that listens on "::" takes IPv4, too; none that listens on an IPv4 address takes IPv6.
    if _version(advertised) == _version(listening) or (_is_unspecified(listening) and _version(listening) == 6):
        return
    wildcard = "::" if _version(advertised) == 6 else "0.0.0.0"
    raise ClusterError(
        f"spark.driver.bindAddress: expected an IPv{_version(advertised)} address, as that of spark.driver.host is "
        f"({advertised}). Received: {listening}. Set it to {advertised}, or to {wildcard} for all addresses.",
        topic="addresses",
    )


def _bare(host: str) -> str:
    """Returns a host without the brackets that Spark puts around IPv6 addresses."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(_bare(host))
    except ValueError:
        return False
    return True


def _version(address: str) -> int:
    return ipaddress.ip_address(address).version


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_unspecified(address: str) -> bool:
    return ipaddress.ip_address(address).is_unspecified
