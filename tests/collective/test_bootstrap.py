import socket
import threading
import time

import numpy as np
import pytest
from leaks import no_descriptor_free, open_descriptors

from elephant.collective import LocalCommunicator, bootstrap, form_collective
from elephant.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    NetworkError,
    ProtocolError,
)
from elephant.net import Listener

TOKEN = b"0123456789abcdef-right"


@pytest.fixture
def listeners():
    listeners = [Listener.bind("127.0.0.1") for _ in range(3)]
    yield listeners
    for listener in listeners:
        listener.close()


def form_all(listeners, *, delays=(0, 0, 0), tokens=(TOKEN,) * 3, run_ids=("run",) * 3, timeout_s=20.0, absent=()):
    addresses = [listener.address for listener in listeners]
    outcomes = [None] * len(listeners)

    def form(rank):
        time.sleep(delays[rank])
        try:
            with form_collective(
                rank, addresses, listeners[rank], tokens[rank], run_ids[rank], timeout_s
            ) as collective:
                array = np.ones(1, "f4")
                collective.allreduce_(array)
                outcomes[rank] = float(array[0])
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(len(listeners)) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def test_one_address_gives_a_world_of_one(listeners):
    assert isinstance(form_collective(0, [listeners[0].address], listeners[0], TOKEN, "run", 1.0), LocalCommunicator)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there_raises(listeners, rank):
    with pytest.raises(ConfigurationError, match="expected one from 0 to 1. Received"):
        form_collective(rank, [listener.address for listener in listeners[:2]], listeners[0], TOKEN, "run", 1.0)


@pytest.mark.parametrize("delays", [(0, 0, 0), (0.2, 0, 0.1), (0, 0.2, 0.1)])
def test_ranks_may_start_in_any_order(listeners, delays):
    assert form_all(listeners, delays=delays) == [3.0] * 3


def test_two_ranks_form_a_ring(listeners):
    assert form_all(listeners[:2]) == [2.0] * 2


def test_ring_over_ipv6():
    try:
        listeners = [Listener.bind("::1") for _ in range(2)]
    except NetworkError:
        pytest.skip("this machine has no IPv6 loopback")
    assert form_all(listeners) == [2.0] * 2
    for listener in listeners:
        listener.close()


def test_strangers_at_every_port_do_not_disturb(listeners):
    strangers = [socket.create_connection(listener.address, timeout=10) for listener in listeners for _ in range(20)]
    for stranger in strangers[::2]:
        stranger.sendall(b"\xff" * 100)
    assert form_all(listeners) == [3.0] * 3
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_is_absent_is_named_by_all_others(listeners):
    outcomes = form_all(listeners, timeout_s=0.5, absent={1})
    assert outcomes[1] is None
    for rank in (0, 2):
        assert type(outcomes[rank]) is DeadlineExceededError
        assert "Connecting rank 2 to rank 1 at 127.0.0.1" in str(outcomes[rank]) or (
            "Ranks that did not connect: 1. Nobody came to be turned away." in str(outcomes[rank])
        )


@pytest.mark.parametrize(
    "others",
    [{"tokens": (TOKEN, b"another token, as long", TOKEN)}, {"run_ids": ("run", "older", "run")}],
    ids=["token", "run"],
)
def test_a_rank_with_another_token_or_run_is_refused(listeners, others):
    outcomes = form_all(listeners, timeout_s=1.0, **others)
    assert type(outcomes[1]) is AuthenticationError and "/collective" in str(outcomes[1])
    for rank in (0, 2):
        text = str(outcomes[rank])
        assert isinstance(outcomes[rank], NetworkError)
        assert "to rank 1 at" in text or ("did not connect: 1." in text and "a proof that does not hold" in text)


def test_world_when_a_rank_has_no_descriptor_left_then_ends_in_seconds_and_says_which_limit_it_is(listeners):
    error = []

    def form():
        try:
            form_collective(0, [each.address for each in listeners[:2]], listeners[0], TOKEN, "run", timeout_s=600.0)
        except NetworkError as failed:
            error.append(str(failed))

    rank = threading.Thread(target=form, name="test-rank", daemon=True)
    rank.start()
    with socket.socket() as other:
        # It listens once its thread accepts.
        while rank.is_alive() and "elephant-collective-accept-0-1" not in {each.name for each in threading.enumerate()}:
            time.sleep(0.01)
        # It closes the socket whose duplicate it listens on.
        before = None
        while (now := open_descriptors()) != before:
            before = now
            time.sleep(0.2)
        with no_descriptor_free():
            other.connect(listeners[0].address)
            rank.join(30)
    assert len(error) == 1 and "ulimit -n" in error[0]


def test_addresses_in_another_order_on_one_rank_are_noticed(listeners):
    addresses = [listener.address for listener in listeners]
    swapped = [addresses[1], addresses[0], addresses[2]]
    answering = threading.Thread(target=form_all, args=(listeners,), kwargs={"timeout_s": 1.0, "absent": {2}})
    answering.start()
    with pytest.raises(ProtocolError, match="Expected rank 0 of 3 at 127.0.0.1.*Received: rank 1 of 3"):
        form_collective(2, swapped, listeners[2], TOKEN, "run", 5.0)
    answering.join(30)


def test_an_unknown_transport_raises(listeners):
    with pytest.raises(ConfigurationError, match="expected one of auto, tcp. Received: 'udp'"):
        form_collective(0, [listener.address for listener in listeners], listeners[0], TOKEN, "run", 1, transport="udp")


def test_a_token_that_is_too_short_raises(listeners):
    with pytest.raises(ConfigurationError, match="expected at least 16 random bytes"):
        form_collective(0, [listener.address for listener in listeners], listeners[0], b"short", "run", 1)


def test_world_when_few_files_may_be_open_then_every_rank_has_raised_the_limit_first(listeners, monkeypatch):
    rooms = []
    monkeypatch.setattr(bootstrap, "allow_descriptors", rooms.append)
    assert form_all(listeners) == [3.0] * 3
    assert len(rooms) == 3 and min(rooms) > 3
