"""Where a client of Spark Connect is, for executors that are to reach it.

``spark.driver.host`` is of no use here: it is where the Connect server runs. The client
takes the address from which it reaches that server, because the executors are near it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elephant.cluster.settings import setting
from elephant.errors import ClusterError
from elephant.net.addresses import address_towards

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTING = "spark.elephant.driver.host"
# No packet is sent to find an address, so that the number has no part in it.
_ANY_PORT = 15002


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
    client = getattr(session, "client", None) or getattr(session, "_client", None)
    host = getattr(client, "host", None)
    if not host:
        raise ClusterError(
            "expected a Spark Connect session that tells the host of its server. Received: "
            f"{type(session).__module__}.{type(session).__qualname__}, which does not. "
            "Set spark.elephant.hosting to executors."
        )
    return str(host).strip("[]")
