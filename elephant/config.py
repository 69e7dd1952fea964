"""The options of one fit, as frozen values that are checked once, where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from elephant.errors import ConfigurationError, UnsupportedError

MODES = ("synchronous", "asynchronous", "hogwild")
AVAILABLE_MODES = ("synchronous",)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long each wait may last, in seconds; each error names the wait that ended.

    Args:
        connect_s: Forming the connections between ranks, and to the driver. It covers the
            slowest rank's import of Keras.
        collective_s: One allreduce. It covers the slowest rank's longest step, tracing included.
        heartbeat_s: Silence of a rank's process after which the driver gives the fit up.
        slots_s: Waiting for executors that a cluster has promised and not started yet.
    """

    connect_s: float = 120.0
    collective_s: float = 600.0
    heartbeat_s: float = 60.0
    slots_s: float = 30.0

    @property
    def heartbeat_interval_s(self) -> float:
        """How often a rank says that it lives: several times in the silence that is allowed."""
        return min(2.0, self.heartbeat_s / 5)


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """What one fit was asked to do.

    Args:
        mode: ``"synchronous"``.
        num_workers: Ranks, each one Spark task.
        epochs: Passes over the training rows.
        batch_size: Rows per worker and step.
        validation_fraction: Share of all rows kept for validation, in [0, 1).
        shuffle: Whether each rank draws its rows in a new order every epoch.
        seed: Source of the row order, the validation split and the ranks' random state.
        learning_rate: Replaces the optimizer's own when given.
        scale_learning_rate: Whether to multiply the learning rate by the number of workers.
        frequency: ``"batch"`` averages gradients at every step; an integer k, or ``"epoch"``, lets
            each rank train alone and averages weights every k steps, or once an epoch.
        compression: How what crosses hosts is encoded; None sends it as it is.
        bucket_bytes: Gradients of so many bytes travel together; None chooses, zero puts all in one bucket.
        sync_batch_norm: Whether batch normalisation uses the statistics of all ranks' rows.
        verbose: 0 silent, 1 plan, progress and a table of epochs, 2 without the progress.

    Raises:
        ConfigurationError: A value is out of its range.
        UnsupportedError: The mode is known and not in this version.
    """

    mode: str = "synchronous"
    num_workers: int = 1
    epochs: int = 1
    batch_size: int = 32
    validation_fraction: float = 0.0
    shuffle: bool = True
    seed: int = 0
    learning_rate: float | None = None
    scale_learning_rate: bool = False
    frequency: str | int = "batch"
    compression: str | None = None
    bucket_bytes: int | None = None
    sync_batch_norm: bool = False
    verbose: int = 1
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        check_mode(self.mode)
        for name in ("num_workers", "epochs", "batch_size"):
            _expect(getattr(self, name) >= 1, name, "an integer of at least 1", getattr(self, name))
        _expect(0 <= self.validation_fraction < 1, "validation_fraction", "in [0, 1)", self.validation_fraction)
        _expect(0 <= self.seed < 2**63, "seed", "an integer in [0, 2**63)", self.seed)
        _expect(self.verbose in (0, 1, 2), "verbose", "0, 1 or 2", self.verbose)
        rate = self.learning_rate
        _expect(rate is None or (rate > 0 and math.isfinite(rate)), "learning_rate", "a positive number", rate)
        check_frequency(self.frequency)
        length = self.bucket_bytes
        _expect(length is None or length >= 0, "bucket_bytes", "bytes, or None to choose them", length)
        if self.sync_batch_norm and not self.averages_gradients:
            raise ConfigurationError(
                f"sync_batch_norm: expected frequency='batch'. Received: frequency={self.frequency!r}, with which "
                "ranks train alone between two averages. Leave one of the two out."
            )

    @property
    def averages_gradients(self) -> bool:
        """Whether ranks exchange gradients at every step, and not weights now and then."""
        return self.frequency == "batch"


def check_mode(mode: str) -> None:
    """Raises unless this version trains in ``mode``."""
    if mode not in MODES:
        raise ConfigurationError(f"mode: expected one of {', '.join(MODES)}. Received: {mode!r}.")
    if mode not in AVAILABLE_MODES:
        raise UnsupportedError(f"mode={mode!r} is not available in this version of elephant. Use mode='synchronous'.")


def check_frequency(frequency: str | int) -> None:
    """Raises ConfigurationError unless it is ``"batch"``, ``"epoch"`` or an integer of at least 1."""
    is_count = isinstance(frequency, int) and not isinstance(frequency, bool) and frequency >= 1
    _expect(
        is_count or frequency in ("batch", "epoch"),
        "frequency",
        "'batch', 'epoch' or an integer of at least 1",
        frequency,
    )


def _expect(holds: bool, name: str, expected: str, received: object) -> None:
    if not holds:
        raise ConfigurationError(f"{name}: expected {expected}. Received: {received!r}.")
