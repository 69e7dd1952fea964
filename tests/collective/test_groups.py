"""Groups of some ranks: random programs over random groups against numpy, and how groups are made and closed."""

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elephant.collective import LocalCommunicator
from elephant.errors import ConfigurationError, DeadlineExceededError, PeerLostError, ProtocolError

several = settings(
    max_examples=min(25, settings.default.max_examples),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
REDUCTIONS = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "product": np.prod}


@st.composite
def programs(draw):
    """A number of ranks, groups of them, and operations: (kind, members, seed), all of them as every rank sees them."""
    size = draw(st.integers(2, 5))
    everybody = list(range(size))
    groups = [draw(st.permutations(everybody))[: draw(st.integers(1, size))] for _ in range(draw(st.integers(1, 3)))]
    kinds = st.sampled_from(
        ["allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast", "object", "barrier", "message"]
    )
    steps = draw(st.lists(st.tuples(kinds, st.integers(0, len(groups)), st.integers(0, 999)), min_size=1, max_size=8))
    return size, groups, [(kind, everybody if place == 0 else groups[place - 1], seed) for kind, place, seed in steps]


def rows_of(member, other, seed):
    """The rows that one member of a group has for another."""
    generator = np.random.default_rng((seed, member, other))
    return generator.integers(-9, 9, (int(generator.integers(0, 40)), 3)).astype("f4")


def values_of(member, seed):
    generator = np.random.default_rng((seed, member))
    shape = np.random.default_rng(seed).integers(1, 60)
    return generator.integers(1, 4, shape).astype(["f4", "f8", "i8"][seed % 3])


def reduction_of(seed):
    return "sum" if seed % 3 == 2 and seed % 5 == 1 else list(REDUCTIONS)[seed % 5]


def perform(group, kind, seed):
    """Takes part in an operation of a group."""
    me, size = group.rank, group.world_size
    if kind == "allreduce":
        return group.allreduce(values_of(me, seed), reduction_of(seed))
    if kind == "reduce_scatter":
        return group.reduce_scatter(values_of(me, seed), reduction_of(seed))
    if kind == "allgather":
        return group.allgather(rows_of(me, 0, seed))
    if kind == "alltoall":
        return group.alltoall([rows_of(me, other, seed) for other in range(size)])
    if kind == "broadcast":
        return group.broadcast(values_of(me, seed), seed % size)
    if kind == "object":
        return group.allgather_object({"rank": me}), group.broadcast_object([me], seed % size)
    if kind == "barrier" or size == 1:
        return group.barrier()
    source, target = seed % size, (seed + 1) % size
    if me == source:
        group.send([rows_of(source, target, seed), values_of(source, seed)], target)
    return group.recv(source) if me == target else None


def expected(kind, size, me, seed):
    """What numpy makes of the same operation."""
    reduced = REDUCTIONS[reduction_of(seed)](np.stack([values_of(member, seed) for member in range(size)]), axis=0)
    everything = {
        "allreduce": reduced,
        "reduce_scatter": np.array_split(reduced, size)[me],
        "allgather": [rows_of(member, 0, seed) for member in range(size)],
        "alltoall": [rows_of(member, me, seed) for member in range(size)],
        "broadcast": values_of(seed % size, seed),
        "object": ([{"rank": member} for member in range(size)], [seed % size]),
        "barrier": None,
        "message": None,
    }
    if kind == "message" and size > 1 and me == (seed + 1) % size:
        source = seed % size
        return [rows_of(source, me, seed), values_of(source, seed)]
    return everything[kind]


def assert_alike(result, wanted):
    if isinstance(wanted, np.ndarray):
        np.testing.assert_allclose(result, wanted, rtol=1e-6)
        assert result.dtype == wanted.dtype or wanted.dtype.kind == "i"
    elif isinstance(wanted, list) and wanted and isinstance(wanted[0], np.ndarray):
        assert len(result) == len(wanted)
        for part, right in zip(result, wanted, strict=True):
            np.testing.assert_array_equal(part, right)
    else:
        assert result == wanted


@several
@given(program=programs(), way=st.sampled_from([{}, {"transport": "tcp"}, {"hosts": "ababa"}]), small=st.booleans())
def test_random_programs_when_groups_overlap_then_give_what_numpy_gives(run_world, small_sizes, program, way, small):
    size, memberships, steps = program

    def run(world):
        groups = [(members, world.new_group(members)) for members in memberships]
        groups.append((list(range(size)), world))
        results = []
        for kind, members, seed in steps:
            group = next(group for known, group in groups if known == members)
            assert (group is None) == (world.rank not in members)
            if group is not None:
                assert (group.ranks, group.rank) == (tuple(members), members.index(world.rank))
                results.append(perform(group, kind, seed))
        return results

    for rank, results in enumerate(run_world(size, run, sizes=small_sizes if small else None, **way)):
        assert not isinstance(results, Exception), results
        mine = [(kind, members, seed) for kind, members, seed in steps if rank in members]
        for result, (kind, members, seed) in zip(results, mine, strict=True):
            assert_alike(result, expected(kind, len(members), members.index(rank), seed))


