"""The extension point of backends: what elephant asks of a framework, and what holds for most of them."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import keras

    from elephant.backends.gradient_averager import GradientAverager
    from elephant.backends.optimizer_part import OptimizerPart
    from elephant.collective.communicator import Communicator
    from elephant.config import FitConfig
    from elephant.data.schema import RowSpec

Arrays = tuple[np.ndarray, ...]
# Shape and dtype of a tensor.
Spec = tuple[Sequence[int | None], Any]
# Takes so many training steps with batches of an iterator, all of so many rows, or of unknown lengths where that is
# None; returns the logs of the last one.
Steps = Callable[[Any, int, int | None], Any]
# Where batches are read one by one.
BATCHES_AHEAD = 4


class BatchForm(Protocol):
    """Form of a batch: made of the arrays that are read."""

    def signature(self) -> list[tuple[Any, tuple[int | None, ...]]]:
        """Returns dtype and shape of each array; the first dimension are the rows."""

    def assembled(self, arrays: Sequence[Any]) -> Any:
        """Returns a batch as Keras gives it to a ``train_step``."""


# Takes the outputs of a model's last stage, and what they are compared with; returns a loss without a dimension.
StageLoss = Callable[[list[Any], Any], Any]


class StageFunctions(NamedTuple):
    """The passes of a stage.

    Attributes:
        forward: Takes arrays, what the outputs are compared with, and the part of the step's rows that these are.
            Returns the outputs, the loss times that part, and what the way back needs.
        backward: Takes the last of these, the gradients of the float outputs, the scale of the loss, and the sums of
            the gradients of the stage's weights so far, or None. Returns the gradients of the float inputs,
            none in the first stage, and the new sums; None in the place of a weight on which nothing depends.
        infer: Takes arrays and returns the outputs, not in training.
    """

    forward: Callable[[Sequence[np.ndarray], Any, float], tuple[list[np.ndarray], float, Any]]
    backward: Callable[[Any, Sequence[np.ndarray], float, list[Any] | None], tuple[list[np.ndarray], list[Any]]]
    infer: Callable[[Sequence[np.ndarray]], list[np.ndarray]]


class ModelDistribution(ABC):
    """Division of a model's variables, and of those of its optimizer, among the devices of all ranks.

    Attributes:
        is_divided: Whether each device has its part of the model now, and no rank the whole.
    """

    is_divided = False

    @abstractmethod
    def run(self, fit: Callable[[], None]) -> None:
        """Runs a fit, which may wait for other ranks in each step; all ranks call it.

        Raises:
            NetworkError: Another rank is gone.
            Exception: Whatever the fit raises.
        """

    @abstractmethod
    def on_host(self) -> contextlib.AbstractContextManager[object]:
        """Has models made in the host's memory, for the time of a ``with`` block: a device may not hold the whole."""

    @abstractmethod
    def begin(self, model: keras.Model) -> None:
        """Divides a model that is whole on all ranks, and has it trained in parts; called in what `run` was given.

        Raises:
            ConfigurationError: The rules divide no variable of this model, or one into parts that are not equal.
        """

    @abstractmethod
    def divide(self, model: keras.Model) -> None:
        """Gives each device its part of a model that is whole, and equal on all ranks."""

    @abstractmethod
    def gather(self, model: keras.Model) -> None:
        """Makes a model whole in each host's memory; all ranks call it."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the other ranks' devices."""


