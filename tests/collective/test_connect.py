import socket
import threading
import time

import numpy as np
import pytest

from elephant.collective import Solo, form_collective
from elephant.errors import AuthenticationError, ConfigurationError, DeadlineExceededError, NetworkError
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
    assert isinstance(form_collective(0, [listeners[0].address], listeners[0], TOKEN, "run", 1.0), Solo)


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


def test_a_rank_that_is_absent_is_named_by_both_its_neighbours(listeners):
    left, absent, right = form_all(listeners, timeout_s=0.5, absent={1})
    assert absent is None
    assert type(left) is DeadlineExceededError and "Connecting rank 0 to rank 1 at 127.0.0.1" in str(left)
    assert type(right) is DeadlineExceededError and "Waiting for rank 1 to connect" in str(right)


def test_a_rank_with_another_token_is_refused(listeners):
    outcomes = form_all(listeners, tokens=(TOKEN, b"another token, as long", TOKEN), timeout_s=1.0)
    assert type(outcomes[0]) is AuthenticationError and "ring/0->1" in str(outcomes[0])
    assert type(outcomes[1]) is AuthenticationError
    assert isinstance(outcomes[2], NetworkError)


def test_a_rank_of_another_run_is_refused(listeners):
    outcomes = form_all(listeners, run_ids=("run", "older", "run"), timeout_s=1.0)
    assert type(outcomes[0]) is AuthenticationError and type(outcomes[1]) is AuthenticationError


def test_addresses_in_another_order_on_one_rank_are_noticed(listeners):
    addresses = [listener.address for listener in listeners]
    with pytest.raises(NetworkError):
        # Rank 0 takes rank 2 for rank 1; nobody else is there to answer at all.
        form_collective(0, [addresses[0], addresses[2], addresses[1]], listeners[0], TOKEN, "run", 0.3)
