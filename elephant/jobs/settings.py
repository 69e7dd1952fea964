"""Settings of a job: names, types, defaults, and the params of the estimator among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# `module:function`; what has a slash in it, or ends as files of models do, is a path.
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_MODEL_FILE = re.compile(r"\.(keras|h5)$")

TRAIN, EVALUATE, PREDICT, RESUME = "train", "evaluate", "predict", "resume"
_FIT = (TRAIN, RESUME)
_MODEL = (TRAIN, EVALUATE, PREDICT, RESUME)
_LABELLED = (TRAIN, EVALUATE, RESUME)
SAVE_MODES = ("errorifexists", "overwrite", "ignore")
# Of each of these, a layer that gives one takes the place of the others in layers below it.
ALTERNATIVES = (
    ("data", "table"),
    ("output", "outputTable"),
    ("featuresCol", "inputCols"),
    ("labelCol", "labelCols"),
    ("validationFraction", "validationIndicatorCol"),
)


@dataclass(frozen=True)
class SettingType:
    """One kind of value.

    Args:
        expected: What it is called in messages.
        check: Returns the value as it is used, from what a file has; raises TypeError or ValueError for others.
        gather: Makes what a file would have of the words of a command line, one for each time that an argument
            was given; None where an argument is given once, and its text is the value.
        is_switch: Whether a command line has ``--name`` and ``--no-name`` instead of a value.
    """

    expected: str
    check: Callable[[Any], Any]
    gather: Callable[[Sequence[str]], Any] | None = None
    is_switch: bool = False


def is_reference(text: str) -> bool:
    """Whether a text names something in a module, and not a path.

    >>> is_reference("models:build"), is_reference("hdfs://host/model.keras"), is_reference("model.keras")
    (True, False, False)
    """
    return _REFERENCE.fullmatch(text) is not None and _MODEL_FILE.search(text) is None


def _text(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise TypeError


def _label(value: Any) -> str | None:
    # No text, or null, says that there is no label.
    return None if value is None or value == "" else _text(value)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError
    return int(value)


def _number(value: Any) -> float:
    # Text too: in YAML 1.1, 1e-3 is no number.
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError
    return float(value)


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError


def _frequency(value: Any) -> str | int:
    return int(value) if str(value).isdecimal() else _text(value)


def _use_gpu(value: Any) -> bool | str:
    known: dict[str, bool | str] = {"true": True, "false": False, "auto": "auto"}
    text = str(value).lower()
    return known[text] if text in known else str(_refuse())


def _warm_workers(value: Any) -> int | str:
    text = str(value)
    return int(text) if text.isdecimal() else text if text == "auto" else str(_refuse())


def _refuse() -> Any:
    raise ValueError


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [_text(value)]
    if isinstance(value, Sequence) and value:
        return [_text(part) for part in value]
    raise TypeError


def _columns(value: Any) -> str | list[str]:
    return value if isinstance(value, str) and value else _texts(value)


def _columns_by_name(value: Any) -> dict[str, str | list[str]] | list[str]:
    if isinstance(value, Mapping) and value:
        return {_text(name): _columns(columns) for name, columns in value.items()}
    return _texts(value)


def _weight_columns(value: Any) -> str | dict[str, str]:
    if isinstance(value, Mapping) and value:
        return {_text(name): _text(column) for name, column in value.items()}
    return _text(value)


def _weights(value: Any) -> dict[str, float]:
    # By text: JSON, in which jobs are kept, has no other keys.
    if isinstance(value, Mapping) and value:
        return {str(_integer(label)): _number(weight) for label, weight in value.items()}
    raise TypeError


def _seconds(value: Any) -> dict[str, float]:
    if isinstance(value, Mapping) and value:
        return {_text(name): _number(seconds) for name, seconds in value.items()}
    raise TypeError


def _options(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError
    # As Spark writes them: options are text there.
    return {
        _text(name): str(option).lower() if isinstance(option, bool) else str(option) for name, option in value.items()
    }


def _references(value: Any) -> list[str]:
    return [_reference(part) for part in _texts(value)]


def _reference(value: Any) -> str:
    return value if is_reference(_text(value)) else _refuse()


def _references_by_name(value: Any) -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        return {_text(name): _reference(reference) for name, reference in value.items()}
    raise TypeError


def one_or_several(words: Sequence[str]) -> str | list[str]:
    """Returns the one word, or a list of several."""
    return words[0] if len(words) == 1 else list(words)


def pairs(words: Sequence[str]) -> dict[str, str | list[str]]:
    """Returns words such as ``name=value`` as a dictionary; a name that comes again has a list of values.

    >>> pairs(["a=x", "b=y", "b=z"])
    {'a': 'x', 'b': ['y', 'z']}
    """
    values: dict[str, list[str]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise ValueError
        values.setdefault(name, []).append(value)
    return {name: one_or_several(several) for name, several in values.items()}


def pairs_or_list(words: Sequence[str]) -> Any:
    """Returns a dictionary where the words are pairs, and a list of them where none is."""
    return pairs(words) if any("=" in word for word in words) else list(words)


def pairs_or_one(words: Sequence[str]) -> Any:
    """Returns a dictionary where the words are pairs, and the word where there is one that is none."""
    return pairs(words) if any("=" in word for word in words) else one_or_several(words)


def one_of(*names: str) -> SettingType:
    """Returns the kind of value that is one of the names."""
    return SettingType(f"one of {', '.join(names)}", lambda value: value if value in names else _refuse())


TEXT = SettingType("text", _text)


LABEL = SettingType("a column, or nothing for none", _label)


INTEGER = SettingType("an integer", _integer)


NUMBER = SettingType("a number", _number)


SWITCH = SettingType("true or false", _switch, is_switch=True)


FREQUENCY = SettingType("batch, epoch or a number of steps", _frequency)


USE_GPU = SettingType("true, false or auto", _use_gpu)


WARM_WORKERS = SettingType("auto or a number", _warm_workers)


TEXTS = SettingType("text, or a list of it", _texts, list)


COLUMNS = SettingType("a column, or a list of them", _columns, one_or_several)


COLUMNS_BY_NAME = SettingType("pairs such as name=column, or a list of columns", _columns_by_name, pairs_or_list)


WEIGHT_COLUMNS = SettingType("a column, or pairs such as output=column", _weight_columns, pairs_or_one)


WEIGHTS = SettingType("pairs such as class=weight", _weights, pairs)


SECONDS = SettingType("pairs such as name=seconds", _seconds, pairs)


OPTIONS = SettingType("pairs such as name=value", _options, pairs)


REFERENCE = SettingType("module:function", _reference)


REFERENCES = SettingType("module:name, or a list of such", _references, list)


REFERENCES_BY_NAME = SettingType("pairs such as Name=module:Name", _references_by_name, pairs)


@dataclass(frozen=True)
class Setting:
    """One thing that jobs can be told.

    Args:
        name: As a param is called: ``numWorkers``.
        kind: What its value may be.
        help: What it is for.
        jobs: The jobs that know it.
    """

    name: str
    kind: SettingType
    help: str
    jobs: tuple[str, ...] = _FIT

    @property
    def key(self) -> str:
        """Its name in a job file, and, behind two dashes, on a command line: ``num-workers``."""
        return key_of(self.name)


def key_of(name: str) -> str:
    """Returns the key of a name.

    >>> key_of("syncBatchNorm")
    'sync-batch-norm'
    """
    return re.sub(r"([A-Z])", r"-\1", name).lower()


# Params of `KerasEstimator` under their own names; those of evaluate and predict are of `KerasModel` too.
PARAMS = (
    Setting("featuresCol", COLUMNS, "features column; several numeric ones make one vector", _MODEL),
    Setting("inputCols", COLUMNS_BY_NAME, "columns of a model with several inputs, by input or in order", _MODEL),
    Setting("labelCol", LABEL, "label column; an empty one trains without", _LABELLED),
    Setting("labelCols", COLUMNS_BY_NAME, "columns of a model with several outputs, by output or in order", _LABELLED),
    Setting("predictionCol", TEXT, "column that predict adds", _MODEL),
    Setting("probabilityCol", TEXT, "column of probabilities that predict adds for classifiers", _MODEL),
    Setting("weightCol", WEIGHT_COLUMNS, "column of sample weights, or one by output", _LABELLED),
    Setting("inferenceBatchSize", INTEGER, "rows that evaluate and predict put through the model at a time", _MODEL),
    Setting("preprocessing", REFERENCE, "function from a batch to what the model takes", _MODEL),
    Setting("validationIndicatorCol", TEXT, "boolean column that keeps rows for validation"),
    Setting("validationFraction", NUMBER, "share of the rows kept for validation"),
    Setting("mode", TEXT, "synchronous, asynchronous or hogwild"),
    Setting("numWorkers", INTEGER, "workers, each one Spark task"),
    Setting("epochs", INTEGER, "passes over the training rows"),
    Setting("batchSize", INTEGER, "rows per worker and step"),
    Setting("shuffle", SWITCH, "draw rows in a new order every epoch"),
    Setting("seed", INTEGER, "source of everything random in the fit"),
    Setting("learningRate", NUMBER, "replaces the one that the model was compiled with"),
    Setting("scaleLearningRate", SWITCH, "multiply the learning rate by the workers"),
    Setting("frequency", FREQUENCY, "batch, epoch or a number of steps between two exchanges"),
    Setting("compression", TEXT, "how gradients are encoded between hosts, such as bfloat16"),
    Setting("bucketBytes", INTEGER, "bytes of gradients that travel together"),
    Setting("syncBatchNorm", SWITCH, "batch normalisation over the rows of all workers"),
    Setting("allowBatchCoupledLoss", SWITCH, "let a loss couple the rows of a batch"),
    Setting("callbacks", REFERENCES, "Keras callbacks: objects, or classes and functions that make one"),
    Setting("classWeight", WEIGHTS, "weights by class"),
    Setting("cachePreprocessing", SWITCH, "run preprocessing once, and keep what it returns"),
    Setting("augmentation", REFERENCE, "function from a batch and a generator to a batch"),
    Setting("cache", TEXT, "where a worker keeps its rows: disk or memory"),
    Setting("stepsPerEpoch", INTEGER, "steps of an epoch"),
    Setting("bucketByLength", SWITCH, "batches of sequences of like length"),
    Setting("useGpu", USE_GPU, "true demands GPUs, false hides them, auto takes those there are"),
    Setting("gpusPerWorker", INTEGER, "GPUs of each worker"),
    Setting("gpuResource", TEXT, "what Spark calls GPUs"),
    Setting("mixedPrecision", SWITCH, "compute in 16 bits where layers leave that open"),
    Setting("checkpointPath", TEXT, "folder of the fit's checkpoints"),
    Setting("checkpointEpochs", INTEGER, "epochs between two checkpoints"),
    Setting("resume", SWITCH, "go on from the last checkpoint, or begin where there is none", (TRAIN,)),
    Setting("maxRestarts", INTEGER, "how often a fit that lost a worker is started again"),
    Setting("warmWorkers", WARM_WORKERS, "processes with Keras that wait on each executor for the next fit"),
    Setting("timeouts", SECONDS, "how long waits may last, such as heartbeat_s=120"),
    Setting("verbose", INTEGER, "0 silent, 1 plan, progress and epochs, 2 without progress"),
    Setting("algorithm", TEXT, "what asynchronous workers push"),
    Setting("elasticity", NUMBER, "moving rate of elastic averaging"),
    Setting("maxStaleness", INTEGER, "steps that an asynchronous worker may be ahead"),
    Setting("backgroundExchange", SWITCH, "compute a step while the last one's exchange goes on"),
    Setting("parameterServers", INTEGER, "processes that the weights are divided over"),
    Setting("serverPlacement", TEXT, "driver or executors"),
    Setting("port", INTEGER, "the first parameter server's port; 0 takes free ones"),
    Setting("snapshotSeconds", NUMBER, "seconds between two snapshots of a parameter server"),
    Setting("snapshotUpdates", INTEGER, "updates between two snapshots of a parameter server"),
    Setting("maxRefusedUpdates", INTEGER, "updates that are not finite, before the fit is given up"),
)


_OWN = (
    Setting("data", TEXT, "path of the rows, on any file system that Spark reaches", _MODEL),
    Setting("table", TEXT, "table or view of the catalog, instead of --data", _MODEL),
    Setting("format", TEXT, "parquet (the default), orc, csv, json, avro, delta or any other that Spark reads", _MODEL),
    Setting("readOption", OPTIONS, "option of Spark's reader, such as header=true", _MODEL),
    Setting("schema", TEXT, "columns and types, such as 'x double, label int', for formats that do not say", _MODEL),
    Setting("where", TEXT, "SQL condition; other rows are left out", _MODEL),
    Setting("sample", NUMBER, "share of the rows to take, in (0, 1]", _MODEL),
    Setting("sampleSeed", INTEGER, "source of the sample (0)", _MODEL),
    Setting("direct", SWITCH, "executors read the files (parquet, delta, tfrecord) without Spark's JVM"),
    Setting("model", TEXT, "saved KerasModel, .keras or .h5 file, or module:function that returns a model", _MODEL),
    Setting("customObjects", REFERENCES_BY_NAME, "custom layers, losses and metrics of a model's file", _MODEL),
    Setting(
        "trusted", SWITCH, "run code that is saved with a model, or that resume.py finds beside checkpoints", _MODEL
    ),
    Setting("output", TEXT, "path to write to, on any file system that Spark reaches", _MODEL),
    Setting("saveMode", one_of(*SAVE_MODES), f"what to do where there is something: {', '.join(SAVE_MODES)}", _MODEL),
    Setting("outputTable", TEXT, "table of the catalog to write to, instead of --output", (PREDICT,)),
    Setting("outputFormat", TEXT, "format of what is written (parquet)", (PREDICT,)),
    Setting("writeOption", OPTIONS, "option of Spark's writer, such as compression=zstd", (PREDICT,)),
    Setting("partitionBy", TEXTS, "column whose values become folders", (PREDICT,)),
    Setting("select", TEXTS, "column or SQL expression to write; all columns where there is none", (PREDICT,)),
)


SETTINGS = (*_OWN, *PARAMS)


def settings_of(job: str) -> tuple[Setting, ...]:
    """Returns what a job can be told."""
    return tuple(setting for setting in SETTINGS if job in setting.jobs)
