"""Settings of a job: names, types, defaults, and the params of the estimator among them."""

from __future__ import annotations

from dataclasses import dataclass

from elephant.kinds import (
    INTEGER,
    NUMBER,
    REFERENCES_BY_NAME,
    SPARK_OPTIONS,
    SWITCH,
    TEXT,
    TEXTS,
    Kind,
    one_of,
)
from elephant.options import INPUT, LABEL, OPTIONS, Option, key_of

TRAIN, EVALUATE, PREDICT, RESUME = "train", "evaluate", "predict", "resume"
_FIT = (TRAIN, RESUME)
_MODEL = (TRAIN, EVALUATE, PREDICT, RESUME)
_LABELLED = (TRAIN, EVALUATE, RESUME)
SAVE_MODES = ("errorifexists", "overwrite", "ignore")
# A layer that gives one name of a row takes the place of the others in layers below it.
ALTERNATIVES = (
    ("data", "table"),
    ("output", "outputTable"),
    ("validationFraction", "validationIndicatorCol"),
)


@dataclass(frozen=True)
class Setting:
    """One thing that jobs can be told."""

    name: str  # as a param is called: numWorkers
    kind: Kind
    help: str
    jobs: tuple[str, ...] = _FIT

    @property
    def key(self) -> str:
        """Its name in a job file, and, behind two dashes, on a command line: ``num-workers``."""
        return key_of(self.name)


_JOBS_OF_SCOPES = {INPUT: _MODEL, LABEL: _LABELLED}


def _setting(option: Option) -> Setting:
    # The job that resumes does so by itself.
    jobs = (TRAIN,) if option.name == "resume" else _JOBS_OF_SCOPES.get(option.scope, _FIT)
    return Setting(option.param, option.kind, option.help, jobs)


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
