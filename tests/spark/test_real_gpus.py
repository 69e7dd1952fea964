"""Fits on a GPU that is there."""

import subprocess
import sys

import numpy as np
import pytest
from gpu_fits import ROWS
from gpu_runs import devices, on_local_cluster, reference

from elephant.backends.process_environment import process_environment
from elephant.task.gpu_devices import host_gpus, listed_devices

GPUS = listed_devices(host_gpus())

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not GPUS, reason="nvidia-smi lists no GPU on this machine"),
]

LOOK = """
import tensorflow as tf
gpus = tf.config.list_physical_devices("GPU")
tf.ones(1).numpy()
print(len(gpus), tf.config.experimental.get_memory_growth(gpus[0]) if gpus else None)
"""


def seen(devices):
    environment = process_environment(threads=1, devices=devices, backend="tensorflow")
    out = subprocess.run([sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, timeout=120)
    return out.stdout.split()


def test_process_sees_its_own_gpu_alone_or_none():
    assert seen([GPUS[0].visible])[0] == "1"
    assert seen([])[0] == "0"


@pytest.mark.spark
def test_fit_on_a_gpu_equals_one_on_the_cpu(tmp_path):
    variables = {"CUDA_VISIBLE_DEVICES": GPUS[0].visible}
    told = on_local_cluster(tmp_path, {"spark.master": "local-cluster[1,1,1024]"}, "single", variables=variables)
    assert devices(told["single"]) == [[GPUS[0].visible]]
    assert told["single"]["plan"][0]["device"].startswith("GPU") and "not seen" not in str(told["single"]["plan"])
    for got, wanted in zip(told["single"]["weights"], reference(epochs=4, batch_size=ROWS), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-3)
