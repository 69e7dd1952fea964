"""Fits on executors whose GPUs a discovery script invents: who gets which, and that nothing else changes by it."""

import json
import os

import pytest
from gpu_fits import ROWS
from gpu_runs import (
    assert_equal_weights,
    devices,
    local_cluster,
    on_local_cluster,
    reference,
)

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(600),
    pytest.mark.slow(
        "clusters of its own; test_devices.py and test_device_assignment.py in tests/task hold who gets which"
    ),
]


@pytest.fixture
def invented(tmp_path):
    """Returns a function that writes a discovery script of so many GPUs, and gives its path."""

    def write(count):
        script = tmp_path / f"addresses-{count}.sh"
        addresses = json.dumps([str(number) for number in range(count)])
        script.write_text(f"""#!/bin/sh\nprintf '%s' '{{"name": "gpu", "addresses": {addresses}}}'\n""")
        script.chmod(0o755)
        return str(script)

    return write


def test_fits_where_one_executor_has_two_gpus_get_them_by_a_profile_of_their_own(tmp_path, invented):
    settings = local_cluster(1, 2, invented(2), held=2)
    cases = ("unseen", "several", "rdd", "run", "asynchronous", "scored")
    told = on_local_cluster(tmp_path, settings, *cases)

    assert sorted(devices(told["unseen"])) == [["0"], ["1"]]
    assert [(rank["rank"], rank["threads"], rank["executor"]) for rank in told["unseen"]["plan"]] == [
        (0, 1, "0"),
        (1, 1, "0"),
    ]
    assert_equal_weights(told["unseen"], reference(epochs=4, batch_size=ROWS))
    # Two ranks of one task, in the order of the addresses; rows are dealt out to them in turn.
    assert devices(told["several"]) == devices(told["rdd"]) == devices(told["asynchronous"]) == [["0"], ["1"]]
    assert_equal_weights(told["several"], reference(epochs=4, batch_size=ROWS))
    assert_equal_weights(told["rdd"], reference(epochs=2, batch_size=8))
    assert len(told["asynchronous"]["history"]["loss"]) == 4
    assert sorted(rank["CUDA_VISIBLE_DEVICES"] for rank in told["run"]) == ["0", "1"]
    assert {rank["TF_FORCE_GPU_ALLOW_GROWTH"] for rank in told["run"]} == {"true"}
    assert told["unseen"]["loaded"] == told["unseen"]["plan"]
    # The application's tasks have none.
    alone, asking = told["scored"]["False"], told["scored"]["True"]
    assert alone["frame"] == alone["files"] == alone["predict"] == [-1.0] * 8 and alone["evaluate"] == 0.0
    for kind in ("frame", "files", "predict"):
        assert len(asking[kind]) == 8 and set(asking[kind]) <= {0.0, 1.0}
    assert asking["evaluate"] >= 1.0 and asking["label"] == [-1.0] * 8
    # Nobody has such GPUs: TensorFlow says that it sees none, and so do the plan and a warning.
    assert {rank["device"] for rank in told["unseen"]["plan"]} == {"GPU 0 (not seen)", "GPU 1 (not seen)"}
    assert any("tensorflow sees none there: it computes on the CPU" in text for text in told["unseen"]["warnings"])


def test_fits_without_gpus_of_sparks_share_out_those_that_nvidia_smi_lists(tmp_path):
    command = tmp_path / "bin" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: GPU-aa)'\necho 'GPU 1: A (UUID: GPU-bb)'\n")
    command.chmod(0o755)
    variables = {"PATH": os.pathsep.join([str(command.parent), os.environ["PATH"]])}
    settings = {"spark.master": "local-cluster[2,1,1024]"}
    told = on_local_cluster(tmp_path, settings, "frame", "asynchronous", variables=variables)
    assert devices(told["frame"]) == [["0"], ["1"]]
    assert told["frame"]["plan"][0]["device"].startswith("GPU 0 (shared out)")
    assert_equal_weights(told["frame"], reference(epochs=4, batch_size=ROWS))
    assert devices(told["asynchronous"]) == [["0"], ["1"]]
