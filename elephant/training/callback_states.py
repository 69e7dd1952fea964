"""What callbacks remember from one epoch to the next, as values that a checkpoint holds.

Of Keras' own callbacks, and of `elephant.LearningRateWarmup`, it is known what that is. One of the user's may
have a method ``get_state()``, which returns a dictionary of JSON values, numpy arrays and lists of arrays,
and a method ``set_state(state)``, which is called after its ``on_train_begin``. Others begin anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elephant.training.warmup import LearningRateWarmup

logger = logging.getLogger(__name__)

# The attributes that change as training goes on. What the user chose, such as patience, is not among them.
_REMEMBERED: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving"),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    LearningRateWarmup: ("_targets", "_start"),
}

States = list[dict[str, Any]]


def states_of(callbacks: Sequence[keras.callbacks.Callback]) -> tuple[States, dict[str, np.ndarray]]:
    """Returns what callbacks remember.

    Args:
        callbacks: The user's, in their order.

    Returns:
        One JSON value per callback, and the arrays that these name.

    Raises:
        TypeError: A ``get_state`` returned something that a checkpoint does not hold.
    """
    arrays: dict[str, np.ndarray] = {}
    states = []
    for index, callback in enumerate(callbacks):

        def keep(value: Any, place: str = f"callback/{index}") -> Any:
            return _kept(value, place, arrays)

        values = {name: keep(value) for name, value in _values(callback).items()}
        states.append({"class": type(callback).__name__, "values": values})
    return states, arrays


def restore_states(
    pairs: Iterable[tuple[keras.callbacks.Callback, Mapping[str, Any]]], arrays: Mapping[str, np.ndarray]
) -> None:
    """Gives callbacks back what they remembered; those that are others than they were begin anew.

    Args:
        pairs: Callbacks, after their ``on_train_begin``, and what `states_of` returned for each.
        arrays: As `states_of` returned them.
    """
    for callback, state in pairs:
        name = type(callback).__name__
        if state["class"] != name:
            logger.warning("the checkpoint has a %s where a %s is now, which begins anew", state["class"], name)
            continue
        values = {key: _given_back(value, arrays) for key, value in state["values"].items()}
        setter = _method(callback, "set_state")
        if setter is not None:
            if values:
                setter(values)
            continue
        for key, value in values.items():
            setattr(callback, key, value)


def continue_files(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Has callbacks go on in the files of the fit that is resumed, where they would begin them anew."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def _values(callback: keras.callbacks.Callback) -> dict[str, Any]:
    getter = _method(callback, "get_state")
    if getter is not None:
        return dict(getter() or {})
    names = next((names for kind, names in _REMEMBERED.items() if isinstance(callback, kind)), ())
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def _method(callback: keras.callbacks.Callback, name: str) -> Callable[..., Any] | None:
    found = getattr(callback, name, None)
    return found if callable(found) else None


def _kept(value: Any, place: str, arrays: dict[str, np.ndarray]) -> Any:
    """Returns a value as JSON holds it; arrays are put aside, and named."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if isinstance(value, np.generic) or keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        value = np.asarray(keras.ops.convert_to_numpy(value))
        if value.ndim == 0:
            return {"value": value.item()}
    if isinstance(value, np.ndarray):
        name = f"{place}/{len(arrays)}"
        arrays[name] = np.array(value)
        return {"array": name}
    if isinstance(value, (list, tuple)):
        return {"list": [_kept(item, place, arrays) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": {str(key): _kept(item, place, arrays) for key, item in value.items()}}
    raise TypeError(
        f"get_state: expected numbers, text, numpy arrays, or lists and dictionaries of these. Received: {value!r}."
    )


def _given_back(kept: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    if "array" in kept:
        return np.array(arrays[kept["array"]])
    if "list" in kept:
        return [_given_back(item, arrays) for item in kept["list"]]
    if "dict" in kept:
        return {key: _given_back(item, arrays) for key, item in kept["dict"].items()}
    return kept["value"]
