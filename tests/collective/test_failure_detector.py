"""The watch of rank 0, whose peers are sockets in the test's own hands."""

import select
import socket
import threading
import time

import pytest

from elephant.collective.operation import MESSAGE, Operation, numbered
from elephant.collective.watch.control_message import ControlKind, ControlMessage, take_notice
from elephant.collective.watch.failure_detector import FailureDetector
from elephant.errors import DeadlineExceededError, PeerLostError, ProtocolError
from elephant.net import Deadline


def operation(sequence, timeout_s=20):
    return Operation(sequence, "barrier", Deadline(timeout_s, "The barrier on rank 0"))


@pytest.fixture
def watched():
    """A watch of ranks 1 and 2, and the other ends of its connections."""
    watch, peers = FailureDetector(0), {}
    for rank in (1, 2):
        own, peers[rank] = socket.socketpair()
        peers[rank].settimeout(10)
        watch.add(rank, own)
    yield watch, peers
    watch.close(ControlMessage(ControlKind.CLOSED, 0))
    for peer in peers.values():
        peer.close()


def heard(peer):
    received = bytearray(peer.recv(10_000))
    notice = take_notice(received)
    assert not received
    return notice


def test_nothing_to_hear_costs_nothing(watched):
    watch, _ = watched
    assert not select.select([watch], [], [], 0)[0]
    watch.begin(operation(1))
    watch.check(operation(1))


def test_a_rank_that_dies_is_named(watched):
    watch, peers = watched
    peers[2].close()
    assert select.select([watch], [], [], 10)[0]
    with pytest.raises(PeerLostError, match=r"Rank 0 lost rank 2 in operation 3 \(barrier\): its process died"):
        watch.check(operation(3))


def test_a_failure_is_raised_as_it_was_and_before_the_end_of_its_connection(watched):
    watch, peers = watched
    peers[1].send(ControlMessage(ControlKind.PROTOCOL, 2, "rank 1 asked for something else").to_bytes())
    peers[1].close()
    with pytest.raises(ProtocolError, match="rank 1 asked for something else"):
        watch.begin(operation(3))


def test_the_cause_is_raised_and_not_the_death_of_another(watched):
    watch, peers = watched
    peers[2].close()
    peers[1].send(ControlMessage(ControlKind.LOST, 2, "rank 1 lost rank 2 because").to_bytes())
    with pytest.raises(PeerLostError, match="rank 1 lost rank 2 because"):
        watch.check(operation(3))


@pytest.mark.parametrize(
    "kind, text", [(ControlKind.CLOSED, "Rank 1 closed its collective after operation 3"), (ControlKind.LOST, "x")]
)
def test_who_leaves_after_an_operation_is_missed_in_the_next_one_only(watched, kind, text):
    watch, peers = watched
    peers[1].send(ControlMessage(kind, 3, "x").to_bytes())
    peers[1].close()
    watch.check(operation(3))
    with pytest.raises(PeerLostError, match=text):
        watch.begin(operation(4))


def test_rank_when_it_gives_up_while_ranks_connect_then_the_others_do_not_wait_for_their_own_deadlines(watched):
    watch, peers = watched
    peers[1].send(ControlMessage(ControlKind.DEADLINE, 0, "rank 1 gave up connecting").to_bytes())
    with pytest.raises(DeadlineExceededError, match="rank 1 gave up connecting"):
        watch.check(operation(0))


def test_failure_in_another_group_when_it_comes_then_ends_any_operation_and_a_closed_group_only_its_own(watched):
    watch, peers = watched
    peers[1].send(ControlMessage(ControlKind.CLOSED, numbered(2, 3)).to_bytes())
    watch.check(operation(9))
    watch.check(operation(numbered(2, 3)))
    watch.check(operation(numbered(2, MESSAGE)))
    with pytest.raises(PeerLostError, match="Rank 1 closed its collective after operation 3 of group 2"):
        watch.begin(operation(numbered(2, 4)))
    peers[2].send(ControlMessage(ControlKind.LOST, numbered(5, 8), "because").to_bytes())
    with pytest.raises(PeerLostError, match="because"):
        watch.check(operation(numbered(1, 1)))


def test_a_question_is_answered_with_the_operation_and_its_age(watched):
    watch, peers = watched
    current = operation(4)
    time.sleep(0.02)
    peers[1].send(ControlMessage(ControlKind.WAITING, 5).to_bytes())
    watch.check(current)
    answer = heard(peers[1])
    assert (answer.kind, answer.sequence) == (ControlKind.PRESENT, 4) and 0.02 <= float(answer.text) < 10


@pytest.mark.parametrize(
    "answers, story",
    [
        ({1: (5, 9.0)}, "Ranks that did not arrive: 2."),
        ({1: (5, 9.0), 2: (5, 0.0)}, "Ranks that arrived too late: 2."),
        ({1: (4, 9.0), 2: (5, 9.0)}, "Rank 1 is still in operation 4."),
        ({1: (5, 9.0), 2: (5, 9.0)}, "All ranks have arrived: the connections are too slow for the data."),
        ({}, "Ranks that did not arrive: 1, 2."),
        ({1: (numbered(3, 9), 9.0), 2: (5, 9.0)}, "Rank 1 is still in operation 9 of group 3."),
        ({1: (5, 9.0), 2: (numbered(0, MESSAGE), 9.0)}, "Rank 2 is still in a send or recv."),
    ],
)
def test_after_a_deadline_those_that_do_not_answer_are_named(watched, answers, story):
    watch, peers = watched

    def answer():
        for rank, (sequence, age_s) in answers.items():
            question = heard(peers[rank])
            assert (question.kind, question.sequence) == (ControlKind.WAITING, 5)
            peers[rank].send(ControlMessage(ControlKind.PRESENT, sequence, str(age_s)).to_bytes())

    thread = threading.Thread(target=answer)
    thread.start()
    error = watch.absence(operation(5, timeout_s=0))
    thread.join(10)
    assert type(error) is DeadlineExceededError
    assert str(error) == f"The barrier on rank 0 did not end within 0 s. {story}"


def test_the_reason_for_a_broken_connection_is_waited_for(watched):
    watch, peers = watched
    timer = threading.Timer(0.1, lambda: peers[1].send(ControlMessage(ControlKind.PROTOCOL, 2, "because").to_bytes()))
    timer.start()
    with pytest.raises(ProtocolError, match="because"):
        watch.reason(2, operation(3))
    timer.join(10)


def test_a_broken_connection_without_a_reason_names_the_rank(watched):
    watch, _ = watched
    with pytest.raises(PeerLostError, match=r"Rank 0 lost rank 2 in operation 3 .*no rank reported an error"):
        watch.reason(2, operation(3))


def test_an_interrupt_wakes_and_is_told_to_all(watched):
    watch, peers = watched
    watch.interrupt(PeerLostError("Rank 0 aborted its collective."), 2)
    assert select.select([watch], [], [], 10)[0]
    with pytest.raises(PeerLostError, match="aborted on this rank, rank 0"):
        watch.check(operation(3))
    for peer in peers.values():
        assert heard(peer) == ControlMessage(ControlKind.LOST, 2, "Rank 0 aborted its collective.")


def test_closing_tells_all_and_an_interrupt_after_it_does_nothing(watched):
    watch, peers = watched
    peers[1].send(ControlMessage(ControlKind.WAITING, 9).to_bytes())
    watch.close(ControlMessage(ControlKind.CLOSED, 7))
    watch.interrupt(PeerLostError("too late"), 7)
    for peer in peers.values():
        assert heard(peer) == ControlMessage(ControlKind.CLOSED, 7)
        assert peer.recv(1) == b""
