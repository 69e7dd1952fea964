"""Table of callbacks: where each kind runs, what it hears and reads there, and why. Every decision about it asks here.

A callback of Keras, or a package of callbacks, is one row of `RULES`. A callback of the user's own is known by its
methods: which events it listens to. Where it runs:

======== =============================================== ====================================== ======================
duty     synchronous fit                                 executors do not reach the driver      asynchronous fit
======== =============================================== ====================================== ======================
DECIDES  all ranks; the driver behind a user's callback  as there                               driver; batches on all
WRITES   driver; rank 0 where it looks at batches        driver, later, if without weights      driver
LOGS     driver                                          driver, later                          driver; batches on all
TUNES    driver                                          driver, later, if without weights      driver; batches on all
OWN      driver; all ranks where it looks at batches     driver, later, if without weights      driver; batches on all
======== =============================================== ====================================== ======================

A callback that sets variables which the model uses too runs where the model is, unless it is a tool's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import keras

from elephant.backends.keras_private import traces_batches
from elephant.errors import ConfigurationError, UnsupportedError, did_you_mean
from elephant.training.warmup import LearningRateWarmup

EPOCH_EVENTS = ("on_epoch_begin", "on_epoch_end")
STEP_EVENTS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
# Events that the driver does not hear of.
BATCH_EVENTS = (*STEP_EVENTS, "on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end")


class Place(Enum):
    """Processes that run a callback of a synchronous fit."""

    DRIVER = "the driver"
    ALL_RANKS = "all ranks"
    RANK_0 = "rank 0"


class Duty(Enum):
    """Part of a callback in a fit, from which follows where it runs."""

    DECIDES = "decides about training, beside what it decides about, alike on all ranks"
    WRITES = "writes files or messages, of which one process's are enough"
    LOGS = "logs to the run of an experiment tracker, which the user has opened on the driver"
    TUNES = "holds a tuner, which belongs to the driver"
    OWN = "does what its methods say"


def _yes(callback: Any) -> bool:
    """Returns True."""
    return True


@dataclass(frozen=True)
class CallbackRule:
    """Row of the table. Where a callback runs holds for subclasses too; what it reads does not: they may do more."""

    kind: type[keras.callbacks.Callback] | str | None  # a class, a package by name, or None where this Keras has it not
    duty: Duty
    reason: str
    by_numbers: bool = False  # whether it decides by the logs alone, and says so with verbose=1
    reads_weights: Callable[[Any], bool] = _yes  # whether it reads weights at the ends of epochs
    hears_later: bool | None = None  # whether epochs may come when training has ended; None: if it reads no weights
    stops_in_batches: bool = True  # whether one that listens to batches may ask to stop after a step
    packages: tuple[str, ...] = ()  # what it needs where it runs, besides Keras

    def holds_for(self, callback: keras.callbacks.Callback) -> bool:
        """Returns whether a callback is of the row's class or package, or of a subclass."""
        if isinstance(self.kind, type):
            return isinstance(callback, self.kind)
        return any(kind.__module__.partition(".")[0] == self.kind for kind in type(callback).__mro__)

    def tells_all_of(self, callback: keras.callbacks.Callback) -> bool:
        """Returns whether what the row says of weights and stops holds: for a class itself, and all of a package."""
        return type(callback) is self.kind or isinstance(self.kind, str)


def _no(callback: keras.callbacks.Callback) -> bool:
    return False


