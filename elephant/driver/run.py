"""`elephant.run`: one function on N workers, connected with each other; its results by rank.

With one worker it is a plain call. With more it is the machinery of a fit, with the
function in the place of training: one barrier job, one process per rank, a channel
to the driver, and a collective between the ranks.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import inspect
import os
import pickle  # noqa: S403  (results come as rows of our own Spark job)
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from elephant.backends import VARIABLE
from elephant.cluster.gpu_plan import ResourcePlan, ResourceRequest
from elephant.cluster.session import environment
from elephant.cluster.spark_private import active_context
from elephant.collective import api
from elephant.config import Timeouts
from elephant.errors import ClusterError, ConfigurationError, brief_errors, warn_user
from elephant.errors import expect as _expect
from elephant.options import OPTION, refuse_unknown

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.task.specs import TaskSpec

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_called_here = contextvars.ContextVar("elephant-run", default=False)
_session_lock = threading.Lock()


@brief_errors
def run(
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int | None = None,
    spark: SparkSession | None = None,
    verbose: int | str = 1,
    timeouts: Timeouts | None = None,
    env: Mapping[str, str] | None = None,
    use_gpu: bool | str = "auto",
    gpus_per_worker: int = 1,
    gpu_resource: str = "gpu",
    encryption: bool | None = None,
    ports: tuple[int, int] | None = None,
    **unknown: NoReturn,
) -> list[Result]:
    """Runs a function on N workers at the same time, and returns its results by rank.

    Inside it, `elephant.collective` connects the workers: ``rank()``, ``world_size()``,
    ``allreduce(...)`` and the rest, and `elephant.DistributedOptimizer` averages the
    gradients of a training loop.

    With one worker the function is called in this very process, without Spark, and its
    exceptions come as they are: a script can be tried on a laptop unchanged. With more,
    each worker is a process of its own beside one task of a Spark barrier stage. What
    the function prints, or logs, is shown here with its rank and host in front, at a limited
    rate, and is in the log of the executor whole.

    Args:
        fn: The function. It travels by cloudpickle, so it may be defined in the main script
            or in a notebook; what it imports must be there on the executors.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        num_workers: Workers. Each needs a task slot at the same time. Without a number it is one, and a warning says
            so.
        spark: The Spark session. Without one: the active session; under ``spark-submit`` a new
            one made by ``SparkSession.builder.getOrCreate()``; else a new one of
            `elephant.cluster.local.local_session` with ``num_workers`` executors on this machine,
            which needs no Java. A new one stays the active session until it is stopped.
        verbose: 0 silent, 1 shows where the workers run and what they print; 2 and ``"auto"``, as Keras has them, are
            the same here.
        timeouts: How long waits may last.
        env: Environment variables for the workers, set before anything is imported. With one
            worker they are set in this process while the function runs.
        use_gpu: True demands a GPU for each worker, False hides them, ``"auto"`` takes those that there are. A single
            worker, which is this process, sees what this process sees.
        gpus_per_worker: GPUs of each worker. With more than one, the function is called once for each of them: there
            are as many ranks, and results, as GPUs.
        gpu_resource: What Spark calls GPUs, as in ``spark.executor.resource.NAME.amount``.
        encryption: Whether the connections between workers, and to the driver, are encrypted, by TLS 1.3 with a key
            pair of this run. None encrypts them where Spark is told to encrypt; False does not, whatever Spark is
            told. What the function opens itself is its own concern.
        ports: The first and the last port that the driver and workers may listen on, for firewalls. None takes those
            of ``spark.elephant.ports``, or any.

    Returns:
        What the function returned on each worker, by rank. Results travel through Spark to the
        driver and should be small: megabytes, within ``spark.driver.maxResultSize``. Write
        large ones to files, from one rank.

    Raises:
        UnknownOptionError: There is no such argument.
        ConfigurationError: An argument cannot be used; function, arguments or a result cannot be
            pickled; or code that they need is missing on the other side.
        ClusterError: The cluster cannot run so many workers.
        WorkerFailure: A worker raised, was killed, or fell silent: rank, host, traceback, last lines.
        TrainingError: The Spark job failed otherwise.

    Examples:
        >>> import numpy as np
        >>> import elephant
        >>> def square_of_rank(offset):
        ...     rank = elephant.collective.rank()
        ...     return elephant.collective.allreduce(np.array([rank**2 + offset]))
        >>> elephant.run(square_of_rank, args=(1,), num_workers=1)
        [array([1])]
    """
    refuse_unknown("elephant.run", unknown, _known())
    kwargs, env = {} if kwargs is None else kwargs, {} if env is None else env
    timeouts = Timeouts() if timeouts is None else timeouts
    is_number_missing, num_workers = num_workers is None, 1 if num_workers is None else num_workers
    check_call(fn, args, kwargs, num_workers, verbose, timeouts, env)
    if is_number_missing:
        warn_user(
            "elephant.run: expected num_workers, the number of workers. Received: none, so that one worker runs the "
            "function. Pass num_workers=N for N of them, or num_workers=1 if one is meant."
        )
    _expect(spark is None or callable(getattr(spark, "range", None)), "spark", "a SparkSession", spark)
    _expect(encryption is None or isinstance(encryption, bool), "encryption", "True, False or None", encryption)
    if ports is not None:
        first, last = OPTION["ports"].value_of(ports)
        ports = first, last
    request = ResourceRequest(
        num_workers=num_workers, use_gpu=use_gpu, gpus_per_worker=gpus_per_worker, gpu_resource=gpu_resource
    )
    if api.in_run() or _called_here.get():
        raise ConfigurationError(
            "elephant.run: expected to be called on the driver. Received: a call inside a worker of another run, "
            "or of a fit. Call it from the main script, one run after another.",
            topic="functions-on-workers",
        )
    if num_workers * gpus_per_worker == 1:
        with _in_this_process(env):
            return [fn(*args, **kwargs)]
    session = spark or _session(num_workers)
    return _run_on_spark(
        session,
        fn,
        args,
        kwargs,
        request,
        verbose=verbose,
        timeouts=timeouts,
        env=env,
        encryption=encryption,
        ports=ports,
    )


def _known() -> list[str]:
    return [name for name in inspect.signature(run).parameters if name != "unknown"]


@brief_errors
def distributed(
    *,
    num_workers: int | None = None,
    spark: SparkSession | None = None,
    verbose: int | str = 1,
    timeouts: Timeouts | None = None,
    env: Mapping[str, str] | None = None,
    use_gpu: bool | str = "auto",
    gpus_per_worker: int = 1,
    gpu_resource: str = "gpu",
    encryption: bool | None = None,
    ports: tuple[int, int] | None = None,
    **unknown: NoReturn,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, list[Result]]]:
    """Decorates a function: a call of it is an `elephant.run` of it, with the arguments of the call.

    ``function.__wrapped__`` is the function itself, for a plain call.

    Args:
        num_workers: Workers; this and the other options are those of `elephant.run`.

    Returns:
        The decorator. What it makes of a function returns the function's results, by rank, and raises what
        `elephant.run` raises.

    Examples:
        >>> import elephant
        >>> @elephant.distributed(num_workers=1)
        ... def shifted_rank(offset):
        ...     return elephant.collective.rank() + offset
        >>> shifted_rank(offset=3)
        [3]
    """
    refuse_unknown("elephant.distributed", unknown, _known()[3:])

    def decorate(fn: Callable[Parameters, Result]) -> Callable[Parameters, list[Result]]:
        @functools.wraps(fn)
        def run_it(*args: Parameters.args, **kwargs: Parameters.kwargs) -> list[Result]:
            return run(
                fn,
                args,
                kwargs,
                num_workers=num_workers,
                spark=spark,
                verbose=verbose,
                timeouts=timeouts,
                env=env,
                use_gpu=use_gpu,
                gpus_per_worker=gpus_per_worker,
                gpu_resource=gpu_resource,
                encryption=encryption,
                ports=ports,
            )

        return run_it

    return decorate


@contextlib.contextmanager
def _in_this_process(env: Mapping[str, str]) -> Iterator[None]:
    mark = _called_here.set(True)
    try:
        with environment(env):
            yield
    finally:
        _called_here.reset(mark)


def _run_on_spark(
    session: SparkSession,
    fn: Callable[..., Result],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    request: ResourceRequest,
    *,
    verbose: int | str,
    timeouts: Timeouts,
    env: Mapping[str, str],
    encryption: bool | None,
    ports: tuple[int, int] | None,
) -> list[Result]:
    from elephant.cluster.checks.preflight import LOOKS, Requirements, preflight_checked
    from elephant.cluster.checks.session_checks import encrypts
    from elephant.cluster.executors import patient
    from elephant.cluster.row_source import NoRows
    from elephant.cluster.session import ports_of, session_settings
    from elephant.cluster.spark_job import counted, described
    from elephant.cluster.warm_workers import COLD, warm_workers
    from elephant.driver.coordinator_location import attempts_at_ranks
    from elephant.driver.run_ranks import RETRIES, results_of, run_ranks
    from elephant.monitor.progress import Progress

    timeouts = patient(session, timeouts, request.num_workers)
    call, warm = pickled_call(fn, args, kwargs), warm_workers(session, timeouts)
    count = request.num_workers * request.gpus_per_worker
    requirements = Requirements(
        num_workers=request.num_workers,
        name="num_workers",
        keras=False,
        slots_s=timeouts.slot_patience_s,
        request=request,
        encryption=encryption,
    )
    about = f"elephant run: {counted(request.num_workers, 'worker')}"
    with Progress(num_workers=count, epochs=0, verbose=verbose) as progress, described(session, about):
        progress.awaits(LOOKS)
        with preflight_checked(session, requirements, progress.note) as plan:
            rows = NoRows(session, plan.slots_needed)
            settings = session_settings(session)
            spec = replace(
                function_spec(call, plan, timeouts, env, progress.shows_output),
                encryption=encrypts(encryption, settings),
                ports=ports_of(ports, settings),
                # A process that waits would hold what the user has set, a secret maybe, when the run is over.
                warm=COLD if env else warm,
            )
            attempt_on = attempts_at_ranks(
                session, spec, progress, result=functools.partial(results_of, spec.plan.world_size)
            )
            results = run_ranks(rows, spec, progress, attempt_on, RETRIES)
    return [unpickled(result, rank) for rank, result in enumerate(results)]


def function_spec(
    call: bytes, plan: ResourcePlan, timeouts: Timeouts, env: Mapping[str, str], shows_output: bool
) -> TaskSpec:
    """Returns the spec of a run of a pickled `elephant.rank.program.FunctionCall`."""
    from elephant.task.rendezvous import installed_versions
    from elephant.task.specs import TaskSpec

    # A function may need no Keras: versions of it are not compared.
    versions = {name: version for name, version in installed_versions().items() if name != "keras"}
    return TaskSpec(
        program="function",
        driver_versions=versions,
        job=call,
        backend=_keras_backend(),
        schema=None,
        timeouts=timeouts,
        environment=dict(env),
        shows_output=shows_output,
        plan=plan,
    )


def _session(num_workers: int) -> SparkSession:
    try:
        from pyspark import SparkContext
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ClusterError(
            f"num_workers={num_workers}: expected PySpark, which runs more than one worker. "
            f"Received: {error}. Install it with pip install 'elephant-spark[local]'."
        ) from error
    from elephant.cluster.local import local_session

    with _session_lock:
        session = SparkSession.getActiveSession()
        if session is not None:
            return session
        # The active session is one thread's; spark-submit names its gateway in the environment.
        if isinstance(active_context(), SparkContext) or "PYSPARK_GATEWAY_PORT" in os.environ:
            return SparkSession.builder.getOrCreate()
        return local_session(num_workers, app_name="elephant run")


def _keras_backend() -> str | None:
    """Returns the backend of the driver's Keras, or None when Keras is not in use here and nothing names one."""
    keras = sys.modules.get("keras")
    return os.environ.get(VARIABLE) if keras is None else str(keras.config.backend())


