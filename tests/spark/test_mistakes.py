"""Typical mistakes of a first fit: a dozen lines on the screen, the cause first and the remedy last, in seconds.

Those that take a fault, or a process, are held to the same where these are: NaN (tests/monitor/test_progress.py), no
Java (tests/cluster/test_local_java.py), a process killed for its memory and Ctrl-C (test_run.py).
"""

import socket
import threading
import time
from dataclasses import replace

import keras
import pytest
from keras_reference import regression_model
from screen import assert_brief
from tables import every_case

from elephant import KerasEstimator
from elephant.cluster.checks.executor_facts import ExecutorReport, driver_facts, known_executors

# A busy machine starts Python on three executors in this time, too; alone most take none.
IN_SECONDS = 60.0


class Locked(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def on_train_batch_end(self, batch, logs=None):
        """Has it run on the workers."""


def not_compiled():
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])


@pytest.fixture(scope="module")
def frame(spark):
    return spark.range(32).selectExpr(
        "array_repeat(double(id), 6) features", "array_repeat(double(id), int(6 - id % 2)) ragged", "double(id) label",
        "if(id < 30, double(id), null) with_nulls", "string(id % 2) text", "map('a', double(id)) counts",
    )  # fmt: skip


@pytest.fixture
def taken_port():
    """The port that a socket on all addresses of this machine listens on."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server.getsockname()[1]


@every_case(
    ("options", "cause", "remedy", "topic"),
    [
        (
            {"batchSize": "32"},
            "batchSize: expected an integer of at least 1",
            r"Received: '32'\.",
            "params-and-options",
        ),
        (
            {"model": lambda units: regression_model("sgd")},
            "model: expected a compiled keras.Model, or a function without arguments that returns one",
            r"Received: builtins\.function \(missing a required argument: 'units'\)\.",
            "params-and-options",
        ),
        (
            {"model": keras.layers.Dense(3)},
            "model: expected a compiled keras.Model, or a function without arguments that returns one",
            r"Received: keras\..*\.Dense\.",
            "params-and-options",
        ),
        (
            {"featuresCol": "feature"},
            r"featuresCol: expected one of the columns features, ragged, .* Received: 'feature'\.",
            r"Did you mean 'features'\?",
            "a-column-that-is-not-there",
        ),
        (
            {"labelCol": "counts"},
            r"labelCol: expected an array of numbers.* Received: column 'counts' of type map<string,double>\.",
            r"Convert it first, such as with cast\.",
            "a-column-of-the-wrong-type",
        ),
        (
            {"labelCol": "text"},
            r"labelCol: expected a label of numbers\. Received: column 'text' of type string\.",
            r"Number its strings first, as pyspark\.ml\.feature\.StringIndexer does, or cast them\.",
            "a-column-of-the-wrong-type",
        ),
        (
            {"numWorkers": 8},
            r"numWorkers=8: expected 8 task slots at the same time\. Received: 3\.",
            r"Lower numWorkers to 3, or give the application more executors or cores \(spark\.task\.cpus is 1\)\.",
            "more-workers-than-slots",
        ),
        (
            {"model": not_compiled()},
            r"model: expected a compiled model\. Received: .* without optimizer and loss\.",
            r"Call model\.compile\(optimizer=\.\.\., loss=\.\.\.\) before you pass it\.",
            "a-model-that-is-not-compiled",
        ),
        (
            {"callbacks": [Locked()]},
            r"The model's code or a callback cannot be sent to the executors: TypeError: cannot pickle '_thread\.lock'",
            r"Keep no SparkSession, lock, file or socket in it: make one where it is used\.",
            "code-that-cannot-be-sent",
        ),
        (
            {"labelCol": "with_nulls"},
            r"column 'with_nulls': expected a value in every row\. Received: null in row \d+ of the partition\.",
            r"Drop such rows \(df\.dropna\) or fill them \(df\.fillna\) before fit\.",
            "nulls",
        ),
        (
            {"featuresCol": "ragged"},
            r"column 'ragged': expected 6 values in every row .* Received: 5 values in row \d+ of the partition\.",
            r"Filter or pad the other rows; for sequences of any length give the model an Input\(\(None,\)\)\.",
            "rows-of-another-width",
        ),
        (
            {"checkpointPath": "/proc/nope/kept"},
            r"checkpointPath=/proc/nope/kept: expected a folder that can be made, or written to\. Received: .*Error: ",
            r"Pass another path, or give this user the right to write there\.",
            "checkpoints",
        ),
        (
            {"ports": "taken"},
            r"Cannot listen on .*: expected a free port from \d+ to \d+, .* Received: all are taken\.",
            r"Give more of them; docs/clusters\.md says how many a host needs\.",
            "a-port-that-is-blocked",
        ),
    ],
)
def test_fit_when_called_with_a_typical_mistake_then_says_it_briefly_with_the_remedy_last(
    frame, capfd, taken_port, options, cause, remedy, topic
):
    if "ports" in options:
        options = {"ports": (taken_port, taken_port)}
    capfd.readouterr()
    began = time.monotonic()
    with pytest.raises(Exception, match=cause) as failure:
        KerasEstimator(**{"model": regression_model("sgd"), "numWorkers": 2, **options}).fit(frame)
    assert time.monotonic() - began < IN_SECONDS
    printed = "".join(capfd.readouterr())
    assert_brief(failure.value, cause=cause, remedy=remedy, topic=topic, printed=printed)


def other_python(facts):
    return replace(facts, python="3.9.2", executable="/usr/bin/python3")


def without_tensorflow(facts):
    return replace(facts, backends=[name for name in facts.backends if name != "tensorflow"])


@every_case(
    ("changed", "cause", "remedy"),
    [
        (
            other_python,
            r"Python: expected 3\.\d+, the driver's, on every executor\. Received: 3\.9\.2 \(/usr/bin/python3\) on ",
            r"Ship one environment to all of them \(spark\.archives, or PYSPARK_PYTHON\)\.",
        ),
        (
            without_tensorflow,
            r"tensorflow: expected tensorflow on every executor\. Received: none on executor ",
            r"Install tensorflow there, or ship one environment \(spark\.archives\)\.",
        ),
    ],
)
def test_fit_when_executors_have_another_environment_then_says_it_briefly_with_the_remedy_last(
    frame, capfd, changed, cause, remedy
):
    report = ExecutorReport(facts=[changed(replace(driver_facts(), executor=number)) for number in "012"])
    capfd.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Exception, match=cause) as failure:
        patch.setattr(known_executors, "look", lambda *args, **options: report)
        patch.setattr(known_executors, "known", lambda session: None)
        KerasEstimator(model=regression_model("sgd"), numWorkers=2).fit(frame)
    printed = "".join(capfd.readouterr())
    assert_brief(failure.value, cause=cause, remedy=remedy, topic="other-packages-on-the-executors", printed=printed)
