"""Keras on JAX: a fit's step is two compiled functions with the exchange between them.

The first one is the model's own ``train_step``, whose optimizer only takes note of the gradients; the second one
applies their averages. Where a step is the user's own, or not of a fit, ordered host callbacks stand in it instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elephant.backends.base import (
    Backend,
    BatchForm,
    ModelDistribution,
    Spec,
    StageFunctions,
    StageLoss,
    in_places,
    stage_objective,
    sums_of_gradients,
)
from elephant.backends.keras_private import optimized_variables, step_counter, train_function
from elephant.errors import ConfigurationError

if TYPE_CHECKING:
    import keras

    from elephant.backends.gradient_averager import GradientAverager
    from elephant.backends.jax_devices import JaxReducer
    from elephant.backends.optimizer_part import OptimizerPart
    from elephant.collective.communicator import Communicator
    from elephant.config import FitConfig

Average = Callable[[Sequence[Any]], list[Any]]


class JaxBackend(Backend):
    """Keras on JAX."""

    name = "jax"
    title = "JAX"
    gpu_package = "jax[cuda12]"
    packages = ("jax",)
    oldest = "0.5"
    count_gpus = "import jax; print('gpus', sum(device.platform == 'gpu' for device in jax.devices()))"
    growth = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    needs_compiler = True
    program_layers = ("FlaxLayer", "JaxLayer")
    # What is wider needs a switch that changes all of JAX.
    count_dtype = "float32"
    fixed_shapes = True
    has_nccl = True
    divides_models = True
    compiles_host_calls = True

    def __init__(self) -> None:
        # What reduces gradients on the devices of all ranks, in a process that has joined them.
        self._reducer: JaxReducer | None = None

    def environment(self, threads: int) -> dict[str, str]:
        import os

        flags = os.environ.get("XLA_FLAGS", "")
        if threads == 1 and "xla_cpu_multi_thread_eigen" not in flags:
            flags = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
        # XLA counts processors by the last one.
        more = {"XLA_FLAGS": flags} if flags else {}
        return {
            **super().environment(threads),
            "NPROC": str(threads),
            **more,
        }

    def prepare_process(self, *, overlaps: bool = False) -> None:
        import jax

        # A callback that reads what is still being computed may wait for itself. Afterwards it is too late to say so.
        with contextlib.suppress(AttributeError):
            jax.config.update("jax_cpu_enable_async_dispatch", False)

    def sees_gpu(self) -> bool:
        import jax

        return any(device.platform == "gpu" for device in jax.devices())

    def is_wide(self) -> bool:
        import jax

        return bool(getattr(jax.config, "jax_enable_x64", False))

    def make_wide(self, wide: bool) -> None:
        import jax

        jax.config.update("jax_enable_x64", wide)

    def is_variable(self, thing: object) -> bool:
        # Arrays do not change.
        return False

    def take_step(self, model: keras.Model, batch: Any) -> None:
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        model.train_step(tuple([variable.value for variable in group] for group in groups), batch)

    def call_on_host(
        self, function: Callable[..., Sequence[np.ndarray]], tensors: Sequence[Any], specs: Sequence[Spec]
    ) -> list[Any]:
        import jax
        from jax.experimental import io_callback

        def call(*arrays: Any) -> list[np.ndarray]:
            found = function(*map(np.asarray, arrays))
            return [np.asarray(array, one.dtype).reshape(one.shape) for array, one in zip(found, outputs, strict=True)]

        outputs = [jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype)) for shape, dtype in specs]
        given = [jax.lax.stop_gradient(tensor) for tensor in tensors]
        return list(io_callback(call, outputs, *given, ordered=True))

    def host_op(
        self,
        forward: Callable[..., Sequence[np.ndarray]],
        backward: Callable[..., Sequence[np.ndarray]],
        tensors: Sequence[Any],
        specs: Sequence[Spec],
    ) -> list[Any]:
        import jax

        def call(*values: Any) -> list[Any]:
            return self.call_on_host(forward, values, specs)

        def call_forward(*values: Any) -> tuple[list[Any], tuple[Any, ...]]:
            return call(*values), values

        def call_backward(values: tuple[Any, ...], upstream: list[Any]) -> tuple[Any, ...]:
            are_floats = [jax.numpy.issubdtype(value.dtype, jax.numpy.floating) for value in values]
            like = [(one.shape, one.dtype) for one, is_float in zip(values, are_floats, strict=True) if is_float]
            return tuple(in_places(self.call_on_host(backward, [*values, *upstream], like), are_floats))

        op = jax.custom_vjp(call)
        op.defvjp(call_forward, call_backward)
        return list(op(*tensors))

    def without_graphs(self) -> contextlib.AbstractContextManager[object]:
        import jax

        eager: contextlib.AbstractContextManager[object] = jax.disable_jit()
        return eager

    def keep_state(self, model: keras.Model) -> None:
        import jax

        def make_train_function(force: bool = False) -> None:
            if model.train_function is None or force:
                compiled = model.jit_compile and not model.run_eagerly
                # Keras' own one gives the memory of the variables away when a step begins.
                model.train_function = train_function(
                    model, jax.jit(model.train_step) if compiled else model.train_step
                )

        model.make_train_function = make_train_function

    def join_devices(self, communicator: Communicator, config: FitConfig, address: str) -> None:
        from elephant.backends.jax_devices import join_devices

        if config.gpu_transport == "nccl" or config.distribution is not None:
            # Once there are devices, it is too late.
            self.prepare_process()
        self._reducer = join_devices(communicator, config, address)

    def distribution(self, config: FitConfig) -> ModelDistribution | None:
        from elephant.backends.jax_distribution import JaxDistribution

        if config.distribution is None or self._reducer is None:
            return None
        return JaxDistribution(self._reducer, config.distribution)

    def reduce_on_devices(self, averager: GradientAverager, config: FitConfig) -> None:
        if self._reducer is not None:
            averager.kernel, self._reducer.averager, averager.uses_kernel = self._reducer, averager, True

    def average_gradients(
        self, averager: GradientAverager, optimizer: keras.optimizers.Optimizer, model: keras.Model | None
    ) -> None:
        import jax

        reducer = self._reducer
        if model is None and reducer is not None:
            raise ConfigurationError(
                "gpuTransport: expected a model with one optimizer and Keras' own train_step, as 'nccl' needs on JAX. "
                "Received: another one. Pass 'host'."
            )

        def average(gradients: Sequence[Any]) -> list[Any]:
            if averager.uses_kernel and reducer is not None:
                averages: list[Any] = averager.noting_failure(reducer.average)(gradients, ())
                return averages
            for gradient in gradients:
                # On a GPU, all copies begin before the first is waited for.
                getattr(gradient, "copy_to_host_async", int)()
            arrays = [None if gradient is None else np.asarray(gradient) for gradient in gradients]
            part = averager.optimizer_part
            variables = optimized_variables(optimizer) if part is None else part.variables
            return averager.noting_failure(averager.average)(id(optimizer), arrays, variables)

        def exchange(weights: Sequence[Any]) -> list[Any]:
            part, found = averager.optimizer_part, list(weights)
            if part is None:
                return found
            values = averager.noting_failure(part.exchange)(*(np.asarray(weights[place]) for place in part.sent))
            for place, value in zip(part.received, values, strict=True):
                found[place] = jax.device_put(value, weights[place].sharding)
            return found

        if model is None:
            self._average_in_step(averager, optimizer, average)
        else:
            _cut_step(model, average, exchange)

    def divide_update(self, optimizer: keras.optimizers.Optimizer, optimizer_part: OptimizerPart) -> None:
        import keras

        from elephant.backends.optimizer_part import WholeClipping

        inner = getattr(optimizer, "inner_optimizer", optimizer)
        stateless_apply, updated = inner.stateless_apply, optimizer_part.updated
        clipping = WholeClipping(inner, optimizer_part) if inner.global_clipnorm else None
        counter = next(i for i, variable in enumerate(inner.variables) if variable is step_counter(inner))

        def apply_part(
            optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Sequence[Any]
        ) -> tuple[list[Any], list[Any]]:
            weights, own = list(trainable_variables), [grads[place] for place in updated]
            if all(gradient is None for gradient in own) and any(gradient is not None for gradient in grads):
                # Keras would miss gradients, which other ranks have.
                variables = list(map(keras.ops.convert_to_tensor, optimizer_variables))
                variables[counter] = variables[counter] + 1
                return weights, variables
            if clipping is not None:
                clipping.begin(grads, optimizer_part.variables)
            values, variables = stateless_apply(optimizer_variables, own, [weights[place] for place in updated])
            for place, value in zip(updated, values, strict=True):
                weights[place] = value
            return weights, variables

        inner.stateless_apply = apply_part

    def _average_in_step(
        self, averager: GradientAverager, optimizer: keras.optimizers.Optimizer, average: Average
    ) -> None:
        import jax

        stateless_apply, apply = optimizer.stateless_apply, optimizer.apply
        is_averaged = False

        def averaged(gradients: Sequence[Any]) -> list[Any]:
            present = [place for place, gradient in enumerate(gradients) if gradient is not None]
            given = [gradients[place] for place in present]
            if not any(isinstance(gradient, jax.core.Tracer) for gradient in given):
                return [None if value is None else jax.numpy.asarray(value) for value in average(gradients)]

            def on_host(*arrays: np.ndarray) -> list[np.ndarray]:
                filled: list[Any] = [None] * len(gradients)
                for place, array in zip(present, arrays, strict=True):
                    filled[place] = array
                averages = average(filled)
                return [averages[place] for place in present]

            values = self.call_on_host(on_host, given, [(gradient.shape, gradient.dtype) for gradient in given])
            result: list[Any] = [None] * len(gradients)
            for place, value in zip(present, values, strict=True):
                result[place] = value
            return result

        def stateless_apply_averaged(variables: Any, grads: Sequence[Any], trainable_variables: Any) -> Any:
            nonlocal is_averaged
            if averager.note is not None:
                averager.note(id(optimizer), list(grads), optimized_variables(optimizer))
                return trainable_variables, variables
            gradients, is_averaged = averaged(grads), True
            try:
                return stateless_apply(variables, gradients, trainable_variables)
            finally:
                is_averaged = False

        def apply_averaged(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
            if averager.note is not None:
                given = optimized_variables(optimizer) if trainable_variables is None else trainable_variables
                return averager.note(id(optimizer), list(grads), list(given))
            return apply(list(grads) if is_averaged else averaged(grads), trainable_variables)

        optimizer.stateless_apply, optimizer.apply = stateless_apply_averaged, apply_averaged

    def stage_functions(self, stage: keras.layers.Layer, loss: StageLoss | None, is_first: bool) -> StageFunctions:
        import jax

        @jax.jit
        def run(weights: Any, others: Any, tensors: list[Any], targets: Any, share: Any) -> tuple[Any, ...]:
            places = [] if is_first else _float_places(tensors)

            def compute(weights: Any, floats: list[Any]) -> tuple[Any, Any]:
                given = list(tensors)
                for place, value in zip(places, floats, strict=True):
                    given[place] = value
                outputs, changed, losses = stage.stateless_call(
                    weights, others, given, training=True, return_losses=True
                )
                objective = stage_objective(loss, outputs, targets, losses, share)
                return ([outputs[place] for place in _float_places(outputs)], objective), (outputs, changed)

            (_, objective), way_back, (outputs, changed) = jax.vjp(
                compute, weights, [tensors[place] for place in places], has_aux=True
            )
            # The way back is a value: one compiled function gives it to another one.
            return outputs, changed, objective, way_back

        @functools.partial(jax.jit, donate_argnums=(3,))
        def go_back(way_back: Any, gradients: list[Any], scale: Any, totals: Any) -> tuple[Any, Any]:
            own, back = way_back((gradients, scale))
            return back, sums_of_gradients(totals, own)

        predict = jax.jit(
            lambda weights, others, given: stage.stateless_call(weights, others, given, training=False)[0]
        )

        def state() -> tuple[list[Any], list[Any]]:
            groups = (stage.trainable_variables, stage.non_trainable_variables)
            weights, others = ([variable.value for variable in group] for group in groups)
            return weights, others

        def forward(inputs: Sequence[np.ndarray], targets: Any, share: float) -> tuple[list[np.ndarray], float, Any]:
            outputs, changed, objective, way_back = run(*state(), list(inputs), targets, np.float32(share))
            for variable, value in zip(stage.non_trainable_variables, changed, strict=True):
                variable.assign(value)
            return [np.asarray(output) for output in outputs], float(objective), way_back

        def backward(
            passed: Any, gradients: Sequence[np.ndarray], scale: float, totals: list[Any] | None
        ) -> tuple[list[np.ndarray], list[Any]]:
            back, sums = go_back(passed, list(gradients), np.float32(scale), totals)
            return [np.asarray(one) for one in back], sums

        def infer(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [np.asarray(output) for output in predict(*state(), list(inputs))]

        return StageFunctions(forward, backward, infer)

    def update_function(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> Callable[..., None]:
        import jax

        step = jax.jit(optimizer.stateless_apply)

        def update(gradients: Sequence[Any]) -> None:
            groups = [list(variables), optimizer.variables]
            weights, state = ([variable.value for variable in group] for group in groups)
            for group, values in zip(groups, step(state, list(gradients), weights), strict=True):
                for variable, value in zip(group, values, strict=True):
                    variable.assign(value)

        return update

    def predict_function(self, model: keras.Model, form: BatchForm) -> Callable[..., Any]:
        if model.run_eagerly:
            return super().predict_function(model, form)
        import jax
        import keras

        step = jax.jit(lambda state, batch: model.predict_step(state, batch)[0])
        rows = 0

        def predict(*arrays: np.ndarray) -> Any:
            # Each number of rows is a program of its own, so that fewer rows are made as many as there were before.
            nonlocal rows
            count = len(arrays[0])
            rows = max(rows, count)
            padded = [np.concatenate([one, np.zeros((rows - count, *one.shape[1:]), one.dtype)]) for one in arrays]
            weights = [variable.value for variable in model.trainable_variables]
            others = [variable.value for variable in model.non_trainable_variables]
            outputs = step((weights, others), form.assembled(padded if rows > count else arrays))
            return keras.tree.map_structure(lambda output: np.asarray(output)[:count], outputs)

        return predict


def _float_places(tensors: Sequence[Any]) -> list[int]:
    import jax

    return [place for place, one in enumerate(tensors) if jax.numpy.issubdtype(one.dtype, jax.numpy.floating)]


def _cut_step(model: keras.Model, average: Average, exchange: Average) -> None:
    """Makes the model's train function of two parts, between which gradients are averaged.

    Args:
        exchange: Takes the weights as this rank has updated them, and returns them as all ranks have.
    """
    import jax

    optimizer = model.optimizer
    apply = optimizer.stateless_apply

    @contextlib.contextmanager
    def recording(taken: list[Any]) -> Iterator[None]:
        def record(variables: Any, gradients: Any, weights: Any) -> tuple[Any, Any]:
            taken.append(list(gradients))
            return weights, variables

        optimizer.stateless_apply = record
        try:
            yield
        finally:
            optimizer.stateless_apply = apply

    def compute(weights: Any, others: Any, variables: Any, metrics: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        taken: list[Any] = []
        with recording(taken):
            logs, (_, others, _, metrics) = model.train_step((weights, others, variables, metrics), batch)
        (gradients,) = taken
        return logs, others, metrics, gradients

    def make_train_function(force: bool = False) -> None:
        if model.train_function is not None and not force:
            return
        first, second = compute, apply
        if model.jit_compile and not model.run_eagerly:
            first = jax.jit(compute, donate_argnums=(1, 3))
            second = jax.jit(apply, donate_argnums=(0, 2))

        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            weights, others, variables, metrics = state
            logs, others, metrics, gradients = first(weights, others, variables, metrics, batch)
            weights, variables = second(variables, average(gradients), weights)
            return logs, (exchange(weights), others, variables, metrics)

        model.train_function = train_function(model, step)

    model.make_train_function = make_train_function
