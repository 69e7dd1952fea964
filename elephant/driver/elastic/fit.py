"""Elastic fit from the driver: it looks at the cluster's slots, and begins attempts with as many workers as they allow.

Spark has no executors to spare where it starts them as tasks wait for them (dynamic allocation). There a small job asks
for them, whose tasks do nothing but wait, and is cancelled when the fit takes their place.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elephant.checkpoint.manager import CheckpointSink
from elephant.checkpoint.state import FitState
from elephant.cluster.checks.preflight import active_stages
from elephant.cluster.executors import TaskProfile, allocates_dynamically, count_slots, patient
from elephant.cluster.gpu_plan import ResourceRequest, plan, scheduling_settings
from elephant.cluster.session import is_true, jvm_context, local_cores, setting
from elephant.cluster.spark_job import SparkJob, counted, described
from elephant.config import FitConfig
from elephant.driver.coordinator_location import coordinates_on_executors
from elephant.driver.elastic.policy import Action, ElasticPolicy
from elephant.errors import ClusterError, ConfigurationError, UnsupportedError
from elephant.monitor.progress import Progress
from elephant.rank.job import TrainingJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 0.5
# Executors that are started on demand come one after the other: after so long without another one, no more will.
_SETTLED_S = 8.0
# Longer than anybody waits; whoever has asked cancels the job before.
_HELD_MS = 3_600_000
_SPECULATION = "spark.speculation"
# Tag of the jobs that ask.
_ASKING = "elephant-asks-for-slots"


class SlotsFreedError(Exception):
    """The attempt is to end here: more workers can go on from the state of this epoch's end."""


