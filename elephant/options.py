"""Table of options: the one place that says what an option is called, what it may be, and what it is for.

From it come the params of `elephant.spark.params`, the checks and defaults of `elephant.config`, the arguments of
`elephant.SparkModel`, and the settings of jobs. An option is added here, and to `elephant.config.FitConfig` and the
signature of `elephant.KerasEstimator`, which have it for type checkers; tests hold them, and the README, to the table.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from elephant.algorithms import ALGORITHMS
from elephant.errors import ConfigurationError, UnknownOptionError, did_you_mean

# Of class weights: all classes count alike.
BALANCED = "balanced"
MODES = ("synchronous", "asynchronous", "hogwild")
_SHORT_MODES = {"sync": "synchronous", "async": "asynchronous"}


class Scope(enum.Enum):
    """Part of the program that an option belongs to."""

    INPUT = "the estimator and the fitted model: inputs and predictions"
    LABEL = "the estimator and the fitted model: labels and weights"
    ROWS = "the estimator alone"
    FIT = "elephant.config.FitConfig"
    SERVERS = "elephant.config.AsynchronousOptions"


@dataclass(frozen=True)
class Range:
    """Values that an option may have.

    Args:
        expected: What they are called in errors.
        holds: Whether a value is one of them.
    """

    expected: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Option:
    """One thing that can be asked for.

    Args:
        name: In snake case.
        type: Of its values, besides None where that is the default.
        default: None where it is not set, unless it is.
        scope: The part of the program that it belongs to.
        range: Values that it may have; None allows all of the type.
        help: One line on what it is for.
        ranks_only: Why modes with a parameter server do not have it; empty where they do.
    """

    name: str
    type: Any
    default: Any
    scope: Scope
    range: Range | None = None
    _: KW_ONLY
    help: str
    ranks_only: str = ""

    @property
    def param(self) -> str:
        """Its name in camel case, as Spark has it.

        >>> OPTION["batch_size"].param
        'batchSize'
        """
        return re.sub("_(.)", lambda letter: letter[1].upper(), self.name)

    @property
    def takes_none(self) -> bool:
        """Whether None is one of its values.

        >>> OPTION["label_col"].takes_none, OPTION["weight_col"].takes_none, OPTION["epochs"].takes_none
        (True, True, False)
        """
        return self.default is None or isinstance(None, self.type)

    def check(self, value: Any, name: str | None = None) -> None:
        """Raises ConfigurationError for a value that it may not have.

        Args:
            value: The value.
            name: What the user calls the option; None for its name.
        """
        if self.range is None or (value is None and self.default is None) or self.range.holds(value):
            return
        raise ConfigurationError(f"{name or self.name}: expected {self.range.expected}. Received: {value!r}.")


def to_columns(value: Any) -> str | list[str]:
    """Returns one column name, or a list of them; raises TypeError for anything else."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Sequence) and value and all(isinstance(name, str) and name for name in value):
        return list(value)
    raise TypeError(f"expected a column name or a list of column names. Received: {value!r}.")


def to_columns_by_name(value: Any) -> dict[str, str | list[str]] | list[str]:
    """Returns columns by the name of an input or output, or a list in their order; raises TypeError for the rest."""
    if isinstance(value, Mapping) and value and all(isinstance(name, str) and name for name in value):
        return {name: to_columns(columns) for name, columns in value.items()}
    columns = to_columns(value)
    if isinstance(columns, list):
        return columns
    raise TypeError(f"expected a dictionary of columns by name, or a list of columns. Received: {value!r}.")


def to_weight_columns(value: Any) -> str | dict[str, str]:
    """Returns a column name, or one by the name of each output; raises TypeError for anything else."""
    names = list(value.values()) if isinstance(value, Mapping) else [value]
    if names and all(isinstance(name, str) and name for name in names):
        return {str(name): column for name, column in value.items()} if isinstance(value, Mapping) else str(value)
    raise TypeError(f"expected a column name, or column names by the name of the output. Received: {value!r}.")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _at_least(least: int, expected: str = "") -> Range:
    return Range(expected or f"an integer of at least {least}", lambda value: value >= least)


def _one_of(*names: str) -> Range:
    return Range(f"one of {', '.join(names)}", lambda value: value in names)


