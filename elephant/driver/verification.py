"""Two workers against one process on the user's own model and rows: whether they give the same, and why not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from elephant.backends import VARIABLE
from elephant.driver.local_ranks import fit_here, run_here
from elephant.errors import DataError
from elephant.monitor.progress import Progress

if TYPE_CHECKING:
    import pyarrow as pa

    from elephant.config import FitConfig
    from elephant.rank.job import TrainingJob
    from elephant.rank.one_process import OneProcess

# Enough to see a step's rows, an uneven last step, and what an epoch leaves to the next one.
_EPOCHS = 2
# Of the rows, so that one worker has steps to which the other brings none.
_FIRST_SHARE = 0.6
# Of a float32 that was summed up in another order, over some tens of steps; of a half precision.
_TOLERANCE, _COARSE = 1e-4, 2e-2
# What ranks would warn of is told as a cause.
_QUIET = {"PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Distance of one number, or of the numbers of one array, of two workers from those of one process.

    Args:
        name: Of the metric, or the path of the weight.
        difference: The largest one, absolute.
        scale: The largest number itself, and 1 at least.
    """

    name: str
    difference: float
    scale: float

    @property
    def relative(self) -> float:
        """The difference in relation to the number."""
        return self.difference / self.scale


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Two workers against one process of ``keras.Model.fit``, on the same rows in the same global batches.

    Args:
        rows: Of each worker.
        batch_size: Of each worker.
        epochs: Of both sides.
        weights: The difference of every weight, the largest first.
        metrics: The difference of every metric over all epochs.
        causes: What makes workers differ from one process here: layers, a loss, options; empty where nothing does.
        random_spread: The largest relative difference of a weight between two runs of the one process with other
            random numbers; None where the model draws none in training.
        tolerance: The largest relative difference that rounding makes.
        seconds: How long it took.
    """

    rows: tuple[int, ...]
    batch_size: int
    epochs: int
    weights: tuple[Difference, ...]
    metrics: tuple[Difference, ...]
    causes: tuple[str, ...]
    random_spread: float | None
    tolerance: float
    seconds: float

    @property
    def equal(self) -> bool:
        """True if nothing differs by more than rounding."""
        return all(one.relative <= self.tolerance for one in (*self.weights, *self.metrics))

    def as_json(self) -> dict[str, Any]:
        """Returns the same as values of JSON."""
        worst = self.weights[0] if self.weights else None
        return {
            "equal": self.equal,
            "rows": list(self.rows),
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "weight": None if worst is None else {"path": worst.name, "difference": worst.difference},
            "metrics": {one.name: one.difference for one in self.metrics},
            "causes": list(self.causes),
            "random_spread": self.random_spread,
            "seconds": round(self.seconds, 1),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        counts = " and ".join(f"{count:,}" for count in self.rows)
        yield (
            f"two workers ({counts} rows, batches of {self.batch_size} each) against one process of keras.Model.fit "
            f"on the same global batches, {self.epochs} epochs, {self.seconds:.0f} s"
        )
        named = [*((f"weight {one.name}", one) for one in self.weights[:1]), *((one.name, one) for one in self.metrics)]
        width = max((len(name) for name, _ in named), default=0)
        for name, one in named:
            yield f"  {name:<{width}}  largest difference {one.difference:.1e}, of numbers up to {one.scale:.3g}"
        if self.random_spread is not None:
            yield f"  one process with other random numbers differs from itself by up to {self.random_spread:.1e}"
        yield f"equal within {self.tolerance:.0e}: {'yes' if self.equal else 'NO'}"
        if self.causes:
            yield "what makes workers differ from one process here:" if not self.equal else "noticed:"
            yield from (f"  - {cause}" for cause in self.causes)
        elif not self.equal:
            yield "no cause is known: please report it, with this model"


def verified(job: TrainingJob, rows: pa.RecordBatch) -> Verification:
    """Trains a job's model by two workers and by one process, as processes of this machine, and compares them.

    Args:
        job: With the options of `config_to_verify`.
        rows: The prepared columns, by their roles.

    Raises:
        DataError: There are fewer than two rows.
        WorkerFailure: One of the processes failed, with its traceback.
    """
    began = time.monotonic()
    if rows.num_rows < 2:
        raise DataError(f"verify: expected two rows or more, one for each worker. Received: {rows.num_rows}.")
    # Both have rows, however few there are.
    cut = min(max(round(rows.num_rows * _FIRST_SHARE), 1), rows.num_rows - 1)
    parts = [rows.slice(0, cut), rows.slice(cut)]
    progress = Progress(num_workers=len(parts), epochs=job.config.epochs, verbose=0)
    ours = fit_here(job, parts, progress, _QUIET)
    one = _alone(job, parts)
    # Layers may have a generator and draw nothing, as an LSTM without dropout.
    random_spread = None if one.again is None else _of_weights(one.again, one)[0].relative or None
    return Verification(
        rows=tuple(part.num_rows for part in parts),
        batch_size=job.config.rank_batch_size,
        epochs=job.config.epochs,
        weights=_of_weights(ours.variables, one),
        metrics=_of_metrics(ours.history, one.history),
        causes=tuple(_causes(job, one, random_spread)),
        random_spread=random_spread,
        tolerance=_COARSE if job.config.mixed_precision else _TOLERANCE,
        seconds=time.monotonic() - began,
    )


def config_to_verify(config: FitConfig) -> FitConfig:
    """Returns a fit's options with two workers, in an order of rows that one process can follow."""
    return config.changed(
        num_workers=2,
        elastic=None,
        epochs=_EPOCHS,
        steps_per_epoch=None,
        shuffle=False,
        bucket_by_length=False,
        validation_fraction=0.0,
        checkpoint_path=None,
        resume=False,
        max_restarts=0,
        use_gpu=False,
        gpus_per_worker=1,
        # To measure what comes of it, not to refuse it.
        allow_batch_coupled_loss=True,
        verbose=0,
    )


