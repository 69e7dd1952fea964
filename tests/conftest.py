"""What tests of several folders share: processes that are kept because importing Keras takes seconds; two hosts."""

import pytest
from hypothesis import HealthCheck, settings
from network_namespaces import Network, NetworkUnavailableError
from rank_pool import RankPool

# On a busy machine an example, or making one, takes as long as it takes: no test fails of that.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def rank_pool():
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def network():
    """Two hosts with a link between them, where this process may make network namespaces."""
    try:
        with Network(2) as network:
            yield network
    except NetworkUnavailableError as error:
        pytest.skip(str(error))
