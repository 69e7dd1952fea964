"""What the other ranks see when one dies, freezes or asks for something else: real processes, real signals."""

import re
import signal
import time

import pytest
from tiers import in_tiers

WAYS = {"host": {}, "tcp": {"transport": "tcp"}, "tls": {"transport": "tcp", "encryption": True}}
TRANSPORTS = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
# Of a loss that nobody sees on a connection, which is then the same whether it is encrypted or not.
UNSEEN = pytest.mark.parametrize("way", in_tiers(WAYS, fast=["host", "tcp"], slow="waits as a plain connection does"))


@pytest.mark.parametrize("world_size", in_tiers([2, 4], fast=[4], slow="fewer ranks"))
@TRANSPORTS
def test_killed_rank_in_an_allreduce_is_seen_by_all_others(start_processes, world_size, way):
    processes = start_processes(world_size, "reduce_without_end", **way)
    time.sleep(0.5)
    killed_at = time.time()
    processes[1].signal(signal.SIGKILL)
    for rank in set(range(world_size)) - {1}:
        outcome = processes[rank].hear()
        assert outcome["error"] == "PeerLostError", outcome
        assert "lost rank 1 in operation" in outcome["text"] and "process died" in outcome["text"]
        assert outcome["at"] - killed_at < 2


@pytest.mark.parametrize(
    "way, network",
    [({}, None), ({"transport": "tcp"}, None), ({"transport": "tcp", "encryption": True}, None), ({}, 4)],
    ids=["host", "tcp", "tls", "hosts"],
    indirect=["network"],
)
def test_killed_rank_in_a_group_is_seen_within_a_second_by_those_who_wait_in_others(start_processes, way, network):
    processes = start_processes(4, "wait_in_groups", network=network, **way)
    time.sleep(0.5)
    killed_at = time.time()
    processes[1].signal(signal.SIGKILL)
    for rank in (0, 2, 3):
        outcome = processes[rank].hear()
        assert outcome["error"] == "PeerLostError" and "lost rank 1 in" in outcome["text"], outcome
        assert outcome["at"] - killed_at < 1


def test_killed_rank_is_seen_from_another_host_and_from_its_own(start_processes, network):
    processes = start_processes(4, "reduce_without_end", network=network)
    time.sleep(0.5)
    killed_at = time.time()
    processes[2].signal(signal.SIGKILL)
    for rank in (0, 1, 3):
        outcome = processes[rank].hear()
        assert outcome["error"] == "PeerLostError" and "lost rank 2 in operation" in outcome["text"], outcome
        assert outcome["at"] - killed_at < 2


def test_two_killed_ranks_are_seen_by_all_others(start_processes):
    processes = start_processes(4, "reduce_without_end")
    time.sleep(0.3)
    for rank in (1, 2):
        processes[rank].signal(signal.SIGKILL)
    for rank in (0, 3):
        outcome = processes[rank].hear()
        assert outcome["error"] == "PeerLostError"
        assert "lost rank 1 in" in outcome["text"] or "lost rank 2 in" in outcome["text"]


@UNSEEN
def test_frozen_rank_is_named_by_all_others_at_the_deadline(start_processes, way):
    processes = start_processes(4, "reduce_without_end", timeout_s=2.0, **way)
    time.sleep(0.3)
    processes[1].signal(signal.SIGSTOP)
    for rank in (0, 2, 3):
        outcome = processes[rank].hear()
        assert outcome["error"] == "DeadlineExceededError", outcome
        assert "The allreduce sum of 8000000 float32 on rank" in outcome["text"]
        # A rank whose data was complete may wait in the operation after it.
        assert re.search(
            r"within 2 s. Ranks that did not arrive: 1\.( Rank \d is still in operation \d+\.)*$", outcome["text"]
        )


@pytest.mark.parametrize(
    "scenario, parts",
    [
        ("reduce_different_shapes", ["allreduce sum of 2000001 float32", "allreduce sum of 2000000 float32"]),
        ("reduce_different_dtypes", ["allreduce sum of 2000000 float64", "allreduce sum of 2000000 float32"]),
        ("call_different_operations", ["broadcast of 2000000 float32 from rank 0", "allreduce sum of"]),
    ],
)
def test_ranks_that_disagree_all_learn_who_asked_for_what(start_processes, scenario, parts):
    for process in start_processes(3, scenario):
        outcome = process.hear()
        assert outcome["error"] == "ProtocolError", outcome
        for part in parts:
            assert part in outcome["text"]
        assert "rank 1 asked for" in outcome["text"] or "rank 1 for" in outcome["text"]


@pytest.mark.parametrize("encryption", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("network", [2, 4], indirect=True)
def test_ranks_on_several_hosts_whose_turns_interleave_use_every_operation(start_processes, network, encryption):
    hosts = len(network.hosts)
    processes = start_processes(4, "use_everything", network=network, encryption=encryption)
    for rank, process in enumerate(processes):
        outcome = process.hear()
        assert outcome["error"] is None, outcome
        each = [10.0, 2.5, 4.0, [1.0, 2.0, 3.0, 4.0], 2.0, 10.0]
        order = [3, 1, 0, 2]
        in_group = [order[order.index(rank) - 1], [10.0 * other + rank for other in order]]
        assert outcome["result"] == [rank // hosts, 4 // hosts, True, *each, *each, *in_group, *in_group]


def test_a_slow_rank_is_waited_for(start_processes):
    for process in start_processes(3, "reduce_after_a_rest"):
        assert process.hear() == {"error": None, "result": 3.0}


@pytest.mark.parametrize("encryption", [False, True], ids=["plain", "tls"])
def test_a_wire_that_is_cut_ends_at_the_deadline_and_names_those_behind_it(start_processes, network, encryption):
    processes = start_processes(3, "reduce_without_end", timeout_s=2.0, network=network, encryption=encryption)
    time.sleep(0.5)
    network.cut(0, 1)
    for rank, absent in ((0, "1."), (1, "0, 2."), (2, "1.")):
        outcome = processes[rank].hear()
        assert outcome["error"] == "DeadlineExceededError", outcome
        assert f"did not end within 2 s. Ranks that did not arrive: {absent}" in outcome["text"]


@pytest.mark.parametrize("network", [4], indirect=True)
def test_host_that_is_cut_off_from_three_others_ends_their_group_at_the_deadline_and_is_named(start_processes, network):
    processes = start_processes(4, "exchange_without_end", timeout_s=2.0, network=network)
    time.sleep(0.5)
    network.isolate(1)
    for rank, absent in ((0, "1"), (1, "0, 2, 3"), (2, "1"), (3, "1")):
        outcome = processes[rank].hear()
        assert outcome["error"] == "DeadlineExceededError", outcome
        where = r"( Rank \d is still in operation \d+ of group 1\.)*$"
        assert re.search(rf"within 2 s. Ranks that did not arrive: {absent}\.{where}", outcome["text"]), outcome


def test_a_frozen_rank_that_thaws_learns_that_it_is_late(start_processes):
    processes = start_processes(3, "reduce_without_end", timeout_s=1.0)
    time.sleep(0.3)
    processes[2].signal(signal.SIGSTOP)
    for rank in (0, 1):
        assert "Ranks that did not arrive: 2." in processes[rank].hear()["text"]
    processes[2].signal(signal.SIGCONT)
    outcome = processes[2].hear()
    assert outcome["error"] == "DeadlineExceededError", outcome
