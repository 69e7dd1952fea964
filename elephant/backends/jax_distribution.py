"""Model whose layers Keras divides among devices that JAX has joined, in the processes of one fit.

Every rank runs the same steps on the same rows, of which JAX computes a part on each device. Outside of steps and
validations the model is whole, in the memory of each host, so that callbacks and checkpoints may read and change it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from elephant.backends.base import ModelDistribution
from elephant.backends.jax_devices import JaxReducer
from elephant.backends.keras_private import give_layout
from elephant.errors import ConfigurationError

if TYPE_CHECKING:
    import keras

# Paths that an error lists.
_MOST_PATHS = 8


class JaxDistribution(ModelDistribution):
    """Division of a model by the rules of ``distribution``.

    Args:
        devices: The ranks' devices, which JAX has joined.
        given: The option's value; see `elephant.kinds.DISTRIBUTION`.
    """

    def __init__(self, devices: JaxReducer, given: Mapping[str, Any]) -> None:
        self._devices = devices
        self._given = given
        self._layouts: dict[int, Any] = {}
        # Functions of validation that were made for parts.
        self._test_function: Any = None

    def run(self, fit: Callable[[], None]) -> None:
        self._devices.run(fit)

    def close(self) -> None:
        self._devices.close()

    def on_host(self) -> contextlib.AbstractContextManager[object]:
        import jax

        host: contextlib.AbstractContextManager[object] = jax.default_device(jax.local_devices(backend="cpu")[0])
        return host

    def begin(self, model: keras.Model) -> None:
        import keras

        given = self._given
        mesh = keras.distribution.DeviceMesh(given["shape"], given["axis_names"], keras.distribution.list_devices())
        rules = keras.distribution.LayoutMap(mesh)
        for pattern, axes in given["layouts"].items():
            rules[pattern] = tuple(axes)
        self._mesh = mesh
        self._distribution = _distribution_of_whole_batches(rules, given["batch_dim_name"])
        self._check_rules(model)
        self._watch_steps(model)
        self.divide(model)

    def divide(self, model: keras.Model) -> None:
        import jax
        import keras

        for variable in _variables_of(model):
            value, layout = np.asarray(variable.value), self._layout_of(variable, model)
            give_layout(variable, layout)
            # Of an array that JAX makes of parts, no rank asks the others whether theirs is the same.
            variable.assign(jax.make_array_from_callback(value.shape, layout.backend_layout, value.__getitem__))
        keras.distribution.set_distribution(self._distribution)
        model.test_function, model.predict_function = self._test_function, None
        self.is_divided = True

    def gather(self, model: keras.Model) -> None:
        import keras
        from jax.experimental import multihost_utils

        with self._devices.waiting(), self.on_host():
            for variable in _variables_of(model):
                value = variable.value
                is_whole = value.is_fully_replicated or value.is_fully_addressable
                whole = np.array(value if is_whole else multihost_utils.process_allgather(value, tiled=True))
                give_layout(variable, None)
                variable.assign(whole)
        keras.distribution.set_distribution(None)
        self._test_function = model.test_function
        model.test_function = model.predict_function = None
        self.is_divided = False

    def _layout_of(self, variable: Any, model: keras.Model) -> Any:
        import keras

        if id(variable) not in self._layouts:
            divided = {id(weight): self._distribution.get_variable_layout(weight) for weight in model.weights}
            reference = variable if id(variable) in divided else _reference_of(variable, model.trainable_variables)
            # What keeps a state of no weight in particular, such as a metric, is whole on each device.
            whole = keras.distribution.TensorLayout([None] * len(variable.shape), self._mesh)
            self._layouts[id(variable)] = divided.get(id(reference), whole)
        return self._layouts[id(variable)]

    def _check_rules(self, model: keras.Model) -> None:
        sizes = dict(zip(self._given["axis_names"], self._given["shape"], strict=True))
        is_any_divided = False
        for weight in model.weights:
            axes = self._distribution.get_variable_layout(weight).axes
            parts = [sizes.get(axis, 1) for axis in axes]
            is_any_divided = is_any_divided or any(axis is not None for axis in axes)
            if len(axes) > len(weight.shape) or any(
                size % count for size, count in zip(weight.shape, parts, strict=False)
            ):
                raise ConfigurationError(
                    f"distribution: expected dimensions of {weight.path!r} that the axes {axes} of the mesh {sizes} "
                    f"divide into equal parts. Received: the shape {tuple(weight.shape)}. Change rule or layer."
                )
        if not is_any_divided:
            paths = [weight.path for weight in model.weights]
            raise ConfigurationError(
                f"distribution: expected rules of which one matches a variable's whole path, such as {paths[0]!r}. "
                f"Received: the rules {', '.join(map(repr, self._given['layouts']))} for {model.name!r} with "
                f"{', '.join(paths[:_MOST_PATHS])}{', ...' if len(paths) > _MOST_PATHS else ''}. Change the rules."
            )

    def _watch_steps(self, model: keras.Model) -> None:
        """Has other ranks looked after while this one is in a step of training or of a validation."""
        model.train_step, model.test_step = self._splitting(model.train_step), self._splitting(model.test_step)
        for kind in ("train", "test"):
            setattr(model, f"make_{kind}_function", self._making_watched(model, kind))
        reset_metrics = model.reset_metrics

        def reset() -> None:
            with self._devices.waiting():
                reset_metrics()

        model.reset_metrics = reset

    def _making_watched(self, model: keras.Model, kind: str) -> Callable[..., None]:
        name = f"{kind}_function"
        make = getattr(model, f"make_{name}")

        def make_watched(force: bool = False) -> None:
            if getattr(model, name) is None or force:
                make(force)
                setattr(model, name, self._watched(getattr(model, name), model))

        return make_watched

    def _watched(self, function: Callable[..., Any], model: keras.Model) -> Callable[..., Any]:
        import jax

        def watched(state: Any, iterator: Iterator[Any]) -> Any:
            # Rows are waited for before the step.
            batches = list(itertools.islice(iterator, model.steps_per_execution))
            if not batches:
                raise StopIteration
            if not self.is_divided:
                return function(state, iter(batches))
            with self._devices.waiting():
                return jax.block_until_ready(function(state, iter(batches)))

        return watched

    def _splitting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a step that divides its rows along the mesh's axis of batches, where they can be divided."""
        import keras

        axis = self._given["batch_dim_name"]
        replicas = self._mesh.shape[self._mesh.axis_names.index(axis)]

        def split(tensor: Any) -> Any:
            if tensor is None or tensor.shape[0] % replicas:
                return tensor
            layout = keras.distribution.TensorLayout([axis, *[None] * (len(tensor.shape) - 1)], self._mesh)
            return keras.distribution.distribute_tensor(tensor, layout)

        def split_step(state: Any, data: Any) -> Any:
            is_split = replicas > 1 and self.is_divided
            return step(state, keras.tree.map_structure(split, data) if is_split else data)

        return split_step


def _distribution_of_whole_batches(rules: Any, batch_dim_name: str) -> Any:
    """Returns a distribution by rules whose batches come whole to each device.

    Batches of any number of rows are possible then, also of one that the mesh does not divide.
    """
    import keras

    class WholeBatches(keras.distribution.ModelParallel):
        def get_data_layout(self, data_shape: Any) -> Any:
            return keras.distribution.TensorLayout([None] * len(data_shape), self.device_mesh)

    return WholeBatches(layout_map=rules, batch_dim_name=batch_dim_name, auto_shard_dataset=False)


def _variables_of(model: keras.Model) -> list[Any]:
    """Returns all variables of a model, its metrics and its optimizer, each once."""
    found = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return list({id(variable): variable for variable in found}.values())


def _reference_of(slot: Any, weights: Iterable[Any]) -> Any:
    """Returns the weight that a variable of an optimizer belongs to, which has the path of the weight in its name."""
    name, shape = slot.path.rpartition("/")[2], tuple(slot.shape)
    known = [
        weight
        for weight in weights
        if name.startswith(f"{weight.path.replace('/', '_')}_") and tuple(weight.shape) == shape
    ]
    return max(known, key=lambda weight: len(weight.path), default=None)