def _listed(names: Sequence[str], last: str) -> str:
    """Returns names as a sentence has them.

    >>> _listed(["a", "b", "c"], "or")
    "'a', 'b' or 'c'"
    """
    *first, end = map(repr, names)
    return f"{', '.join(first)} {last} {end}" if first else end


_ELASTIC = [name for name, algorithm in ALGORITHMS.items() if algorithm.is_elastic]
_BYTES = _at_least(0, "bytes, or None to choose them")
_POSITIVE = Range("a positive number", lambda value: value > 0 and math.isfinite(value))
_SHARE = Range("in [0, 1)", lambda value: 0 <= value < 1)
_INSIDE = Range("a number in (0, 1)", lambda value: 0 < value < 1)
_SEED = Range("an integer in [0, 2**63)", lambda value: 0 <= value < 2**63)
_PORT = Range("0, or a port of at most 65535", lambda value: 0 <= value <= 65535)
_VERBOSITY = Range("0, 1, 2 or 'auto'", lambda value: value in (0, 1, 2, "auto"))
_FREQUENCY = Range(
    "'batch', 'epoch' or an integer of at least 1", lambda value: value in ("batch", "epoch") or _is_count(value, 1)
)
_SWITCH_OR_AUTO = Range("True, False or 'auto'", lambda value: value is True or value is False or value == "auto")
_COUNT_OR_AUTO = Range("'auto' or an integer of at least 0", lambda value: value == "auto" or _is_count(value, 0))

