"""Spark's resource profiles: what the tasks of one stage have, where that is not what the application's tasks have."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession


@dataclass(frozen=True, kw_only=True)
class TaskProfile:
    """What each task of the training stage is to have, where that is not what the application's tasks have.

    Args:
        cpus: Cores.
        resource: What Spark calls the devices.
        amount: Devices.
        held: Devices of each executor that is started for the stage, with dynamic allocation; zero where the stage
            runs on the executors that there are.
        script: What such an executor finds its devices with; empty where it is told of them.
        vendor: Of the devices, which Kubernetes asks for.
    """

    cpus: float
    resource: str
    amount: int
    held: int = 0
    script: str = ""
    vendor: str = ""

    def build(self) -> ResourceProfile:
        """Returns it as Spark takes it."""
        from pyspark.resource import ExecutorResourceRequests, ResourceProfileBuilder, TaskResourceRequests

        builder = ResourceProfileBuilder()
        builder.require(TaskResourceRequests().cpus(self.cpus).resource(self.resource, float(self.amount)))
        if self.held:
            # Cores and memory are those of the application's executors, as long as nobody names them.
            builder.require(
                ExecutorResourceRequests().resource(
                    self.resource, self.held, discoveryScript=self.script, vendor=self.vendor
                )
            )
        return builder.build


_made: weakref.WeakKeyDictionary[SparkSession, dict[TaskProfile, ResourceProfile]] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def profile_of(session: SparkSession, profile: TaskProfile | None) -> ResourceProfile | None:
    """Returns a profile as Spark takes it, made once for each session; None for none.

    Spark keeps every one that it was ever told of. Where executors come and go, it starts some for every new profile,
    though it be equal to an older one.

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
