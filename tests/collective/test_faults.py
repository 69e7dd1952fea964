"""What the other ranks see when one dies, freezes or asks for something else: real processes, real signals."""

import re
import signal
import time

import pytest


@pytest.mark.parametrize("world_size", [2, 4])
def test_killed_rank_in_an_allreduce_is_seen_by_all_others(start_processes, world_size):
    processes = start_processes(world_size, "reduce_without_end")
    time.sleep(0.5)
    killed_at = time.time()
    processes[1].signal(signal.SIGKILL)
    for rank in set(range(world_size)) - {1}:
        outcome = processes[rank].hear()
        assert outcome["error"] == "PeerLostError", outcome
        assert "lost its neighbour, rank 1" in outcome["text"]
        assert outcome["at"] - killed_at < 2


def test_two_killed_ranks_are_seen_by_all_others(start_processes):
    processes = start_processes(4, "reduce_without_end")
    time.sleep(0.3)
    for rank in (1, 2):
        processes[rank].signal(signal.SIGKILL)
    for rank in (0, 3):
        outcome = processes[rank].hear()
        assert outcome["error"] == "PeerLostError"
        assert "lost its neighbour" in outcome["text"]


def test_frozen_rank_ends_in_a_deadline_that_names_a_neighbour(start_processes):
    processes = start_processes(3, "reduce_without_end", timeout_s=2.0)
    time.sleep(0.3)
    processes[1].signal(signal.SIGSTOP)
    outcomes = [processes[rank].hear() for rank in (0, 2)]
    # Who notices first tells the other, or closes, and then the frozen rank's silence is what the other sees.
    late = [outcome for outcome in outcomes if outcome["error"] == "DeadlineExceededError"]
    assert late and "The allreduce sum of 8000000 float32 on rank" in late[0]["text"]
    assert "did not end within 2 s" in late[0]["text"] and re.search("rank [12] did not", late[0]["text"])
    for outcome in outcomes:
        assert outcome in late or "and rank 1 does not say why" in outcome["text"], outcome


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
