"""Which addresses the processes of a run give each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elephant.cluster.client_address import client_addresses
from elephant.cluster.sessions import is_remote
from elephant.errors import ClusterError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def driver_addresses(session: SparkSession) -> tuple[str, str]:
    """Returns the address that executors reach the driver at, and the one that it binds to."""
    if is_remote(session):
        return client_addresses(session)
    advertised = session.conf.get("spark.driver.host", None)
    if not advertised:
        raise ClusterError("expected spark.driver.host to be set. Received: nothing.")
    bind = session.conf.get("spark.driver.bindAddress", None) or advertised
    return advertised, bind