INPUT, LABEL, ROWS, FIT, SERVERS = Scope
# A table: one or two lines of help below the line of an option.
# fmt: off
OPTIONS = (
    Option("features_col", str | list, "features", INPUT,
           help="features: one column (array of numbers, ml vector, number), or numeric columns that make one vector"),
    Option("input_cols", dict | list, None, INPUT,
           help="for models with several inputs: columns by the name of the input, or a list in their order"),
    Option("prediction_col", str, "prediction", INPUT,
           help="column to add: the class (cross-entropy losses) or the value (one output unit) as double, else an "
           "array"),
    Option("probability_col", str, "probability", INPUT,
           help="column to add for classifiers: the classes' probabilities as an ml vector"),
    Option("raw_prediction_col", str, "rawPrediction", INPUT,
           help="column to add for classifiers: the scores of the classes as an ml vector, which are logits where the "
           "loss takes logits, and else probabilities"),
    Option("preprocessing", Callable, None, INPUT,
           help="a function from a batch, a dictionary of columns, to what the model takes; runs on the workers"),
    Option("inference_batch_size", int, None, INPUT,
           help="rows that transform and evaluate put through the model at a time; not set means 1024, more where "
           "rows are small, and fewer where they are large"),
    Option("label_col", str | list | None, "label", LABEL,
           help="label: one column (number, boolean, array of numbers, ml vector), or numeric columns that make one "
           "vector; None for models that train without"),
    Option("label_cols", dict | list, None, LABEL,
           help="for models with several outputs: columns by the name of the output, or a list in their order"),
    Option("weight_col", str | dict, None, LABEL,
           help="sample weights: a column of numbers, or of arrays with one for each token or pixel, or one by "
           "the name of each output; not set means 1 for every row"),
    Option("validation_indicator_col", str, None, ROWS,
           help="a column of booleans, or of 0 and 1: true keeps the row for validation; not set means "
           "validationFraction"),
    Option("class_weight", dict | str, None, ROWS,
           help="weights by class, which weigh the loss of rows in training, or 'balanced', which counts the labels "
           "for them; not set weighs all alike"),
    Option("callbacks", list, (), ROWS,
           help="Keras callbacks, or one; those that look at epochs alone and decide nothing run on the driver"),
    Option("driver_callbacks", list, (), ROWS,
           help="more Keras callbacks, or one, which run on the driver whatever they look at; listeners, "
           "elephant.FitListener"),
    Option("events_path", str, None, ROWS,
           help="a folder, on any file system that Spark or fsspec reaches, for a file of each fit's events; not set "
           "writes none"),
    Option("trace_path", str, None, ROWS,
           help="a folder, on any file system that Spark or fsspec reaches, for a trace of each fit that Perfetto "
           "opens; not set makes none"),
    Option("cache_preprocessing", bool, True, ROWS,
           help="whether preprocessing runs once and its result is kept, or again in every epoch"),
    Option("augmentation", Callable, None, ROWS,
           help="a function from a batch and a random generator to a batch, for every training batch of every epoch"),
    Option("mode", str, "synchronous", FIT, _one_of(*MODES),
           help="how workers train together: 'synchronous' ('sync'), or with a parameter server 'asynchronous' "
           "('async') or 'hogwild' (asynchronous without locks)"),
    Option("num_workers", int, 1, FIT, _at_least(1),
           help="workers, each one Spark task (>= 1); of a barrier stage in synchronous mode"),
    Option("epochs", int, 1, FIT, _at_least(1),
           help="passes over the training rows (>= 1)"),
    Option("batch_size", int, 32, FIT, _at_least(1),
           help="rows per worker and step (>= 1): a synchronous step trains on numWorkers times as many"),
    Option("validation_fraction", float, 0.0, FIT, _SHARE,
           help="share of the rows kept for validation, in [0, 1)"),
    Option("shuffle", bool, True, FIT,
           help="whether each worker draws its rows in a new order every epoch"),
    Option("seed", int, 0, FIT, _SEED,
           help="source of the row order, the validation split and the workers' random state"),
    Option("learning_rate", float, None, FIT, _POSITIVE,
           help="replaces the learning rate that the model was compiled with; not set keeps it"),
    Option("scale_learning_rate", bool, False, FIT, ranks_only="no global batch: every push is one worker's own",
           help="whether to multiply the learning rate by numWorkers, as larger global batches may want"),
    Option("frequency", str | int, "batch", FIT, _FREQUENCY,
           help="'batch' exchanges gradients each step; an integer k or 'epoch' exchanges weights, every k steps or "
           "each epoch"),
    Option("compression", str, None, FIT,
           help="how gradients are encoded where they cross hosts: 'bfloat16', 'float16', 'int8', 'topk', 'powersgd'; "
           "not set sends them as they are"),
    Option("bucket_bytes", int, None, FIT, _BYTES, ranks_only="no allreduce to bundle gradients for",
           help="bytes of gradients that travel together while the next are computed; not set chooses, 0 makes one "
           "bucket"),
    Option("sync_batch_norm", bool, False, FIT, ranks_only="no step in which all workers' rows meet",
           help="whether batch normalization uses the statistics of all workers' rows"),
    Option("allow_batch_coupled_loss", bool, False, FIT, ranks_only="no loss of several workers' rows",
           help="whether a loss may couple the rows of a batch; each worker computes it on its own rows"),
    Option("cache", str, "disk", FIT, _one_of("disk", "memory"),
           help="where a worker keeps its rows: 'disk', memory-mapped, or 'memory'"),
    Option("steps_per_epoch", int, None, FIT, _at_least(1),
           help="steps of an epoch (>= 1), which goes on in the rows where the last one ended; not set means all rows"),
    Option("bucket_by_length", bool, False, FIT,
           help="whether batches are made of sequences of like length, so that little is padded"),
    Option("use_gpu", bool | str, "auto", FIT, _SWITCH_OR_AUTO,
           help="True demands GPUs, False hides them, 'auto' takes those that there are"),
    Option("gpus_per_worker", int, 1, FIT, _at_least(1),
           help="GPUs of each worker (>= 1), each of which is one rank; the worker's rows and batches are divided"),
    Option("gpu_resource", str, "gpu", FIT,
           help="what Spark calls GPUs, as in spark.executor.resource.NAME.amount"),
    Option("gpu_transport", str, "auto", FIT, _one_of("auto", "host", "nccl"), ranks_only="no allreduce to run on GPUs",
           help="how GPUs reduce gradients: 'host', or on PyTorch and JAX 'nccl'; 'auto' takes nccl on PyTorch where "
           "all workers share a host"),
    Option("mixed_precision", bool, False, FIT,
           help="whether workers compute in 16 bits where the model's layers leave that open"),
    Option("checkpoint_path", str, None, FIT,
           help="a folder, on any file system that Spark or fsspec reaches, for checkpoints; not set makes none"),
    Option("checkpoint_epochs", int, 1, FIT, _at_least(1),
           help="epochs between two checkpoints (>= 1)"),
    Option("resume", bool, False, FIT,
           help="whether to go on from the last checkpoint in checkpointPath, where there is one"),
    Option("max_restarts", int, 0, FIT, _at_least(0),
           help="how often a fit that lost a worker is started again, from its last checkpoint (>= 0)"),
    Option("warm_workers", int | str, "auto", FIT, _COUNT_OR_AUTO,
           help="processes that have imported Keras and wait on each executor for the next fit, at most; 0 for none; "
           "'auto' is what spark.elephant.warmWorkers says, or else 2"),
    Option("timeouts", dict, None, FIT,
           help="how long waits may last: elephant.config.Timeouts, or seconds by its names; not set: its defaults"),
    Option("verbose", int | str, 1, FIT, _VERBOSITY,
           help="0 silent, 1 or 'auto' plan, a live line of progress and a table of epochs, 2 without the live line"),
    Option("algorithm", str, "downpour", SERVERS, _one_of(*ALGORITHMS),
           help=f"asynchronous modes: what workers push: {_listed([*ALGORITHMS], 'or')}"),
    Option("elasticity", float, None, SERVERS, _INSIDE,
           help=f"asynchronous modes: moving rate of {_listed(_ELASTIC, 'and')}, in (0, 1); not set means "
           "0.9 / numWorkers"),
    Option("max_staleness", int, None, SERVERS, _at_least(0),
           help="asynchronous modes: steps that a worker may be ahead of the slowest live one (>= 0); not set means "
           "no limit"),
    Option("background_exchange", bool, False, SERVERS,
           help="asynchronous modes: whether a worker computes a step while the exchange of the last one goes on"),
    Option("parameter_servers", int, 1, SERVERS, _at_least(1),
           help="asynchronous modes: processes that the weights are divided over (>= 1)"),
    Option("server_placement", str, "driver", SERVERS, _one_of("driver", "executors"),
           help="asynchronous modes: where parameter servers run: 'driver' or 'executors'"),
    Option("port", int, 0, SERVERS, _PORT,
           help="asynchronous modes: the first parameter server's port, others take the next ones; 0 takes free ones"),
    Option("snapshot_seconds", float, 30.0, SERVERS, _at_least(0, "zero or more seconds"),
           help="asynchronous modes: seconds between two snapshots, from which a lost server comes back; 0 makes none "
           "by time"),
    Option("snapshot_updates", int, 0, SERVERS, _at_least(0, "zero or more"),
           help="asynchronous modes: updates between two snapshots; 0 makes none by count"),
    Option("max_refused_updates", int, 100, SERVERS, _at_least(0, "zero or more"),
           help="asynchronous modes: updates with NaN or infinity that are refused before the fit is given up"),
)
# fmt: on
OPTION = {option.name: option for option in OPTIONS}


