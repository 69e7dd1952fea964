"""Search for the best params of an estimator: trials that Optuna suggests, each of them a fit."""

from __future__ import annotations

import contextlib
import importlib
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import keras
from pyspark import inheritable_thread_target

from elephant.checkpoint.retention import Objective
from elephant.cluster.session import is_remote, jvm_context
from elephant.errors import ConfigurationError, JobCancelledError, brief_errors, expect
from elephant.kinds import METRIC
from elephant.spark.file_formats import Files
from elephant.spark.prepared import PreparedFrame
from elephant.spark.training_data import active_session, dataset_of
from elephant.spark.tuning.reading_ahead import prepared
from elephant.spark.tuning.trial_runs import TrialRuns

if TYPE_CHECKING:
    import optuna
    from pyspark.sql import SparkSession

    from elephant.spark.estimator import Dataset, KerasEstimator
    from elephant.spark.model import KerasModel

    Space = Mapping[str, Any] | Callable[[optuna.Trial], Mapping[str, Any]]

_LOOK_S = 0.5


@dataclass(frozen=True)
class SearchResult:
    """Outcome of a search.

    Args:
        study: All trials, as Optuna has them.
        best: The fitted model of the best one of this search; None where none of its trials was the best of the study.
        is_whole: Whether all trials that were asked for have ended; not after an interrupt.
    """

    study: optuna.Study
    best: KerasModel | None = field(repr=False)
    is_whole: bool = True

    @property
    def best_params(self) -> dict[str, Any]:
        """The suggestions of Optuna to the best trial, by name."""
        return dict(self.study.best_params)

    @property
    def best_value(self) -> float:
        """The metric of the best trial."""
        return float(self.study.best_value)


@brief_errors
def search(
    estimator: KerasEstimator,
    dataset: Dataset,
    space: Space,
    *,
    trials: int = 20,
    parallelism: int = 1,
    metric: str = "val_loss",
    study: optuna.Study | None = None,
    seed: int = 0,
    refit: bool = False,
) -> SearchResult:
    """Fits an estimator with params that Optuna suggests, several at the same time, and returns the best model.

    Rows of a DataFrame are read once for all trials; see `elephant.prepared`. The driver tells Optuna the metric of
    each epoch, and its pruner ends a trial that is worse than others were. An interrupt (Ctrl-C) ends the trials that
    run, and keeps those that have ended. Where a run of MLflow is active, or MLflow logs by itself, each trial is a run
    within it.

    Args:
        estimator: What the trials have in common; it stays as it is. It has rows for validation where the metric is one
            of these.
        dataset: What `elephant.KerasEstimator.fit` takes, or what `elephant.prepared` returned.
        space: Params of the estimator by name, each with the values to choose from, or a distribution of
            `optuna.distributions`. Or a function that takes a trial of Optuna and returns params, such as a ``model``
            that it has built.
        trials: How many are to end in the study, with those that have ended before.
        parallelism: Trials at the same time. Each takes the task slots of a fit; where there are fewer, they wait.
        metric: Of the last epoch, such as ``"val_accuracy"``; ``":max"`` or ``":min"`` behind it where the name does
            not say which way is better.
        study: Goes on with this one, which may lie in a data base. None makes one in memory, with a TPE sampler
            (Bergstra et al., 2011, section 4) and a median pruner.
        seed: Of the sampler of a study that is made here.
        refit: Whether to fit the best params again on all rows, those for validation too.

    Raises:
        ConfigurationError: An argument is out of its range, or the fit has no such metric.
        ModuleNotFoundError: Optuna is not installed.
        ElephantError: A trial has failed; the others are ended, and the study keeps what was done.
        KeyboardInterrupt: Before any trial has ended well.

    Examples:
        >>> found = elephant.search(  # doctest: +SKIP
        ...     estimator, train_df, {"learningRate": FloatDistribution(1e-4, 0.1, log=True), "batchSize": [32, 128]}
        ... )
        >>> found.best_params, found.best.transform(test_df)  # doctest: +SKIP
    """
    for name, count in (("trials", trials), ("parallelism", parallelism)):
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        expect(is_count, name, "a whole number, 1 or more", count)
    try:
        objective = Objective.of(METRIC.value_of(metric))
    except ValueError as error:
        raise ConfigurationError(f"metric: {error}") from None
    library = _optuna()
    study = _study(library, study, objective, seed)
    rows: Any = dataset_of(dataset)
    with contextlib.ExitStack() as closing:
        if not isinstance(rows, (Files, PreparedFrame)):
            rows = closing.enter_context(prepared(rows, estimator))
        session = active_session("read the files", "search") if isinstance(rows, Files) else rows.sparkSession
        runs = closing.enter_context(TrialRuns.opened())
        searching = Search(library, study, estimator, rows, space, objective, session, runs)
        is_whole = searching.run(trials, parallelism)
        best = searching.best
        if refit and is_whole and best is not None:
            best = searching.refitted()
    return SearchResult(study=study, best=best, is_whole=is_whole)


