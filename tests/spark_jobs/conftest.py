"""A standalone cluster for the jobs, and what they are given."""

import pytest
from spark_submit import write_inputs
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
