"""State of a fit in a checkpoint, and what it must agree in with the fit that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from elephant.config import FitConfig
from elephant.errors import ConfigurationError

# Others may change: workers, epochs, the size of batches, where rows are kept, how they travel.
_FIXED = (
    "mode",
    "seed",
    "shuffle",
    "validation_fraction",
    "frequency",
    "steps_per_epoch",
    "learning_rate",
    "scale_learning_rate",
    "bucket_by_length",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class FitState:
    """A fit at the end of an epoch.

    >>> state = FitState(epochs=2, arrays={"model/0": np.zeros(3), "model/1": np.ones(2), "other/0": np.zeros(1)})
    >>> [array.tolist() for array in state.group("model")]
    [[0.0, 0.0, 0.0], [1.0, 1.0]]
    """

    epochs: int
    # one number per epoch and metric, over all workers, of all of them
    history: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # by name; several of a kind are called kind/0, kind/1 and so on
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # what is no array, as JSON values

    def group(self, kind: str) -> list[np.ndarray]:
        """Returns the arrays of a kind, in order; none when there are none."""
        found: list[np.ndarray] = []
        while (name := f"{kind}/{len(found)}") in self.arrays:
            found.append(self.arrays[name])
        return found

    def without_arrays(self) -> FitState:
        """Returns what is left when the arrays are dropped: who only needs to know the epoch need not carry them."""
        return replace(self, arrays={})


def named(kind: str, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays of a kind by the names that `FitState.group` finds them by.

    >>> named("model", [np.zeros(1)])
    {'model/0': array([0.])}
    """
    return {f"{kind}/{index}": array for index, array in enumerate(arrays)}


def joined(before: Mapping[str, Sequence[Any]], after: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Returns one history of two that follow one another.

    >>> joined({"loss": [3.0]}, {"loss": [2.0], "val_loss": [4.0]})
    {'loss': [3.0, 2.0], 'val_loss': [4.0]}
    """
    return {name: [*before.get(name, []), *after.get(name, [])] for name in {**before, **after}}


def identity_of(config: FitConfig) -> dict[str, Any]:
    """Returns the options that a checkpoint keeps, as JSON values: the fixed ones, and workers and batches."""
    fixed = {name: getattr(config, name) for name in _FIXED}
    return {
        **fixed,
        "algorithm": config.asynchronous.algorithm,
        "num_workers": config.num_ranks,
        "batch_size": config.rank_batch_size,
    }


def is_saved(done: int, config: FitConfig, *, stopped: bool) -> bool:
    """Returns whether there is to be a checkpoint after so many epochs: every few, and at the end.

    >>> config = FitConfig(epochs=5, checkpoint_path="kept", checkpoint_epochs=2)
    >>> [is_saved(done, config, stopped=False) for done in range(1, 6)]
    [False, True, False, True, True]
    """
    if config.checkpoint_path is None:
        return False
    return stopped or done % config.checkpoint_epochs == 0 or done >= config.epochs


def require_same_fit(kept: Mapping[str, Any], config: FitConfig, url: str) -> None:
    """Raises ConfigurationError when a fit that is to go on has options of another one."""
    for name, value in identity_of(config).items():
        if name not in ("num_workers", "batch_size") and name in kept and kept[name] != value:
            raise ConfigurationError(
                f"{name}: expected {kept[name]!r}, with which the checkpoints in {url} were made. Received: {value!r}. "
                "Leave it as it was, or give another checkpointPath to a fit that begins anew."
            )


def require_same_optimizers(facts: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises ConfigurationError when the model has other optimizers than the fit that it is to go on with.

    What one remembers means something else to another, and may well be of the same shapes.
    """
    kept = facts.get("optimizer_names", list(names))
    if kept != list(names):
        raise ConfigurationError(
            f"model: expected to be compiled with {', '.join(kept)}, with which the checkpoint was made. "
            f"Received: {', '.join(names)}. Compile it as it was, or give another checkpointPath to a fit that begins "
            "anew."
        )


def changes_of(kept: Mapping[str, Any], config: FitConfig) -> list[str]:
    """Returns what is allowed to be otherwise and is, as sentences for the user.

    >>> changes_of({"num_workers": 4, "batch_size": 32}, FitConfig(num_workers=2))
    ['4 workers before, 2 now: batches of all workers, and who has which rows, are others from here on']
    """
    changes = []
    if kept.get("num_workers", config.num_ranks) != config.num_ranks:
        changes.append(
            f"{kept['num_workers']} workers before, {config.num_ranks} now: batches of all workers, and who has "
            "which rows, are others from here on"
        )
        if config.validation_fraction:
            changes.append(
                "validationFraction draws from each worker's rows: some that were trained on are for validation now, "
                "and the other way round. A validationIndicatorCol keeps them apart"
            )
    if kept.get("batch_size", config.rank_batch_size) != config.rank_batch_size:
        changes.append(f"batches of {kept['batch_size']} rows before, of {config.rank_batch_size} now")
    return changes