class ElasticFit:
    """Attempts of one elastic fit.

    Args:
        policy: Decides.
        slots: Returns the task slots that are free for the fit, when it has so many; None where that is unknown.
        asked: Asks for so many slots within a ``with`` block; does nothing where all that there are run already.
        is_dynamic: Whether executors are started as tasks wait for them.

    Attributes:
        policy: As given.
        sizes: Workers of each attempt so far.
        is_dynamic: As given.
    """

    def __init__(
        self,
        policy: ElasticPolicy,
        progress: Progress,
        *,
        slots: Callable[[int], int | None],
        asked: Callable[[int], contextlib.AbstractContextManager[None]],
        is_dynamic: bool,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.sizes: list[int] = []
        self.is_dynamic = is_dynamic
        self._progress = progress
        self._slots = slots
        self._asked = asked
        self._pause = pause
        self._clock = clock

    @classmethod
    def of(cls, session: SparkSession, job: TrainingJob, progress: Progress) -> ElasticFit | None:
        """Returns the attempts of a fit on a cluster; None where its number of workers does not change.

        Raises:
            UnsupportedError: The session does not tell its slots, or is otherwise none for an elastic fit.
        """
        config = job.config
        if config.elastic is None:
            return None
        least, most = config.elastic
        _require_session(session, config.elastic)
        master = setting(session, "spark.master") or ""
        slots_s, least_s = 0.0, 0.0
        # A local master has all its slots at once.
        if local_cores(master) is None:
            slots_s = config.timeouts.slot_patience_s
            least_s = patient(session, config.timeouts, least).slot_patience_s
        policy = ElasticPolicy(least, most, slots_s=slots_s, least_s=least_s, max_restarts=config.max_restarts)
        is_dynamic, profile = allocates_dynamically(session), _profile(session, config)
        if is_dynamic and profile is not None:
            raise UnsupportedError(
                f"numWorkers={config.elastic}: expected tasks of the application's own resources with dynamic "
                f"allocation. Received: a stage that asks for {profile.amount} {profile.resource} besides. Set "
                f"spark.task.resource.{profile.resource}.amount, or pass one number of workers."
            )

        def slots(own: int) -> int | None:
            return free_slots(session, own, profile)

        def asked(number: int) -> contextlib.AbstractContextManager[None]:
            return asked_slots(session, number) if is_dynamic else contextlib.nullcontext()

        return cls(policy, progress, slots=slots, asked=asked, is_dynamic=is_dynamic)

    def sized(self, job: TrainingJob) -> TrainingJob:
        """Returns the job with the workers that the next attempt has, once there are slots for them.

        Raises:
            ClusterError: There are too few for the fewest workers.
        """
        began = changed = self._clock()
        before, noted = -1, False
        with self._asked(self.policy.most):
            while True:
                slots, now = self._slots(0) or 0, self._clock()
                before, changed = slots, changed if slots == before else now
                coming = self.is_dynamic and now - changed < _SETTLED_S
                decision = self.policy.before_attempt(slots, waited_s=now - began, are_coming=coming)
                if decision.action is not Action.WAIT:
                    break
                if not noted:
                    noted = True
                    self._progress.note(f"waiting for task slots: the cluster has {slots} that are free so far")
                self._pause(_POLL_S)
        if decision.action is Action.GIVE_UP:
            raise ClusterError(
                f"numWorkers={(self.policy.least, self.policy.most)}: expected at least "
                f"{counted(self.policy.least, 'task slot')} within {now - began:.0f} s. Received: {slots}. Give the "
                "application more executors or cores, lower the first of the two numbers, or raise "
                "timeouts={'slots_s': ...}. With checkpointPath and resume=True the fit goes on later."
            )
        workers = decision.workers
        if self.sizes and self.sizes[-1] != workers:
            self._progress.note(f"going on with {counted(workers, 'worker')}, {self.sizes[-1]} before")
        elif not self.sizes:
            self._progress.note(f"beginning with {counted(workers, 'worker')} of at most {self.policy.most}")
        self.sizes.append(workers)
        self._progress.expect(workers)
        return replace(job, config=job.config.changed(num_workers=workers))

    @contextlib.contextmanager
    def watched(self, checkpoint_sink: CheckpointSink, epochs: int) -> Iterator[CheckpointSink]:
        """Gives a receiver of an attempt's states that ends the attempt when it is to grow, for the ``with`` block.

        Args:
            checkpoint_sink: What keeps them.
            epochs: Of the fit.
        """
        with contextlib.ExitStack() as asking:
            yield GrowthWatch(checkpoint_sink, self._grows, lambda: self._ask_for_more(asking), epochs=epochs)

    def has_lost_slots(self) -> bool:
        """Returns whether there are fewer slots than the attempt was to have workers: it is to be sized anew."""
        workers = self.policy.workers or 0
        slots = self._slots(workers)
        return slots is not None and slots < workers

    def _ask_for_more(self, asking: contextlib.ExitStack) -> None:
        missing = self.policy.most - (self.policy.workers or 0)
        # Not before the fit itself has its slots, and once for each attempt.
        if self.is_dynamic and missing:
            asking.enter_context(self._asked(missing))

    def _grows(self) -> bool:
        workers = self.policy.workers or 0
        return self.policy.grows_after_epoch(self._slots(workers) or 0)


class GrowthWatch:
    """Receiver of an attempt's states, which looks at the end of each epoch whether more workers can go on.

    Args:
        checkpoint_sink: What keeps them.
        grows: Whether the fit is to start again with more.
        ask: Called at the first end of an epoch.
        epochs: Of the fit; after the last one there is nothing left to grow for.
    """

    def __init__(
        self, checkpoint_sink: CheckpointSink, grows: Callable[[], bool], ask: Callable[[], None], *, epochs: int
    ) -> None:
        self._checkpoint_sink = checkpoint_sink
        self._grows = grows
        self._ask: Callable[[], None] | None = ask
        self._epochs = epochs
        self._is_due = False

    @property
    def is_wanted(self) -> bool:
        """True if somebody has asked for a state since this was read last."""
        return self._checkpoint_sink.is_wanted

    def keep(self, state: FitState) -> bool:
        """Takes a state; returns whether it is a checkpoint."""
        is_end = not state.step and state.epochs < self._epochs and not state.facts.get("stopped")
        self._is_due = self._is_due or is_end
        return self._checkpoint_sink.keep(state)

    def check(self) -> None:
        """Raises SlotsFreedError after an epoch's end where the fit is to grow, or what the other receiver raises."""
        self._checkpoint_sink.check()
        if self._is_due:
            self._is_due = False
            if self._grows():
                raise SlotsFreedError
            ask, self._ask = self._ask, None
            if ask is not None:
                ask()


def _require_session(session: SparkSession, elastic: tuple[int, int]) -> None:
    """Raises UnsupportedError for a session whose slots are unknown, or whose ranks do not report to the driver."""
    if coordinates_on_executors(session):
        raise UnsupportedError(
            f"numWorkers={elastic}: expected executors that reach the driver, which has the state that other workers "
            "go on from. Received: a session in which rank 0 coordinates the fit. Pass one number of workers."
        )
    if count_slots(session) is None or (jvm_context(session) is None and allocates_dynamically(session)):
        raise UnsupportedError(
            f"numWorkers={elastic}: expected a session that tells its task slots. Received: one of Spark Connect that "
            "does not. Pass one number of workers."
        )
    if allocates_dynamically(session) and is_true({_SPECULATION: setting(session, _SPECULATION) or ""}, _SPECULATION):
        raise UnsupportedError(
            f"numWorkers={elastic}: expected {_SPECULATION}=false with dynamic allocation, where workers are ordinary "
            "tasks, of which there may be no second one. Received: true. Set it to false, or pass one number of "
            "workers."
        )


def _profile(session: SparkSession, config: FitConfig) -> TaskProfile | None:
    """Returns the resources of a task besides the application's own; the pre-flight says where they cannot be had."""
    request = replace(ResourceRequest.of_fit(config), synchronous=False)
    try:
        request = request.named_in(session)
        return plan(scheduling_settings(session, request.gpu_resource), request).profile
    except (ClusterError, ConfigurationError):
        return None


def free_slots(session: SparkSession, own: int = 0, profile: TaskProfile | None = None) -> int | None:
    """Returns the task slots that others leave to a fit, with those that it has itself; None where it is unknown.

    Args:
        own: Tasks of the fit that run.
        profile: Of its tasks; None where they take what all tasks of the application do.
    """
    slots = count_slots(session, profile)
    if slots is None:
        return None
    busy = sum(stage.tasks for stage in active_stages(session, _ASKING) if not stage.own)
    return max(slots - max(busy - own, 0), 0)


@contextlib.contextmanager
def asked_slots(session: SparkSession, number: int) -> Iterator[None]:
    """Has Spark start executors for so many tasks, which wait, for the ``with`` block."""
    context: Any = jvm_context(session)

    def wait() -> list[Any]:
        # In this job's own thread: its tasks end when it is cancelled, though they are asleep.
        context.setLocalProperty("spark.job.interruptOnCancel", "true")
        context.addJobTag(_ASKING)
        asleep = f"java_method('java.lang.Thread', 'sleep', {_HELD_MS}L)"
        return list(session.range(0, number, 1, number).selectExpr(f"{asleep} AS slept").collect())

    with described(session, "executors for more workers"):
        job = SparkJob(session, f"elephant-slots-{uuid.uuid4().hex}", wait)
    try:
        yield
    finally:
        job.cancel()