class Backend(ABC):
    """One framework.

    Attributes:
        name: As ``KERAS_BACKEND`` has it; the package to import and the extra of setup.py have the same name.
        title: What users call it.
        gpu_package: What pip installs for a GPU.
        packages: Distributions that bring the framework.
        oldest: The oldest version that setup.py takes.
        log_level: The environment variable that has the lowest level that it logs, from "0" on.
        noise: A pattern of the beginnings of lines that it prints of itself, for Python and for ``grep -E``.
        growth: The environment in which it takes memory of a GPU as it needs it, and not all of it at once.
        count_gpus: A program that prints the number of GPUs that the framework sees.
        forks_after_import: Whether a process that has imported it, and computed nothing, can be forked.
        traces_ahead: Whether a training step can be made before there are rows.
        takes_strings: Whether models can have inputs of strings.
        count_dtype: In which dtype large numbers are counted exactly.
        has_nccl: Whether gradients can be reduced on the ranks' devices.
        divides_models: Whether Keras can divide a model's layers among the ranks' devices.
        gives_slices: Whether gradients of embeddings are slices, of which a graph alone tells the lookups.
        needs_compiler: Whether a step that is not compiled takes many times as long.
        fixed_shapes: Whether a step must know the shapes of all that it computes.
        stand_in_rows: How many rows a rank that brings none to a step puts through its model.
        optimizers: The beginning of the module's name by which Keras saves its optimizers, where that is the backend's.
        outside_table: A pattern of its error where a layer looks up a number for which its table has no row: the
            number, the rows and the layer. Empty where such an error does not tell.
        program_layers: Layers of Keras that hold a program of the framework, or load one.
        compiles_host_calls: Whether a step that XLA compiles can call a function on the host.
        compiles_divided_updates: Whether ranks can exchange weights at the end of a step with ``jit_compile=True``.
    """

    name: str
    title: str
    gpu_package: str
    packages: tuple[str, ...]
    oldest: str
    count_gpus: str
    log_level = ""
    noise = ""
    growth: Mapping[str, str] = {}
    forks_after_import = False
    traces_ahead = False
    takes_strings = False
    count_dtype = "float64"
    has_nccl = False
    divides_models = False
    gives_slices = False
    needs_compiler = False
    fixed_shapes = False
    stand_in_rows = 1
    optimizers = ""
    outside_table = ""
    program_layers: tuple[str, ...] = ()
    compiles_host_calls = False
    compiles_divided_updates = True

    # Before the framework is imported.

    def environment(self, threads: int) -> dict[str, str]:
        """Returns the environment of a process that computes with so many threads."""
        return {"OMP_NUM_THREADS": str(threads)}

    # After that, before it computes.

    def prepare_process(self, *, overlaps: bool = False) -> None:  # noqa: B027 - nothing, in most
        """Sets up the process of a rank.

        Args:
            overlaps: Whether the backward pass goes on while gradients are sent.
        """

    @abstractmethod
    def sees_gpu(self) -> bool:
        """Returns whether the framework, which is imported, sees a GPU."""

    @contextlib.contextmanager
    def random_state(self) -> Iterator[None]:
        """Puts back what `keras.utils.set_random_seed` changes in the framework, at the end of a ``with`` block."""
        yield

    def generator_state(self) -> np.ndarray:
        """Returns the state of the framework's own generator, from which layers without a seed may draw; flat."""
        return np.empty(0, np.uint8)

    def restore_generator(self, state: np.ndarray) -> None:  # noqa: B027 - nothing, in most
        """Gives the framework's own generator a state that `generator_state` has returned."""

    def seed_generator(self, seed: int) -> None:  # noqa: B027 - nothing, in most
        """Seeds the framework's own generator."""

    def on_cpu(self) -> contextlib.AbstractContextManager[object]:
        """Has the driver's copies of a model computed on the processor, where the framework would take a whole GPU."""
        return contextlib.nullcontext()

    def without_graphs(self) -> contextlib.AbstractContextManager[object]:
        """Has functions that the user compiles run as they stand, so that no graph of theirs is made and kept."""
        return contextlib.nullcontext()

    def is_wide(self) -> bool:
        """Returns whether a framework that leaves 64 bits out by itself was told to compute in them."""
        return False

    def make_wide(self, wide: bool) -> None:  # noqa: B027 - nothing, in most
        """Tells such a framework so."""

    def refuse_step(self) -> None:  # noqa: B027 - nothing, in most
        """Raises ConfigurationError in a step that is compiled in a way that cannot contain an exchange."""

    def leave_compiled_step(self, model: keras.Model) -> str:
        """Switches a compilation off that cannot contain an exchange; returns its name, or nothing."""
        return ""

    # What the user's own code makes.

    @abstractmethod
    def is_variable(self, thing: object) -> bool:
        """Returns whether something holds a state of the framework's own; without an import of it, nothing does."""

    def assign(self, variable: Any, value: np.ndarray) -> None:
        """Gives a variable of the framework's own a value."""
        variable.assign(value)

    def python_function(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """Returns the function that the user has compiled into another one; None where none was."""
        return None

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a function that `python_function` has returned."""
        return function

    # The step.

    def take_step(self, model: keras.Model, batch: Any) -> None:
        """Takes a model's training step by its own ``train_step``."""
        model.train_step(batch)

    @abstractmethod
    def call_on_host(
        self, function: Callable[..., Sequence[np.ndarray]], tensors: Sequence[Any], specs: Sequence[Spec]
    ) -> list[Any]:
        """Calls a function at every step, in the order in which calls stand in the step.

        Args:
            function: Takes arrays of numpy, which it neither keeps nor changes, and returns as many as ``specs`` has.
            tensors: What it gets; no gradient flows back.
            specs: Shape and dtype of what it returns.
        """

    @abstractmethod
    def host_op(
        self,
        forward: Callable[..., Sequence[np.ndarray]],
        backward: Callable[..., Sequence[np.ndarray]],
        tensors: Sequence[Any],
        specs: Sequence[Spec],
    ) -> list[Any]:
        """Calls a function as `call_on_host` does, and has gradients flow back through another one.

        Args:
            forward: As the function of `call_on_host`.
            backward: Takes the arrays of the tensors, then the gradients of what ``forward`` has returned for them;
                returns the gradients of those tensors that are floats.
            tensors: What ``forward`` gets.
            specs: Shape and dtype of what it returns; a dimension may be None unless `fixed_shapes`.
        """

    def keep_state(self, model: keras.Model) -> None:  # noqa: B027 - nothing, in most
        """Makes a step that raises leave the model's variables as they were before it."""

    def fuse_update(self, optimizer: keras.optimizers.Optimizer) -> None:  # noqa: B027 - nothing, in most
        """Makes an optimizer's update go through memory less often, where the framework can, by the same formula."""

    @abstractmethod
    def average_gradients(
        self, averager: GradientAverager, optimizer: keras.optimizers.Optimizer, model: keras.Model | None
    ) -> None:
        """Makes an optimizer average gradients over all ranks before it applies them.

        Args:
            model: Whose step this optimizer ends, once, as Keras' own does; None where that is not known.
        """

    def divide_update(self, optimizer: keras.optimizers.Optimizer, optimizer_part: OptimizerPart) -> None:
        """Makes an optimizer, which was built for a part of the variables, apply the gradients of these alone.

        It gets the gradients of all, before `average_gradients` makes it average them; that also has the values of the
        variables exchanged, where the averager knows the part.
        """
        from elephant.backends.keras_private import step_counter
        from elephant.backends.optimizer_part import WholeClipping

        inner = getattr(optimizer, "inner_optimizer", optimizer)
        apply, clipping = inner.apply, WholeClipping(inner, optimizer_part) if inner.global_clipnorm else None

        def apply_part(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            given = optimizer_part.variables if trainable_variables is None else list(trainable_variables)
            pairs = [pair for pair in zip(grads, given, strict=True) if optimizer_part.updates(pair[1])]
            if not any(gradient is not None for gradient, _ in pairs) and any(one is not None for one in grads):
                # Keras would miss gradients, which other ranks have.
                step_counter(inner).assign_add(1)
                return
            if clipping is not None:
                clipping.begin(grads, given)
            apply(*map(list, zip(*pairs, strict=True)))

        inner.apply = apply_part

    def join_devices(self, communicator: Communicator, config: FitConfig, address: str) -> None:  # noqa: B027 - most do not
        """Joins the devices of all ranks of a fit, where the framework has to before it looks for its own.

        Args:
            address: Under which the other ranks reach this one.
        """

    def distribution(self, config: FitConfig) -> ModelDistribution | None:
        """Returns the division of a model among devices that `join_devices` has joined; None where it stays whole."""
        return None

    def reduce_on_devices(self, averager: GradientAverager, config: FitConfig) -> None:  # noqa: B027 - most cannot
        """Has the gradients of an averager reduced on the ranks' devices, where the options and all ranks allow it."""

    def decayed_variable(self, variable: Any) -> Any:
        """Returns the variable, or the one inside, of which Keras asks an optimizer whether it decays."""
        return variable

    def release(self) -> None:  # noqa: B027 - nothing, in most
        """Makes the framework give back arrays that it has done with."""

    # Stages of a model.

    @abstractmethod
    def stage_functions(self, stage: keras.layers.Layer, loss: StageLoss | None, is_first: bool) -> StageFunctions:
        """Returns the passes of a stage, each compiled where the framework can.

        Args:
            stage: Takes and gives lists of tensors.
            loss: Of the outputs of the last stage; None of others, whose losses are those of their layers.
            is_first: Whether the inputs are rows, of which nobody wants gradients.
        """

    def update_function(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> Callable[..., None]:
        """Returns a function that applies gradients to the variables that an optimizer was built for."""
        return lambda gradients: optimizer.apply(gradients, list(variables))

    def lookup_gradient(self, indices: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> Any:
        """Returns the gradient of a table: slices, or, where the framework has none, a table with their sums.

        Args:
            indices: Rows of the table, of which one may be there twice.
            values: Of shape (indices, ...).
            shape: Of the table.
        """
        import keras

        table = np.zeros(shape, values.dtype)
        np.add.at(table, indices, values)
        return keras.ops.convert_to_tensor(table)

    # Rows in, predictions out.

    def sparse_tensor(self, indices: Any, values: Any, shape: Any) -> Any:
        """Returns the rows of a sparse input: a sparse tensor, or, where elephant makes none, a dense array.

        Args:
            indices: Rows and columns of the values, int64 of shape (values, 2).
            values: Of shape (values,).
            shape: Rows and columns, int64 of shape (2,).
        """
        rows = np.zeros(tuple(shape), values.dtype)
        rows[tuple(np.asarray(indices).T)] = values
        return rows

    def batches(
        self,
        read: Callable[[int], Arrays],
        count: int | None,
        form: BatchForm,
        *,
        in_runs: bool,
        of_lengths: bool = False,
    ) -> Any:
        """Returns batches in a form that Keras' ``fit`` takes; those that come next are read before they are asked for.

        Args:
            read: Returns the arrays of a batch, or of a run of batches in the shape (batches, rows, ...).
            count: How many there are to read; None for no end.
            of_lengths: Whether batches of a run have different lengths: its arrays are then of shape (rows, ...), and
                behind them comes one of the lengths, int64 of shape (batches,).
        """
        indices = itertools.count() if count is None else range(count)
        return _each(read, indices, form, in_runs, of_lengths)

    def steps_function(  # noqa: B027 - nothing, in most
        self, model: keras.Model, begins: Callable[[], None] | None = None
    ) -> Steps | None:
        """Returns a function that takes several training steps by one call; None where there is nothing to gain.

        Args:
            begins: Called before each of them; None where nobody is to know.
        """

    def trace(  # noqa: B027 - nothing, in most
        self, model: keras.Model, steps: Steps | None, batches: Any, rows: int | None = None
    ) -> None:
        """Makes the model's training step for such batches; none is computed, and no variable changes.

        Args:
            steps: What `steps_function` returned.
            rows: Of whole batches, where the step is to be made for these as well; None makes it for any.
        """

    def build_in_step(self, model: keras.Model, rows: RowSpec) -> None:  # noqa: B027 - Keras itself does it for one alone
        """Creates the variables of a model that waits for its first ``train_step``; none is computed.

        Args:
            rows: One row of what the step gets.
        """

    def predict_function(self, model: keras.Model, form: BatchForm) -> Callable[..., Any]:
        """Returns a function of a batch's arrays that gives the model's outputs."""
        import keras

        inputs = keras.utils.unpack_x_y_sample_weight
        return lambda *arrays: model.predict_on_batch(inputs(form.assembled(arrays))[0])

    def test_function(self, model: keras.Model) -> Callable[[Any], Any] | None:
        """Returns a function that adds a batch to what a model's metrics hold, and returns what its ``test_step`` does.

        None where ``test_on_batch``, which has the metrics begin anew, is all that there is.
        """
        return None


def in_places(found: Sequence[Any], are_floats: Sequence[bool]) -> list[Any]:
    """Returns the gradients of tensors, of those that are floats as they were found; None in the others' places.

    >>> in_places(["a", "b"], [True, False, True])
    ['a', None, 'b']
    """
    gradients = iter(found)
    return [next(gradients) if is_float else None for is_float in are_floats]


def stage_objective(loss: StageLoss | None, outputs: list[Any], targets: Any, losses: Sequence[Any], share: Any) -> Any:
    """Returns the part of a step's loss that a stage adds, for a part of the step's rows.

    Args:
        losses: Those of the stage's layers.
        share: The part of the rows.
    """
    import keras

    # What losses count for themselves is not part of the step.
    with keras.StatelessScope():
        own = [] if loss is None else [loss(outputs, targets)]
    total = keras.ops.zeros((), "float32")
    for one in (*own, *losses):
        total = total + keras.ops.sum(keras.ops.cast(one, "float32"))
    return total * share


def sums_of_gradients(totals: Sequence[Any] | None, gradients: Sequence[Any]) -> list[Any]:
    """Returns the sums of gradients with those of one more part of the rows; None where there are none yet."""
    if totals is None:
        return list(gradients)
    return [
        total if gradient is None else gradient if total is None else total + gradient
        for total, gradient in zip(totals, gradients, strict=True)
    ]


def _each(
    read: Callable[[int], Arrays], indices: Iterable[int], form: BatchForm, in_runs: bool, of_lengths: bool
) -> Iterator[Any]:
    for run in _ahead(read, indices, 1 if in_runs else BATCHES_AHEAD):
        cut = _of_lengths(run) if of_lengths else zip(*run, strict=True) if in_runs else [run]
        for batch in map(form.assembled, cut):
            # What Keras takes from a generator is a tuple.
            yield batch if isinstance(batch, tuple) else (batch,)


def _of_lengths(run: Arrays) -> Iterator[Arrays]:
    *arrays, lengths = run
    for last, length in zip(np.cumsum(lengths).tolist(), lengths.tolist(), strict=True):
        yield tuple(array[last - length : last] for array in arrays)


def _ahead(read: Callable[[int], Arrays], indices: Iterable[int], depth: int) -> Iterator[Arrays]:
    """Yields the results of ``read``, which a thread calls up to ``depth`` times more than was asked for."""
    ready: queue.Queue[tuple[Arrays | None, BaseException | None]] = queue.Queue()
    room, ended = threading.Semaphore(depth + 1), threading.Event()

    def work() -> None:
        try:
            for index in indices:
                room.acquire()
                if ended.is_set():
                    return
                ready.put((read(index), None))
            ready.put((None, None))
        except BaseException as error:
            ready.put((None, error))

    thread = threading.Thread(target=work, name="elephant-feed", daemon=True)
    thread.start()
    try:
        while True:
            arrays, error = ready.get()
            if error is not None:
                raise error
            if arrays is None:
                return
            room.release()
            yield arrays
    finally:
        ended.set()
        room.release()
        thread.join()
