"""Callbacks in training processes: which rank runs them, metrics that ranks agree on, and files elsewhere.

Keras writes archives and HDF5 files by seeking in them, and logs by appending to them, and most URLs it does not know.
For mounts that take no more than whole files, and for URLs, callbacks write to a local folder instead, and
what is new in it is copied after each event at which one of them may have written.

Order in the list: `ShareSteps`, `IdleSteps` and `GlobalEpoch` first, so that the user's
callbacks see the numbers of all workers; then the user's; `CollectiveStop` last,
so that all ranks stop at the same step when one of them wants to.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import keras
import numpy as np

from elephant.backends.gradient_averager import StopSignal
from elephant.collective.communicator import Communicator
from elephant.data.epoch_plan import EpochPlan
from elephant.errors import ConfigurationError, TrainingError, UnsupportedError
from elephant.modeling.sync_batch_norm import synchronized_layers
from elephant.modeling.variables import (
    assign_flat,
    constant_rate,
    flatten,
    metric_variables,
    moving_statistics,
    optimizer_slots,
    parts_of,
    read_variables,
)
from elephant.monitor.events import CallbacksDue, RankEpoch, StepEnded
from elephant.net.buffers import portable
from elephant.rank.input.feed import BatchFeed
from elephant.rank.job import WEIGHTS, ExchangeCounts, Reporter, StepReporter, as_numbers
from elephant.rank.rank_progress import RankWeight
from elephant.storage.filesystem import is_mounted, local_form, open_file_system, scratch_folder, url_root
from elephant.storage.folder import Folder, folder_at
from elephant.training.warmup import LearningRateWarmup

# Where Keras' callbacks keep the paths that they write to.
_ATTRIBUTES = ("filepath", "filename", "log_dir")
_BLOCK_BYTES = 2**20

_PROGRESS_INTERVAL_S = 0.25
BATCH_EVENTS = [
    f"on_{name}"
    for name in ("batch_begin", "batch_end", "train_batch_begin", "train_batch_end")
    + ("test_begin", "test_end", "test_batch_begin", "test_batch_end")
]
# Of all ranks together.
_PROGRESS_PER_S = 100
# They write files: one rank's, or the driver's, are enough.
WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    # Not in every Keras 3.
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),
)
# They decide alike on all ranks, and with ``verbose=1`` print so.
_TALKERS = (keras.callbacks.EarlyStopping, keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)


class RemoteFiles(keras.callbacks.Callback):
    """Copies what other callbacks write to mounts, and what those of Keras write to URLs. It comes after them.

    Args:
        folder_of: Opens the folder of a URL.

    Raises:
        ConfigurationError: This process does not know the file system of a URL.
    """

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], folder_of: Callable[[str], Folder] = folder_at
    ) -> None:
        super().__init__()
        self._given = [
            (callback, name, os.fspath(path))
            for callback in callbacks
            for name in _ATTRIBUTES
            if isinstance(path := getattr(callback, name, None), (str, os.PathLike))
            # A callback of the user's own may know what to do with a URL.
            and (is_mounted(os.fspath(path)) or (url_root(os.fspath(path)) and isinstance(callback, WRITERS)))
        ]
        self._every_batch = any(getattr(callback, "save_freq", "epoch") != "epoch" for callback, _, _ in self._given)
        self._folder_of = folder_of
        self._folder: Path | None = None
        # What the given paths begin with: ``s3://bucket``, or nothing for a mount.
        self._roots: list[str] = []
        self._remote: dict[Path, Folder] = {}
        self._copied: dict[Path, tuple[int, int]] = {}
        if self._given:
            # Before training begins: some open their files at its first event, before this one hears of it.
            try:
                self._redirect(Path(tempfile.mkdtemp(prefix="elephant-files-", dir=scratch_folder())))
            except BaseException:
                self.close()
                raise

    @property
    def is_needed(self) -> bool:
        """True if any of the callbacks writes to a mount or a URL."""
        return bool(self._given)

    def _redirect(self, folder: Path) -> None:
        self._folder = folder
        for number, (callback, name, given) in enumerate(self._given):
            path = local_form(open_file_system(given)[1] if given.lower().startswith("file:") else given)
            root = url_root(path)
            self._roots.append(root)
            if root or is_mounted(path):
                self._require_known(root, given, type(callback).__name__)
                local = folder / str(number) / path[len(root) :].strip("/")
                if local.parent == folder and name != "log_dir":
                    raise ConfigurationError(
                        f"callbacks: expected a file below {root}, for {type(callback).__name__}. Received: {given!r}."
                    )
                local.parent.mkdir(parents=True, exist_ok=True)
                if name == "filename" or not root:
                    self._fetch(local)
                path = str(local)
            setattr(callback, name, path)

    def _require_known(self, root: str, given: str, name: str) -> None:
        try:
            self._opened(f"{root}/")
        except (ConfigurationError, OSError) as error:
            raise ConfigurationError(
                f"callbacks: expected {name} to write to a file system that is known where it runs. Received: "
                f"{given!r}. {error}"
            ) from error

    def _opened(self, url: str) -> Folder:
        return self._folder_of(url) if url_root(url) else folder_at(url)

    def _target(self, local: Path) -> Folder:
        """Returns the folder that a local file is meant for."""
        if local.parent not in self._remote:
            number, *names = local.parent.relative_to(self._folder or "").parts
            self._remote[local.parent] = self._opened("/".join([self._roots[int(number)], *names]))
        return self._remote[local.parent]

    def _fetch(self, local: Path) -> None:
        """Gets a file, such as a log that is gone on with, if it is there."""
        target = self._target(local)
        if target.has(local.name):
            with target.reading(local.name) as source, open(local, "wb") as file:
                shutil.copyfileobj(source, file, _BLOCK_BYTES)
            self._copied[local] = _stamp(local)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._every_batch:
            self._copy()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._copy()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._copy()
        self.close()

    def _copy(self) -> None:
        if self._folder is None:
            return
        for path in sorted(self._folder.rglob("*")):
            if path.is_file() and self._copied.get(path) != _stamp(path):
                self._copied[path] = _stamp(path)
                self._target(path).replace(path.name, functools.partial(_pour, path))

    def close(self) -> None:
        """Gives the callbacks their own paths back, and removes the local folder."""
        for callback, name, path in self._given:
            setattr(callback, name, path)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _stamp(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_mtime_ns, about.st_size


def _pour(path: Path, target: BinaryIO) -> None:
    with open(path, "rb") as source:
        shutil.copyfileobj(source, target, _BLOCK_BYTES)


def sum_metrics(model: keras.Model, collective: Communicator) -> dict[str, Any]:
    """Returns the model's metrics over the rows of all ranks.

    A metric keeps sums and counts; added up over the ranks they are what one process
    would hold. An average of each rank's results would be something else.
    """
    variables = metric_variables(model)
    sums = flatten(variables)
    collective.allreduce_(sums)
    assign_flat(variables, sums)
    # As Keras orders them.
    return dict(sorted(as_numbers(model.get_metrics_result()).items()))


def global_logs(model: keras.Model, collective: Communicator, logs: dict[str, Any], share: float) -> dict[str, Any]:
    """Returns an epoch's training logs over all ranks.

    Metrics come from their sums. What a custom ``train_step`` returned besides, such as a
    loss that no metric tracks, is its value in the last step, averaged over the ranks.
    """
    sum_metrics(model, collective)
    # Summed over all ranks, so that all decide alike which ones were updated.
    results = updated_results(model)
    raw = sorted(name for name, value in as_numbers(logs).items() if name not in results and np.ndim(value) == 0)
    values = np.array([logs[name] for name in raw], dtype=np.float64)
    values = values * share if share else np.zeros_like(values)
    collective.allreduce_(values)
    results = {name: value for name, value in results.items() if name in logs}
    return {**results, **{name: float(value) for name, value in zip(raw, values, strict=True)}}


def updated_results(model: keras.Model) -> dict[str, Any]:
    """Returns the results of the model's metrics, without those that are still zero: they were never updated.

    One that was updated may have the name of one that was not, as a tracker called "loss" beside Keras' own.
    """
    results: dict[str, Any] = {}
    for metric in model.metrics:
        if any(np.any(keras.ops.convert_to_numpy(variable)) for variable in metric.variables):
            results |= as_numbers({metric.name: metric.result()})
    return results


def average_moving_statistics(model: keras.Model, collective: Communicator, share: float) -> None:
    """Replaces each rank's moving statistics by the average over the ranks, weighted by the rows of the epoch."""
    variables = moving_statistics(model)
    if not variables:
        return
    statistics = flatten(variables) * share if share else np.zeros(sum(int(np.prod(v.shape)) for v in variables))
    collective.allreduce_(statistics)
    assign_flat(variables, statistics)


