"""Launchers: they start the ranks of a run, to which `elephant.driver.run_ranks` listens.

Ranks that need each other run in a barrier stage, or, where executors come and go, in ordinary tasks that meet;
workers that go at their own pace in ordinary tasks; and ranks of a test as processes of this machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import pyarrow as pa

from elephant.cluster.addresses import driver_addresses
from elephant.cluster.broadcast import for_tasks, in_task
from elephant.cluster.executors import ExecutorAbsence, profile_of
from elephant.cluster.spark_job import SparkJob
from elephant.config import Timeouts
from elephant.driver.coordinator import RunningJob
from elephant.task.rank_task import RankTask, run_partition, run_restartable_partition, run_worker
from elephant.task.specs import RunContext, ServerAddresses, TaskSpec

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

    from elephant.cluster.row_source import RowSource, TaskFunction

LOOPBACK = "127.0.0.1"
# How long processes of this machine may take to hear that the run is over.
_DISMISSED_WITHIN_S = 2.0


class RankJob(RunningJob, Protocol):
    """Ranks that were started; see `elephant.cluster.spark_job.SparkJob`."""

    @property
    def rows(self) -> Sequence[Any]:
        """Rows of `elephant.task.task.result_rows`, when all have ended well."""

    def cancel(self) -> None:
        """Ends the ranks."""


class Launcher(ABC):
    """Starts the ranks of one run."""

    @property
    @abstractmethod
    def addresses(self) -> tuple[str, str]:
        """Address that ranks reach this process at, and the one that it listens on."""

    @abstractmethod
    def start(self, spec: TaskSpec, run: RunContext) -> RankJob:
        """Starts all ranks.

        Args:
            spec: What the run asks for.
            run: Which attempt this is, and how to reach the coordinator.
        """

    def watch(self, timeouts: Timeouts) -> Callable[[], None] | None:
        """Returns a function that raises ClusterError where the ranks can never end; None where that cannot be."""
        return None

    def close(self) -> None:
        """Ends ranks that may outlive the run; of a Spark job none do."""
        return


class SparkLauncher(Launcher):
    """Starts each rank beside a task of one Spark job.

    Args:
        rows: The rows, a partition for each task.
    """

    is_barrier: ClassVar[bool]

    def __init__(self, rows: RowSource) -> None:
        self._rows = rows

    @property
    def addresses(self) -> tuple[str, str]:
        return driver_addresses(self._rows.session)

    @abstractmethod
    def task(self, spec: TaskSpec, run: RunContext) -> TaskFunction:
        """Returns the function of each task."""

    def start(self, spec: TaskSpec, run: RunContext) -> SparkJob:
        session = self._rows.session
        profile = profile_of(session, spec.plan.profile)
        job = in_task(spec.job)
        spec = replace(spec, job=for_tasks(session, job, len(job)))
        action = functools.partial(self._rows.run, self.task(spec, run), barrier=self.is_barrier, profile=profile)
        return SparkJob(session, f"elephant-{run.run_id}", action)

    def watch(self, timeouts: Timeouts) -> Callable[[], None]:
        return ExecutorAbsence(self._rows.session, timeouts.executor_patience_s).check


class SparkBarrierLauncher(SparkLauncher):
    """Starts ranks that need each other: Spark runs all tasks of a barrier stage at the same time."""

    is_barrier = True

    def task(self, spec: TaskSpec, run: RunContext) -> TaskFunction:
        return functools.partial(run_partition, spec, run)


class SparkRestartableLauncher(SparkLauncher):
    """Starts ranks that need each other, each of which Spark runs again alone when its task is lost."""

    is_barrier = False

    def task(self, spec: TaskSpec, run: RunContext) -> TaskFunction:
        return functools.partial(run_restartable_partition, spec, run)


class SparkTaskLauncher(SparkLauncher):
    """Starts workers that go at their own pace, each of which Spark runs again when it is lost.

    Args:
        rows: The rows, a partition for each task.
        servers: The parameter servers.
    """

    is_barrier = False

    def __init__(self, rows: RowSource, servers: ServerAddresses) -> None:
        super().__init__(rows)
        self._servers = servers

    def task(self, spec: TaskSpec, run: RunContext) -> TaskFunction:
        return functools.partial(run_worker, spec, run, self._servers)


class LocalLauncher(Launcher):
    """Starts ranks as processes of this machine, without Spark.

    Args:
        rows: Record batches of each rank, of which there are as many.
    """

    addresses = (LOOPBACK, LOOPBACK)

    def __init__(self, rows: Sequence[Sequence[pa.RecordBatch]]) -> None:
        self._rows = rows
        self._closing = contextlib.ExitStack()

    def start(self, spec: TaskSpec, run: RunContext) -> LocalJob:
        job = LocalJob(spec, run, self._rows)
        self._closing.callback(job.close)
        return job

    def close(self) -> None:
        self._closing.close()


class LocalJob:
    """Ranks of one run, each beside a thread of this process, which does what a Spark task does elsewhere.

    Args:
        spec: What the run asks for.
        run: How to reach the coordinator.
        rows: Record batches of each rank.
    """

    def __init__(self, spec: TaskSpec, run: RunContext, rows: Sequence[Sequence[pa.RecordBatch]]) -> None:
        contexts = [cast("BarrierTaskContext", LocalContext(rank, len(rows))) for rank in range(len(rows))]
        self._tasks = [RankTask(spec, run, context) for context in contexts]
        self._pool = ThreadPoolExecutor(len(rows), thread_name_prefix="elephant-task")
        self._ends = [
            self._pool.submit(_rows_of, task, batches) for task, batches in zip(self._tasks, rows, strict=True)
        ]

    @property
    def running(self) -> bool:
        """True if a rank has not ended yet."""
        return not all(end.done() for end in self._ends)

    @property
    def error(self) -> Exception | None:
        """Error of the first task that has failed."""
        errors = (end.exception() for end in self._ends if end.done())
        return next((error for error in errors if isinstance(error, Exception)), None)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of `elephant.task.task.result_rows`, when all have ended well."""
        return [row for end in self._ends for row in end.result()]

    def cancel(self) -> None:
        """Does nothing: ranks end when the channel dismisses them."""

    def close(self) -> None:
        """Ends ranks that have not heard of the end of the run, and waits for all."""
        wait(self._ends, timeout=_DISMISSED_WITHIN_S)
        for task in self._tasks:
            task.kill()
        self._pool.shutdown()


def _rows_of(task: RankTask, batches: Sequence[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [{"rank": rank, "result": result} for rank, result in task.rows(batches)]


@dataclass(frozen=True)
class LocalContext:
    """One rank's place among those of this machine, with the methods of `pyspark.BarrierTaskContext`.

    Args:
        rank: The rank.
        num_ranks: How many there are.
    """

    rank: int
    num_ranks: int
    address: str = f"{LOOPBACK}:0"

    def getTaskInfos(self) -> list[LocalContext]:
        """Returns all ranks; each has an address."""
        return [self] * self.num_ranks

    def partitionId(self) -> int:
        """Returns the rank."""
        return self.rank

    def taskAttemptId(self) -> int:
        """Returns the rank: there is one attempt."""
        return self.rank

    def attemptNumber(self) -> int:
        """Returns zero: there is one attempt."""
        return 0

    def cpus(self) -> int:
        """Returns the rank's share of the cores."""
        return max((os.cpu_count() or 1) // self.num_ranks, 1)

    def resources(self) -> dict[str, Any]:
        """Returns nothing: there are no devices."""
        return {}
