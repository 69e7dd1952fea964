"""Keras on TensorFlow: a step is one graph, in which host callbacks stand between gradients and weights."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elephant.backends.base import (
    BATCHES_AHEAD,
    Arrays,
    Backend,
    BatchForm,
    Spec,
    StageFunctions,
    StageLoss,
    Steps,
    in_places,
    stage_objective,
    sums_of_gradients,
)
from elephant.backends.keras_private import optimized_variables
from elephant.backends.tensorflow_gradients import Lookups, fuse_update, lookups_of, without_repeated
from elephant.data.schema import RowSpec, pack
from elephant.errors import ConfigurationError

if TYPE_CHECKING:
    import keras

    from elephant.backends.gradient_averager import GradientAverager
    from elephant.backends.optimizer_part import OptimizerPart

# What Keras tests by, besides the step itself.
_TEST_METHODS = ("test_on_batch", "make_test_function")
_STAMP = r"([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]+: )"


class TensorFlowBackend(Backend):
    """Keras on TensorFlow."""

    name = "tensorflow"
    title = "TensorFlow"
    gpu_package = "tensorflow[and-cuda]"
    packages = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly", "tensorflow-macos")
    oldest = "2.16.1"
    count_gpus = "import tensorflow as tf; print('gpus', len(tf.config.list_physical_devices('GPU')))"
    log_level = "TF_CPP_MIN_LOG_LEVEL"
    # Wherever it is imported, and where there is no GPU.
    noise = (
        rf"I0000 00:00:|{_STAMP}I |WARNING: All log messages before absl::InitializeLog|"
        r"To enable the following instructions:|"
        rf"([WE]0000 00:00:|{_STAMP}[WE] ).*"
        r"(Unable to register cu|computation placer already registered|failed call to cuInit|cuda_diagnostics|TF-TRT)"
    )
    outside_table = r"indices\[[\d,]*\] = (-?\d+) is not in \[0, (\d+)\)\s+\[\[\{\{node (?:\S+/)?([^/\s]+)/GatherV2\}\}"
    growth = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    # Its import leaves two threads and no device: measured.
    forks_after_import = True
    traces_ahead = True
    takes_strings = True
    gives_slices = True
    program_layers = ("TFSMLayer",)

    def __init__(self) -> None:
        self._host_calls = 0
        # Lookups at places of the model's own, in all graphs so far.
        self._own_places = 0

    def environment(self, threads: int) -> dict[str, str]:
        return {
            **super().environment(threads),
            "TF_NUM_INTRAOP_THREADS": str(threads),
            # On one core, a second thread only takes turns with the first.
            "TF_NUM_INTEROP_THREADS": str(min(threads, 2)),
        }

    def prepare_process(self, *, overlaps: bool = False) -> None:
        import tensorflow as tf

        if overlaps:
            # The backward pass goes on beside those that send. Once TensorFlow has computed it is too late to say so.
            with contextlib.suppress(RuntimeError):
                threads = tf.config.threading
                threads.set_inter_op_parallelism_threads(max(threads.get_inter_op_parallelism_threads(), 2))

    def sees_gpu(self) -> bool:
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))

    @contextlib.contextmanager
    def random_state(self) -> Iterator[None]:
        from tensorflow.python.eager import context

        seeds = vars(context.context())
        before = {name: seeds[name] for name in ("_seed", "_rng") if name in seeds}
        try:
            yield
        finally:
            # One that nobody has seeded yet has no generator.
            seeds.pop("_rng", None)
            seeds.update(before)

    def on_cpu(self) -> contextlib.AbstractContextManager[object]:
        import keras

        device: contextlib.AbstractContextManager[object] = keras.device("cpu:0")
        return device

    @contextlib.contextmanager
    def without_graphs(self) -> Iterator[None]:
        import tensorflow as tf

        before = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(before)

    def is_variable(self, thing: object) -> bool:
        return "tensorflow" in sys.modules and isinstance(thing, sys.modules["tensorflow"].Variable)

    def python_function(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        found: Callable[..., Any] | None = getattr(function, "python_function", None)
        return found

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import tensorflow as tf

        made: Callable[..., Any] = tf.function(function)
        return made

    def refuse_step(self) -> None:
        import tensorflow as tf

        try:
            from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
        except ImportError:
            # Not part of TensorFlow's public interface. Without it, TensorFlow itself fails, in words of its own.
            return
        if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ConfigurationError(
                "DistributedOptimizer: expected a step without XLA, which cannot contain the exchange between ranks. "
                "Received: jit_compile=True. Pass jit_compile=False to model.compile ('auto' means True where there "
                "is a GPU) or to tf.function.",
                topic="functions-on-workers",
            )

    def leave_compiled_step(self, model: keras.Model) -> str:
        if not model.jit_compile:
            return ""
        model.jit_compile = False
        return "XLA"

    def call_on_host(
        self, function: Callable[..., Sequence[np.ndarray]], tensors: Sequence[Any], specs: Sequence[Spec]
    ) -> list[Any]:
        import tensorflow as tf

        from elephant.backends.tensorflow_exchange import on_host

        self._host_calls += 1
        types = [tf.as_dtype(dtype) for _, dtype in specs]
        results = on_host(lambda *arrays: list(function(*arrays)), tensors, types)
        for result, (shape, _) in zip(results, specs, strict=True):
            result.set_shape(tuple(shape))
        return results

    def host_op(
        self,
        forward: Callable[..., Sequence[np.ndarray]],
        backward: Callable[..., Sequence[np.ndarray]],
        tensors: Sequence[Any],
        specs: Sequence[Spec],
    ) -> list[Any]:
        import tensorflow as tf

        @tf.custom_gradient
        def op(*values: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
            def gradient(*upstream: Any) -> list[Any]:
                given = [*values, *map(tf.convert_to_tensor, upstream)]
                are_floats = [value.dtype.is_floating for value in values]
                like = [(one.shape, one.dtype) for one in values if one.dtype.is_floating]
                return in_places(self.call_on_host(backward, given, like), are_floats)

            return self.call_on_host(forward, values, specs), gradient

        return list(op(*tensors))

    fuse_update = staticmethod(fuse_update)

    def average_gradients(
        self, averager: GradientAverager, optimizer: keras.optimizers.Optimizer, model: keras.Model | None
    ) -> None:
        from elephant.backends.tensorflow_exchange import cut_step, kernel_of

        if model is not None:
            averager.kernel = kernel_of(averager)

        def average(grads: Sequence[Any], variables: Sequence[Any] | None, lookups: Lookups | None = None) -> list[Any]:
            known = optimized_variables(optimizer) if variables is None else list(variables)
            return self._averaged(averager, id(optimizer), list(grads), known, lookups)

        def exchange() -> None:
            if averager.optimizer_part is not None:
                self._exchange_weights(averager, averager.optimizer_part)

        if model is not None and model.jit_compile and not model.run_eagerly:
            cut_step(model, average, exchange, lambda: self._host_calls)
            return
        apply = optimizer.apply

        def apply_averaged(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
            if averager.note is not None:
                variables = optimized_variables(optimizer) if trainable_variables is None else trainable_variables
                return averager.note(id(optimizer), list(grads), list(variables))
            applied = apply(average(grads, trainable_variables), trainable_variables)
            exchange()
            return applied

        optimizer.apply = apply_averaged

    def _exchange_weights(self, averager: GradientAverager, optimizer_part: OptimizerPart) -> None:
        """Puts the exchange of the variables' values into the step, behind their update."""
        import tensorflow as tf

        def exchange(*values: np.ndarray) -> list[np.ndarray]:
            return [np.zeros((), np.int32), *optimizer_part.exchange(*values)]

        sent = [tf.convert_to_tensor(optimizer_part.variables[place].value) for place in optimizer_part.sent]
        # A rank that has all of the variables gets nothing, and a call has to return something.
        specs: list[Spec] = [((), np.int32), *optimizer_part.specs_received]
        _, *values = self.call_on_host(averager.noting_failure(exchange), sent, specs)
        for place, value in zip(optimizer_part.received, values, strict=True):
            optimizer_part.variables[place].assign(value)

    def _averaged(
        self, averager: GradientAverager, owner: int, grads: list[Any], variables: list[Any], lookups: Lookups | None
    ) -> list[Any]:
        """Puts the averaging of all gradients into the step; absent gradients stay absent.

        Args:
            lookups: Of each gradient that is slices, see `lookups_of`; None finds them.
        """
        import tensorflow as tf

        from elephant.backends.tensorflow_exchange import averaged

        sparse = [i for i, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
        dense = [i for i, grad in enumerate(grads) if grad is not None and i not in sparse]
        if not dense and not sparse:
            return grads
        # A gradient has its variable's shape, also where the graph does not know it.
        specs = [(tuple(variables[i].shape), grads[i].dtype.as_numpy_dtype) for i in dense]
        names = [(owner, id(variable)) for variable in variables]
        found = lookups
        if found is None:
            found = [lookups_of(grads[i].indices, averager.places.get(names[i])) for i in sparse]
        self._own_places += sum(number >= 0 for numbers, _ in found for number in numbers)
        if lookups is None and not tf.executing_eagerly():
            indices = [grads[i].indices for i in sparse]
            found = [
                (without_repeated(one, numbers), sizes) for one, (numbers, sizes) in zip(indices, found, strict=True)
            ]
        slices = [(grads[i].indices, grads[i].values, *own) for i, own in zip(sparse, found, strict=True)]
        group = averager.group(owner, specs, [names[i] for i in dense])
        means, gathered = averaged(
            averager, group, [grads[i] for i in dense], slices, self.release, [names[i] for i in sparse]
        )
        reduced = list(grads)
        for index, gradient in zip(dense, means, strict=True):
            gradient.set_shape(tuple(variables[index].shape))
            reduced[index] = gradient
        for index, (indices, values) in zip(sparse, gathered, strict=True):
            indices.set_shape([None])
            values.set_shape([None, *grads[index].values.shape[1:]])
            reduced[index] = tf.IndexedSlices(values, indices, grads[index].dense_shape)
        return reduced

    def stage_functions(self, stage: keras.layers.Layer, loss: StageLoss | None, is_first: bool) -> StageFunctions:
        import tensorflow as tf

        weights = [variable.value for variable in stage.trainable_variables]

        @tf.function(reduce_retracing=True, autograph=False)
        def run(tensors: list[Any], targets: Any, share: Any) -> tuple[list[Any], Any]:
            outputs = stage(tensors, training=True)
            return outputs, stage_objective(loss, outputs, targets, stage.losses, share)

        @tf.function(reduce_retracing=True, autograph=False)
        def predict(tensors: list[Any]) -> list[Any]:
            made: list[Any] = stage(tensors, training=False)
            return made

        def forward(inputs: Sequence[np.ndarray], targets: Any, share: float) -> tuple[list[np.ndarray], float, Any]:
            tensors = [tf.convert_to_tensor(array) for array in inputs]
            floats = [] if is_first else [tensor for tensor in tensors if tensor.dtype.is_floating]
            # The way back through a function is a function, too.
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([*weights, *floats])
                outputs, objective = run(tensors, targets, tf.constant(share, tf.float32))
            ends = [*(output for output in outputs if output.dtype.is_floating), objective]
            return [output.numpy() for output in outputs], float(objective), (tape, floats, ends)

        def backward(
            passed: Any, gradients: Sequence[np.ndarray], scale: float, totals: list[Any] | None
        ) -> tuple[list[np.ndarray], list[Any]]:
            tape, floats, ends = passed
            seeds = [*map(tf.convert_to_tensor, gradients), tf.constant(scale, tf.float32)]
            found = tape.gradient(ends, [*floats, *weights], output_gradients=seeds)
            back = [tf.zeros_like(tensor) if one is None else one for one, tensor in zip(found, floats, strict=False)]
            return [one.numpy() for one in back], _sums(totals, found[len(floats) :])

        def infer(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [output.numpy() for output in predict([tf.convert_to_tensor(array) for array in inputs])]

        return StageFunctions(forward, backward, infer)

    def update_function(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> Callable[..., None]:
        import tensorflow as tf

        update: Callable[..., None] = tf.function(
            super().update_function(optimizer, variables), autograph=False, reduce_retracing=True
        )
        return update

    def lookup_gradient(self, indices: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> Any:
        import tensorflow as tf

        return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant(shape, tf.int64))

    def decayed_variable(self, variable: Any) -> Any:
        import keras

        return variable.value if isinstance(variable, keras.Variable) else variable

    def release(self) -> None:
        import tensorflow as tf

        # It gives back what it has done with when it next makes a tensor.
        tf.constant(0.0)

    def sparse_tensor(self, indices: Any, values: Any, shape: Any) -> Any:
        import tensorflow as tf

        return tf.SparseTensor(indices, values, shape)

    def batches(
        self,
        read: Callable[[int], Arrays],
        count: int | None,
        form: BatchForm,
        *,
        in_runs: bool,
        of_lengths: bool = False,
    ) -> Any:
        # One call into Python per run, on the thread of the data set's prefetch.
        import tensorflow as tf

        signature = [*form.signature(), *([("int64", (None,))] if of_lengths else [])]

        # Nothing here depends on what a tensor holds: rewriting it for graphs takes time, and can fail with a warning.
        @tf.autograph.experimental.do_not_convert
        def load(index: Any) -> tuple[Any, ...]:
            parts = tf.numpy_function(read, [index], [tf.as_dtype(dtype) for dtype, _ in signature], stateful=True)
            for part, (_, shape) in zip(parts, signature, strict=True):
                part.set_shape((None, *shape) if in_runs and not of_lengths else shape)
            return tuple(parts) if in_runs else form.assembled(parts)

        @tf.autograph.experimental.do_not_convert
        def cut(*parts: Any) -> Any:
            if not of_lengths:
                return tf.data.Dataset.from_tensor_slices(form.assembled(parts))
            *arrays, lengths = parts
            ends = tf.cumsum(lengths)

            @tf.autograph.experimental.do_not_convert
            def batch(place: Any) -> Any:
                last = ends[place]
                return form.assembled([array[last - lengths[place] : last] for array in arrays])

            return tf.data.Dataset.range(tf.size(lengths, tf.int64)).map(batch)

        indices = tf.data.Dataset.counter() if count is None else tf.data.Dataset.range(count)
        batches = indices.map(load).prefetch(1 if in_runs else BATCHES_AHEAD)
        if in_runs:
            batches = batches.flat_map(cut)
        options = tf.data.Options()
        # There is nothing to tune, and the tuning takes a thread.
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        return batches.with_options(options)

    def steps_function(self, model: keras.Model, begins: Callable[[], None] | None = None) -> Steps | None:
        import keras
        import tensorflow as tf

        is_own = type(model).make_train_function is not keras.Model.make_train_function
        if is_own or model.run_eagerly or model.jit_compile or model.steps_per_execution > 1:
            return None

        @tf.autograph.experimental.do_not_convert
        def take(iterator: Any, count: Any, rows: int | None) -> Any:
            # A graph of its own, which is traced once for each `rows`.
            step = tf.function(model.train_step, reduce_retracing=True, autograph=False)

            def sized(part: Any) -> Any:
                return tf.ensure_shape(part, (rows, *part.shape[1:])) if isinstance(part, tf.Tensor) else part

            def one(after: Sequence[Any] = ()) -> Any:
                # A graph does not keep calls on the host in the order of the program.
                with tf.control_dependencies(list(after)):
                    begun = [] if begins is None else [tf.numpy_function(begins, [], [], stateful=True)]
                with tf.control_dependencies(begun):
                    return step(tf.nest.map_structure(sized, iterator.get_next()))

            def another(taken: Any) -> Any:
                one()
                return [taken + 1]

            # What a step returns may have any form, which a loop could not hand on.
            first = [tf.constant(1, tf.int64)]
            loop = tf.while_loop(lambda taken: taken < count, another, first, parallel_iterations=1)
            return one(loop)

        return GraphSteps(tf.function(take, reduce_retracing=True), lambda: self._own_places)

    def trace(self, model: keras.Model, steps: Steps | None, batches: Any, rows: int | None = None) -> None:
        if model.run_eagerly or model.jit_compile or model.steps_per_execution > 1:
            return
        if isinstance(steps, GraphSteps):
            steps.trace(iter(batches), None)
            if rows is not None:
                steps.trace(iter(batches), rows)
            return
        model.make_train_function()
        step = compiled_part(model.train_function)
        if step is not None:
            step.get_concrete_function(iter(batches))

    def build_in_step(self, model: keras.Model, rows: RowSpec) -> None:
        import tensorflow as tf

        if any(tensor.sparse for tensor in rows.tensors):
            return
        leaves = [tf.TensorSpec((None, *one.shape), tf.as_dtype(one.dtype)) for one in (*rows.tensors, *rows.targets)]
        tf.function(model.train_step, autograph=False).get_concrete_function(pack(rows.step, leaves))

    def predict_function(self, model: keras.Model, form: BatchForm) -> Callable[..., Any]:
        # One graph, traced once: its signature leaves the number of rows open.
        import tensorflow as tf

        def step(*arrays: Any) -> Any:
            return model.predict_step(form.assembled(arrays))

        if model.run_eagerly:
            return step
        signature = [tf.TensorSpec(shape, tf.as_dtype(dtype)) for dtype, shape in form.signature()]
        # TensorFlow counts traces by the code of a function, and would warn where several models predict.
        compiled: Callable[..., Any] = tf.function(functools.partial(step), input_signature=signature, autograph=False)
        return compiled

    def test_function(self, model: keras.Model) -> Callable[[Any], Any] | None:
        import keras
        import tensorflow as tf

        # One that tests in a way of its own is left alone, and so is one that XLA compiles.
        of_keras = all(getattr(type(model), name) is getattr(keras.Model, name) for name in _TEST_METHODS)
        if model.run_eagerly or model.jit_compile or not of_keras:
            return None

        # Without Keras' iterators, and its look at the metrics after each batch.
        compiled: Callable[[Any], Any] = tf.function(
            lambda batch: model.test_step(batch), autograph=False, reduce_retracing=True
        )
        return compiled


class GraphSteps:
    """Steps of a model in one call of a graph: one graph for batches of any rows, and one for whole batches.

    Args:
        taken: Function of TensorFlow: the iterator of batches, the number of steps, and the rows of each or None.
        places: Returns how many places of outputs were repeated for each row in graphs so far.

    Attributes:
        taken: As given.
    """

    def __init__(self, taken: Any, places: Callable[[], Any]) -> None:
        self.taken = taken
        self._places = places
        self._knows_rows: dict[int, bool] = {}

    def trace(self, iterator: Any, rows: int | None) -> None:
        """Makes the graph for batches of so many rows, or of any."""
        import tensorflow as tf

        before = self._places()
        self.taken.get_concrete_function(iterator, tf.TensorSpec((), tf.int64), rows)
        if rows is not None:
            # In a graph that knows the rows, places repeated for each of them are constants as others are.
            self._knows_rows[rows] = self._places() == before

    def __call__(self, iterator: Any, count: int, rows: int | None) -> Any:
        import tensorflow as tf

        if rows is not None and rows not in self._knows_rows:
            self.trace(iterator, rows)
        known = rows if self._knows_rows.get(rows or 0) else None
        return self.taken(iterator, tf.constant(count, tf.int64), known)


def _sums(totals: Sequence[Any] | None, gradients: Sequence[Any]) -> list[Any]:
    """Returns sums of gradients; those of lookups stay slices, which optimizers do not treat as they treat tables."""
    import tensorflow as tf

    def added(total: Any, gradient: Any) -> Any:
        if not isinstance(total, tf.IndexedSlices) or not isinstance(gradient, tf.IndexedSlices):
            return sums_of_gradients([total], [gradient])[0]
        values = tf.concat([total.values, gradient.values], 0)
        return tf.IndexedSlices(values, tf.concat([total.indices, gradient.indices], 0), total.dense_shape)

    return list(map(added, totals, gradients)) if totals is not None else list(gradients)


def compiled_part(function: Any) -> Any:
    """Returns the TensorFlow function that a train function of Keras' calls; None where it is made in another way."""
    cells = getattr(function, "__closure__", None) or ()
    found = [cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "get_concrete_function")]
    return found[0] if len(found) == 1 else None
