"""Ranks as processes of this machine: the same programs, channel, coordinator and collective as on executors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elephant.cluster.gpu_plan import NONE, ResourcePlan
from elephant.config import Timeouts
from elephant.data.schema import RowSpec
from elephant.driver.launcher import LocalLauncher
from elephant.driver.run import function_spec, pickled_call, pickler, unpickled
from elephant.driver.run_ranks import attempt_here, results_of, run_ranks, the_coordinator
from elephant.monitor.progress import Progress
from elephant.task.rendezvous import installed_versions
from elephant.task.specs import TaskSpec

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from elephant.rank.job import TrainingJob


@dataclass(frozen=True, kw_only=True)
class LocalFit:
    """Outcome of a fit by ranks on this machine.

    Args:
        history: One number per epoch, by metric.
        variables: The model's, with those of its optimizer.
        rows: One row of the model's input.
    """

    history: dict[str, list[float]]
    variables: list[np.ndarray]
    rows: RowSpec


def run_here(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    num_workers: int,
    progress: Progress,
    timeouts: Timeouts,
    env: Mapping[str, str],
) -> list[Any]:
    """Runs a function on processes of this machine, and returns its results by rank; see `elephant.testing.run_local`.

    Raises:
        ConfigurationError: Something cannot be pickled.
        WorkerFailure: A rank raised, was killed, or fell silent.
    """
    call = pickled_call(fn, args, kwargs)
    spec = function_spec(call, _plan(num_workers), timeouts, env, progress.shows_output)
    result = functools.partial(results_of, num_workers)
    attempt_on = functools.partial(attempt_here, LocalLauncher, spec, progress, result=result)
    results = run_ranks([()] * num_workers, spec, progress, attempt_on)
    return [unpickled(result, rank) for rank, result in enumerate(results)]


def fit_here(job: TrainingJob, parts: Sequence[pa.RecordBatch], progress: Progress, env: Mapping[str, str]) -> LocalFit:
    """Trains on as many processes of this machine as there are parts of the rows, as a synchronous fit does.

    Args:
        parts: The rows of each rank: the columns of the job's schema, by their roles.
        env: Environment variables for the ranks.

    Raises:
        WorkerFailure: A rank raised, was killed, or fell silent.
    """
    # Keras is imported only where there is a model.
    from elephant.driver.driver_turns import SynchronousEpochs

    turns = SynchronousEpochs(job)
    spec = TaskSpec(
        program="fit",
        driver_versions=installed_versions(),
        job=pickler()(turns.job_of_ranks()),
        backend=job.model.settings.backend,
        schema=job.schema,
        timeouts=job.config.timeouts,
        environment=dict(env),
        shows_output=progress.shows_output,
        plan=_plan(len(parts)),
        encryption=bool(job.config.encryption),
    )
    attempt_on = functools.partial(attempt_here, LocalLauncher, spec, progress, result=the_coordinator, turns=turns)
    with contextlib.closing(turns):
        result = run_ranks([[part] for part in parts], spec, progress, attempt_on).result()
        variables = turns.end(result.variables, result.rows, ())
    return LocalFit(history=result.history, variables=variables, rows=result.rows)


def _plan(num_workers: int) -> ResourcePlan:
    return ResourcePlan(devices=NONE, slots_needed=num_workers)
