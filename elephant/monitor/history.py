"""One number per epoch and metric, over all workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class History:
    """Collects the logs of the epochs, in the form of Keras' ``History.history``.

    >>> history = History()
    >>> history.add({"loss": 0.5})
    >>> history.add({"loss": 0.25, "val_loss": 0.3})
    >>> history.as_dict()
    {'loss': [0.5, 0.25], 'val_loss': [0.3]}
    """

    def __init__(self) -> None:
        self._series: dict[str, list[float]] = {}

    def add(self, logs: Mapping[str, Any]) -> None:
        """Appends the numbers of one epoch."""
        for name, value in logs.items():
            self._series.setdefault(name, []).append(value)

    def as_dict(self) -> dict[str, list[float]]:
        """Returns a copy: name of the metric to one number per epoch."""
        return {name: list(values) for name, values in self._series.items()}
