"""Hosts that are network namespaces of this machine, where this process may make them."""

import pytest
from networks import Network, NetworkUnavailableError


@pytest.fixture
def network():
    """Two hosts with a link between them."""
    try:
        with Network(2) as network:
            yield network
    except NetworkUnavailableError as error:
        pytest.skip(str(error))
