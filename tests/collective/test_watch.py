"""The watch of more ranks than are all connected with each other: what one learns, all do, once."""

import select
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.collective.operation import Operation
from elephant.collective.watch.control_message import ControlKind, ControlMessage, take_notice
from elephant.collective.watch.failure_detector import FailureDetector
from elephant.collective.watch.peer import watched_ranks
from elephant.errors import DeadlineExceededError, PeerLostError, ProtocolError
from elephant.net import Deadline, socket_io


def barrier(sequence, timeout_s=20):
    return Operation(sequence, "barrier", Deadline(timeout_s, "The barrier on rank 0"))


@pytest.fixture
def relay():
    """The watch of rank 0 of many, in no operation, and the other ends of its connections with ranks 1, 2 and 4."""
    detector, peers = FailureDetector(0), {}
    detector.pass_on()
    for rank in (1, 2, 4):
        own, peers[rank] = socket.socketpair()
        peers[rank].settimeout(10)
        detector.add(rank, own, f"host {rank}")
    yield detector, {rank: Listening(peer) for rank, peer in peers.items()}
    detector.close(ControlMessage(ControlKind.CLOSED, 0))
    for peer in peers.values():
        peer.close()


class Listening:
    """The other end of a connection of the watch."""

    def __init__(self, sock):
        self._sock = sock
        self._received = bytearray()

    def say(self, *arguments, **options):
        self.send(ControlMessage(*arguments, **options).to_bytes())

    def send(self, data):
        self._sock.sendall(data)

    def hear(self):
        """Returns the next notice that is not about hosts."""
        while True:
            if (notice := take_notice(self._received)) is None:
                self._received += self._sock.recv(10_000)
            elif notice.kind is not ControlKind.HOST:
                return notice

    def end(self):
        self._sock.close()


@given(world_size=st.integers(2, 300), data=st.data())
def test_watched_ranks_when_several_die_then_the_others_hear_of_it_over_few_connections(world_size, data):
    watched = [set(watched_ranks(rank, world_size)) for rank in range(world_size)]
    assert all(rank in watched[other] for rank in range(world_size) for other in watched[rank])
    doublings = (world_size - 1).bit_length()
    assert all(len(others) <= max(2 * doublings, 7) and rank not in others for rank, others in enumerate(watched))
    dead = data.draw(st.sets(st.integers(0, world_size - 1), max_size=min(doublings, world_size - 1)))
    reached, news = set(), [min(set(range(world_size)) - dead)]
    while news:
        rank = news.pop()
        reached.add(rank)
        news.extend(watched[rank] - dead - reached)
    assert reached | dead == set(range(world_size))


def test_death_when_this_rank_computes_then_is_passed_on_once_and_raised_in_its_next_operation(relay):
    detector, peers = relay
    peers[1].end()
    died = ControlMessage(ControlKind.DIED, 0, "0", 1)
    assert peers[2].hear() == peers[4].hear() == died
    # What has gone round comes back, and is not passed on again: the next thing that is heard is the next death.
    peers[2].say(ControlKind.DIED, 0, "9", rank=1)
    peers[4].end()
    assert peers[2].hear() == ControlMessage(ControlKind.DIED, 0, "0", 4)
    with pytest.raises(PeerLostError, match=r"Rank 0 lost rank 1 in operation 3 \(barrier\): its process died"):
        detector.begin(barrier(3))


def test_news_of_a_death_when_its_messenger_ends_after_it_then_names_the_dead_rank_alone(relay):
    detector, peers = relay
    peers[1].say(ControlKind.DIED, 0, "5", rank=9)
    peers[1].say(ControlKind.LOST, 2, "Rank 1 lost rank 9 in operation 3 (barrier): its process died.")
    peers[1].end()
    assert [peers[2].hear() for _ in range(2)] == [
        ControlMessage(ControlKind.DIED, 0, "5", 9),
        ControlMessage(ControlKind.LOST, 2, "Rank 1 lost rank 9 in operation 3 (barrier): its process died.", 1),
    ]
    # In an operation that the messenger had finished, too.
    with pytest.raises(PeerLostError, match=r"Rank 0 lost rank 9 .* the network between it and rank 5 broke"):
        detector.begin(barrier(2))
    peers[4].end()
    assert peers[2].hear().rank == 4


def test_farewell_when_a_rank_leaves_in_good_order_then_all_are_told_and_nobody_takes_it_for_dead(relay):
    detector, peers = relay
    peers[1].say(ControlKind.CLOSED, 3)
    peers[1].say(ControlKind.CLOSED, 3, rank=33)
    peers[1].end()
    peers[2].say(ControlKind.DIED, 0, "7", rank=33)
    peers[2].say(ControlKind.CLOSED, 3, rank=34)
    assert [peers[4].hear() for _ in range(3)] == [ControlMessage(ControlKind.CLOSED, 3, "", r) for r in (1, 33, 34)]
    detector.begin(barrier(3))
    with pytest.raises(PeerLostError, match="Rank 1 closed its collective after operation 3"):
        detector.begin(barrier(4))