def pickler() -> Callable[[Any], bytes]:
    """Returns cloudpickle's ``dumps``, of PySpark, or of its own package on a machine without Spark."""
    name = "pyspark.cloudpickle" if importlib.util.find_spec("pyspark") else "cloudpickle"
    dumps: Callable[[Any], bytes] = importlib.import_module(name).dumps
    return dumps


def pickled_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Returns a call as it travels; raises ConfigurationError where it cannot be pickled."""
    from elephant.rank.program import FunctionCall

    try:
        dumps = pickler()
        return dumps(FunctionCall(fn=fn, args=tuple(args), kwargs=dict(kwargs), pickled=dumps))
    except Exception as error:
        raise ConfigurationError(
            f"{_unpicklable(fn, args, kwargs)}: expected something that can be pickled, to be sent to the executors. "
            f"Received: {type(error).__name__}: {error}. Do not pass, or refer to, a SparkSession, a lock, a file or "
            "a socket: create it inside the function.",
            topic="code-that-cannot-be-sent",
        ) from error


def _unpicklable(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns the name of the first of them that cannot be pickled."""
    named = {"fn": fn, **{f"args[{index}]": value for index, value in enumerate(args)}}
    named.update({f"kwargs[{name!r}]": value for name, value in kwargs.items()})
    for name, value in named.items():
        try:
            pickler()(value)
        except Exception:
            return name
    return "fn and its arguments"


