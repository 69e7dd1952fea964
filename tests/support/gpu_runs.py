"""Running `gpu_fits` on clusters of its own, and what its fits are compared with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
from gpu_fits import ROWS
from keras_reference import classifier_data, regression_model
from spark_daemons import end_with_children

SUPPORT = Path(__file__).resolve().parent
APPLICATION = SUPPORT / "gpu_fits.py"
PATHS = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])])
# Of all cases of one test, on a machine that is busy with others.
TIMEOUT_S = 500


def on_local_cluster(tmp_path, settings, *cases, variables=None):
    """Returns what the cases of `gpu_fits` give on a local cluster of its own, in a process of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": PATHS,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "ELEPHANT_TEST_FOLDER": str(tmp_path),
        **(variables or {}),
    }
    process = subprocess.Popen(
        [sys.executable, str(APPLICATION), json.dumps(settings), *cases],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        end_with_children([process])
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


def local_cluster(workers, cores, script, *, held, **more):
    return {
        "spark.master": f"local-cluster[{workers},{cores},1024]",
        "spark.worker.resource.gpu.amount": str(held),
        "spark.worker.resource.gpu.discoveryScript": script,
        "spark.executor.resource.gpu.amount": str(held),
        **more,
    }


def reference(epochs, batch_size):
    data = classifier_data(ROWS)
    model = regression_model(keras.optimizers.SGD(0.05, momentum=0.9))
    model.fit(data["features"], data["label"], epochs=epochs, batch_size=batch_size, shuffle=False, verbose=0)
    return model.get_weights()


def assert_equal_weights(received, expected):
    for got, wanted in zip(received["weights"], expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def devices(told):
    return [rank["devices"] for rank in told["plan"]]
