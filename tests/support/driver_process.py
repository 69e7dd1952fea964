"""A driver of a cluster's in a process of its own, fits that it is told to do, and what must come of them."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from counting_model import counted, counting_data
from keras_reference import classifier_data, fit_one_process, regression_model
from spark_daemons import end_with_children, end_with_parent

# Of every fit, half of the rows on each of two workers.
ROWS, BATCH = 32, 8
# A busy machine takes minutes for what a quiet one does in seconds: no test waits for it to pass.
OUTCOME_S = 180.0

_PROGRAM = Path(__file__).with_name("fitting_driver.py")
_INTERRUPT_S = 30.0


class DriverProcess:
    """A driver's process on a host of its own; see `fitting_driver`.

    Args:
        cluster: What it runs on, a `spark_applications.SparkApplications`.
        prefix: What stands before its command.
    """

    def __init__(self, cluster, prefix):
        environment = cluster.environment
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(_PROGRAM)],
            env={**environment, "PYTHONPATH": os.pathsep.join([str(_PROGRAM.parent), environment["PYTHONPATH"]])},
            cwd=cluster.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=end_with_parent,
        )
        self._answers = queue.Queue()
        self._is_fitting = False
        self.said = []
        self._reader = threading.Thread(target=self._read, name="test-driver-output", daemon=True)
        self._reader.start()

    def begin(self, **order):
        """Has it begin a fit."""
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._is_fitting = True

    @property
    def has_answered(self):
        """Whether the fit has ended."""
        return not self._answers.empty()

    def outcome(self, timeout_s):
        """Returns what came of the fit; fails when that takes longer, with what the driver has said."""
        try:
            outcome = self._answers.get(timeout=timeout_s)
            self._is_fitting = False
            return outcome
        except queue.Empty:
            pytest.fail(f"the driver has not answered in {timeout_s:g} s:\n{''.join(self.said[-60:])}")

    def interrupt(self):
        """Ends a fit whose outcome nobody waits for, after a test that failed: the next one needs the driver."""
        if self._is_fitting and not self.has_answered:
            self._process.send_signal(signal.SIGINT)
        if self._is_fitting:
            self.outcome(_INTERRUPT_S)

    def _read(self):
        for line in self._process.stdout:
            self.said.append(line)
            if line.startswith("ANSWER "):
                self._answers.put(json.loads(line.removeprefix("ANSWER ")))
        self._answers.put({"error": "the driver has ended:\n" + "".join(self.said[-60:])})

    def close(self):
        """Ends it, and all that it started."""
        end_with_children([self._process])
        self._reader.join(10)
        self._process.stdin.close()
        self._process.stdout.close()


class Training:
    """A fit that goes on, whose steps leave marks in a folder.

    Args:
        driver: The `DriverProcess`, which was told to do it.
        folder: Where each step leaves a mark, in a file named after the address that it was made at.
    """

    def __init__(self, driver, folder):
        self._driver, self._folder = driver, folder
        self._begin = len(driver.said)

    def steps_at(self, address):
        """Steps that were made at an address."""
        path = self._folder / address
        return path.stat().st_size if path.exists() else 0

    def await_line(self, text, timeout_s=OUTCOME_S):
        """Waits until the driver says something of this fit."""
        self.await_(lambda: any(text in line for line in self._driver.said[self._begin :]), timeout_s)

    def await_(self, condition, timeout_s=OUTCOME_S):
        """Waits until something is so; fails when the fit ends before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline and not self._driver.has_answered, "".join(self._driver.said[-60:])
            time.sleep(0.02)

    def outcome(self):
        """Returns what came of it."""
        return self._driver.outcome(OUTCOME_S)


def assert_equals_one_process(outcome, epochs):
    """Fails where a synchronous fit of the regression has not the weights of plain Keras."""
    columns = classifier_data(ROWS)
    half = ROWS // 2
    step_rows = [np.r_[start : start + BATCH, half + start : half + start + BATCH] for start in range(0, half, BATCH)]
    batches = [{name: values[rows] for name, values in columns.items()} for rows in step_rows] * epochs
    expected, _ = fit_one_process(regression_model("sgd"), batches, epochs)
    assert "weights" in outcome, outcome["error"]
    for weight, wanted in zip(outcome["weights"], expected, strict=True):
        np.testing.assert_allclose(np.array(weight), wanted, atol=1e-5)


def assert_counted(outcome, epochs):
    """Fails where an asynchronous fit has not counted every batch once."""
    assert "weights" in outcome, outcome["error"]
    expected = counted(counting_data(ROWS), batch_size=BATCH, epochs=epochs)
    np.testing.assert_array_equal(np.array(outcome["weights"][0])[:, 0], expected)
