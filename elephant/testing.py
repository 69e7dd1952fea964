"""Ranks on this machine, without Spark: training code and callbacks are tested in seconds.

The ranks are real processes that run what they run on executors: the same programs, channel, coordinator and
collective. There is no Spark session, and no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from elephant.config import FitConfig, Timeouts
from elephant.data.casting import lists_of
from elephant.data.schema import DENSE, FEATURES, LABEL, SCALAR, DataSchema, Field, nest_of, role_of
from elephant.driver.local_ranks import fit_here, run_here
from elephant.driver.run import check_call
from elephant.errors import ConfigurationError, DataError, brief_errors
from elephant.monitor.progress import Progress
from elephant.options import FIT, options_of, refuse_unknown

if TYPE_CHECKING:
    import keras

Result = TypeVar("Result")
_ARGUMENTS = ("num_workers", "validation_split", "callbacks", "custom_objects", "verbose", "env")
# The options of a fit that need no cluster, and are no arguments of their own.
_OPTIONS = tuple(
    option.name
    for option in options_of(FIT)
    if option.name not in (*_ARGUMENTS, "mode", "validation_fraction", "max_restarts", "resume")
    and not option.name.startswith(("checkpoint_", "gpu", "use_gpu"))
)


@brief_errors
def run_local(
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int = 2,
    verbose: int | str = 0,
    timeouts: Timeouts | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Runs a function on N processes of this machine, and returns its results by rank.

    It is `elephant.run` without Spark: the arguments, the results and the errors are the same.

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        num_workers: Processes.
        verbose: 0 silent, 1 shows where the ranks run and what they print.
        timeouts: How long waits may last.
        env: Environment variables for the ranks, set before anything is imported.

    Raises:
        ConfigurationError: An argument cannot be used, or something cannot be pickled.
        WorkerFailure: A rank raised, was killed, or fell silent: rank, traceback, last lines.

    Examples:
        >>> import elephant.testing
        >>> def sum_of_ranks():
        ...     import numpy as np
        ...     from elephant import collective
        ...     return float(collective.allreduce(np.array([collective.rank() + 1.0]), op="sum")[0])
        >>> elephant.testing.run_local(sum_of_ranks, num_workers=2)
        [3.0, 3.0]
    """
    kwargs, env = {} if kwargs is None else kwargs, {} if env is None else env
    timeouts = Timeouts() if timeouts is None else timeouts
    check_call(fn, args, kwargs, num_workers, verbose, timeouts, env)
    with Progress(num_workers=num_workers, epochs=0, verbose=verbose) as progress:
        return run_here(fn, args, kwargs, num_workers=num_workers, progress=progress, timeouts=timeouts, env=env)


