import numpy as np
import pytest

from elephant.collective.communicator import LocalCommunicator
from elephant.errors import ConfigurationError


def test_solo_is_a_world_of_one():
    with LocalCommunicator() as collective:
        assert (collective.rank, collective.world_size) == (0, 1)
        array = np.arange(4, dtype="f4")
        collective.allreduce_(array)
        collective.broadcast_(array)
        collective.barrier()
        (gathered,) = collective.allgather(array)
        assert (collective.local_rank, collective.local_world_size, collective.crosses_hosts) == (0, 1, False)
        for result in (
            collective.allreduce(array, "mean"),
            collective.reduce_scatter(array),
            collective.broadcast(array),
        ):
            np.testing.assert_array_equal(result, array)
            assert not np.shares_memory(result, array)
    np.testing.assert_array_equal(array, [0, 1, 2, 3])
    np.testing.assert_array_equal(gathered, array)
    assert not np.shares_memory(gathered, array)


def test_solo_refuses_what_a_ring_refuses():
    with pytest.raises(ConfigurationError, match="expected dtype"):
        LocalCommunicator().allreduce_(np.zeros(1, "u1"))
    with pytest.raises(ConfigurationError, match="a rank from 0 to 0"):
        LocalCommunicator().broadcast_(np.zeros(1), 1)
    with pytest.raises(ConfigurationError, match="at least one dimension"):
        LocalCommunicator().allgather(np.zeros(()))
