"""Division of variables among ranks, and the exchange of what each has updated."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.backends.optimizer_part import OptimizerPart, owners_of

SIZES = st.lists(st.integers(0, 10**6), max_size=40)


@given(SIZES, st.integers(1, 9))
def test_owners_when_variables_are_dealt_then_no_rank_has_much_more_than_its_share(sizes, world_size):
    owners = owners_of(sizes, world_size)
    loads = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(world_size)
    ]
    assert sum(loads) == sum(sizes)
    # Who got its last variable had least before it (Graham 1966).
    assert max(loads) <= sum(sizes) / world_size + max(sizes, default=0)


class Gathering:
    """A group of ranks of which the others' blocks are given."""

    def __init__(self, rank, blocks):
        self.rank, self.world_size, self._blocks = rank, len(blocks), blocks

    def allgather(self, block):
        return [block if rank == self.rank else other for rank, other in enumerate(self._blocks)]


@pytest.mark.parametrize("rank", range(3))
def test_exchange_when_each_rank_has_updated_its_part_then_all_have_all(rank):
    shapes = {"a": ((3, 2), "float32"), "b": ((), "float32"), "c": ((5,), "float16"), "d": ((2, 2), "bfloat16")}
    variables = [keras.Variable(np.zeros(shape), dtype=dtype, name=name) for name, (shape, dtype) in shapes.items()]
    values = [np.arange(1, 1 + int(np.prod(one.shape))).reshape(one.shape).astype(one.dtype) for one in variables]
    parts = [OptimizerPart(Gathering(place, [None] * 3), variables) for place in range(3)]
    blocks = [b"".join(values[place].tobytes() for place in part.sent) for part in parts]
    part = OptimizerPart(Gathering(rank, [np.frombuffer(block, np.uint8) for block in blocks]), variables)
    received = part.exchange(*(values[place] for place in part.sent))
    assert sorted([*part.sent, *part.received]) == [0, 1, 2, 3]
    for place, array, spec in zip(part.received, received, part.specs_received, strict=True):
        np.testing.assert_array_equal(array, values[place])
        assert (array.shape, array.dtype) == spec


def test_part_when_there_are_more_ranks_than_variables_then_the_others_update_the_smallest():
    variables = [keras.Variable(np.zeros(size)) for size in (4, 2)]
    parts = [OptimizerPart(Gathering(rank, [None] * 3), variables) for rank in range(3)]
    assert [part.sent for part in parts] == [[0], [1], []]
    assert [part.updated for part in parts] == [[0], [1], [1]]
    assert [part.updates(variables[1]) for part in parts] == [False, True, True]
