import hashlib
import pickle

import numpy as np
import pytest

from elephant.collective import LocalCommunicator, objects
from elephant.errors import AuthenticationError, ConfigurationError


def seal(sender, data):
    return hashlib.sha256(bytes([sender]) + data).digest()


def test_object_when_sealed_and_opened_then_is_as_it_was():
    array = objects.sealed(objects.pickled({"a": [1, None]}, pickle.dumps), seal, 3)
    assert objects.opened(array, seal, 3) == {"a": [1, None]}


@pytest.mark.parametrize("place", [0, -1])
def test_object_when_a_byte_of_it_is_another_then_is_never_unpickled(monkeypatch, place):
    monkeypatch.setattr(pickle, "loads", lambda data: pytest.fail("unpickled"))
    array = objects.sealed(pickle.dumps([1, 2]), seal, 3).copy()
    array[place] ^= 1
    with pytest.raises(AuthenticationError, match="a proof that does not hold"):
        objects.opened(array, seal, 3)
    with pytest.raises(AuthenticationError, match="a proof that does not hold"):
        objects.opened(array[:10], seal, 3)


def test_object_when_it_cannot_be_pickled_then_says_so():
    with pytest.raises(ConfigurationError, match="value: expected an object that can be pickled. Received: generator"):
        LocalCommunicator().broadcast_object(one for one in [1])


def test_object_when_one_rank_alone_has_it_then_all_get_copies(run_world):
    def run(world):
        found = world.broadcast_object({"rows": np.arange(world.rank, 4)}, root=1)
        return found["rows"].tolist(), world.allgather_object((world.rank, "x" * 100_000 * world.rank))[2][1][:3]

    assert run_world(3, run) == [([1, 2, 3], "xxx")] * 3
    kept = {"a": []}
    assert LocalCommunicator().allgather_object(kept)[0] is not kept
