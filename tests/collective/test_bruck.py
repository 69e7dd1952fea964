from hypothesis import given
from hypothesis import strategies as st
from tables import every_case

from elephant.collective.links import distances, rounds


@given(st.integers(1, 300))
def test_after_all_rounds_every_member_has_every_block_once(size):
    # What member p holds, in the order in which it came: its own block, then those of the members before it.
    held = [[place] for place in range(size)]
    for distance, count in rounds(size):
        sent = [blocks[:count] for blocks in held]
        for place in range(size):
            assert len(held[place]) == distance
            held[place] = held[place] + sent[(place - distance) % size]
    for place, blocks in enumerate(held):
        assert blocks == [(place - step) % size for step in range(size)]


@every_case("size, count", [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_the_number_of_rounds_is_the_logarithm_rounded_up(size, count):
    assert len(rounds(size)) == len(distances(size)) == count