def require_equal_weights(model: keras.Model, collective: Communicator, epoch: int) -> None:
    """Raises TrainingError on every rank when the ranks' weights have drifted apart."""
    digest = 0
    for variable in model.trainable_variables:
        digest = zlib.crc32(np.asarray(keras.ops.convert_to_numpy(variable)).tobytes(), digest)
    digests = [int(part[0]) for part in collective.allgather(np.array([digest], dtype=np.int64))]
    if len(set(digests)) > 1:
        raise TrainingError(
            f"expected equal weights on all ranks after epoch {epoch + 1}. Received: different ones "
            f"(checksums {', '.join(f'{value:08x}' for value in digests)}). A callback or train_step that changes "
            "weights must do the same on every rank, and only gradients that model.optimizer applies are averaged."
        )


def share_variables(variables: Sequence[keras.Variable], collective: Communicator) -> None:
    """Gives every rank the values that variables have on rank 0."""
    for variable in variables:
        value = np.array(keras.ops.convert_to_numpy(variable), order="C")
        collective.broadcast_(value)
        variable.assign(value)


def any_rank(flag: bool, collective: Communicator) -> bool:
    """Returns whether the flag is set on any rank."""
    flags = np.array([flag], dtype=np.int64)
    collective.allreduce_(flags, op="max")
    return bool(flags[0])


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raises ConfigurationError for what is no callback, UnsupportedError for what cannot run on several ranks."""
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ConfigurationError(
                f"callbacks: expected instances of keras.callbacks.Callback. Received: {callback!r}."
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise UnsupportedError(
                "callbacks: BackupAndRestore would resume one rank at another epoch than the rest. Pass it in "
                "callbacks of a KerasEstimator, once, which makes checkpoints in its folder and goes on from them. Or "
                "leave it out, and pass checkpointPath, and resume=True to go on from the last checkpoint."
            )


def require_absolute_paths(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises ConfigurationError for callbacks of workers that write to a folder of an executor, where nobody looks."""
    for callback in callbacks:
        for path in (getattr(callback, name, None) for name in _ATTRIBUTES if isinstance(callback, WRITERS)):
            if isinstance(path, (str, os.PathLike)) and not os.path.isabs(path) and not url_root(os.fspath(path)):
                raise ConfigurationError(
                    "callbacks: expected an absolute path, which the driver reaches too, for "
                    f"{type(callback).__name__}, which runs on rank 0 because it looks at batches. Received: "
                    f"{os.fspath(path)!r}, which would lie in a folder of an executor. Give it a URL or a path of "
                    "a shared or mounted file system, or let it look at epochs alone (save_freq='epoch', "
                    "update_freq='epoch'), so that it runs on the driver."
                )


