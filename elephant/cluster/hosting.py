"""Who hosts the channel and the parameter servers of a run: the driver, or, where executors cannot reach it, rank 0.

The driver of a classic session is reached: Spark itself needs that. A client of Spark
Connect reaches its server, and nothing says that executors reach the client: it may sit
behind a firewall, or address translation. So it listens for a moment, and one task of a
small Spark job tries to come to it; what came of it holds as long as the session.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from elephant.cluster.addresses import driver_addresses
from elephant.cluster.door import Door, knock_function
from elephant.cluster.executor_facts import ask_executors
from elephant.cluster.sessions import is_remote
from elephant.cluster.settings import setting
from elephant.errors import ConfigurationError, NetworkError
from elephant.net.addresses import name_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

SETTING = "spark.elephant.hosting"
_AUTO, _DRIVER, _EXECUTORS = "auto", "driver", "executors"
_PROBE_S = 3.0
# The first job of an application starts Python on its executors, which takes a busy machine long.
_ANSWER_S = 120.0
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
    reached = _reached.get(session)
    if reached is None:
        reached = is_reached(session)
    if reached is None:
        # Not known, and tried again for the next fit: rank 0 can host in any case.
        return True
    _reached[session] = reached
    return not reached


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


def is_reached(session: SparkSession) -> bool | None:
    """Returns whether an executor reaches this process, which one task of a small Spark job tries.

    None says that no slot was free for that task in time.
    """
    try:
        advertised, bind = driver_addresses(session)
        door = Door(bind, advertised)
    except NetworkError as error:
        logger.info("this client has no address for executors: %s", error)
        return False
    with door:
        knock = knock_function(door.address, door.token, _PROBE_S)
        try:
            (hindrance,) = ask_executors(session, knock, tasks=1, timeout_s=_ANSWER_S)
        except TimeoutError:
            logger.info("no executor was free to try whether it reaches this client")
            return None
    place = name_of(door.address)
    logger.info("executors %s", f"do not reach this client at {place}: {hindrance}" if hindrance else f"reach {place}")
    return not hindrance
