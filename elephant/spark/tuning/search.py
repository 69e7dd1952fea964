"""Search for the best params of an estimator: trials that Optuna suggests, each of them a fit."""

from __future__ import annotations

import contextlib
import importlib
import math
import secrets
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from pyspark import inheritable_thread_target

from elephant.checkpoint.retention import Objective
from elephant.cluster.session import is_remote, jvm_context
from elephant.errors import ConfigurationError, brief_errors, expect, warn_user
from elephant.kinds import METRIC
from elephant.options import OPTIONS
from elephant.spark.file_formats import Files
from elephant.spark.prepared import PreparedFrame
from elephant.spark.training_data import active_session, dataset_of
from elephant.spark.tuning.folds import folded, refuse_conflicts
from elephant.spark.tuning.pruning import Pruning, search_ended
from elephant.spark.tuning.reading_ahead import prepared
from elephant.spark.tuning.trial_runs import TrialRun, TrialRuns

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
        best: The fitted model of the best trial of this search; after a refit, a model with the best params of the
            study on all rows. None where no trial has ended well, and with folds where there was no refit.
        is_whole: Whether all trials that were asked for have ended, and the refit; not after an interrupt.
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
        """The metric of the best trial; with folds, the mean over them."""
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
    folds: int | None = None,
    refit: bool | None = None,
) -> SearchResult:
    """Fits an estimator with params that Optuna suggests, several at the same time, and returns the best model.

    Rows of a DataFrame are read once for all trials; see `elephant.prepared`. The driver tells Optuna the metric of
    each epoch, and its pruner ends a trial that is worse than others were. An interrupt (Ctrl-C) ends the trials that
    run, and keeps those that have ended. Where a run of MLflow is active, or MLflow logs by itself, each trial is a run
    within it.

    Args:
        estimator: What the trials have in common; it stays as it is. It has rows for validation where the metric is one
            of these, and there are no folds.
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
        seed: Of the sampler of a study that is made here, and of the folds.
        folds: Of k-fold cross-validation, 2 or more: each trial is so many fits, one after the other, each with another
            part of the rows for validation, and is compared by the mean of their metrics. What the pruner hears of an
            epoch is the mean of the folds that have ended and of this epoch. None fits once for each trial.
        refit: Whether to fit the best params of the study again on all rows, those for validation too. None does with
            folds, whose models have each seen only a part of the rows.

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
        >>> found = elephant.search(estimator, train_df, {"batchSize": [32, 128]}, folds=5)  # doctest: +SKIP
        >>> found.best_value, found.study.best_trial.user_attrs["folds"]  # doctest: +SKIP
    """
    for name, count in (("trials", trials), ("parallelism", parallelism)):
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        expect(is_count, name, "a whole number, 1 or more", count)
    if folds is not None:
        is_count = isinstance(folds, int) and not isinstance(folds, bool) and folds >= 2
        expect(is_count, "folds", "a whole number, 2 or more, or None", folds)
        refuse_conflicts(estimator, () if callable(space) else space)
    try:
        objective = Objective.of(METRIC.value_of(metric))
    except ValueError as error:
        raise ConfigurationError(f"metric: {error}") from None
    library = _optuna()
    study = _study(library, study, objective, seed)
    rows: Any = dataset_of(dataset)
    with contextlib.ExitStack() as closing:
        if folds is not None:
            rows = closing.enter_context(folded(rows, estimator, folds, seed))
        elif not isinstance(rows, (Files, PreparedFrame)):
            rows = closing.enter_context(prepared(rows, estimator))
        session = active_session("read the files", "search") if isinstance(rows, Files) else rows.sparkSession
        runs = closing.enter_context(TrialRuns.opened())
        searching = Search(library, study, estimator, rows, space, objective, session, runs, folds)
        is_whole = searching.run(trials, parallelism)
        best = searching.best
        if is_whole and (folds is not None if refit is None else refit):
            try:
                best = searching.refitted()
            except KeyboardInterrupt:
                is_whole = False
            except Exception as error:
                # Hours of trials are worth more.
                is_whole = False
                warn_user(f"The best params could not be fitted on all rows: {type(error).__name__}: {error}")
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
        best: The fitted model of the best trial so far, of those that ended here; None with folds.
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
        folds: int | None,
    ) -> None:
        self._library, self._study, self._estimator, self._rows = library, study, estimator, rows
        self._space, self._objective, self._session, self._runs = space, objective, session, runs
        self._folds = folds
        self._tag = f"elephant-search-{secrets.token_hex(8)}"
        self._stopped = threading.Event()
        self._comparing = threading.Lock()
        self.best: KerasModel | None = None
        self._best_params: Mapping[str, Any] = {}
        self._best_number: int | None = None
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
                if self._best_number is None:
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
        params = self._params_of(trial)
        with self._tagged(), self._runs.run_of(trial.number, trial.params) as run:
            fitted, values = self._fits(params, trial, run)
            run.end_with(values)
        mean = statistics.fmean(values)
        if not math.isfinite(mean):
            return math.nan
        value = mean if self._objective.more_is_better else -mean
        with self._comparing:
            if value > self._best_value:
                self.best = fitted if self._folds is None else None
                self._best_params, self._best_number, self._best_value = params, trial.number, value
        return mean

    def _params_of(self, trial: optuna.trial.BaseTrial) -> Mapping[str, Any]:
        """Returns params of the estimator for what a trial suggests."""
        if callable(self._space):
            return self._space(cast("optuna.Trial", trial))
        return {name: self._suggested(trial, name, values) for name, values in self._space.items()}

    def _suggested(self, trial: optuna.trial.BaseTrial, name: str, values: Any) -> Any:
        distributions = self._library.distributions
        if isinstance(values, distributions.FloatDistribution):
            return trial.suggest_float(name, values.low, values.high, step=values.step, log=values.log)
        if isinstance(values, distributions.IntDistribution):
            return trial.suggest_int(name, values.low, values.high, step=values.step, log=values.log)
        is_distribution = isinstance(values, distributions.CategoricalDistribution)
        return trial.suggest_categorical(name, values.choices if is_distribution else list(values))

    def _fits(self, params: Mapping[str, Any], trial: optuna.Trial, run: TrialRun) -> tuple[KerasModel, list[float]]:
        """Fits once, or once for each fold; returns the last model, and the metric of each one's last epoch.

        Folds follow each other, so that a trial takes the slots of one fit, and a pruned one costs no more of them. No
        fit follows one whose metric is not finite.
        """
        estimator, values = self._estimator.copy().setParams(**params), list[float]()
        # Of these, Spark's pages tell.
        told = {option.param: params[option.param] for option in OPTIONS if option.param in params}
        told.pop("driverCallbacks", None)
        epochs, pruned, is_stopped = estimator.getOrDefault("epochs"), self._library.TrialPruned, self._stopped.is_set
        if self._folds is not None:
            refuse_conflicts(estimator)
        for fold in [None] if self._folds is None else range(self._folds):
            if is_stopped():
                raise search_ended()
            rows = self._rows if fold is None else self._rows.with_validation(replace(self._rows.fold, number=fold))
            pruning = Pruning(trial, self._objective, pruned, is_stopped, tuple(values), fold, epochs)
            listeners = [*estimator.getOrDefault("driverCallbacks"), pruning]
            with run.of_fold(fold):
                fitted = estimator.copy().setParams(driverCallbacks=listeners).fit(rows, **told)
            values.append(float(fitted.history[self._objective.metric][-1]))
            if fold is not None:
                trial.set_user_attr("folds", list(values))
            if not math.isfinite(values[-1]):
                break
        return fitted, values

    def refitted(self) -> KerasModel | None:
        """Fits the best params of the study on all rows, those for validation too; None where no trial has ended well.

        Those of a trial that ended in an earlier search are made of what Optuna suggested then.
        """
        try:
            best = self._study.best_trial
        except ValueError:
            return None
        params = self._best_params
        if best.number != self._best_number:
            params = self._params_of(self._library.trial.FixedTrial(best.params, best.number))
        estimator = self._estimator.copy().setParams(**{**params, "validationFraction": 0.0})
        estimator.clear(estimator.validationIndicatorCol)
        return estimator.fit(self._rows)