def test_groups_when_threads_use_two_at_once_then_each_has_its_own_order(run_world):
    def run(world):
        rows = [world.new_group(members) for members in ([0, 1], [2, 3])][world.rank // 2]
        columns = [world.new_group(members) for members in ([0, 2], [1, 3])][world.rank % 2]
        totals = []

        def reduce_columns():
            totals.extend(float(columns.allreduce(np.array([world.rank + step]))[0]) for step in range(50))

        thread = threading.Thread(target=reduce_columns)
        thread.start()
        sums = [float(rows.allreduce(np.array([world.rank + step]))[0]) for step in range(50)]
        thread.join()
        return sums, totals

    for rank, (sums, totals) in enumerate(run_world(4, run)):
        assert sums == [2 * step + 1 + 4 * (rank // 2) for step in range(50)]
        assert totals == [2 * step + 2 + 2 * (rank % 2) for step in range(50)]


def test_new_group_when_ranks_name_different_ones_then_all_are_told(run_world):
    outcomes = run_world(3, lambda world: world.new_group([0, 1] if world.rank < 2 else [1, 0]))
    assert all(isinstance(error, ProtocolError) for error in outcomes)
    assert "'new_group of ranks 1, 0'" in str(outcomes[0])


def test_group_of_a_group_when_made_by_its_members_alone_then_works_beside_one_of_the_world(run_world):
    def run(world):
        first = world.new_group([3, 1, 2])
        inner = None if first is None else first.new_group([2, 0])
        last = world.new_group([0, 3])
        totals = [None if group is None else group.allgather_object(world.rank) for group in (first, inner, last)]
        return totals, [group.ranks for group in (first, inner, last) if group is not None]

    assert run_world(4, run) == [
        ([None, None, [0, 3]], [(0, 3)]),
        ([[3, 1, 2], None, None], [(3, 1, 2)]),
        ([[3, 1, 2], [2, 3], None], [(3, 1, 2), (2, 3)]),
        ([[3, 1, 2], [2, 3], [0, 3]], [(3, 1, 2), (2, 3), (0, 3)]),
    ]


def test_group_of_one_when_made_then_is_a_world_of_one_that_knows_its_number(run_world):
    def run(world):
        group = world.new_group([1])
        return None if group is None else (isinstance(group, LocalCommunicator), group.ranks, group.rank)

    assert run_world(2, run) == [None, (True, (1,), 0)]
    assert LocalCommunicator().new_group([0]).ranks == (0,) and LocalCommunicator().new_group([]) is None


@pytest.mark.parametrize("ranks", [[0, 0], [0, 2], [-1]])
def test_new_group_when_a_rank_is_not_there_or_twice_then_raises_and_breaks_nothing(run_world, ranks):
    def run(world):
        with pytest.raises(ConfigurationError, match="expected ranks from 0 to 1, each once. Received"):
            world.new_group(ranks)
        return world.allgather_object(world.rank)

    assert run_world(2, run) == [[0, 1]] * 2


def test_group_when_one_member_closes_it_then_the_others_are_told_and_the_world_goes_on(run_world):
    def run(world):
        group = world.new_group([0, 1])
        if world.rank == 1:
            group.barrier()
            group.close()
            with pytest.raises(PeerLostError, match="Expected a group that is open. Received: group 1, closed on this"):
                group.barrier()
        elif world.rank == 0:
            group.barrier()
        return world.allgather_object(world.rank)

    assert run_world(3, run) == [[0, 1, 2]] * 3

    def ask_once_more(world):
        group = world.new_group([0, 1])
        if world.rank == 1:
            group.close()
            world.barrier()
        group.barrier()

    outcomes = run_world(2, ask_once_more, operation_timeout_s=10)
    assert "Rank 1 closed its collective after operation 0 of group 1" in str(outcomes[0])


def test_world_when_closed_then_closes_its_groups_and_their_groups(run_world):
    kept = {}

    def run(world):
        outer = world.new_group([1, 0])
        kept[world.rank] = (outer, outer.new_group([0, 1]))
        outer.send([np.arange(3)], 1 - outer.rank)
        return outer.recv(1 - outer.rank)[0].tolist()

    assert run_world(2, run) == [[0, 1, 2]] * 2
    for groups in kept.values():
        for group in groups:
            with pytest.raises(PeerLostError, match="The collective was closed on this rank"):
                group.barrier()
            with pytest.raises(PeerLostError, match="The collective was closed on this rank"):
                group.send([], 1 - group.rank)


def test_failure_when_one_group_has_it_then_ends_the_waits_of_all_others_and_tells_why(run_world):
    def run(world):
        pair = world.new_group([0, 1])
        others = world.new_group([2, 3])
        if world.rank == 0:
            raise ZeroDivisionError("of rank 0")
        if world.rank == 2:
            others.recv(1)
        (pair or others).barrier()

    outcomes = run_world(4, run)
    assert isinstance(outcomes[0], ZeroDivisionError)
    assert [str(error) for error in outcomes[1:]] == ["Rank 0 aborted its collective."] * 3


def test_deadline_when_a_member_is_in_another_groups_operation_then_says_where_it_is(run_world):
    def run(world):
        rows, columns = world.new_group([0, 1]), world.new_group([1, 2])
        (rows if world.rank == 0 else columns).barrier() if world.rank < 2 else world.recv(0)

    outcomes = run_world(3, run, operation_timeout_s=1.0)
    texts = [str(error) for error in outcomes]
    assert all(isinstance(error, DeadlineExceededError) for error in outcomes)
    assert any(
        "Rank 1 is still in operation 1 of group 2." in text
        or "Rank 2 is still in a send or recv." in text
        or "Rank 0 is still in operation 1 of group 1." in text
        for text in texts
    )