_TRACKERS = (
    "aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "neptune_tensorflow_keras", "optuna",
    "optuna_integration", "wandb",
)  # fmt: skip
# Where two rows hold for a callback, as for a tracker's subclass of ModelCheckpoint, the first one counts.
_ROWS = (
    CallbackRule(
        keras.callbacks.EarlyStopping,
        Duty.DECIDES,
        "ends training in the same epoch on all ranks; its best weights are those of each rank",
        by_numbers=True,
        reads_weights=lambda callback: bool(callback.restore_best_weights),
    ),
    CallbackRule(
        keras.callbacks.LearningRateScheduler,
        Duty.DECIDES,
        "sets the rate of each rank's optimizer before its first step",
        by_numbers=True,
        reads_weights=_no,
    ),
    CallbackRule(
        keras.callbacks.ReduceLROnPlateau,
        Duty.DECIDES,
        "sets the rate of each rank's optimizer by what it has seen of epochs",
        by_numbers=True,
        reads_weights=_no,
    ),
    CallbackRule(
        keras.callbacks.SwapEMAWeights, Duty.DECIDES, "swaps the weights of each rank's model for their averages"
    ),
    CallbackRule(
        keras.callbacks.TerminateOnNaN, Duty.DECIDES, "looks at each step's loss, and ends all ranks", reads_weights=_no
    ),
    CallbackRule(
        keras.callbacks.ModelCheckpoint, Duty.WRITES, "saves the model into the user's folder", stops_in_batches=False
    ),
    CallbackRule(
        keras.callbacks.CSVLogger,
        Duty.WRITES,
        "appends an epoch's numbers to the user's file",
        reads_weights=_no,
        stops_in_batches=False,
    ),
    CallbackRule(
        keras.callbacks.TensorBoard,
        Duty.WRITES,
        "writes numbers, and perhaps weights, with the time at which it hears of them",
        reads_weights=lambda callback: bool(callback.histogram_freq or callback.embeddings_freq),
        hears_later=False,
        stops_in_batches=False,
        packages=("tensorboard",),
    ),
    CallbackRule(
        keras.callbacks.RemoteMonitor,
        Duty.WRITES,
        "sends an epoch's numbers to a server that the driver reaches",
        reads_weights=_no,
        stops_in_batches=False,
    ),
    CallbackRule(
        getattr(keras.callbacks, "OrbaxCheckpoint", None),
        Duty.WRITES,
        "saves the model into the user's folder",
        stops_in_batches=False,
    ),
    *(
        CallbackRule(name, Duty.LOGS, "logs numbers, and may listen to batches for details", hears_later=True)
        for name in _TRACKERS
    ),
    CallbackRule("keras_tuner", Duty.TUNES, "one of its callbacks keeps the weights of the best epoch"),
    CallbackRule(keras.callbacks.History, Duty.OWN, "collects numbers", reads_weights=_no),
    CallbackRule(keras.callbacks.LambdaCallback, Duty.OWN, "looks at numbers, most often", hears_later=True),
    CallbackRule(LearningRateWarmup, Duty.OWN, "sets the rate before each step", stops_in_batches=False),
)
RULES = tuple(rule for rule in _ROWS if rule.kind is not None)
_OF_USERS = CallbackRule(keras.callbacks.Callback, Duty.OWN, "a class of the user's own")


def rule_of(callback: keras.callbacks.Callback) -> CallbackRule:
    """Returns the rule of a callback."""
    return next((rule for rule in RULES if rule.holds_for(callback)), _OF_USERS)


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


def is_of_tool(callback: keras.callbacks.Callback, *duties: Duty) -> bool:
    """Returns whether a callback belongs to a tracker or a tuner, of Keras' classes its subclasses too."""
    duties = duties or (Duty.LOGS, Duty.TUNES)
    return any(rule.duty in duties and rule.holds_for(callback) for rule in RULES)


def place_of(callback: keras.callbacks.Callback) -> Place:
    """Returns where a callback of a synchronous fit runs, as far as that follows from itself.

    >>> place_of(keras.callbacks.CSVLogger("log.csv")), place_of(keras.callbacks.EarlyStopping())
    (<Place.DRIVER: 'the driver'>, <Place.ALL_RANKS: 'all ranks'>)
    """
    duty = rule_of(callback).duty
    if duty is Duty.DECIDES:
        on_driver = False
    elif duty is Duty.WRITES:
        on_driver = not _writes_in_batches(callback)
    else:
        on_driver = duty is not Duty.OWN or not listens(callback, *BATCH_EVENTS)
    return Place.DRIVER if on_driver else _place_on_ranks(callback)


def _place_on_ranks(callback: keras.callbacks.Callback) -> Place:
    return Place.RANK_0 if rule_of(callback).duty is Duty.WRITES else Place.ALL_RANKS


def _writes_in_batches(callback: keras.callbacks.Callback) -> bool:
    # A profile of TensorBoard is one of the process that trains.
    often = getattr(callback, "save_freq", getattr(callback, "update_freq", "epoch")) != "epoch"
    of_keras = next(kind for kind in type(callback).__mro__ if kind.__module__.startswith("keras."))
    adds = not is_of_tool(callback, Duty.LOGS) and any(
        getattr(type(callback), event) is not getattr(of_keras, event) for event in BATCH_EVENTS
    )
    return bool(often or adds or traces_batches(callback))


def places_of(
    callbacks: Sequence[keras.callbacks.Callback], sharing: Collection[int] = (), *, later: bool = False
) -> list[Place]:
    """Returns where each callback of a synchronous fit runs.

    As one of the user's own may put a number into the logs that one behind it decides by, those
    behind it follow it to the driver.

    Args:
        callbacks: Those of the fit, in their order.
        sharing: Indices of those that share variables with the model: what they set has to be set where the model is.
        later: Whether the driver hears of epochs when training has ended.

    >>> class F1(keras.callbacks.Callback):
    ...     def on_epoch_end(self, epoch, logs=None):
    ...         logs["val_f1"] = 0.5
    >>> stopping = keras.callbacks.EarlyStopping("val_f1", mode="max")
    >>> [place.value for place in places_of([stopping, F1(), stopping])]
    ['all ranks', 'the driver', 'the driver']
    """
    places, follows = list[Place](), False
    for index, callback in enumerate(callbacks):
        place = place_of(callback)
        if index in sharing and not is_of_tool(callback):
            place = _place_on_ranks(callback)
        elif follows and rule_of(callback).by_numbers:
            place = Place.DRIVER
        follows = follows or (place is Place.DRIVER and _is_of_user(callback))
        is_late = later and place is Place.DRIVER and not may_hear_later(callback)
        places.append(_place_on_ranks(callback) if is_late else place)
    return places


