"""What crosses the network between ranks, as a recording proxy before each of them sees it."""

import contextlib
import threading

import numpy as np
import pytest
from proxies import recording_proxy

from elephant.collective import form_collective
from elephant.collective.connector import PeerConnector
from elephant.net import Listener, tls
from elephant.net.tls import new_token

WORLD = 3
# More than what one record holds, of values that are nowhere else.
GRADIENT = np.random.default_rng(3).normal(size=50_000).astype(np.float32)
SECRET = np.random.default_rng(4).normal(size=4_000).astype(np.float32)


def reduce_and_send(communicator):
    """Reduces a gradient that one rank has, and sends another from rank to rank."""
    own = GRADIENT if communicator.rank == 0 else np.zeros_like(GRADIENT)
    total = communicator.allreduce(own, "sum")
    communicator.send([SECRET], (communicator.rank + 1) % WORLD)
    (message,) = communicator.recv((communicator.rank - 1) % WORLD)
    return total, message, communicator.allgather(np.full(2, communicator.rank, np.float32))


@pytest.mark.parametrize("encryption", [False, True], ids=["plain", "tls"])
def test_proxies_between_ranks_see_gradients_and_handshakes_of_plain_connections_alone(encryption):
    token, results = new_token(encryption=encryption), [None] * WORLD
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(Listener.bind("127.0.0.1")) for _ in range(WORLD)]
        proxies = [opened.enter_context(recording_proxy(listener.address)) for listener in listeners]
        addresses = [proxy.address for proxy in proxies]

        def live(rank):
            with form_collective(
                rank, addresses, listeners[rank], token, "run", 30.0, operation_timeout_s=30.0, transport="tcp"
            ) as communicator:
                results[rank] = reduce_and_send(communicator)

        threads = [threading.Thread(target=live, args=(rank,)) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for total, message, gathered in results:
        np.testing.assert_array_equal(total, GRADIENT)
        np.testing.assert_array_equal(message, SECRET)
        assert [part[0] for part in gathered] == [0, 1, 2]
    seen = b"\n".join(proxy.seen for proxy in proxies)
    assert len(seen) > GRADIENT.nbytes
    is_visible = not encryption
    assert (GRADIENT[:4].tobytes() in seen) is is_visible
    assert (SECRET[:4].tobytes() in seen) is is_visible
    assert (b"elephant/auth" in seen) is is_visible
    # It is proved, and never sent.
    assert token[:32] not in seen and token not in seen


@pytest.mark.parametrize("limit", [1, 300_000])
def test_connections_when_their_keys_are_worn_then_are_made_again_and_lose_nothing(run_world, monkeypatch, limit):
    """With a limit of one byte, before every operation and message."""
    monkeypatch.setattr(tls, "RENEW_BYTES", limit)
    calls = []
    monkeypatch.setattr(PeerConnector, "call", counted(PeerConnector.call, calls))

    def work(world):
        generator, others = np.random.default_rng(world.rank), [rank for rank in range(5) if rank != world.rank]
        group = world.new_group([4, 0, 2]) if world.rank % 2 == 0 else world.new_group([4, 0, 2])
        totals = []
        for turn in range(6):
            for communicator in filter(None, (world, group)):
                values = np.arange(40_000, dtype=np.float32) * (turn + 1)
                totals.append(float(communicator.allreduce(values, "sum")[-1]) / communicator.world_size)
                totals.append(float(communicator.broadcast(values, root=1)[-1]))
            for rank in others:
                world.send([np.full(3, world.rank + turn), generator.normal(size=200_000)], rank)
            for rank in others:
                assert world.recv(rank)[0].tolist() == [rank + turn] * 3
            parts = world.alltoall([np.full((1000, 2), world.rank, np.float32)] * 5)
            assert [part[0, 0] for part in parts] == [0, 1, 2, 3, 4]
        return totals

    results = run_world(5, work, transport="tcp", encryption=True)
    assert all(isinstance(result, list) for result in results), results
    for rank, totals in enumerate(results):
        times = 2 if rank % 2 == 0 else 1
        assert totals == [39_999.0 * (turn + 1) for turn in range(6) for _ in range(2 * times)]
    first = {call for call in calls if not call[2].endswith("/again")}
    assert len(calls) > len(first) > 5 * 4


def counted(function, calls):
    def call(self, other, purpose, operation):
        calls.append((self.rank, other, purpose))
        return function(self, other, purpose, operation)

    return call
