"""A standalone cluster for the jobs, and what they are given."""

import pytest
from spark_submit import EPOCHS, JOBS, submit, write_inputs
from standalone_cluster import StandaloneCluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Two workers with an invented GPU each, of which only applications know that ask for them."""
    folder = tmp_path_factory.mktemp("gpus")
    # Both workers are on this machine, where two GPUs with one address would be one GPU.
    script = folder / "invented.sh"
    script.write_text(
        "#!/bin/sh\n"
        # Whoever makes the folder first is the first of the two workers.
        f"mkdir {folder}/first 2>/dev/null && address=0 || address=1\n"
        """printf '{"name": "gpu", "addresses": ["%s"]}\\n' "$address"\n"""
    )
    script.chmod(0o755)
    properties = {"spark.worker.resource.gpu.amount": "1", "spark.worker.resource.gpu.discoveryScript": str(script)}
    with StandaloneCluster(2, worker_properties=properties) as running:
        yield running


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def code(inputs):
    """Options that ship the user's code."""
    return ("--py-files", str(inputs / "net_of_user.py"))


@pytest.fixture(scope="session")
def job_file(inputs):
    path = inputs / "job.yaml"
    lines = [
        f"data: {inputs / 'data.parquet'}",
        f"output: {inputs / 'fitted'}",
        f"checkpoint-path: {inputs / 'checkpoints'}",
        f"events-path: {inputs / 'events'}",
        "model: net_of_user:build",
        "num-workers: 2",
        "epochs: 30",
        "batch-size: 16",
        "validation-fraction: 0.1",
        "seed: 3",
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def trained(cluster, inputs, job_file, code):
    """A job that was submitted with a job file, one line of which the command line overrules, and with GPUs."""
    smaller = ["spark.executor.cores=1", "spark.cores.max=2", "spark.executor.memory=1024m"]
    options = ["--properties-file", str(JOBS / "conf" / "gpu-standalone.conf"), "--master", cluster.url]
    options += [word for setting in smaller for word in ("--conf", setting)]
    return submit(cluster, "train", "--config", job_file, "--epochs", EPOCHS, options=(*options, *code))