def _optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"elephant.search: expected optuna to be installed. Received: {error}. Run pip install "
            "'elephant-spark[tune]'.",
            name=error.name,
        ) from None


def _study(library: Any, given: optuna.Study | None, objective: Objective, seed: int) -> optuna.Study:
    direction = "maximize" if objective.more_is_better else "minimize"
    if given is None:
        sampler = library.samplers.TPESampler(seed=seed)
        pruner = library.pruners.MedianPruner()
        made: optuna.Study = library.create_study(direction=direction, sampler=sampler, pruner=pruner)
        return made
    if [one.name.lower() for one in given.directions] != [direction]:
        raise ConfigurationError(
            f"study: expected one that is to {direction} {objective.metric}. Received: "
            f"{', '.join(one.name.lower() for one in given.directions)}. Create it with direction={direction!r}."
        )
    return given


class Search:
    """Trials of one study, some at the same time, until there are enough or somebody interrupts.

    Attributes:
        best: The fitted model of the best trial so far, of those that ended here.
    """

    def __init__(
        self,
        library: Any,
        study: optuna.Study,
        estimator: KerasEstimator,
        rows: Any,
        space: Space,
        objective: Objective,
        session: SparkSession,
        runs: TrialRuns,
    ) -> None:
        self._library, self._study, self._estimator, self._rows = library, study, estimator, rows
        self._space, self._objective, self._session, self._runs = space, objective, session, runs
        self._tag = f"elephant-search-{secrets.token_hex(8)}"
        self._stopped = threading.Event()
        self._comparing = threading.Lock()
        self.best: KerasModel | None = None
        self._best_params: Mapping[str, Any] = {}
        self._best_value = -math.inf

    def run(self, trials: int, parallelism: int) -> bool:
        """Runs trials until so many of the study have ended; returns false where they were interrupted before.

        Raises:
            Exception: What a trial has raised.
        """
        states = self._library.trial.TrialState
        ended = len(self._study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED)))
        left = max(trials - ended, 0)
        # Spark's own properties, such as the scheduler pool, are those of the calling thread.
        trial = inheritable_thread_target(self._session)(self._try_once)
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(parallelism, thread_name_prefix="elephant-trial") as pool:
            try:
                while left or running:
                    while left and len(running) < parallelism:
                        running.add(pool.submit(trial))
                        left -= 1
                    done, running = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                    for one in done:
                        one.result()
            except KeyboardInterrupt:
                self._stop(running)
                if self.best is None:
                    raise
                return False
            except BaseException:
                self._stop(running)
                raise
        return True

    def _stop(self, running: set[Future[None]]) -> None:
        """Ends the trials that run, and waits for them."""
        self._stopped.set()
        while running:
            with contextlib.suppress(Exception):
                self._cancel_jobs()
            _, running = wait(running, timeout=_LOOK_S)

    def _cancel_jobs(self) -> None:
        context = jvm_context(self._session)
        if context is not None:
            context.cancelJobsWithTag(self._tag)
        elif is_remote(self._session):
            self._session.interruptTag(self._tag)

    @contextlib.contextmanager
    def _tagged(self) -> Iterator[None]:
        """Marks the jobs that this thread begins, so that another one can end them."""
        spark: Any = jvm_context(self._session) or (self._session if is_remote(self._session) else None)
        if spark is None:
            yield
            return
        add, remove = ("addTag", "removeTag") if is_remote(self._session) else ("addJobTag", "removeJobTag")
        getattr(spark, add)(self._tag)
        try:
            yield
        finally:
            with contextlib.suppress(Exception):
                getattr(spark, remove)(self._tag)

    def _try_once(self) -> None:
        """Has Optuna run one trial."""
        if self._stopped.is_set():
            return
        try:
            self._study.optimize(self._value_of, n_trials=1)
        except BaseException:
            # One that was ended says nothing of use.
            if not self._stopped.is_set():
                raise

    def _value_of(self, trial: optuna.Trial) -> float:
        """Fits with what Optuna suggests; returns the metric, or NaN, by which Optuna takes this trial for failed."""
        if callable(self._space):
            params = self._space(trial)
        else:
            params = {name: self._suggested(trial, name, values) for name, values in self._space.items()}
        with self._tagged(), self._runs.run_of(trial.number, trial.params) as run:
            fitted = self._fit(params, trial)
            run.end_with(self._objective.metric, fitted.history)
        value = self._objective.value_of(fitted.history)
        if value is None:
            return math.nan
        with self._comparing:
            if value > self._best_value:
                self.best, self._best_params, self._best_value = fitted, params, value
        return value if self._objective.more_is_better else -value

    def _suggested(self, trial: optuna.Trial, name: str, values: Any) -> Any:
        distributions = self._library.distributions
        if isinstance(values, distributions.FloatDistribution):
            return trial.suggest_float(name, values.low, values.high, step=values.step, log=values.log)
        if isinstance(values, distributions.IntDistribution):
            return trial.suggest_int(name, values.low, values.high, step=values.step, log=values.log)
        is_distribution = isinstance(values, distributions.CategoricalDistribution)
        return trial.suggest_categorical(name, values.choices if is_distribution else list(values))

    def _fit(self, params: Mapping[str, Any], trial: optuna.Trial) -> KerasModel:
        estimator = self._estimator.copy().setParams(**params)
        telling = _Telling(trial, self._objective, self._library.TrialPruned, self._stopped.is_set)
        listeners = [*estimator.getOrDefault("driverCallbacks"), telling]
        return estimator.setParams(driverCallbacks=listeners).fit(self._rows)

    def refitted(self) -> KerasModel:
        """Fits the best params once more, on the rows for validation too."""
        estimator = self._estimator.copy().setParams(**self._best_params, validationFraction=0.0)
        estimator.clear(estimator.validationIndicatorCol)
        return estimator.fit(self._rows)


class _Telling(keras.callbacks.Callback):
    """Tells Optuna the metric of each epoch, and ends a trial that it prunes; runs on the driver."""

    def __init__(
        self, trial: optuna.Trial, objective: Objective, pruned: type[Exception], is_stopped: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._trial, self._objective, self._pruned, self._is_stopped = trial, objective, pruned, is_stopped

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        history = {name: [value] for name, value in (logs or {}).items()}
        self._objective.require_in(history, "metric")
        if self._is_stopped():
            raise JobCancelledError("the search was ended")
        value = self._objective.value_of(history)
        if value is not None:
            self._trial.report(value if self._objective.more_is_better else -value, epoch)
            if self._trial.should_prune():
                raise self._pruned(f"after epoch {epoch + 1}")
