"""What tests of several folders share: processes that are kept because importing Keras takes seconds; two hosts."""

import os

import class_archive
import pytest
from hypothesis import HealthCheck, settings
from network_namespaces import Network, NetworkUnavailableError
from python_start import shorten_imports
from rank_pool import WORLD, RankPool
from warm_ranks import end_servers, forked_ranks

# Java processes of tests live for seconds: what the second compiler does for them comes too late, and takes a quarter
# of the processors. Java tells of it in a line of its own, on standard error.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1")
shorten_imports()
if java_with_classes := class_archive.java_home():
    os.environ["JAVA_HOME"] = str(java_with_classes)

pytest_plugins = ["budget", "grouping"]

# On a busy machine an example, or making one, takes as long as it takes: no test fails of that.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=10, **PATIENT)
settings.register_profile("ci", max_examples=100, **PATIENT)
# What `make fuzz` runs tests/fuzz with.
settings.register_profile("fuzz", max_examples=int(os.environ.get("FUZZ_EXAMPLES", "3000")), **PATIENT)
settings.load_profile("dev")


def pytest_configure(config):
    # Of pytest-randomly the order alone: tests that need a seed have one.
    config.option.randomly_reset_seed = False


@pytest.fixture(scope="session")
def rank_pool():
    pool = RankPool()
    # The first test does not wait for imports: its seconds are its own.
    pool.run(int, [()] * WORLD)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def servers_folder(tmp_path_factory):
    """Where servers that fork ranks have their files."""
    folder = tmp_path_factory.mktemp("servers")
    yield folder
    end_servers(folder)


@pytest.fixture
def warm_ranks(servers_folder):
    """Ranks of `fit_local` are forked: two fresh processes would import Keras for each fit."""
    with forked_ranks(servers_folder):
        yield


@pytest.fixture
def by_value(request):
    """What a test's module defines travels to other processes, which cannot import it."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def network(request):
    """Two hosts, or ``request.param`` of them, with links between all, where this process may make network namespaces.

    None where the parameter is that.
    """
    count = getattr(request, "param", 2)
    if count is None:
        yield None
        return
    try:
        with Network(count) as network:
            yield network
    except NetworkUnavailableError as error:
        pytest.skip(str(error))
