"""Fit of some seconds with a model and rows of its own, whose phases are timed; `elephant doctor --fit` runs it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import keras

from elephant.config import Timeouts
from elephant.monitor.events import EpochEnded, Event, Started
from elephant.monitor.listeners import Recorder
from elephant.monitor.report import PARTS
from elephant.spark.estimator import KerasEstimator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from elephant.monitor.summary import FitSummary

TRAINING_S = 10.0
_FEATURES, _ROWS_PER_WORKER, _BATCH_SIZE, _STEPS = 32, 20_000, 64, 100
# More than fit into the time.
_EPOCHS = 100_000


@dataclass(frozen=True, kw_only=True)
class TrialFit:
    """Phases of a fit that has ended well.

    Args:
        seconds: Of each phase, by name, in their order; they add up to those of the fit.
        rows_per_s: Of all workers together.
        shares: Parts of the workers' time in training, by name; they add up to 1.
    """

    seconds: dict[str, float]
    rows_per_s: float
    shares: dict[str, float]

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        parts = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items() if share >= 0.005)
        return f"{phases}; {self.rows_per_s:,.0f} rows/s ({parts})"


def trial_fit(
    session: SparkSession, *, num_workers: int, mode: str, timeouts: Timeouts, training_s: float = TRAINING_S
) -> TrialFit:
    """Trains a small model on made rows for some seconds, and tells what they went into.

    Args:
        training_s: Seconds after the first epoch's end; the start comes before.

    Raises:
        ElephantError: The fit failed, as any other one would.
    """
    clock, stop = _Clock(), _StopAfter(training_s)
    estimator = KerasEstimator(
        model=_model(),
        mode=cast(Any, mode),
        numWorkers=num_workers,
        batchSize=_BATCH_SIZE,
        epochs=_EPOCHS,
        stepsPerEpoch=_STEPS,
        driverCallbacks=[clock, stop],
        timeouts=timeouts,
        verbose=0,
    )
    clock.moments["called"] = time.monotonic()
    fitted = estimator.fit(_rows(session, num_workers))
    clock.moments["returned"] = time.monotonic()
    return TrialFit(seconds=clock.phases(), rows_per_s=fitted.summary.rows_per_s, shares=_shares(fitted.summary))


def _model() -> keras.Model:
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu"), keras.layers.Dense(1, "sigmoid")]
    model = keras.Sequential([keras.Input((_FEATURES,)), *layers])
    model.compile("adam", "binary_crossentropy")
    return model


def _rows(session: SparkSession, num_workers: int) -> DataFrame:
    # Made by Spark alone, and the same whenever they are made.
    value = "cast(pmod(hash(id, place), 1000) / 1000.0 as float)"
    columns = (f"transform(sequence(1, {_FEATURES}), place -> {value}) as features", "float(id % 2) as label")
    return session.range(0, _ROWS_PER_WORKER * num_workers, 1, num_workers).selectExpr(*columns)


def _shares(summary: FitSummary) -> dict[str, float]:
    seconds = {title: sum(own[name] for own in summary.by_rank) for name, (title, _) in PARTS.items()}
    total = sum(seconds.values())
    return {title: part / total for title, part in seconds.items()} if total else {}


class _StopAfter(keras.callbacks.Callback):
    """Ends training some seconds after its first epoch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._began = seconds, 0.0

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._began = self._began or time.monotonic()
        if time.monotonic() - self._began >= self._seconds:
            self.model.stop_training = True


@dataclass
class _Clock(Recorder):
    """Moments of a fit."""

    moments: dict[str, float] = field(default_factory=dict)

    def show(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, Started):
            # The last one counts: of all ranks.
            self.moments["ready"] = now
        elif isinstance(event, EpochEnded):
            self.moments.setdefault("traced", now)
            self.moments["trained"] = now

    def phases(self) -> dict[str, float]:
        """Returns the seconds between the moments, each under the name of what happens in them."""
        order = {
            "ready": "pre-flight, processes and rows",
            "traced": "first epoch",
            "trained": "training",
            "returned": "result",
        }
        times = [self.moments[moment] for moment in ("called", *order)]
        return {name: after - before for name, before, after in zip(order.values(), times, times[1:], strict=False)}
