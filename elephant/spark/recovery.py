"""A fit that survives: it begins where its last checkpoint ended, leaves checkpoints, and starts again when it is lost.

Spark does not run a failed barrier job again, so the driver does, with a new run id: from the last
checkpoint, or from the beginning where there is none. What failed of the user's code or data fails again, and is
not tried twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elephant.checkpoint.manager import Checkpoint, CheckpointStore
from elephant.checkpoint.state import changes_of, joined, require_same_fit
from elephant.checkpoint.writer import Keeper
from elephant.config import FitConfig
from elephant.data.schema import RowSpec
from elephant.errors import CheckpointError, ConfigurationError, TrainingError
from elephant.monitor.progress import Progress
from elephant.spark.checkpoint_folder import checkpoint_folder
from elephant.spark.trained import Trained
from elephant.training.job import TrainingJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Attempt = Callable[[TrainingJob, Keeper | None], Trained]


def require_own_folder(session: SparkSession, config: FitConfig) -> None:
    """Raises ConfigurationError when a fit would leave its checkpoints among those of another one.

    Args:
        session: The Spark session.
        config: The options of the fit.
    """
    if config.checkpoint_path is None:
        return
    manifests = CheckpointStore(checkpoint_folder(session, config.checkpoint_path)).manifests()
    if manifests and not config.resume:
        raise ConfigurationError(
            f"checkpointPath: expected a folder without checkpoints. Received: {config.checkpoint_path}, which has one "
            f"of epoch {manifests[-1].epochs}. Pass resume=True to go on from there, or give the fit another folder, "
            "or remove this one."
        )
    if manifests:
        require_same_fit(_options_of(manifests[-1].facts, config.checkpoint_path), config, config.checkpoint_path)


def _options_of(facts: Mapping[str, Any], url: str) -> Mapping[str, Any]:
    """Returns the options of the fit that has left a checkpoint."""
    options = facts.get("fit")
    if not isinstance(options, Mapping):
        raise CheckpointError(
            f"checkpointPath={url}: expected a checkpoint with the options of its fit. Received: {options!r}. "
            "Restore the folder, or remove it to begin from the first epoch."
        )
    return options


class Recovery:
    """The checkpoints and restarts of one fit.

    Args:
        session: The Spark session.
        config: The options of the fit.
        progress: Told what happens.

    Raises:
        ConfigurationError: There are checkpoints, and the fit is not to go on from them; or they are of another fit.
        CheckpointError: The checkpoints cannot be read.
    """

    def __init__(self, session: SparkSession, config: FitConfig, progress: Progress) -> None:
        require_own_folder(session, config)
        self._config = config
        self._progress = progress
        self._store: CheckpointStore | None = None
        if config.checkpoint_path is not None:
            self._store = CheckpointStore(checkpoint_folder(session, config.checkpoint_path))
        self._restarts = 0

    def train(self, job: TrainingJob, attempt: Attempt) -> Trained:
        """Trains to the end, however many attempts that takes and the user allows.

        Args:
            job: What to do.
            attempt: Trains once, from the job's state on; told where to leave checkpoints.

        Raises:
            TrainingError: The fit failed of something that would not pass, or once too often.
        """
        while True:
            checkpoint = self._latest()
            if checkpoint is not None and checkpoint.finished:
                return self._as_trained(checkpoint)
            state = None if checkpoint is None else checkpoint.state
            try:
                trained = self._attempt(replace(job, state=state), attempt)
            except TrainingError as error:
                if not error.passing or self._restarts >= self._config.max_restarts:
                    raise
                self._restarts += 1
                self._tell_of_restart(error)
                continue
            history = trained.history if state is None else joined(state.history, trained.history)
            return replace(trained, history=history, statistics=self._counted(trained.statistics))

    def _latest(self) -> Checkpoint | None:
        """Returns what to go on from."""
        checkpoint = (
            None if self._store is None else self._store.latest(self._progress.note, epochs=self._config.epochs)
        )
        if checkpoint is None or self._store is None:
            return None
        kept = _options_of(checkpoint.state.facts, self._store.url)
        require_same_fit(kept, self._config, self._store.url)
        if not checkpoint.finished and checkpoint.state.epochs >= self._config.epochs:
            self._progress.note(
                f"all epochs are done ({checkpoint.state.epochs} of {self._config.epochs}): only the end of the fit is "
                f"left, from the checkpoint in {self._store.url}"
            )
        elif not checkpoint.finished:
            self._progress.note(
                f"going on after epoch {checkpoint.state.epochs} of {self._config.epochs}, from the checkpoint in "
                f"{self._store.url}"
            )
            for change in changes_of(kept, self._config):
                self._progress.note(change)
        return checkpoint

    def _as_trained(self, checkpoint: Checkpoint) -> Trained:
        state = checkpoint.state
        why = "a callback had stopped it" if state.facts["stopped"] else f"{self._config.epochs} were asked for"
        self._progress.note(f"nothing is left to train: {state.epochs} epochs are done, and {why}")
        return Trained(
            variables=list(checkpoint.result),
            rows=RowSpec.from_json(state.facts["rows"]),
            history=joined(state.history, {}),
            statistics={"refused_connections": {}, **self._counted({})},
        )

    def _attempt(self, job: TrainingJob, attempt: Attempt) -> Trained:
        if self._store is None:
            return attempt(job, None)
        with Keeper(self._store) as keeper:
            trained = attempt(job, keeper)
            try:
                # A fit that was lost between its last epoch and its end has none left to train.
                keeper.finish(trained.variables, trained=any(trained.history.values()))
            except CheckpointError as error:
                # The model is here, and worth more than its checkpoint.
                warnings.warn(f"The fit has ended well, and its last checkpoint is missing: {error}", stacklevel=2)
        return trained

    def _counted(self, statistics: Mapping[str, object]) -> dict[str, object]:
        return {**statistics, **({"restarts": self._restarts} if self._config.max_restarts else {})}

    def _tell_of_restart(self, error: TrainingError) -> None:
        reason = str(error).splitlines()[0]
        self._progress.note(
            f"the fit failed and starts again ({self._restarts} of {self._config.max_restarts}): {reason}"
        )
