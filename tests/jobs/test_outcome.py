"""How jobs end: the code by which schedulers decide, and the line that people read."""

import json
import math

import pytest
from tables import every_case

from elephant.errors import (
    ClusterError,
    ConfigurationError,
    DataError,
    JobCancelledError,
    PeerLostError,
    SchemaError,
    TrainingError,
    UnsupportedError,
    WorkerFailure,
)
from elephant.jobs import submission
from elephant.jobs.submission import JobKind, code_of, json_line, line_of, shown_line, submit

STAGE = "Job aborted due to stage failure: Task 1 in stage 0.0 failed 4 times: {}\nDriver stacktrace:\n\tat org.apache"
WORKER = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "rows.py", line 3, in check
elephant.errors.DataError: column 'x': expected a number. Received: null in row 2 of the partition.
"""

# Of a driver's pod that does not find the API's server.
JVM = """An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.
: org.apache.spark.SparkException: External scheduler cannot be instantiated
\tat org.apache.spark.SparkContext.<init>(SparkContext.scala:603)
Caused by: java.lang.reflect.InvocationTargetException
\tat java.base/jdk.internal.reflect.NativeConstructorAccessorImpl.newInstance0(Native Method)
\t... 15 more
Caused by: java.net.UnknownHostException: kubernetes.default.svc
\tat java.base/java.net.InetAddress.getAllByName0(InetAddress.java:1529)
"""


def retryable(error):
    error.retryable = True
    return error


@every_case(
    ("error", "code"),
    [
        (ConfigurationError("epochs: ..."), 2),
        (UnsupportedError("backend: ..."), 2),
        (SchemaError("featuresCol: ..."), 1),
        (DataError("rows"), 1),
        (FileExistsError("output: ..."), 1),
        (TrainingError("the loss"), 1),
        (KeyError("x"), 1),
        (WorkerFailure("ValueError: shapes", rank=1, host="a"), 1),
        (retryable(WorkerFailure("its process was killed (signal 9)", rank=1, host="a")), 3),
        (ClusterError("numWorkers=4: expected 4 task slots"), 3),
        (PeerLostError("gone"), 3),
        (RuntimeError(STAGE.format("ExecutorLostFailure (executor 3 exited")), 3),
        (RuntimeError(STAGE.format("java.lang.OutOfMemoryError")), 1),
        (RuntimeError("Job 3 cancelled because SparkContext was shut down"), 3),
        (JobCancelledError("the Spark job was cancelled: Job 3 cancelled because SparkContext was shut down"), 3),
        (JobCancelledError("the Spark job was cancelled: Job 3 cancelled part of cancelled job group nightly"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_code_when_a_job_fails_then_says_whether_to_try_again(error, code):
    assert code_of(error) == code


@every_case(
    ("error", "line"),
    [
        (
            WorkerFailure("ValueError: shapes", rank=1, host="a", traceback="Traceback"),
            "rank 1 on a failed: ValueError: shapes",
        ),
        (RuntimeError(WORKER), WORKER.splitlines()[-1].strip()),
        (
            RuntimeError(JVM),
            "org.apache.spark.SparkException: External scheduler cannot be instantiated: "
            "java.net.UnknownHostException: kubernetes.default.svc",
        ),
        (FileExistsError("output: expected a path"), "output: expected a path"),
        (KeyError("x"), "KeyError: 'x'"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_line_when_a_job_fails_then_is_one_and_names_the_cause(error, line):
    assert line_of(error) == line


def test_result_when_numbers_are_not_finite_then_stays_json():
    line = json_line({"loss": [math.nan, 1.0], "about": {"best": math.inf}})
    assert json.loads(line, parse_constant=pytest.fail) == {"loss": [None, 1.0], "about": {"best": None}}


def test_line_when_an_error_speaks_of_params_then_names_the_job_s_arguments():
    text = "labelCol=None: expected 'numWorkers' below batchSize. Set labelCol=None, or lower numWorkers to 2."
    assert shown_line(ConfigurationError(text)).startswith(
        "--label-col '': expected 'numWorkers' below --batch-size. Set --label-col '', or lower --num-workers to 2. See"
    )


def test_submit_when_an_argument_is_wrong_then_ends_with_2_before_spark_starts(capsys):
    job = JobKind("train", "Trains.", check=lambda settings: None, work=lambda session, settings: pytest.fail("it ran"))
    assert submit(job, ["--epochz", "3"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("train.py: --epochz: expected the name of a setting")
    assert said.err.count("\n") == 1


def test_submit_when_settings_do_not_go_together_then_ends_with_2_before_spark_starts(capsys):
    def refuse(settings):
        raise ConfigurationError("expected --data or --table. Received: none.")

    job = JobKind("predict", "Predicts.", check=refuse, work=lambda session, settings: pytest.fail("it ran"))
    assert submit(job, []) == 2
    error = capsys.readouterr().err
    assert error.startswith("predict.py: expected --data or --table. Received: none. See https://")
    assert error.endswith("/troubleshooting/#params-and-options\n")


def test_submit_when_the_model_names_no_module_then_ends_with_2_before_spark_starts(monkeypatch, capsys):
    monkeypatch.setattr(submission, "_session", lambda name: pytest.fail("Spark was started"))
    job = JobKind("train", "Trains.", check=lambda settings: None, work=lambda session, settings: None)
    assert submit(job, ["--model", "no_such_module:build"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: model: expected a module that can be imported. Received: 'no_such_module:build'")
    assert error.count("\n") == 1


@pytest.mark.parametrize(("error", "code"), [(None, 0), (DataError("x: a null"), 1)])
def test_submit_when_the_session_cannot_be_stopped_then_what_the_work_came_to_stands(error, code, monkeypatch, capsys):
    class Session:
        def stop(self):
            raise ConnectionRefusedError("the JVM is gone")

    def work(session, settings):
        if error is not None:
            raise error
        return {"rows": 3}

    monkeypatch.setattr(submission, "_session", lambda name: Session())
    assert submit(JobKind("predict", "Predicts.", check=lambda settings: None, work=work), []) == code
    said = capsys.readouterr()
    assert said.out == ("" if error else '{"rows": 3}\n')
    assert "the Spark session did not stop: ConnectionRefusedError: the JVM is gone" in said.err
    assert error is None or "predict.py: x: a null" in said.err
