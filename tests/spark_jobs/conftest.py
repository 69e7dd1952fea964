"""A standalone cluster for the jobs, and what they are given."""

import pytest
from spark_submit import write_inputs
from standalone_cluster import StandaloneCluster


@pytest.fixture(scope="session")
def cluster():
    with StandaloneCluster(2) as running:
        yield running


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder
