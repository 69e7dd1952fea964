"""Limits on the processes of an executor that wait, with Keras imported or for functions, as the cluster sets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elephant.cluster.session import setting
from elephant.config import Timeouts
from elephant.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTING = "spark.elephant.warmWorkers"
# One for training and one for inference, whose environments may differ.
_AUTO = 2


@dataclass(frozen=True, kw_only=True)
class WarmWorkers:
    """Limits on the processes of an executor that have imported and wait: their number, and for how long.

    Args:
        limit: Processes with Keras that wait on each executor at most, and those for functions beside them; zero
            starts every process of a rank fresh.
        idle_s: Seconds without a fit or run after which they end.
    """

    limit: int = 0
    idle_s: float = 300.0


COLD = WarmWorkers()


def warm_workers(session: SparkSession | None, timeouts: Timeouts | None = None) -> WarmWorkers:
    """Returns how many processes may wait, as the cluster's setting says.

    Args:
        session: The Spark session; None where there is none yet.
        timeouts: Of the fit or run; None for inference.

    Raises:
        ConfigurationError: The setting is no number.
    """
    number = "auto" if session is None else setting(session, SETTING) or "auto"
    if number != "auto" and not number.isdigit():
        raise ConfigurationError(f"{SETTING}: expected 'auto' or an integer of at least 0. Received: {number!r}.")
    return WarmWorkers(limit=_AUTO if number == "auto" else int(number), idle_s=(timeouts or Timeouts()).warm_s)
