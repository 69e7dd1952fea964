"""A cluster of pods, where this process may make network namespaces and the API's server can be had."""

import pytest
from kubernetes_cluster import KubernetesCluster
from maven_jars import JarsUnavailableError
from network_namespaces import NetworkUnavailableError


@pytest.fixture(scope="session")
def cluster():
    """Room for five pods at a time."""
    try:
        with KubernetesCluster(5) as cluster:
            yield cluster
    except (NetworkUnavailableError, JarsUnavailableError) as error:
        pytest.skip(str(error))


@pytest.fixture
def folder(cluster, request):
    """A folder that all pods share."""
    folder = cluster.shared / request.node.name
    folder.mkdir()
    return folder
