"""Who hosts the channel and the parameter servers of a run: the driver, or, where executors cannot reach it, rank 0.

The driver of a classic session is reached: Spark itself needs that. A client of Spark
Connect reaches its server, and nothing says that executors reach the client: it may sit
behind a firewall, or address translation. So it listens for a moment, and one task of a
small Spark job tries to come to it; what came of it holds as long as the session.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import uuid
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from elephant.cluster.addresses import driver_addresses
from elephant.cluster.sessions import is_remote
from elephant.cluster.settings import setting
from elephant.errors import ConfigurationError, NetworkError
from elephant.net.addresses import Address, name_of
from elephant.net.deadline import Deadline
from elephant.net.server import Server
from elephant.net.stream import Listener, connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

SETTING = "spark.elephant.hosting"
_AUTO, _DRIVER, _EXECUTORS = "auto", "driver", "executors"
_PROBE_S = 3.0
_REACHED_SCHEMA = "reached boolean"
_reached: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def executors_host(session: SparkSession) -> bool:
    """Returns whether rank 0 is to host what the driver hosts otherwise.

    Args:
        session: The Spark session; its ``spark.elephant.hosting`` decides, unless that is ``auto`` or not set.

    Raises:
        ConfigurationError: The setting has another value.
    """
    wanted = _wanted(session)
    if wanted != _AUTO:
        return wanted == _EXECUTORS
    if not is_remote(session):
        return False
    if session not in _reached:
        _reached[session] = is_reached(session)
    return not _reached[session]


def may_host(session: SparkSession) -> bool:
    """Returns whether rank 0 hosts at least where executors do not reach the driver, so that no fit fails of that.

    Args:
        session: The Spark session.

    Raises:
        ConfigurationError: Its ``spark.elephant.hosting`` has another value.
    """
    wanted = _wanted(session)
    return wanted == _EXECUTORS or (wanted == _AUTO and is_remote(session))


def _wanted(session: SparkSession) -> str:
    wanted = setting(session, SETTING) or _AUTO
    if wanted not in (_AUTO, _DRIVER, _EXECUTORS):
        raise ConfigurationError(f"{SETTING}: expected auto, driver or executors. Received: {wanted!r}.")
    return wanted


def is_reached(session: SparkSession) -> bool:
    """Returns whether an executor reaches this process, which one task of a small Spark job tries."""
    token, run_id = secrets.token_bytes(32), uuid.uuid4().hex
    try:
        advertised, bind = driver_addresses(session)
        listener = Listener.bind(bind, 0)
    except NetworkError as error:
        logger.info("this client has no address for executors: %s", error)
        return False
    with contextlib.closing(Server(listener, token, run_id, _hold)):
        address = (advertised, int(listener.address[1]))
        task = functools.partial(try_to_reach, address, token, run_id)
        rows = session.range(0, 1, 1, 1).mapInArrow(task, _REACHED_SCHEMA).collect()
    reached = bool(rows and rows[0]["reached"])
    logger.info("executors %s this client at %s", "reach" if reached else "do not reach", name_of(address))
    return reached


def _hold(stream: Any) -> None:
    """Leaves a connection to its client, who has shown by now all that there was to show."""


def try_to_reach(
    address: Address, token: bytes, run_id: str, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yields whether this executor reaches the driver; the function that ``mapInArrow`` runs.

    Args:
        address: Host and port of the driver.
        token: Shows that it is the driver.
        run_id: The attempt.
        batches: Spark's, which carry nothing.
    """
    for _ in batches:
        pass
    try:
        connect(address, token=token, context=run_id, deadline=Deadline(_PROBE_S, "reaching the driver")).close()
        reached = True
    except NetworkError:
        reached = False
    yield pa.RecordBatch.from_arrays([pa.array([reached])], ["reached"])
