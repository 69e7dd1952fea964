"""Everything that a job can be told, in one table: a new param of the estimator is one line here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elephant.jobs.kinds import (
    COLUMNS,
    COLUMNS_BY_NAME,
    FREQUENCY,
    INTEGER,
    LABEL,
    NUMBER,
    OPTIONS,
    REFERENCE,
    REFERENCES,
    REFERENCES_BY_NAME,
    SECONDS,
    SWITCH,
    TEXT,
    TEXTS,
    USE_GPU,
    WARM_WORKERS,
    WEIGHT_COLUMNS,
    WEIGHTS,
    Kind,
    one_of,
)

TRAIN, EVALUATE, PREDICT, RESUME = "train", "evaluate", "predict", "resume"
_FIT = (TRAIN, RESUME)
_MODEL = (TRAIN, EVALUATE, PREDICT, RESUME)
_LABELLED = (TRAIN, EVALUATE, RESUME)


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
    kind: Kind
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

SAVE_MODES = ("errorifexists", "overwrite", "ignore")

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

# Of each of these, a layer that gives one takes the place of the others in layers below it.
ALTERNATIVES = (
    ("data", "table"),
    ("output", "outputTable"),
    ("featuresCol", "inputCols"),
    ("labelCol", "labelCols"),
    ("validationFraction", "validationIndicatorCol"),
)


def settings_of(job: str) -> tuple[Setting, ...]:
    """Returns what a job can be told."""
    return tuple(setting for setting in SETTINGS if job in setting.jobs)
