"""The resource plan of a session's fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elephant.cluster.resources import ResourcePlan, ResourceRequest, plan
from elephant.cluster.scheduling import scheduling_settings
from elephant.config import FitConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def plan_of_fit(session: SparkSession, config: FitConfig, *, of_frame: bool) -> ResourcePlan:
    """Returns where the devices of a fit's ranks come from; raises what `elephant.cluster.resources.plan` does.

    Args:
        session: The Spark session.
        config: The options of the fit, as the user gave them.
        of_frame: Whether its rows are those of a DataFrame or of files, and not of an RDD.
    """
    request = ResourceRequest(
        num_workers=config.num_workers,
        use_gpu=config.use_gpu,
        gpus_per_worker=config.gpus_per_worker,
        gpu_resource=config.gpu_resource,
        synchronous=config.is_synchronous,
        of_frame=of_frame,
    )
    return plan(scheduling_settings(session, config.gpu_resource), request)
