"""How many workers a fit on an RDD has."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from elephant.cluster.executors import awaited_slots, expected_slots
from elephant.cluster.resources import ResourceRequest, plan
from elephant.cluster.scheduling import scheduling_settings
from elephant.config import FitConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def chosen_workers(
    session: SparkSession,
    config: FitConfig,
    *,
    wanted: int | None,
    num_partitions: int,
    note: Callable[[str], None],
) -> int:
    """Returns the number of workers: what is wanted, or one per partition, as far as they can run at the same time.

    Asynchronous workers that are asked for by number may be more: they take turns.

    Args:
        session: The Spark session.
        config: The options of the fit; its number of workers is not looked at.
        wanted: What the user asks for, or None.
        num_partitions: Partitions of the RDD.
        note: Told what was chosen in place of what.
    """
    asked = replace(config, num_workers=wanted or max(num_partitions, 1))
    settings = scheduling_settings(session, config.gpu_resource)
    profile = plan(settings, ResourceRequest.of_fit(asked)).profile
    servers = config.asynchronous.parameter_servers if config.asynchronous.server_placement == "executors" else 0
    servers = 0 if config.is_synchronous else servers
    if wanted is None:
        slots = expected_slots(session, profile)
        if slots is None or slots - servers >= num_partitions:
            return max(num_partitions, 1)
        chosen = max(slots - servers, 1)
        note(f"{chosen} workers for {num_partitions} partitions: the cluster has {slots} task slots")
        return chosen
    if not config.is_synchronous:
        return wanted
    slots = awaited_slots(session, wanted, config.timeouts.slots_s, note, profile)
    if slots is None or not 0 < slots < wanted:
        return wanted
    warnings.warn(
        f"num_workers={wanted}: expected as many task slots, because synchronous workers take every step together. "
        f"Received: {slots}. The fit has {slots} workers; give the application more executors or cores for more.",
        UserWarning,
        stacklevel=4,
    )
    return slots
