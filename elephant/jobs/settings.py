"""Settings of a job: names, types, defaults, and the params of the estimator among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elephant.options import (
    BALANCED,
    COLUMN_CHOICES,
    INPUT,
    LABEL,
    OPTION,
    OPTIONS,
    Option,
    to_columns,
    to_columns_by_name,
    to_weight_columns,
)

# `module:function`; what has a slash in it, or ends as files of models do, is a path.
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
MODEL_FILE = re.compile(r"\.(keras|h5)$")

TRAIN, EVALUATE, PREDICT, RESUME = "train", "evaluate", "predict", "resume"
_FIT = (TRAIN, RESUME)
_MODEL = (TRAIN, EVALUATE, PREDICT, RESUME)
_LABELLED = (TRAIN, EVALUATE, RESUME)
SAVE_MODES = ("errorifexists", "overwrite", "ignore")
# Of each of these, a layer that gives one takes the place of the others in layers below it.
ALTERNATIVES = (
    ("data", "table"),
    ("output", "outputTable"),
    *((OPTION[one].param, OPTION[several].param) for one, several in COLUMN_CHOICES),
    ("validationFraction", "validationIndicatorCol"),
)


@dataclass(frozen=True)
class SettingType:
    """One kind of value."""

    expected: str  # what it is called in messages
    # returns the value as it is used, from what a file has; raises TypeError or ValueError for others
    check: Callable[[Any], Any]
    # makes what a file would have of the words of a command line, one for each time that an argument was given; None
    # where an argument is given once, and its text is the value
    gather: Callable[[Sequence[str]], Any] | None = None
    is_switch: bool = False  # whether a command line has --name and --no-name instead of a value


def is_reference(text: str) -> bool:
    """Returns whether a text names something in a module, and not a path.

    >>> is_reference("models:build"), is_reference("hdfs://host/model.keras"), is_reference("model.keras")
    (True, False, False)
    """
    return _REFERENCE.fullmatch(text) is not None and MODEL_FILE.search(text) is None


def _text(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise TypeError


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


def _count_or_auto(value: Any) -> int | str:
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


def _label(value: Any) -> str | list[str] | None:
    # No text, or null, says that there is no label.
    return None if value is None or value == "" else to_columns(value)


def _weights(value: Any) -> dict[str, float] | str:
    if value == BALANCED:
        return BALANCED
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
LABEL_COLUMN = SettingType("a column, a list of them, or nothing for none", _label, one_or_several)
INTEGER = SettingType("an integer", _integer)
NUMBER = SettingType("a number", _number)
SWITCH = SettingType("true or false", _switch, is_switch=True)
FREQUENCY = SettingType("batch, epoch or a number of steps", _frequency)
USE_GPU = SettingType("true, false or auto", _use_gpu)
COUNT_OR_AUTO = SettingType("auto or a number", _count_or_auto)
TEXTS = SettingType("text, or a list of it", _texts, list)
COLUMNS = SettingType("a column, or a list of them", to_columns, one_or_several)
COLUMNS_BY_NAME = SettingType("pairs such as name=column, or a list of columns", to_columns_by_name, pairs_or_list)
WEIGHT_COLUMNS = SettingType("a column, or pairs such as output=column", to_weight_columns, pairs_or_one)
WEIGHTS = SettingType(f"pairs such as class=weight, or {BALANCED}", _weights, pairs_or_one)
SECONDS = SettingType("pairs such as name=seconds", _seconds, pairs)
SPARK_OPTIONS = SettingType("pairs such as name=value", _options, pairs)
REFERENCE = SettingType("module:function", _reference)
REFERENCES = SettingType("module:name, or a list of such", _references, list)
REFERENCES_BY_NAME = SettingType("pairs such as Name=module:Name", _references_by_name, pairs)


@dataclass(frozen=True)
class Setting:
    """One thing that jobs can be told."""

    name: str  # as a param is called: numWorkers
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


_KINDS_OF_TYPES = {int: INTEGER, float: NUMBER, bool: SWITCH, str: TEXT}
_KINDS_OF_OPTIONS = {
    "features_col": COLUMNS,
    "input_cols": COLUMNS_BY_NAME,
    "label_col": LABEL_COLUMN,
    "label_cols": COLUMNS_BY_NAME,
    "weight_col": WEIGHT_COLUMNS,
    "preprocessing": REFERENCE,
    "augmentation": REFERENCE,
    "callbacks": REFERENCES,
    "driver_callbacks": REFERENCES,
    "class_weight": WEIGHTS,
    "frequency": FREQUENCY,
    "use_gpu": USE_GPU,
    "verbose": COUNT_OR_AUTO,
    "warm_workers": COUNT_OR_AUTO,
    "timeouts": SECONDS,
}
_JOBS_OF_SCOPES = {INPUT: _MODEL, LABEL: _LABELLED}


def _setting(option: Option) -> Setting:
    kind = _KINDS_OF_OPTIONS.get(option.name) or _KINDS_OF_TYPES[option.type]
    # The job that resumes does so by itself.
    jobs = (TRAIN,) if option.name == "resume" else _JOBS_OF_SCOPES.get(option.scope, _FIT)
    return Setting(option.param, kind, option.help, jobs)


# Params of `KerasEstimator` under their own names; those of evaluate and predict are of `KerasModel` too.
PARAMS = tuple(_setting(option) for option in OPTIONS)


_OWN = (
    Setting("data", TEXT, "path of the rows, on any file system that Spark reaches", _MODEL),
    Setting("table", TEXT, "table or view of the catalog, instead of --data", _MODEL),
    Setting("format", TEXT, "parquet (the default), orc, csv, json, avro, delta or any other that Spark reads", _MODEL),
    Setting("readOption", SPARK_OPTIONS, "option of Spark's reader, such as header=true", _MODEL),
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
    Setting("writeOption", SPARK_OPTIONS, "option of Spark's writer, such as compression=zstd", (PREDICT,)),
    Setting("partitionBy", TEXTS, "column whose values become folders", (PREDICT,)),
    Setting("select", TEXTS, "column or SQL expression to write; all columns where there is none", (PREDICT,)),
)


SETTINGS = (*_OWN, *PARAMS)


def settings_of(job: str) -> tuple[Setting, ...]:
    """Returns the settings of a kind of job."""
    return tuple(setting for setting in SETTINGS if job in setting.jobs)