def test_failures_when_many_follow_from_one_then_only_an_earlier_one_is_passed_on(relay):
    _, peers = relay
    for sequence, rank in ((5, 9), (5, 10), (6, 11), (4, 12)):
        peers[1].say(ControlKind.LOST, sequence, "because", rank=rank)
    assert [peers[2].hear().rank for _ in range(2)] == [9, 12]


def test_rank_when_others_take_it_for_dead_then_names_the_one_it_is_cut_off_from(relay):
    detector, peers = relay
    peers[1].say(ControlKind.DIED, 0, "8", rank=0)
    assert peers[2].hear() == ControlMessage(ControlKind.DIED, 0, "8", 0)
    with pytest.raises(PeerLostError, match=r"Rank 0 lost rank 8 .* or the network between the two broke"):
        detector.begin(barrier(1))


def test_absence_when_answers_come_by_way_of_others_then_names_those_who_are_missing_or_cut_off(relay):
    detector, peers = relay
    for rank in (7, 8):
        peers[1].say(ControlKind.HOST, 0, "far", rank=rank)
    outcome = []
    waiting = threading.Thread(target=lambda: outcome.append(detector.absence(barrier(5, timeout_s=0))))
    waiting.start()
    assert peers[2].hear() == ControlMessage(ControlKind.WAITING, 5)
    peers[2].say(ControlKind.PRESENT, 5, "9")
    # 4 is connected with this rank and does not answer on that connection; 8 answers nowhere.
    for rank in (1, 4, 7):
        peers[2].say(ControlKind.PRESENT, 5, "9", rank=rank)
    peers[1].say(ControlKind.PRESENT, 5, "9")
    waiting.join(10)
    assert isinstance(outcome[0], DeadlineExceededError)
    assert str(outcome[0]).endswith("Ranks that did not arrive: 4, 8.")


def die(world):
    """Does what the system does with a dead process' connections: all end at once, before it says a word."""
    with world._detector._telling:
        for peer in world._detector._peers.values():
            socket_io.shut_down(peer.sock)


@pytest.mark.parametrize("dead", [{5}, {0, 1, 11}], ids=["one", "three at once"])
def test_death_in_a_world_of_twelve_when_some_compute_then_all_name_it_within_a_second(run_world, dead):
    formed, over, ended = threading.Barrier(12), threading.Event(), {}

    def run(world):
        formed.wait(20)
        if world.rank in dead:
            die(world)
            over.wait(20)
            raise ZeroDivisionError
        died_at = time.monotonic()
        if world.rank % 3 == 0:
            over.wait(0.5)
        try:
            world.recv((world.rank + 1) % 12) if world.rank % 3 == 1 else world.barrier()
        finally:
            ended[world.rank] = time.monotonic() - died_at
            if len(ended) == 12 - len(dead):
                over.set()

    outcomes = run_world(12, run)
    for rank in set(range(12)) - dead:
        assert any(f"lost rank {lost} in " in str(outcomes[rank]) for lost in dead), outcomes[rank]
        assert ended[rank] < 1.5


def test_death_in_a_group_when_all_ranks_between_its_members_have_left_then_the_members_name_it(run_world):
    members, outside_left, over = [0, 3, 6, 11], threading.Semaphore(0), threading.Event()

    def run(world):
        group = world.new_group(members)
        if group is None:
            outside_left.release()
            return None
        for _ in range(8):
            outside_left.acquire(timeout=20)
        for _ in range(8):
            outside_left.release()
        # They have left once their connections have ended.
        time.sleep(0.5)
        if world.rank == 6:
            die(world)
            over.wait(20)
            raise ZeroDivisionError
        died_at = time.monotonic()
        try:
            # 0 waits for 3, 3 for 11, and 11 for the dead one.
            group.recv({0: 1, 3: 3, 11: 2}[world.rank])
        except PeerLostError as error:
            return str(error), time.monotonic() - died_at
        finally:
            if world.rank == 0:
                over.set()

    outcomes = run_world(12, run)
    for rank in (0, 3, 11):
        text, waited_s = outcomes[rank]
        assert "lost rank 6 in" in text and waited_s < 1.5


def test_watch_when_what_comes_is_no_notice_then_the_next_operation_raises_and_the_others_are_told(relay):
    detector, peers = relay
    peers[1].send(b"\xff" * 40)
    assert peers[2].hear().kind is ControlKind.PROTOCOL
    # The others are told first.
    assert select.select([detector], [], [], 10)[0]
    with pytest.raises(ProtocolError, match="Expected a notice"):
        detector.begin(barrier(1))