def packages_of(callbacks: Sequence[keras.callbacks.Callback]) -> tuple[str, ...]:
    """Returns the packages that callbacks need where they run, besides Keras and what it computes with."""
    has_board = any(isinstance(callback, keras.callbacks.TensorBoard) for callback in callbacks)
    return ("tensorboard",) if has_board else ()


def listens(callback: keras.callbacks.Callback, *events: str) -> bool:
    """Returns whether a callback does anything at one of the events.

    Args:
        callback: Of a class that has a method for it, or an object that was given one, as `LambdaCallback` is.
        events: Names such as ``"on_epoch_end"``.

    >>> listens(keras.callbacks.LambdaCallback(on_epoch_end=print), "on_epoch_begin", "on_epoch_end")
    True
    """
    methods = ((getattr(callback, event), getattr(keras.callbacks.Callback, event)) for event in events)
    return any(getattr(method, "__func__", method) is not nothing for method, nothing in methods)


def callbacks_of_rank(callbacks: Sequence[keras.callbacks.Callback], rank: int) -> list[keras.callbacks.Callback]:
    """Returns those of the user's callbacks that run on a rank: the ones that write files run on rank 0 alone.

    Of Keras' own that run on every rank, rank 0's alone print what they do.
    """
    here = (callback for callback in callbacks if type(callback) is not keras.callbacks.Callback)
    own = [callback for callback in here if rank == 0 or not isinstance(callback, WRITERS)]
    for callback in own if rank else ():
        if isinstance(callback, _TALKERS):
            callback.verbose = 0
    return own