def _alone(job: TrainingJob, parts: Sequence[pa.RecordBatch]) -> OneProcess:
    from elephant.rank.one_process import fit_alone

    progress = Progress(num_workers=1, epochs=0, verbose=0)
    env = {VARIABLE: job.model.settings.backend, **_QUIET}
    [one] = run_here(
        fit_alone, (job, parts), {}, num_workers=1, progress=progress, timeouts=job.config.timeouts, env=env
    )
    result: OneProcess = one
    return result


def _of_weights(ours: Mapping[int, np.ndarray] | Sequence[np.ndarray], one: OneProcess) -> tuple[Difference, ...]:
    return _sorted(_difference(one.paths[place], ours[place], weight) for place, weight in one.weights.items())


def _of_metrics(ours: Mapping[str, Any], one: Mapping[str, Any]) -> tuple[Difference, ...]:
    return _sorted(_difference(name, ours.get(name, np.nan), values) for name, values in one.items())


def _sorted(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(differences, key=lambda one: -one.relative))


def _difference(name: str, ours: Any, one: Any) -> Difference:
    mine, its = np.asarray(ours, np.float64), np.asarray(one, np.float64)
    # What is no number, or infinite, on both sides is equal; on one side alone it is as far away as can be.
    same = (mine == its) | (np.isnan(mine) & np.isnan(its))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.nan_to_num(np.abs(mine - its), nan=np.inf))
    scale = np.abs(its[np.isfinite(its)]).max(initial=1.0)
    return Difference(name=name, difference=float(gap.max(initial=0.0)), scale=float(scale))


def _causes(job: TrainingJob, one: OneProcess, random_spread: float | None) -> Iterator[str]:
    config = job.config
    if one.own_statistics:
        yield (
            f"batch normalization ({', '.join(one.own_statistics)}): each worker takes mean and variance of the rows "
            "of its own batch. syncBatchNorm=True takes those of all rows."
        )
    if random_spread is not None:
        yield f"random numbers ({', '.join(one.random_layers)}): each worker draws its own."
    yield from one.couplings
    if config.compression not in (None, "none"):
        yield f"compression={config.compression!r}: gradients that cross hosts are rounded (not between these two)."
    if config.frequency != "batch":
        yield f"frequency={config.frequency!r}: each worker trains by itself between two averages of the weights."