@brief_errors
def fit_local(
    model: keras.Model | Callable[[], keras.Model],
    x: Any,
    y: Any = None,
    *,
    num_workers: int = 2,
    validation_split: float = 0.0,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    custom_objects: Mapping[str, Any] | None = None,
    verbose: int | str = 0,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[dict[str, list[float]], keras.Model]:
    """Trains a compiled Keras model on N processes of this machine, as a synchronous `elephant.KerasEstimator` does.

    Each rank has a part of the rows; their gradients are averaged in every step.

    Args:
        model: A compiled `keras.Model`, or a function without arguments that returns one. It stays as it is.
        x: Numbers, shape (rows, ...), nested as the model takes them.
        y: Labels, shape (rows, ...), nested as the model's outputs; None trains without.
        num_workers: Processes.
        validation_split: Share of the rows kept for validation.
        callbacks: Keras callbacks, which run on the ranks or in this process, as on executors or the driver.
        custom_objects: Custom layers, losses and metrics by name.
        verbose: 0 silent, 1 shows plan, progress, a table of epochs, and what the ranks print.
        env: Environment variables for the ranks, set before anything is imported.
        options: Those of synchronous fits of `elephant.KerasEstimator`, in snake case: ``epochs``, ``batch_size``,
            ``shuffle``, ``seed``, ``learning_rate``, ``frequency``, ``compression``, ``steps_per_epoch``,
            ``timeouts`` and others; not those of checkpoints, GPUs and executors.

    Returns:
        The history, one number per epoch by metric, and the trained model.

    Raises:
        ConfigurationError: The model or an option cannot be used.
        UnknownOptionError: There is no such option.
        DataError: The arrays are of different lengths, or hold no numbers.
        WorkerFailure: A rank raised, was killed, or fell silent: rank, traceback, last lines.

    Examples:
        >>> def train():
        ...     import keras
        ...     import numpy as np
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     return fit_local(model, np.ones((8, 3)), np.ones(8), num_workers=2, epochs=2)
        >>> history, model = train()  # doctest: +SKIP
        >>> len(history["loss"])  # doctest: +SKIP
        2
    """
    from elephant.modeling.model_spec import model_source
    from elephant.rank.callbacks.callback_rules import check_callbacks
    from elephant.rank.job import TrainingJob, limited

    refuse_unknown("fit_local", options, [*_OPTIONS, *_ARGUMENTS])
    given = {"num_workers": num_workers, "validation_fraction": validation_split, "use_gpu": False, "verbose": verbose}
    check_callbacks(callbacks)
    config = limited(FitConfig.of({**options, **given}))
    if config.elastic is not None:
        raise ConfigurationError(
            "num_workers: expected one number in fit_local, whose processes neither come nor go. Received: "
            f"{num_workers!r}."
        )
    model_spec = model_source(model, custom_objects)
    schema, columns = _columns_of(x, y, model_spec.info.dtype)
    job = TrainingJob(model_spec, tuple(callbacks), config, schema)
    with Progress(
        num_workers=num_workers, epochs=config.epochs, verbose=verbose, waits_for_all=config.waits_for_all
    ) as progress:
        fit = fit_here(job, _parts_of(columns, num_workers), progress, {} if env is None else env)
    return fit.history, model_spec.with_variables(fit.variables, fit.rows).build()


def _columns_of(x: Any, y: Any, float_type: str) -> tuple[DataSchema, dict[str, np.ndarray]]:
    """Returns the schema of the arrays, and the arrays by role."""
    x_nest, x_arrays = nest_of(x)
    y_nest, y_arrays = (0, []) if y is None else nest_of(y)
    named = {
        role_of(base, place): _numbers(array, role_of(base, place), float_type)
        for base, arrays in ((FEATURES, x_arrays), (LABEL, y_arrays))
        for place, array in enumerate(arrays)
    }
    lengths = {role: len(array) for role, array in named.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(f"x, y: expected arrays of the same length. Received: {lengths}.")
    fields = [
        Field(role, (role,), str(array.dtype), DENSE if array.ndim > 1 else SCALAR, array.shape[1:])
        for role, array in named.items()
    ]
    inputs, labels = tuple(fields[: len(x_arrays)]), tuple(fields[len(x_arrays) :])
    return DataSchema(inputs, labels, x=x_nest, y=y_nest), named


def _numbers(array: Any, role: str, float_type: str) -> np.ndarray:
    array = np.asarray(array)
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise DataError(
            f"{role}: expected an array of numbers, shape (rows, ...). Received: {array.dtype} {array.shape}."
        )
    return array.astype(float_type) if array.dtype.kind == "f" else array


def _parts_of(columns: Mapping[str, np.ndarray], count: int) -> list[pa.RecordBatch]:
    """Returns the rows of each rank: the first ones of the first, and so on."""
    parts = [np.array_split(array, count) for array in columns.values()]
    return [
        pa.RecordBatch.from_arrays([_arrow_of(array) for array in own], list(columns))
        for own in zip(*parts, strict=True)
    ]


def _arrow_of(array: np.ndarray) -> pa.Array:
    return pa.array(array) if array.ndim == 1 else lists_of(pa.array(array.ravel()), len(array))