def options_of(*scopes: Scope) -> tuple[Option, ...]:
    """Returns the options of some parts of the program, in the order of the table."""
    return tuple(option for option in OPTIONS if option.scope in scopes)


@dataclass(frozen=True)
class Pair:
    """Rule on several options, by which one of them is refused.

    Args:
        name: The one.
        scope: The part of the program that has values of all of them.
        holds: Whether values go together; gets an object that has them by the options' names.
        message: What is expected, and what came.
    """

    name: str
    scope: Scope
    holds: Callable[[Any], bool]
    message: Callable[[Any], str]


def _either(one: str, several: str) -> Pair:
    """Returns the rule that columns are named in one of two ways; a default is what nobody has asked for."""
    first, second = OPTION[one], OPTION[several]
    return Pair(
        several,
        second.scope,
        lambda given: getattr(given, several) is None or getattr(given, one) in (None, first.default),
        lambda given: (
            f"{first.param} not to be set, which names the one column. Received: "
            f"{first.param}={getattr(given, one)!r} beside {second.param}={getattr(given, several)!r}."
        ),
    )


def _excludes_nccl(name: str, holds: Callable[[Any], bool], expected: str) -> Pair:
    """Returns the rule that NCCL goes with some values alone of another option."""
    return Pair(
        "gpu_transport",
        FIT,
        lambda given: given.gpu_transport != "nccl" or holds(getattr(given, name)),
        lambda given: (
            f"{expected} with 'nccl', which reduces every step's gradients on GPUs, as they are. Received: "
            f"{name}={getattr(given, name)!r}. Leave {name} out, or pass 'host'."
        ),
    )


