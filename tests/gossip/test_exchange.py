"""Exchanges as state machines: under any order of messages, and any losses between them, no weight comes or goes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elephant.errors import ProtocolError
from elephant.gossip.exchange import Answerer, Asker, Asking, Refusal
from elephant.gossip.weights import WEIGHTS, Parcel

WORKERS = 4
EVENTS = ["step", "offer", "deliver", "deliver", "deliver", "give up", "kill", "leave"]
PAIRS = [(one, other) for one in range(WORKERS) for other in range(WORKERS) if one != other]


class Network:
    """Workers, and the messages between an asker and an answerer, which stay in order and are lost with a connection.

    Attributes:
        expected: What values and shares of all workers that live add up to.
    """

    def __init__(self, kind):
        # Multiples of 2**10: float32 adds and halves them without rounding, as often as a test does.
        steps = np.zeros(WORKERS)
        self.weights = [kind(np.array([1024.0 * (worker + 1), -2048.0]), steps) for worker in range(WORKERS)]
        self.answerers = [Answerer(weights) for weights in self.weights]
        self.askers = {pair: Asker(self.weights[pair[0]]) for pair in PAIRS}
        self.sent = {pair: [] for pair in PAIRS}
        self.replies = {pair: [] for pair in PAIRS}
        self.alive = set(range(WORKERS))
        self.left = {}
        self.gone = self.held_by({}) * 0

    def held_by(self, workers):
        held = [self.weights[worker].held() for worker in workers]
        values = np.sum([np.append(parcel.values, parcel.share) for parcel in held], axis=0, dtype=np.float64)
        return values if held else np.zeros(3)

    def run(self, event, pair):
        asker, answerer = pair
        if not {asker, answerer} <= self.alive:
            return
        machine = self.askers[pair]
        if event == "step":
            before = self.held_by([asker])
            self.weights[asker].move(np.array([512.0, 1024.0], np.float32), asker, 1)
            # What a step adds is no part of what is conserved.
            self.gone += before - self.held_by([asker])
        elif event == "offer" and machine.state is Asking.IDLE and not self.offers(asker):
            self.sent[pair].append(("offer", machine.offer()))
        elif event == "give up" and machine.state is Asking.OFFERED:
            self.disconnect(pair)
        elif event == "leave" and self.answerers[asker].leave():
            self.left[asker] = True
        elif event == "kill" and len(self.alive) > 2:
            self.kill(asker)
        elif event == "deliver":
            self.deliver(pair)

    def offers(self, worker):
        """A worker asks one peer after the other."""
        return any(pair[0] == worker and machine.state is Asking.OFFERED for pair, machine in self.askers.items())

    def deliver(self, pair):
        asker, answerer = pair
        machine = self.askers[pair]
        if self.sent[pair]:
            what, parcel = self.sent[pair].pop(0)
            if what == "confirm":
                self.answerers[answerer].confirm((asker, 0))
                self.replies[pair].append("done")
            else:
                self.replies[pair].append(self.answerers[answerer].reply_to((asker, 0), parcel))
        elif self.replies[pair]:
            reply = self.replies[pair].pop(0)
            if reply == "done":
                machine.done()
            elif isinstance(reply, Refusal):
                machine.refused()
            else:
                machine.replied(reply)
                self.sent[pair].append(("confirm", None))
                machine.confirmed()

    def disconnect(self, pair):
        """The asker hangs up: what it has sent is read, as far as it confirms; then the answerer lets go."""
        asker, answerer = pair
        if self.sent[pair] and self.sent[pair][0][0] == "confirm" and answerer in self.alive:
            self.answerers[answerer].confirm((asker, 0))
        self.sent[pair], self.replies[pair] = [], []
        self.answerers[answerer].drop((asker, 0))
        self.askers[pair] = Asker(self.weights[asker])

    def kill(self, worker):
        self.gone += self.held_by([worker])
        for pair in PAIRS:
            if worker == pair[1] and self.sent[pair] and self.sent[pair][0][0] == "confirm":
                # A gift on its way to the one that died is lost with it.
                before = self.held_by([worker])
                self.answerers[worker].confirm((pair[0], 0))
                self.gone += self.held_by([worker]) - before
                self.sent[pair] = []
        self.alive.discard(worker)
        for pair in PAIRS:
            if worker in pair:
                self.disconnect(pair)

    def settle(self):
        """Delivers all that is on its way, and ends what waits for a reply."""
        for _ in range(6):
            for pair in PAIRS:
                if set(pair) <= self.alive:
                    self.deliver(pair)
        for pair in PAIRS:
            if set(pair) <= self.alive and self.askers[pair].state is Asking.OFFERED:
                self.disconnect(pair)


@pytest.mark.parametrize("algorithm", sorted(WEIGHTS))
@given(events=st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(PAIRS)), max_size=60))
@settings(max_examples=300, deadline=None)
def test_sum_of_weights_when_messages_come_in_any_order_and_workers_die_then_is_kept_to_the_bit(algorithm, events):
    network = Network(WEIGHTS[algorithm])
    began = network.held_by(range(WORKERS))
    for event in events:
        network.run(*event)
    network.settle()
    assert np.array_equal(network.held_by(network.alive) + network.gone, began)
    assert all(network.weights[worker].held().share > 0 for worker in network.alive)
    # Nobody is left with a gift of somebody who does not confirm any more.
    assert all(network.answerers[worker].leave() for worker in network.alive)


@pytest.mark.parametrize("algorithm", sorted(WEIGHTS))
def test_two_workers_when_each_asks_the_other_at_once_then_both_exchanges_come_about(algorithm):
    network = Network(WEIGHTS[algorithm])
    for event in ("offer", "deliver", "deliver", "deliver", "deliver"):
        network.run(event, (0, 1))
        network.run(event, (1, 0))
    assert network.askers[0, 1].state is network.askers[1, 0].state is Asking.IDLE
    assert np.array_equal(network.held_by(range(WORKERS)), [1024 * 10, -2048 * 4, 4])


def test_third_worker_when_another_one_is_answered_then_is_told_that_it_is_busy_and_later_that_it_has_left():
    network = Network(WEIGHTS["adpsgd"])
    offer = network.askers[2, 1].offer()
    network.run("offer", (0, 1))
    network.run("deliver", (0, 1))
    assert network.answerers[1].reply_to((2, 0), offer) is Refusal.BUSY
    assert not network.answerers[1].leave()
    for _ in range(2):
        network.run("deliver", (0, 1))
    assert network.answerers[1].leave()
    assert network.answerers[1].reply_to((2, 0), offer) is Refusal.LEFT


def test_gift_when_somebody_else_confirms_then_is_refused():
    network = Network(WEIGHTS["adpsgd"])
    network.run("offer", (0, 1))
    network.run("deliver", (0, 1))
    with pytest.raises(ProtocolError, match=r"Expected a confirmation of worker \(0, 0\)"):
        network.answerers[1].confirm((2, 0))


@pytest.mark.parametrize("algorithm", sorted(WEIGHTS))
def test_weights_when_gossip_goes_on_then_all_become_the_average_and_know_all_steps(algorithm):
    network, random = Network(WEIGHTS[algorithm]), np.random.default_rng(0)
    average = network.held_by(range(WORKERS))[:2] / WORKERS
    for worker in range(WORKERS):
        network.weights[worker].move(np.zeros(2, np.float32), worker, worker + 1)
    for _ in range(200):
        pair = PAIRS[random.integers(len(PAIRS))]
        for event in ("offer", "deliver", "deliver", "deliver", "deliver"):
            network.run(event, pair)
    for weights in network.weights:
        np.testing.assert_allclose(weights.trained().values, average, rtol=1e-4)
        assert weights.trained().steps.tolist() == [1, 2, 3, 4]


def test_move_when_it_is_not_finite_then_is_left_out_and_its_steps_are_counted():
    weights = WEIGHTS["sgp"](np.ones(2), np.zeros(3))
    assert not weights.move(np.array([np.nan, 1.0], np.float32), partition=2, step=5)
    assert weights.move(np.array([1.0, 1.0], np.float32), partition=2, step=6)
    held = weights.held()
    assert isinstance(held, Parcel) and held.values.tolist() == [2.0, 2.0] and held.steps.tolist() == [0, 0, 6]