def _is_of_user(callback: keras.callbacks.Callback) -> bool:
    return not (type(callback).__module__.startswith("keras.") or is_of_tool(callback, Duty.LOGS))


def callbacks_of_rank(callbacks: Sequence[keras.callbacks.Callback], rank: int) -> list[keras.callbacks.Callback]:
    """Returns those of the workers' callbacks that run on a rank: the ones that write files run on rank 0 alone.

    Of Keras' own that decide on every rank, rank 0's alone print what they do.
    """
    here = (callback for callback in callbacks if type(callback) is not keras.callbacks.Callback)
    own = [callback for callback in here if rank == 0 or _place_on_ranks(callback) is Place.ALL_RANKS]
    for callback in own if rank else ():
        if rule_of(callback).by_numbers:
            callback.verbose = 0
    return own


def has_copies_on_workers(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback of an asynchronous fit has copies on the workers, which hear of their batches.

    All have their epochs on the driver. Those of Keras that write files have no copies.
    """
    return rule_of(callback).duty is not Duty.WRITES and listens(callback, *BATCH_EVENTS)


def reads_weights(callback: keras.callbacks.Callback, *events: str) -> bool:
    """Returns whether a callback may look at weights at one of the events, `EPOCH_EVENTS` among them."""
    rule = rule_of(callback)
    return listens(callback, *events) and (rule.reads_weights(callback) or not rule.tells_all_of(callback))


def may_hear_later(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback may hear of epochs when training has ended, and weights and rate are others."""
    rule = rule_of(callback)
    if rule.hears_later is not None and rule.tells_all_of(callback):
        return rule.hears_later
    return not reads_weights(callback, "on_train_begin", *EPOCH_EVENTS)


def may_stop_in_batches(callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Returns whether one of the callbacks may ask to stop after a step; all of a fit's, so that ranks decide alike.

    >>> may_stop_in_batches([keras.callbacks.EarlyStopping()]), may_stop_in_batches([keras.callbacks.TerminateOnNaN()])
    (False, True)
    """
    rules = ((one, rule_of(one)) for one in callbacks if listens(one, *STEP_EVENTS))
    return any(rule.stops_in_batches or not rule.tells_all_of(one) for one, rule in rules)


def packages_of(callbacks: Sequence[keras.callbacks.Callback]) -> tuple[str, ...]:
    """Returns the packages that callbacks need where they run, besides Keras and what it computes with."""
    return tuple(dict.fromkeys(name for callback in callbacks for name in rule_of(callback).packages))


def require_late(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises UnsupportedError for callbacks of Keras that make no sense on the driver when training has ended."""
    for callback in callbacks:
        duty = rule_of(callback).duty
        if duty is Duty.DECIDES or (duty is Duty.WRITES and not may_hear_later(callback)):
            raise UnsupportedError(
                f"driverCallbacks: {type(callback).__name__} looks at weights or decides about training, and executors "
                "do not reach this driver, which hears of epochs when training has ended. Pass it in callbacks: it "
                "then runs on the workers."
            )


_MONITORS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.ModelCheckpoint)


def check_monitors(callbacks: Sequence[keras.callbacks.Callback], measures: Sequence[str] | None) -> None:
    """Raises ConfigurationError where a callback of Keras follows a number that no epoch of the fit will have.

    Args:
        callbacks: Those of the fit. One of the user's own, or what stands in its place, may add numbers: nothing is
            known then.
        measures: See `elephant.modeling.model_info.ModelInfo`.
    """
    may_add = (keras.callbacks.Callback, keras.callbacks.LambdaCallback)
    if measures is None or any(_is_of_user(one) or type(one) in may_add for one in callbacks):
        return
    known = [*measures, *(f"val_{name}" for name in measures)]
    # With several outputs their names come before, and of several metrics of one name all but one are counted.
    logged = re.compile(rf"(.+_)?({'|'.join(map(re.escape, measures))})(_\d+)?|learning_rate")
    for callback in (one for one in callbacks if isinstance(one, _MONITORS)):
        if not logged.fullmatch(str(callback.monitor)):
            raise ConfigurationError(
                f"callbacks: expected {type(callback).__name__} with one of the monitors {', '.join(known)}. "
                f"Received: monitor={callback.monitor!r}.{did_you_mean(str(callback.monitor), known)}"
            )


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
                "leave it out, and pass checkpointPath, and resume=True to go on from the last checkpoint.",
                topic="callbacks",
            )