def unpickled(result: bytes, rank: int) -> Any:
    """Returns the result of a rank's function; raises ConfigurationError where it cannot be unpickled."""
    try:
        return pickle.loads(result)  # noqa: S301  (see the import)
    except Exception as error:
        raise ConfigurationError(
            f"result of rank {rank}: expected something that can be unpickled on the driver. "
            f"Received: {type(error).__name__}: {error}. Return numbers, numpy arrays, or containers of them.",
            topic="code-that-cannot-be-sent",
        ) from error


def check_call(
    fn: object,
    args: object,
    kwargs: object,
    num_workers: object,
    verbose: object,
    timeouts: object,
    env: object,
) -> None:
    """Raises ConfigurationError unless the arguments of `run` are what they should be."""
    is_count = isinstance(num_workers, int) and not isinstance(num_workers, bool) and num_workers >= 1
    named = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    variables = isinstance(env, Mapping) and all(_is_variable(*pair) for pair in env.items())
    _expect(callable(fn), "fn", "a function", fn)
    if isinstance(args, int):
        raise ConfigurationError(
            f"args: expected a tuple of arguments. Received: {args!r}. Pass the number of workers by its name, "
            f"num_workers={args!r}."
        )
    _expect(isinstance(args, Sequence) and not isinstance(args, str | bytes), "args", "a tuple of arguments", args)
    _expect(named, "kwargs", "a dictionary of arguments by name", kwargs)
    _expect(is_count, "num_workers", "an integer of at least 1", num_workers)
    _expect(verbose in (0, 1, 2, "auto"), "verbose", "0, 1, 2 or 'auto'", verbose)
    _expect(isinstance(timeouts, Timeouts), "timeouts", "elephant.config.Timeouts", timeouts)
    _expect(variables, "env", "a dictionary of strings by name, as the system takes them", env)


def _is_variable(name: object, value: object) -> bool:
    is_text = isinstance(name, str) and isinstance(value, str)
    return is_text and bool(name) and "=" not in str(name) and "\0" not in f"{name}{value}"
