"""Retention: the checkpoints that stay in a folder when one more is written, and the best one among them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elephant.checkpoint.state import CheckpointManifest
from elephant.errors import ConfigurationError
from elephant.kinds import named_metric

_NEWEST = 2


@dataclass(frozen=True)
class Objective:
    """Metric by which one epoch of a fit is better than another.

    >>> Objective.of("val_accuracy").value_of({"val_accuracy": [0.5, 0.25]})
    0.25
    >>> Objective.of("val_loss").value_of({"val_loss": [0.5, 0.25]})
    -0.25
    """

    metric: str
    more_is_better: bool

    @classmethod
    def of(cls, text: str) -> Objective:
        """Returns the one that a text such as ``"val_gain:max"`` says; see `elephant.kinds.METRIC`."""
        return cls(*named_metric(text))

    def value_of(self, history: Mapping[str, Sequence[Any]]) -> float | None:
        """Returns how good the last epoch of a history was: more is better. None where it has no finite number."""
        value = (history.get(self.metric) or [None])[-1]
        if not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return value if self.more_is_better else -value

    def best_of(self, manifests: Iterable[CheckpointManifest]) -> CheckpointManifest | None:
        """Returns the checkpoint of the best epoch, the earliest of several that are equally good; None without any.

        Those within an epoch are left out, whose history is that of the epoch before, and models that are not finite.
        """
        values = [(self.value_of(one.history), one) for one in manifests if not one.step and one.finite]
        scored = [(value, -one.epochs, one.number, one) for value, one in values if value is not None]
        return max(scored, key=lambda entry: entry[:3])[-1] if scored else None

    def require_in(self, history: Mapping[str, Sequence[Any]], option: str = "keepBest") -> None:
        """Raises ConfigurationError where a history has epochs, and the metric not, or not as one number.

        Args:
            option: Where the metric comes from.
        """
        if history and self.metric not in history:
            raise ConfigurationError(
                f"{option}: expected a metric of the fit: {', '.join(history)}. Received: {self.metric!r}."
            )
        if any(isinstance(value, list) for value in history.get(self.metric, ())[-1:]):
            raise ConfigurationError(
                f"{option}: expected a metric with one number for an epoch. Received: {self.metric!r}, which has one "
                "for each class. Compile the model with an average of them, such as F1Score(average='macro')."
            )


def retained(manifests: Mapping[str, CheckpointManifest], written: str, objective: Objective | None) -> set[str]:
    """Returns the names of the checkpoints that stay, of those that are whole.

    These are the last two, the last one of an epoch's end, of both sorts the last one whose model is finite, and the
    best one.

    Args:
        manifests: By their names.
        written: The one that has just come. It stays though others were before it, which its fit has not gone on from.
        objective: Says which is the best one; None for none.
    """
    # The later of two that share their state says more.
    by_age = sorted(manifests, key=lambda name: manifests[name].age)
    ordered = list({manifests[name].state.name: name for name in by_age}.values())
    # Only from there can other workers go on, or others' rows.
    at_ends = [name for name in ordered if not manifests[name].step]
    kept = {written, *ordered[-_NEWEST:], *at_ends[-1:]}
    for names in (ordered, at_ends):
        # There is nothing to go on from in a model of NaN, and the best epoch may lie far behind.
        kept.update([name for name in names if manifests[name].finite][-1:])
    best = None if objective is None else objective.best_of(manifests[name] for name in ordered)
    return kept | {name for name in ordered if manifests[name] is best}
