"""Recovery of a fit from its states: what it goes on from, and whether it does after a loss.

Within their Spark job ranks begin again where they can (`elephant.driver.recovery.generations`). Otherwise the driver
starts the job once more, with a new run id: from the last state, or from the beginning where there is none. What failed
of the user's code or data fails again, and is not tried twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elephant.checkpoint.manager import Checkpoint, CheckpointManager, CheckpointWriter
from elephant.checkpoint.memory import StatesInMemory
from elephant.checkpoint.state import (
    CheckpointManifest,
    FitState,
    changes_of,
    identity_of,
    is_saved,
    joined,
    require_same_fit,
)
from elephant.cluster.spark_job import counted
from elephant.config import FitConfig
from elephant.data.json_types import require_parts, require_type
from elephant.data.schema import RowSpec
from elephant.driver.coordinator import FitResult
from elephant.driver.elastic.policy import ElasticPolicy
from elephant.errors import CheckpointError, PreemptedError, RowsMovedError, TrainingError, WorkerFailure, first_line
from elephant.monitor.progress import Progress
from elephant.storage.folder import DAMAGES

# What a checkpoint tells of its fit besides arrays; some of it in one mode alone.
_FACTS = {
    "rows": dict[str, Any],
    "num_workers": int,
    "stopped": bool,
    "optimizer_names": list[str],
    "callbacks": list[Any],
    "begun": bool,
    "variables": list[str],
    "frozen": list[str],
    "tables": dict[str, Any],
    "optimizers": list[list[Any]],
    "ledgers": list[dict[str, list[Any]]],
    "parts": list[Any],
}


def options_of_fit(info: Mapping[str, Any], url: str) -> Mapping[str, Any]:
    """Returns the options of the fit that has left a checkpoint.

    Raises:
        CheckpointError: It is a checkpoint of something else.
    """
    options = info.get("fit")
    if not isinstance(options, Mapping):
        raise CheckpointError(
            f"checkpointPath={url}: expected a checkpoint with the options of its fit. Received: {options!r}. "
            "Restore the folder, or remove it to begin from the first epoch."
        )
    try:
        require_parts(info, _FACTS)
        require_type(options.get("num_workers"), int, "num_workers")
        RowSpec.from_json(info["rows"])
        missing = [name for name in ("stopped", "optimizer_names", "callbacks") if name not in info]
        if missing:
            raise TypeError(f"expected {', '.join(missing)}")
    except DAMAGES as error:
        raise CheckpointError(
            f"checkpointPath={url}: expected a checkpoint of a fit. Received: one that tells other things of it: "
            f"{type(error).__name__}: {error} Restore the folder, or remove it to begin from the first epoch."
        ) from error
    return options


def _other_batches(manifest: CheckpointManifest | FitState, config: FitConfig) -> str:
    """Returns why a fit has other batches than that of a checkpoint; nothing where it has the same."""
    kept = manifest.facts.get("fit")
    kept, own = kept if isinstance(kept, Mapping) else {}, identity_of(config)
    workers, batch_size = own["num_workers"], own["batch_size"]
    workers_before, size_before = kept.get("num_workers", workers), kept.get("batch_size", batch_size)
    changes = [f"{counted(workers_before, 'worker')} before, {workers} now"] if workers_before != workers else []
    changes += [f"batches of {size_before} rows before, of {batch_size} now"] if size_before != batch_size else []
    cache_before = kept.get("cache", config.cache)
    changes += [f"cache={cache_before!r} before, {config.cache!r} now"] if cache_before != config.cache else []
    if (kept.get("elastic") is None) != (own.get("elastic") is None):
        changes += ["rows are in virtual shards before or now, and not both"]
    if config.pipeline_stages is not None or config.distribution is not None:
        changes += ["a model that is divided begins with an epoch"]
    return "; ".join(changes)


class Recovery:
    """The checkpoints and restarts of one fit.

    Args:
        checkpoints: Those of the fit; None where it makes none.
        config: The options of the fit.
        progress: Told what the fit goes on from.
        in_tasks: Whether ranks may begin again within their job, and so often that states are kept in memory as well.
        is_decommissioned: Returns whether the cluster takes an executor away, by its id.

    Attributes:
        state: What ranks have gone on from last; None where they have begun.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager | None,
        config: FitConfig,
        progress: Progress,
        elastic: ElasticPolicy | None = None,
        *,
        in_tasks: bool = False,
        is_decommissioned: Callable[[str], bool] = lambda executor: False,
    ) -> None:
        self._is_decommissioned = is_decommissioned
        self._config = config
        self._elastic = elastic
        self._progress = progress
        self._checkpoints = checkpoints
        self._in_memory: StatesInMemory | None = None
        if in_tasks or (config.keeps_states and self._checkpoints is None):

            def is_checkpoint(state: FitState) -> bool:
                return is_saved(state.epochs, config, stopped=bool(state.facts.get("stopped")))

            self._in_memory = StatesInMemory(is_checkpoint, seconds=config.checkpoint_seconds)
        self._restarts = 0
        self.state: FitState | None = None
        # Whether ranks have other rows than those of checkpoints within an epoch.
        self._rows_moved = False

    def latest(self) -> Checkpoint | None:
        """Returns the checkpoint to go on from, which `state` is of from here on."""
        self.state = None
        skipped_manifests: list[CheckpointManifest | FitState] = []

        def suits(manifest: CheckpointManifest | FitState) -> bool:
            if self._suits(manifest):
                return True
            skipped_manifests.append(manifest)
            return False

        # What is in memory is never older.
        stores = [store for store in (self._in_memory, self._checkpoints) if store is not None]
        checkpoint, url = None, ""
        for store in stores:
            if checkpoint is None:
                checkpoint, url = store.latest(self._progress.note, epochs=self._config.epochs, suits=suits), store.url
        self._note_left_out(skipped_manifests, checkpoint)
        if checkpoint is None:
            if self._config.resume and not skipped_manifests:
                # Of the path something may have been mistyped.
                self._progress.note(f"no checkpoint in {self._config.checkpoint_path}: the fit begins with epoch 1")
            return None
        self.state = state = checkpoint.state
        kept = options_of_fit(state.facts, url)
        require_same_fit(kept, self._config, url)
        if not checkpoint.finished and state.epochs >= self._config.epochs:
            self._progress.note(
                f"all epochs are done ({state.epochs} of {self._config.epochs}): only the end of the fit is left, from "
                f"the checkpoint in {url}"
            )
        elif not checkpoint.finished:
            within = f" and {counted(state.step, 'step')} of the next one" if state.step else ""
            self._progress.note(
                f"going on after epoch {state.epochs} of {self._config.epochs}{within}, from the checkpoint in {url}"
            )
            for change in changes_of(kept, self._config):
                self._progress.note(change)
        return checkpoint

    def find_state(self) -> FitState | None:
        """Returns the state that ranks are to go on from, which `state` is from here on; None has them begin."""
        checkpoint = self.latest()
        return None if checkpoint is None else checkpoint.state

    def _suits(self, manifest: CheckpointManifest | FitState) -> bool:
        """Returns whether the fit can go on from a checkpoint: within an epoch, as long as batches are the same."""
        is_next = manifest.epochs < self._config.epochs and not self._rows_moved
        return not manifest.step or (is_next and not _other_batches(manifest, self._config))

    def _note_left_out(
        self, skipped_manifests: Sequence[CheckpointManifest | FitState], taken: Checkpoint | None
    ) -> None:
        """Says what is lost of the newest checkpoint where that is one within an epoch which does not suit."""
        newest = max(skipped_manifests, key=lambda manifest: (manifest.epochs, manifest.step), default=None)
        done = 0 if taken is None else taken.state.epochs
        if newest is None or not done <= newest.epochs < self._config.epochs or (taken and taken.state.step):
            return
        why = _other_batches(newest, self._config)
        why = why or "the workers have other rows, or the model other metrics, than before"
        begin = "beginning anew, without a checkpoint of the end of an epoch"
        lost = f"{counted(newest.epochs - done, 'epoch')} and " * (newest.epochs > done)
        lost += counted(newest.step, "step")
        if taken is not None:
            begin = f"going on from the end of epoch {done}"
            lost += " of the next one" * (newest.epochs == done)
        self._progress.note(f"{why}: {begin}, {lost} {'is' if lost.startswith('1 step') else 'are'} trained again")

    def result_of(self, checkpoint: Checkpoint) -> FitResult:
        """Returns the result of a fit that has left its last checkpoint."""
        state = checkpoint.state
        why = "a callback had stopped it" if state.facts["stopped"] else f"{self._config.epochs} were asked for"
        self._progress.note(f"nothing is left to train: {state.epochs} epochs are done, and {why}")
        return FitResult(
            variables=list(checkpoint.result),
            rows=RowSpec.from_json(state.facts["rows"]),
            history=joined(state.history, {}),
            statistics={"refused_connections": {}, **self.counted({})},
        )

    def writer(self) -> contextlib.AbstractContextManager[CheckpointWriter | StatesInMemory | None]:
        """Returns a receiver of the fit's states, for a ``with`` block; it is None where none are wanted."""
        writer = None if self._checkpoints is None else CheckpointWriter(self._checkpoints)
        if self._in_memory is None:
            return contextlib.nullcontext() if writer is None else writer
        return contextlib.nullcontext(self._in_memory) if writer is None else self._in_memory.writing(writer)

    def checkpoint_facts(self) -> list[Mapping[str, Any]]:
        """Returns the facts of the checkpoints that there are; raises CheckpointError where they cannot be read."""
        if self._checkpoints is None:
            return []
        return [manifest.facts for manifest in self._checkpoints.manifests(lambda note: None)]

    def counted(self, statistics: Mapping[str, object]) -> dict[str, object]:
        """Returns the statistics of a fit with the number of restarts, where there may be any."""
        counts = self._config.max_restarts or self._elastic is not None
        return {**statistics, **({"restarts": self._restarts} if counts else {})}

    @property
    def _has_come_further(self) -> bool:
        """True if there is a newer state than that which ranks have gone on from."""
        store = self._in_memory or self._checkpoints
        newest = None if store is None else store.latest(lambda note: None)
        before = (0, 0) if self.state is None else (self.state.epochs, self.state.step)
        return newest is not None and (newest.state.epochs, newest.state.step) > before

    def _is_taken_away(self, error: TrainingError) -> bool:
        """Returns whether the cluster has asked for the worker, or the executor that it was on."""
        if isinstance(error, WorkerFailure) and error.retryable and error.executor:
            return self._is_decommissioned(error.executor)
        return isinstance(error, PreemptedError)

    def goes_on_after(self, error: TrainingError) -> bool:
        """Returns whether the fit goes on after an error; counts it, unless it only went on from no good place."""
        if isinstance(error, RowsMovedError) and self.state is not None and self.state.step:
            self._rows_moved = True
            return True
        # Those within an epoch that are written from here on are of the rows that workers have now.
        self._rows_moved = False
        if error.retryable and error.is_counted:
            if self._elastic is not None:
                self._elastic.goes_on_with_fewer()
            self._progress.note(f"the fit starts again as a whole: {first_line(error)}")
            return True
        counts = self._config.max_restarts or self._elastic is not None
        if counts and self._has_come_further and self._is_taken_away(error):
            self._progress.note(f"the fit goes on without the worker that has left: {first_line(error)}")
            return True
        if error.retryable and self._elastic is not None:
            goes_on = self._elastic.goes_on_after_loss(came_further=self._has_come_further)
            self._restarts = self._elastic.restarts
            if goes_on:
                self._progress.note(f"the fit has lost workers, and goes on from its last state: {first_line(error)}")
            return goes_on
        if not error.retryable or self._restarts >= self._config.max_restarts:
            return False
        self._restarts += 1
        again = f"{self._restarts} of {self._config.max_restarts}"
        self._progress.note(f"the fit failed and starts again ({again}): {first_line(error)}")
        return True