_NCCL_PAIRS = (
    _excludes_nccl("frequency", lambda frequency: frequency == "batch", "frequency='batch'"),
    _excludes_nccl("compression", lambda compression: compression is None, "no compression"),
    _excludes_nccl("use_gpu", lambda use_gpu: use_gpu is not False, "use_gpu=True or 'auto'"),
)

# Of each of these, one names columns in the place of the other.
COLUMN_CHOICES = (("features_col", "input_cols"), ("label_col", "label_cols"))
PAIRS = (
    *(_either(one, several) for one, several in COLUMN_CHOICES),
    *_NCCL_PAIRS,
    Pair(
        "validation_fraction",
        ROWS,
        lambda given: given.validation_indicator_col is None or given.validation_fraction == 0,
        lambda given: (
            "0 because validationIndicatorCol already chooses the validation rows. "
            f"Received: {given.validation_fraction!r}."
        ),
    ),
    Pair(
        "elasticity",
        SERVERS,
        lambda given: given.elasticity is None or given.is_elastic,
        lambda given: (
            f"algorithm={_listed(_ELASTIC, 'or')}, whose workers are drawn to the servers' weights. Received: "
            f"elasticity={given.elasticity!r} with algorithm={given.algorithm!r}. Leave elasticity out, or change the "
            "algorithm."
        ),
    ),
    Pair(
        "port",
        SERVERS,
        lambda given: given.port + given.parameter_servers <= 65536,
        lambda given: f"0, or a port of at most {65536 - given.parameter_servers}. Received: {given.port!r}.",
    ),
    Pair(
        "resume",
        FIT,
        lambda given: not given.resume or given.checkpoint_path is not None,
        lambda given: (
            "checkpoint_path, where the fit that is to go on has left its checkpoints. Received: None. Pass the path, "
            "or leave resume out."
        ),
    ),
    Pair(
        "batch_size",
        FIT,
        lambda given: given.batch_size % given.gpus_per_worker == 0,
        lambda given: (
            f"a multiple of gpus_per_worker={given.gpus_per_worker}, because the rows of a worker's step are divided "
            f"among its GPUs. Received: {given.batch_size!r}."
        ),
    ),
    Pair(
        "sync_batch_norm",
        FIT,
        lambda given: not given.sync_batch_norm or given.averages_gradients,
        lambda given: (
            f"frequency='batch'. Received: frequency={given.frequency!r}, with which ranks train alone between two "
            "averages. Leave one of the two out."
        ),
    ),
)


def check_values(given: object, scope: Scope) -> None:
    """Raises ConfigurationError for a value of a scope's options that is out of its range, or for a pair.

    Args:
        given: What has the values by the options' names.
        scope: The scope.
    """
    for option in options_of(scope):
        option.check(getattr(given, option.name))
    check_pairs(given, scope)


def check_pairs(given: object, scope: Scope) -> None:
    """Raises ConfigurationError for values of a scope's options that exclude each other; see `check_values`."""
    for pair in PAIRS:
        if pair.scope is scope and not pair.holds(given):
            # Those that a fit does not have, users know as Spark's params alone.
            name = pair.name if scope in (FIT, SERVERS) else OPTION[pair.name].param
            raise ConfigurationError(f"{name}: expected {pair.message(given)}")


def full_mode(mode: Any) -> Any:
    """Returns the full name of a mode; anything else as it is, and a member of an enumeration as its value.

    >>> full_mode("sync"), full_mode("async"), full_mode("hogwild")
    ('synchronous', 'asynchronous', 'hogwild')
    """
    mode = getattr(mode, "value", mode)
    return _SHORT_MODES.get(mode, mode) if isinstance(mode, str) else mode


def refuse_unknown(
    caller: str,
    given: Mapping[str, Any],
    known: Sequence[str],
    *,
    noun: str = "argument",
    explained: Mapping[str, str] | None = None,
) -> None:
    """Raises UnknownOptionError for a keyword argument that is not known; the error lists those that are.

    Args:
        caller: What was called.
        given: The keyword arguments.
        known: Their names.
        noun: What they are called.
        explained: What to say of some that users of other libraries pass, by name.
    """
    for name in given:
        if name not in known:
            hint = (explained or {}).get(name) or did_you_mean(name, known)
            raise UnknownOptionError(f"{caller} has no {noun} {name!r}.{hint} Known: {', '.join(known)}.")
