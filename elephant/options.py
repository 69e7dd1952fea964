"""Table of options: the one place that says what an option is called, what it may be, and what it is for.

From it come the params of `elephant.spark.params`, the checks and defaults of `elephant.config`, the arguments of
`elephant.SparkModel`, and the settings of jobs. An option is added here, and to the signature and the docstring of
`elephant.KerasEstimator`, which type checkers and readers need; tests hold these, and the documentation, to the table.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from elephant.algorithms import ALGORITHMS, GOSSIP_ALGORITHMS, is_algorithm
from elephant.errors import ConfigurationError, ElephantError, UnknownOptionError, did_you_mean
from elephant.kinds import (
    CALLBACKS,
    CLASS_WEIGHT,
    COLUMNS,
    DISTRIBUTION,
    FUNCTION,
    LABEL_COLUMNS,
    METRIC,
    NUMBER,
    PATH,
    PORTS,
    STAGES,
    SWITCH,
    SWITCH_OR_AUTO,
    TEXT,
    WEIGHT_COLUMNS,
    WORKERS,
    Kind,
    count_or,
    integer,
    number,
    one_of,
    pairs,
)
from elephant.timeouts import Timeouts

MODES = ("synchronous", "asynchronous", "hogwild", "gossip")
_SHORT_MODES = {"sync": "synchronous", "async": "asynchronous"}


class Scope(enum.Enum):
    """Part of the program that an option belongs to."""

    INPUT = "the estimator and the fitted model: inputs and predictions"
    LABEL = "the estimator and the fitted model: labels and weights"
    ROWS = "the estimator alone"
    FIT = "elephant.config.FitConfig"
    SERVERS = "elephant.config.AsynchronousOptions"


@dataclass(frozen=True)
class Option:
    """One thing that can be asked for.

    Args:
        name: In snake case.
        kind: Of its values, besides None where that is the default.
        default: None where it is not set, unless it is.
        scope: The part of the program that it belongs to.
        help: One line on what it is for.
        ranks_only: Why modes with a parameter server do not have it; empty where they do.
        in_rounds: Whether synchronous training in rounds at parameter servers has it, where not all modes with them do.
    """

    name: str
    kind: Kind
    default: Any
    scope: Scope
    _: KW_ONLY
    help: str
    ranks_only: str = ""
    in_rounds: bool = False

    @property
    def param(self) -> str:
        """Its name in camel case, as Spark has it.

        >>> OPTION["batch_size"].param
        'batchSize'
        """
        return re.sub("_(.)", lambda letter: letter[1].upper(), self.name)

    @property
    def takes_none(self) -> bool:
        """True if None is one of its values.

        >>> OPTION["label_col"].takes_none, OPTION["weight_col"].takes_none, OPTION["epochs"].takes_none
        (True, True, False)
        """
        return self.default is None or isinstance(None, self.kind.type)

    @property
    def type(self) -> Any:
        """Type of its values, in signatures."""
        return self.kind.type | None if self.default is None else self.kind.type

    def value_of(self, given: Any, name: str | None = None) -> Any:
        """Returns a value as Python has it, such as ``3`` for ``numpy.int64(3)``; None where that is the default.

        Args:
            given: The value.
            name: What the user calls the option; None for its name.

        Raises:
            ConfigurationError: It may not have this value.
        """
        if given is None and self.default is None:
            return None
        try:
            return self.kind.value_of(given)
        except ElephantError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{name or self.name}: {error}") from None


def full_mode(mode: Any) -> Any:
    """Returns the full name of a mode; anything else as it is, and a member of an enumeration as its value.

    >>> full_mode("sync"), full_mode("async"), full_mode("hogwild")
    ('synchronous', 'asynchronous', 'hogwild')
    """
    mode = getattr(mode, "value", mode)
    return _SHORT_MODES.get(mode, mode) if isinstance(mode, str) else mode


def _seconds(given: Any) -> dict[str, float]:
    """Returns seconds by their names in `Timeouts`, of which it raises the errors."""
    checked = asdict(Timeouts.of(given))
    named = checked if isinstance(given, Timeouts) else given
    return {name: float(checked[name]) for name in named if checked[name] is not None}


def _seconds_of_text(given: Any) -> dict[str, float]:
    if isinstance(given, Mapping) and given:
        return {name: NUMBER.read(seconds) for name, seconds in given.items()}
    raise TypeError


def _listed(names: Sequence[str], last: str) -> str:
    """Returns names as a sentence has them.

    >>> _listed(["a", "b", "c"], "or")
    "'a', 'b' or 'c'"
    """
    *first, end = map(repr, names)
    return f"{', '.join(first)} {last} {end}" if first else end


INPUT, LABEL, ROWS, FIT, SERVERS = Scope
_ELASTIC = [name for name, algorithm in ALGORITHMS.items() if algorithm.is_elastic]
_MODE = one_of(*MODES, convert=full_mode)
_COUNT = integer(1)
_POSITIVE = number("a positive number", lambda value: 0 < value < math.inf)
_SHARE = number("in [0, 1)", lambda value: 0 <= value < 1)
_ALGORITHM = Kind(
    str,
    f"one of {', '.join([*ALGORITHMS, *GOSSIP_ALGORITHMS])}, of which {_listed(_ELASTIC, 'and')} may have a moving "
    f"rate in (0, 1) behind a colon, such as '{_ELASTIC[0]}:0.3'",
    TEXT.convert,
    is_algorithm,
)
_SECONDS = number("zero or more seconds", lambda value: value >= 0)
_SEED = integer(0, "an integer in [0, 2**63)", most=2**63 - 1)
_PORT = integer(0, "0, or a port of at most 65535", most=65535)
_VERBOSITY = count_or("auto", expected="0, 1, 2 or 'auto'", holds=lambda value: value in (0, 1, 2))
_FREQUENCY = count_or(
    "batch",
    "epoch",
    expected="'batch', 'epoch' or an integer of at least 1",
    holds=lambda value: value >= 1,
    written="batch, epoch or a number of steps",
)
_TIMEOUTS = Kind(
    dict,
    "seconds by name",
    _seconds,
    written="pairs such as name=seconds",
    parse=_seconds_of_text,
    gather=pairs,
)
# A table: one or two lines of help below the line of an option.
# fmt: off
OPTIONS = (
    Option("features_col", COLUMNS, "features", INPUT,
           help="features: one column (array of numbers, ml vector, number), or numeric columns that make one vector; "
           "for several inputs, columns by the name of the input, or a list in their order"),
    Option("prediction_col", TEXT, "prediction", INPUT,
           help="column to add: the class (cross-entropy losses) or the value (one output unit) as double, else an "
           "array"),
    Option("probability_col", TEXT, "probability", INPUT,
           help="column to add for classifiers: the classes' probabilities as an ml vector"),
    Option("raw_prediction_col", TEXT, "rawPrediction", INPUT,
           help="column to add for classifiers: the scores of the classes as an ml vector, which are logits where the "
           "loss takes logits, and else probabilities"),
    Option("preprocessing", FUNCTION, None, INPUT,
           help="a function from a batch, a dictionary of columns, to what the model takes; runs on the workers, once, "
           "or for every batch where it takes a random generator"),
    Option("inference_batch_size", _COUNT, None, INPUT,
           help="rows that transform and evaluate put through the model at a time; not set means 1024, more where "
           "rows are small, and fewer where they are large"),
    Option("inference_use_gpu", SWITCH, False, INPUT,
           help="whether the tasks of transform, evaluate and predict ask Spark for a GPU each by themselves; "
           "otherwise they use what the application's tasks have"),
    Option("label_col", LABEL_COLUMNS, "label", LABEL,
           help="label: one column (number, boolean, array of numbers, ml vector), or numeric columns that make one "
           "vector; for several outputs, columns by the name of the output, or a list in their order; None for models "
           "that train without"),
    Option("weight_col", WEIGHT_COLUMNS, None, LABEL,
           help="sample weights: a column of numbers, or of arrays with one for each token or pixel, or one by "
           "the name of each output; not set means 1 for every row"),
    Option("validation_indicator_col", TEXT, None, ROWS,
           help="a column of booleans, or of 0 and 1: true keeps the row for validation; not set means "
           "validationFraction"),
    Option("class_weight", CLASS_WEIGHT, None, ROWS,
           help="weights by class, which weigh the loss of rows in training, or 'balanced', which counts the labels "
           "for them; not set weighs all alike"),
    Option("callbacks", CALLBACKS, (), ROWS,
           help="Keras callbacks, or one; those that look at epochs alone and decide nothing run on the driver"),
    Option("driver_callbacks", CALLBACKS, (), ROWS,
           help="more Keras callbacks, or one, which run on the driver whatever they look at; listeners, "
           "elephant.FitListener"),
    Option("events_path", PATH, None, ROWS,
           help="a folder, on any file system that Spark or fsspec reaches, for a file of each fit's events, and with "
           "spark.elephant.trace its trace; not set writes none"),
    Option("augmentation", FUNCTION, None, ROWS,
           help="a function from a batch and a random generator to a batch, for every training batch of every epoch"),
    Option("mode", _MODE, "synchronous", FIT,
           help="how workers train together: 'synchronous' ('sync'), with a parameter server 'asynchronous' "
           "('async') or 'hogwild' (asynchronous without locks), or in pairs without a server: 'gossip'"),
    Option("aggregation", one_of("allreduce", "server"), "allreduce", FIT,
           help="synchronous mode: where gradients are averaged: 'allreduce' among the workers, or 'server' at "
           "parameter servers, where a lost worker is started again while the others wait"),
    Option("num_workers", WORKERS, 1, FIT,
           help="workers, each one Spark task (>= 1); of a barrier stage in synchronous mode; a pair such as (2, 8) is "
           "the fewest and the most of an elastic fit, which goes on with the task slots that there are"),
    Option("epochs", _COUNT, 1, FIT,
           help="passes over the training rows (>= 1)"),
    Option("batch_size", _COUNT, 32, FIT,
           help="rows per worker and step (>= 1): a synchronous step trains on numWorkers times as many"),
    Option("validation_fraction", _SHARE, 0.0, FIT,
           help="share of the rows kept for validation, in [0, 1)"),
    Option("shuffle", SWITCH, True, FIT,
           help="whether each worker draws its rows in a new order every epoch"),
    Option("seed", _SEED, 0, FIT,
           help="source of the row order, the validation split and the workers' random state"),
    Option("learning_rate", _POSITIVE, None, FIT,
           help="replaces the learning rate that the model was compiled with; not set keeps it"),
    Option("scale_learning_rate", SWITCH, False, FIT, ranks_only="no global batch: every push is one worker's own",
           in_rounds=True,
           help="whether to multiply the learning rate by numWorkers, as larger global batches may want"),
    Option("frequency", _FREQUENCY, "batch", FIT,
           help="'batch' exchanges gradients each step; an integer k or 'epoch' exchanges weights, every k steps or "
           "each epoch"),
    Option("compression", TEXT, None, FIT,
           help="how gradients are encoded where they cross hosts: 'bfloat16', 'float16', 'int8', 'topk', 'powersgd'; "
           "not set sends them as they are"),
    Option("sync_batch_norm", SWITCH, False, FIT, ranks_only="no step in which all workers' rows meet",
           help="whether batch normalization uses the statistics of all workers' rows"),
    Option("shard_optimizer", SWITCH, False, FIT, ranks_only="no update that all workers compute together",
           help="whether each worker keeps the optimizer's state of a part of the weights alone (ZeRO, stage 1): less "
           "memory, for half as many bytes more in each step, and the same results"),
    Option("allow_batch_coupled_loss", SWITCH, False, FIT, ranks_only="no loss of several workers' rows",
           in_rounds=True,
           help="whether a loss may couple the rows of a batch; each worker computes it on its own rows"),
    Option("cache", one_of("disk", "memory"), "disk", FIT,
           help="where a worker keeps its rows: 'disk', memory-mapped, or 'memory'"),
    Option("steps_per_epoch", _COUNT, None, FIT,
           help="steps of an epoch (>= 1), which goes on in the rows where the last one ended; not set means all rows"),
    Option("bucket_by_length", SWITCH, False, FIT,
           help="whether batches are made of sequences of like length, so that little is padded"),
    Option("use_gpu", SWITCH_OR_AUTO, "auto", FIT,
           help="True demands GPUs, False hides them, 'auto' takes those that there are"),
    Option("gpus_per_worker", _COUNT, 1, FIT,
           help="GPUs of each worker (>= 1), each of which is one rank; the worker's rows and batches are divided"),
    Option("gpu_transport", one_of("auto", "host", "nccl"), "auto", FIT, ranks_only="no allreduce to run on GPUs",
           help="how GPUs reduce gradients: 'host', or on PyTorch and JAX 'nccl'; 'auto' takes nccl on PyTorch where "
           "all workers share a host"),
    Option("distribution", DISTRIBUTION, None, FIT, ranks_only="no step that all workers compute together",
           help="on JAX: keras.distribution.ModelParallel, or a LayoutMap, by which Keras divides the layers among the "
           "workers; not set gives each worker the whole model"),
    Option("pipeline_stages", STAGES, None, FIT, ranks_only="no step that all workers compute together",
           help="parts of the model, one after the other, each on workers of its own: a number, or the layers with "
           "which the second and later ones begin; not set gives each worker the whole model"),
    Option("micro_batches", _COUNT, 8, FIT, ranks_only="no step that all workers compute together",
           help="parts of a batch that follow one another through the stages of pipelineStages (>= 1)"),
    Option("mixed_precision", SWITCH, False, FIT,
           help="whether workers compute in 16 bits where the model's layers leave that open"),
    Option("checkpoint_path", PATH, None, FIT,
           help="a folder, on any file system that Spark or fsspec reaches, for checkpoints; not set makes none"),
    Option("checkpoint_epochs", _COUNT, 1, FIT,
           help="epochs between two checkpoints (>= 1)"),
    Option("checkpoint_seconds", _POSITIVE, None, FIT,
           help="seconds between two checkpoints, wherever in an epoch they fall; not set: at ends of epochs alone"),
    Option("keep_best", METRIC, None, FIT,
           help="a metric, as the history has it: the checkpoint of the best epoch by it is kept beside the last two; "
           "'val_auc:max' or 'val_cost:min' says which way is better where the name does not"),
    Option("resume", SWITCH, False, FIT,
           help="whether to go on from the last checkpoint in checkpointPath, where there is one"),
    Option("max_restarts", integer(0), 0, FIT,
           help="how often a fit goes on after it has lost a worker, from its last state (>= 0); with a pair of "
           "numWorkers, 0 means as long as it comes further"),
    Option("timeouts", _TIMEOUTS, None, FIT,
           help="how long waits may last: elephant.config.Timeouts, or seconds by its names; not set: its defaults"),
    Option("encryption", SWITCH, None, FIT,
           help="whether all connections of the fit are encrypted, by TLS 1.3 with a key pair of its own; not set: "
           "where Spark is told to encrypt"),
    Option("ports", PORTS, None, FIT,
           help="the first and the last port that the driver and workers may listen on, for firewalls; not set: as "
           "spark.elephant.ports says, or any"),
    Option("verbose", _VERBOSITY, 1, FIT,
           help="0 silent, 1 or 'auto' plan, a live line of progress and a table of epochs, 2 without the live line"),
    Option("algorithm", _ALGORITHM, "downpour", SERVERS,
           help=f"asynchronous modes: what workers push: {_listed([*ALGORITHMS], 'or')}; "
           f"{_listed(_ELASTIC, 'and')} may name their moving rate, as in '{_ELASTIC[0]}:0.3', which is else "
           f"0.9 / numWorkers; gossip: {_listed(GOSSIP_ALGORITHMS, 'or')}, of which the first is the default there"),
    Option("max_staleness", integer(0), None, SERVERS,
           help="asynchronous modes: steps that a worker may be ahead of the slowest live one (>= 0); not set means "
           "no limit"),
    Option("background_exchange", SWITCH, False, SERVERS,
           help="asynchronous modes: whether a worker computes a step while the exchange of the last one goes on"),
    Option("parameter_servers", _COUNT, 1, SERVERS,
           in_rounds=True,
           help="parameter servers: processes that the weights are divided over (>= 1)"),
    Option("server_placement", one_of("driver", "executors"), "driver", SERVERS,
           in_rounds=True,
           help="parameter servers: where they run: 'driver' or 'executors'"),
    Option("port", _PORT, 0, SERVERS, in_rounds=True,
           help="parameter servers: the first one's port, others take the next ones; 0 takes free ones"),
    Option("snapshot_seconds", _SECONDS, 30.0, SERVERS, in_rounds=True,
           help="parameter servers: seconds between two snapshots, from which a lost server comes back; 0 makes none "
           "by time"),
)
# fmt: on
OPTION = {option.name: option for option in OPTIONS}

# Options that there are no more, and what to do instead. Names in braces are shown as the user writes options.
REMOVED = {
    "input_cols": "{features_col} takes the columns of several inputs, by the name of the input or as a list in their "
    "order.",
    "label_cols": "{label_col} takes the columns of several outputs, by the name of the output or as a list in their "
    "order.",
    "snapshot_updates": "{snapshot_seconds} says how often a server makes a snapshot.",
    "max_refused_updates": "A fit is given up after 100 updates with NaN or infinity: leave it out.",
    "bucket_bytes": "The network is measured and the length chosen: leave it out. The variable ELEPHANT_BUCKET_BYTES "
    "of the driver's environment sets it, and 0 makes one bucket.",
    "gpu_resource": "What Spark calls GPUs is a setting of the cluster: spark.elephant.gpuResource.",
    "cache_preprocessing": "{preprocessing} runs in every epoch where it takes a random generator, and once where it "
    "takes none: leave it out, or draw in {augmentation}.",
    "warm_workers": "How many processes wait for the next fit is a setting of the cluster: spark.elephant.warmWorkers.",
    "trace_path": "The trace of a fit lies beside its events: set {events_path}, and spark.elephant.trace=true.",
    "elasticity": "{algorithm} has it behind a colon, such as 'aeasgd:0.3'.",
}


def key_of(name: str) -> str:
    """Returns a name as job files have it.

    >>> key_of("syncBatchNorm"), key_of("sync_batch_norm")
    ('sync-batch-norm', 'sync-batch-norm')
    """
    return re.sub(r"([A-Z])", r"-\1", name).lower().replace("_", "-")


def remedy_for(name: str) -> str:
    """Returns the remedy for an option that there is no more: what to do instead. Empty for all other names.

    >>> remedy_for("inputCols")[:40], remedy_for("input-cols")[:40], remedy_for("epochs")
    (' featuresCol takes the columns of severa', ' features-col takes the columns of sever', '')
    """
    snake = key_of(name.lstrip("-")).replace("-", "_")
    if snake not in REMOVED:
        return ""
    in_words = {option.name: key_of(option.name) if "-" in name else option.name for option in OPTIONS}
    in_params = {option.name: option.param for option in OPTIONS}
    return " " + REMOVED[snake].format_map(in_words if {"-", "_"} & set(name) else in_params)


def in_params(text: str) -> str:
    """Returns a message with options as Spark names them, where it has them as Python does; values stay.

    >>> in_params("keep_best: expected checkpoint_path. Received: None, with keep_best='batch_size'.")
    "keepBest: expected checkpointPath. Received: None, with keepBest='batch_size'."
    """
    names = "|".join(option.name for option in OPTIONS if "_" in option.name)
    return re.sub(rf"(?<![\w/.'\"])(?:{names})(?![\w/])", lambda found: OPTION[found[0]].param, text)


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


def _excludes_rounds(name: str, holds: Callable[[Any], bool], expected: str, why: str) -> Pair:
    """Returns the rule that averages at parameter servers go with some values alone of another option."""
    return Pair(
        "aggregation",
        FIT,
        lambda given: given.aggregation == "allreduce" or holds(getattr(given, name)),
        lambda given: (
            f"{expected} with 'server', {why}. Received: {name}={getattr(given, name)!r}. Change {name}, or pass "
            "'allreduce'."
        ),
    )


_ROUND_PAIRS = (
    _excludes_rounds(
        "mode", lambda mode: mode == "synchronous", "mode='synchronous'", "which is a way of taking steps together"
    ),
    _excludes_rounds(
        "frequency",
        lambda frequency: frequency == "batch",
        "frequency='batch'",
        "which averages every step's gradients",
    ),
    _excludes_rounds(
        "steps_per_epoch",
        lambda steps: steps is None,
        "epochs of all rows",
        "whose workers know of their own rows alone",
    ),
)


def _needs_checkpoints(name: str, *, on_disk: bool) -> Pair:
    """Returns the rule that an option about checkpoints goes with a place for them alone.

    Args:
        on_disk: Whether that has to be a folder. The driver's memory is one where a fit may be started again.
    """
    other = (
        ""
        if on_disk
        else ", or max_restarts above 0 or a pair of num_workers, with which the driver keeps one in memory"
    )
    return Pair(
        name,
        FIT,
        lambda given: (
            getattr(given, name) is None
            or given.checkpoint_path is not None
            or (not on_disk and (given.max_restarts > 0 or given.elastic is not None))
        ),
        lambda given: (
            f"checkpoint_path, the folder of the checkpoints that it is about{other}. Received: None, with "
            f"{name}={getattr(given, name)!r}. Pass the path, or leave {name} out."
        ),
    )


def _excludes_moments(name: str) -> Pair:
    """Returns the rule that checkpoints within an epoch do not go with models that no rank has as a whole then."""
    return Pair(
        "checkpoint_seconds",
        FIT,
        lambda given: given.checkpoint_seconds is None or getattr(given, name) is None,
        lambda given: (
            f"None with {name}, because no rank has the whole model before the end of an epoch. "
            f"Received: {given.checkpoint_seconds!r}. Use checkpoint_epochs, or leave {name} out."
        ),
    )


def _excludes_distribution(name: str, holds: Callable[[Any], bool], expected: str) -> Pair:
    """Returns the rule that a divided model goes with some values alone of another option."""
    return Pair(
        "distribution",
        FIT,
        lambda given: given.distribution is None or holds(getattr(given, name)),
        lambda given: (
            f"{expected} with a model whose layers are divided among the workers, which have no gradients to "
            f"exchange. Received: {name}={getattr(given, name)!r}. Leave {name} or distribution out."
        ),
    )


_DISTRIBUTION_PAIRS = (
    _excludes_distribution("frequency", lambda frequency: frequency == "batch", "frequency='batch'"),
    _excludes_distribution("compression", lambda compression: compression is None, "no compression"),
    _excludes_distribution("gpu_transport", lambda transport: transport != "nccl", "gpu_transport='auto'"),
    Pair(
        "distribution",
        FIT,
        lambda given: given.distribution is None or math.prod(given.distribution["shape"]) == given.num_ranks,
        lambda given: (
            f"a device mesh of {given.num_ranks} devices, one for each rank (num_workers={given.num_workers}, "
            f"gpus_per_worker={given.gpus_per_worker}). Received: the shape {tuple(given.distribution['shape'])}. "
            "Change the mesh, or num_workers."
        ),
    ),
)

_GOSSIP_PAIRS = (
    Pair(
        "compression",
        FIT,
        lambda given: given.mode != "gossip" or given.compression is None,
        lambda given: (
            "no compression with mode='gossip', in which both workers of a pair change by the same numbers. Received: "
            f"compression={given.compression!r}. Leave compression out, or change the mode."
        ),
    ),
)


def _excludes_stages(name: str, holds: Callable[[Any], bool], expected: str) -> Pair:
    """Returns the rule that a model in stages goes with some values alone of another option."""
    return Pair(
        "pipeline_stages",
        FIT,
        lambda given: given.pipeline_stages is None or holds(getattr(given, name)),
        lambda given: (
            f"{expected} with a model in stages. Received: {name}={getattr(given, name)!r}. Leave {name} or "
            "pipeline_stages out."
        ),
    )


_STAGE_PAIRS = (
    _excludes_stages("frequency", lambda frequency: frequency == "batch", "frequency='batch'"),
    _excludes_stages("compression", lambda compression: compression is None, "no compression"),
    _excludes_stages("gpu_transport", lambda transport: transport != "nccl", "gpu_transport='auto' or 'host'"),
    _excludes_stages("distribution", lambda distribution: distribution is None, "no distribution"),
    _excludes_stages("sync_batch_norm", lambda synchronized: not synchronized, "sync_batch_norm=False"),
    Pair(
        "pipeline_stages",
        FIT,
        lambda given: given.num_ranks % given.num_stages == 0,
        lambda given: (
            f"a number of ranks that {given.num_stages} stages divide. Received: {given.num_ranks} "
            f"(num_workers={given.num_workers}, gpus_per_worker={given.gpus_per_worker}). Change num_workers, or the "
            "stages."
        ),
    ),
    Pair(
        "micro_batches",
        FIT,
        lambda given: given.pipeline_stages is not None or given.micro_batches == OPTION["micro_batches"].default,
        lambda given: (
            f"pipeline_stages, through which parts of a batch go. Received: micro_batches={given.micro_batches!r} "
            "without it. Pass both, or leave micro_batches out."
        ),
    ),
)


def _excludes_elastic(name: str, holds: Callable[[Any], bool], expected: str, why: str) -> Pair:
    """Returns the rule that a changing number of workers goes with some values alone of another option."""
    return Pair(
        "num_workers",
        FIT,
        lambda given: given.elastic is None or holds(getattr(given, name)),
        lambda given: (
            f"{expected} with a pair of numbers, {why}. Received: {name}={getattr(given, name)!r} with "
            f"num_workers={given.elastic!r}. Change {name}, or pass one number of workers."
        ),
    )


# Those that take over nothing from one step to the next but what all ranks have.
_WITHOUT_MEMORY = (None, "bfloat16", "float16", "int8")
_ELASTIC_PAIRS = (
    _excludes_elastic(
        "mode",
        lambda mode: mode == "synchronous",
        "mode='synchronous'",
        "because other workers go at their own pace, and Spark starts each again that is lost",
    ),
    _excludes_elastic(
        "aggregation",
        lambda aggregation: aggregation == "allreduce",
        "aggregation='allreduce'",
        "because parameter servers wait for a worker that is lost, and Spark starts it again",
    ),
    _excludes_elastic(
        "frequency",
        lambda frequency: frequency == "batch",
        "frequency='batch'",
        "whose workers have the same weights after every step, so that others can go on with them",
    ),
    _excludes_elastic(
        "compression",
        lambda compression: compression in _WITHOUT_MEMORY,
        "no compression, or 'bfloat16', 'float16' or 'int8'",
        "because what others keep back for later steps is lost with a worker",
    ),
    _excludes_elastic(
        "pipeline_stages",
        lambda stages: stages is None,
        "no pipeline_stages",
        "because a part of the model is lost with a worker",
    ),
    _excludes_elastic(
        "distribution",
        lambda distribution: distribution is None,
        "no distribution",
        "because a part of the model is lost with a worker",
    ),
    _excludes_elastic(
        "bucket_by_length",
        lambda buckets: not buckets,
        "bucket_by_length=False",
        "whose steps have the same rows whatever the number of workers",
    ),
    _excludes_elastic(
        "gpus_per_worker",
        lambda gpus: gpus == 1,
        "gpus_per_worker=1",
        "because virtual shards are dealt to workers of one rank each",
    ),
)


def _excludes_sharding(name: str, holds: Callable[[Any], bool], expected: str, why: str) -> Pair:
    """Returns the rule that an optimizer whose state is divided goes with some values alone of another option."""
    return Pair(
        "shard_optimizer",
        FIT,
        lambda given: not given.shard_optimizer or holds(getattr(given, name)),
        lambda given: (
            f"{expected} with an optimizer whose state is divided among the workers, {why}. Received: "
            f"{name}={getattr(given, name)!r}. Leave {name} or shard_optimizer out."
        ),
    )


_SHARDING_PAIRS = (
    _excludes_sharding(
        "frequency",
        lambda frequency: frequency == "batch",
        "frequency='batch'",
        "because each updates a part of the weights in every step",
    ),
    _excludes_sharding(
        "pipeline_stages",
        lambda stages: stages is None,
        "no pipeline_stages",
        "because a stage's worker has the state of its stage alone anyway",
    ),
    _excludes_sharding(
        "distribution",
        lambda distribution: distribution is None,
        "no distribution",
        "because that divides the state with the layers",
    ),
    _excludes_sharding(
        "gpu_transport",
        lambda transport: transport != "nccl",
        "gpu_transport='auto' or 'host'",
        "because updated weights go through the host's memory",
    ),
)


def _excludes_encryption(name: str, holds: Callable[[Any], bool], expected: str, why: str) -> Pair:
    """Returns the rule that encrypted connections go with some values alone of another option."""
    return Pair(
        "encryption",
        FIT,
        lambda given: not given.encryption or holds(getattr(given, name)),
        lambda given: (
            f"{expected} where connections are encrypted, {why}. Received: {name}={getattr(given, name)!r}. Leave "
            f"{name} out, or pass encryption=False, with which nothing is encrypted, whatever Spark is told."
        ),
    )


_ENCRYPTION_PAIRS = (
    _excludes_encryption(
        "gpu_transport",
        lambda transport: transport != "nccl",
        "gpu_transport='auto' or 'host'",
        "because NCCL's own sockets are not",
    ),
    _excludes_encryption(
        "distribution",
        lambda distribution: distribution is None,
        "no distribution",
        "because those of JAX' own processes are not",
    ),
)

PAIRS = (
    *_ENCRYPTION_PAIRS,
    *_ELASTIC_PAIRS,
    *_SHARDING_PAIRS,
    *_NCCL_PAIRS,
    *_DISTRIBUTION_PAIRS,
    *_STAGE_PAIRS,
    *_ROUND_PAIRS,
    *_GOSSIP_PAIRS,
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
        "port",
        SERVERS,
        lambda given: given.port + given.parameter_servers <= 65536,
        lambda given: f"0, or a port of at most {65536 - given.parameter_servers}. Received: {given.port!r}.",
    ),
    _needs_checkpoints("checkpoint_seconds", on_disk=False),
    _needs_checkpoints("keep_best", on_disk=True),
    _excludes_moments("pipeline_stages"),
    _excludes_moments("distribution"),
    Pair(
        "checkpoint_seconds",
        FIT,
        lambda given: (
            given.checkpoint_seconds is None or not given.trains_in_rounds or given.asynchronous.parameter_servers == 1
        ),
        lambda given: (
            "None with aggregation='server' and several parameter servers, which are asked one after the other, and so "
            f"in different rounds. Received: {given.checkpoint_seconds!r} with "
            f"parameter_servers={given.asynchronous.parameter_servers}. Use checkpoint_epochs, or one server."
        ),
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


def settle(given: object, scope: Scope, names: Iterable[str]) -> None:
    """Gives a frozen object the values of a scope's options as Python has them.

    Args:
        given: What has the values by the options' names.
        scope: The scope.
        names: Of those options that it has as the table has them.

    Raises:
        ConfigurationError: A value is out of its range, or a pair of them excludes each other.
    """
    for name in names:
        object.__setattr__(given, name, OPTION[name].value_of(getattr(given, name)))
    check_pairs(given, scope)


def check_pairs(given: object, scope: Scope) -> None:
    """Raises ConfigurationError for values of a scope's options that exclude each other."""
    for pair in PAIRS:
        if pair.scope is scope and not pair.holds(given):
            # Those that a fit does not have, users know as Spark's params alone.
            name = pair.name if scope in (FIT, SERVERS) else OPTION[pair.name].param
            raise ConfigurationError(f"{name}: expected {pair.message(given)}")


def refuse_unknown(
    caller: str,
    given: Mapping[str, Any],
    known: Sequence[str],
    *,
    noun: str = "argument",
    explained: Mapping[str, str] | None = None,
) -> None:
    """Raises UnknownOptionError for a keyword argument that is not known; the error says which is meant, or lists them.

    Args:
        caller: What was called.
        given: The keyword arguments.
        known: Their names.
        noun: What they are called.
        explained: What to say of some that users of other libraries pass, by name.
    """
    for name in given:
        if name not in known:
            # Who is told what to write need not look for it among sixty names.
            hint = (explained or {}).get(name) or remedy_for(name) or did_you_mean(name, known)
            raise UnknownOptionError(f"{caller} has no {noun} {name!r}.{hint or ' Known: ' + ', '.join(known) + '.'}")
