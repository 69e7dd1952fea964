"""The Spark session that doctor looks at, when none is given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_WORKERS = 2
_APP_NAME = "elephant doctor"


def submitted() -> bool:
    """Returns whether this process was started by ``spark-submit``, which has a session for it."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def start_session(
    *, master: str | None, remote: str | None, conf: Mapping[str, str], workers: int | None
) -> SparkSession:
    """Starts a session, or takes that of ``spark-submit``.

    Args:
        master: A Spark master; None for another kind.
        remote: A Spark Connect server; None for another kind.
        conf: Settings of the user's.
        workers: Workers of the fit, as many of which a session on this machine gets.
    """
    from pyspark.sql import SparkSession

    from elephant.cluster.local import local_session

    if master is None and remote is None and not submitted():
        return local_session(workers or DEFAULT_WORKERS, app_name=_APP_NAME, conf=conf)
    builder = SparkSession.builder.appName(_APP_NAME)
    if remote is not None:
        builder = builder.remote(remote)
    elif master is not None:
        # Otherwise the progress bar is written into the table.
        builder = builder.master(master).config("spark.ui.showConsoleProgress", "false")
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
