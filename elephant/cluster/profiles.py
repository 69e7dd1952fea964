"""Spark's resource profiles, made once for each session: Spark keeps every one that it was ever told of."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from elephant.cluster.resources import TaskProfile

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_made: weakref.WeakKeyDictionary[SparkSession, dict[TaskProfile, ResourceProfile]] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def profile_of(session: SparkSession, profile: TaskProfile | None) -> ResourceProfile | None:
    """Returns a profile as Spark takes it; None for none.

    Where executors come and go, Spark starts some for every new profile, though it be equal to an older one.

    Args:
        session: The Spark session.
        profile: What each task is to have, or None.
    """
    if profile is None:
        return None
    with _making:
        made = _made.setdefault(session, {})
        if profile not in made:
            made[profile] = profile.build()
        return made[profile]