def may_stop_in_batches(callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Returns whether one of the callbacks may ask to stop after a step; all of a fit's, so that ranks decide alike.

    >>> may_stop_in_batches([keras.callbacks.EarlyStopping()]), may_stop_in_batches([keras.callbacks.TerminateOnNaN()])
    (False, True)
    """
    events = [event for event in BATCH_EVENTS if "test" not in event]
    return any(listens(one, *events) and type(one) not in (*WRITERS, LearningRateWarmup) for one in callbacks)


def require_averaged_weights(model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises ConfigurationError where a callback swaps in averages of weights, and no optimizer makes any."""
    swaps = any(isinstance(callback, keras.callbacks.SwapEMAWeights) for callback in callbacks)
    if swaps and not any(getattr(part, "use_ema", False) for part in parts_of(model.optimizer)):
        raise ConfigurationError(
            "callbacks: expected an optimizer with use_ema=True for SwapEMAWeights, which swaps in its averages of "
            f"weights. Received: {model.optimizer.name!r} with use_ema=False. Pass use_ema=True to the optimizer, or "
            "leave the callback out."
        )


class IdleSteps(keras.callbacks.Callback):
    """Undoes what the stand-in rows of a rank that has run out do to its metrics and moving statistics.

    The stand-in's gradient has the weight zero. Its forward pass still counts in the
    metrics and moves batch normalization's averages: both are kept before the first of several
    idle steps and put back after the last. A rank that trains alone between
    two averages would also apply the stand-in's gradient: its optimizer's state is kept too.
    """

    def __init__(self, share: RankWeight, *, keep_optimizers: bool = False, synchronized: bool = False) -> None:
        super().__init__()
        self._share = share
        self._keep_optimizers = keep_optimizers
        self._synchronised = synchronized
        self._saved: list[tuple[keras.Variable, np.ndarray]] | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._saved = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._share.is_idle:
            self._put_back()
        elif self._saved is None:
            layers = synchronized_layers(self.model, self._synchronised) if not self._keep_optimizers else []
            shared = {id(variable) for layer in layers for variable in layer.non_trainable_variables}
            variables = [*metric_variables(self.model), *moving_statistics(self.model)]
            variables = [variable for variable in variables if id(variable) not in shared]
            if self._keep_optimizers:
                variables += optimizer_slots(self.model)
            self._saved = [(variable, np.array(keras.ops.convert_to_numpy(variable))) for variable in variables]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._put_back()

    def _put_back(self) -> None:
        if self._saved is not None:
            # Metrics that were first built in an idle step were not kept: they had counted nothing.
            self.model.reset_metrics()
            for variable, value in self._saved:
                variable.assign(value)
            self._saved = None


class GlobalEpoch(keras.callbacks.Callback):
    """Makes the end of an epoch one for all ranks: metrics, moving statistics, validation."""

    def __init__(
        self,
        collective: Communicator,
        plan: EpochPlan,
        share: RankWeight,
        validation_batches: Callable[[], Any],
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        super().__init__()
        self._collective = collective
        self._plan = plan
        self._share = share
        self._validation_batches = validation_batches
        self._callbacks = _TestCallbacks(list(callbacks))
        self._logs: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        if self._collective.world_size > 1:
            logs.update(global_logs(self.model, self._collective, logs, self._share()))
            average_moving_statistics(self.model, self._collective, self._share.since(0))
            require_equal_weights(self.model, self._collective, epoch)
        if sum(self._plan.validation_rows):
            results = self._validate()
            logs.update({f"val_{name}": value for name, value in results.items()})
        self._logs = dict(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        # Keras ends training with what it knows itself: the numbers of this rank, without validation.
        if logs is not None:
            logs.update(self._logs)

    def _validate(self) -> dict[str, Any]:
        steps = self._plan.validation_steps(self._collective.rank)
        if steps:
            self.model.evaluate(self._validation_batches(), steps=steps, verbose=0, callbacks=self._callbacks)
        else:
            self._callbacks.on_test_begin()
            self.model.reset_metrics()
        results = sum_metrics(self.model, self._collective)
        self._callbacks.end_test(results)
        return results


class _TestCallbacks(keras.callbacks.CallbackList):
    """The user's callbacks in an evaluation, which ends for them when the numbers of all workers are known.

    They are without a model: Keras' fit has given them theirs, and some start anew when they get one.
    """

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Nothing: this rank's evaluation alone has ended."""

    def end_test(self, logs: dict[str, Any]) -> None:
        """Tells the callbacks that the evaluation has ended."""
        super().on_test_end(dict(logs))


class StepProgress(keras.callbacks.Callback):
    """Tells the reporter where this rank is, a few times a second, and at the end of an epoch where its seconds went.

    It comes after the callbacks that may take long.

    Args:
        plan: The steps of an epoch.
        feed: Where the rows come from.
        exchange: Counts what goes to other ranks, or to servers, and how long that takes.
    """

    def __init__(
        self, reporter: StepReporter, plan: EpochPlan, rank: int, feed: BatchFeed, exchange: ExchangeCounts
    ) -> None:
        super().__init__()
        self._reporter = reporter
        self._plan = plan
        self._rank = rank
        self._feed = feed
        self._exchange = exchange
        self._interval_s = max(_PROGRESS_INTERVAL_S, plan.world_size / _PROGRESS_PER_S)
        self._noted_at = 0.0
        self._is_traced = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._first, self._last = epoch, -1, 0
        self._began = self._ended = self._step_began = time.monotonic()
        self._counted = (self._exchange.waited_s, self._feed.waited_s, self._exchange.bytes_sent)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._first < 0:
            # A worker may go on in the middle of an epoch.
            self._first = self._last = batch
            self._measure()
        self._step_began = time.monotonic()

    def _measure(self) -> None:
        self._measured = (self._last, time.monotonic(), self._exchange.waited_s)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._ended = time.monotonic()
        self._feed.step_ended(self._step_began, batch + 1 - self._last)
        self._last = batch + 1
        if self._ended - self._noted_at >= self._interval_s:
            self._noted_at = self._ended
            self._report(as_numbers(logs))
        if not self._is_traced:
            self._is_traced = True
            self._measure()

    def _report(self, logs: dict[str, Any]) -> None:
        first, began, waited_s = self._measured
        steps, seconds = self._last - first if self._is_traced else 0, self._ended - began
        self._reporter.send(
            StepEnded(
                rank=self._rank,
                epoch=self._epoch,
                step=self._last,
                steps=self._plan.steps,
                logs=logs,
                rows=self._rows(self._first),
                rows_per_s=self._rows(first) / seconds if steps else 0.0,
                step_s=seconds / steps if steps else 0.0,
                wait_s=(self._exchange.waited_s - waited_s) / steps if steps else 0.0,
            )
        )

    def _rows(self, first: int) -> int:
        """Returns how many rows of its own the epoch's steps from ``first`` on have used."""
        number = self._plan.number
        return self._plan.rows_between(self._rank, number(self._epoch, first), number(self._epoch, self._last))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        waited_s, fed_s, bytes_sent = self._counted
        self._reporter.send(
            RankEpoch(
                rank=self._rank,
                epoch=epoch,
                rows=self._rows(max(self._first, 0)),
                seconds=time.monotonic() - self._began,
                training_s=self._ended - self._began,
                wait_s=self._exchange.waited_s - waited_s,
                input_s=self._feed.waited_s - fed_s,
                bytes_sent=self._exchange.bytes_sent - bytes_sent,
            )
        )


class DriverTurn(keras.callbacks.Callback):
    """Has all ranks wait for callbacks on the driver, and do what these ask for.

    Args:
        told: `TrainingJob.driver_reads`.
        steps: Steps of an epoch.
        feed: Says what one row of the model's input is.
        reporter: Asked by rank 0.
        wait_s: How long other ranks may wait for rank 0 until they hear that it still waits.
    """

    def __init__(
        self, collective: Communicator, reporter: Reporter, *, told: str, steps: int, feed: BatchFeed, wait_s: float
    ) -> None:
        super().__init__()
        self._steps = steps
        self._collective = collective
        self._reporter = reporter
        self._told = told
        self._feed = feed
        self._wait_s = wait_s
        self._has_begun = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Not when training begins: a checkpoint's optimizer is restored then, after all callbacks.
        if not self._has_begun:
            self._has_begun = True
            self._take_turn(None, {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        logs.update(self._take_turn(epoch, as_numbers(logs)))

    def _take_turn(self, epoch: int | None, logs: dict[str, Any]) -> dict[str, Any]:
        """Waits for the driver; returns the logs as its callbacks have left them, on rank 0."""
        is_first, weights = self._collective.rank == 0, list[np.ndarray]()
        if is_first:
            self._reporter.send(self._due(epoch, logs))
        orders = np.array([1.0, 0.0, np.nan, 0.0])
        while orders[0]:
            done = self._reporter.await_callbacks(self._wait_s) if is_first else None
            if done is not None:
                logs, weights = done.logs, list(done.arrays)
                rate = np.nan if done.learning_rate is None else done.learning_rate
                orders = np.array([0.0, done.stop, rate, bool(weights)])
            if self._collective.world_size > 1:
                self._collective.broadcast_(orders)
        for variable, value in zip(self.model.weights, weights, strict=False):
            variable.assign(value)
        if orders[3] and self._collective.world_size > 1:
            share_variables(self.model.weights, self._collective)
        if not np.isnan(orders[2]):
            self.model.optimizer.learning_rate = float(orders[2])
        self.model.stop_training = self.model.stop_training or bool(orders[1])
        return logs

    def _due(self, epoch: int | None, logs: dict[str, Any]) -> CallbacksDue:
        return CallbacksDue(
            rank=0,
            epoch=epoch,
            steps=self._steps,
            logs=logs,
            stopped=bool(self.model.stop_training),
            learning_rate=constant_rate(self.model),
            iterations=int(keras.ops.convert_to_numpy(parts_of(self.model.optimizer)[0].iterations)),
            rows=self._feed.rows.to_json(),
            row_shapes={role: list(shape) for role, shape in self._feed.row_shapes.items()},
            arrays=[portable(value) for value in read_variables(self.model)] if self._told == WEIGHTS else (),
        )


class CollectiveStop(keras.callbacks.Callback):
    """Lets all ranks stop together when a callback of any rank asks for it, and reports the epoch.

    Where a callback may ask for it after a step, the ranks ask each other after each. Else a request in mid-epoch,
    of a step of the model's own, travels with the gradients or weights that the ranks exchange next, so
    that no rank is left alone in an allreduce: with gradients, the fit stops one step later than
    one process would, or two where devices reduce them.

    Args:
        asks: Whether a callback may ask after a step; the same on all ranks.
        reporter: Told of every epoch by rank 0; None where the driver hears of epochs by `DriverTurn`.
    """

    def __init__(
        self,
        collective: Communicator,
        stop: StopSignal,
        reporter: Reporter | None,
        share: RankWeight,
        *,
        asks: bool,
    ) -> None:
        super().__init__()
        self._asks = asks
        self._share = share
        self._collective = collective
        self._stop = stop
        self._reporter = reporter

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Not ``self.model``, which on JAX puts the state of every step back into the variables.
        if self._collective.world_size > 1:
            if not self._share.is_idle:
                self._stop.requested = self._stop.requested or self._model.stop_training
            if self._asks:
                self._stop.agreed = any_rank(self._stop.requested, self._collective)
            self._model.stop_training = self._stop.agreed

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        wanted = self.model.stop_training or self._stop.requested
        self.model.stop_training = any_rank(wanted, self._collective)
        if self._collective.rank == 0 and self._reporter is not None:
            self._reporter.epoch(epoch, as_numbers(logs))
