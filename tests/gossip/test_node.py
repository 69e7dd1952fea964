"""Nodes over sockets, each in a process of its own: some slow, some frozen, some killed. No wait is without an end."""

import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import time

import numpy as np
import pytest
from tables import every_case
from tiers import in_tiers

from elephant.errors import NetworkError, ProtocolError
from elephant.gossip.exchange import Refusal
from elephant.gossip.node import GossipNode, read_model
from elephant.gossip.peers import CHOICES
from elephant.gossip.weights import WEIGHTS
from elephant.net import stream, tls
from elephant.net.deadline import Deadline
from elephant.net.frames import Message
from elephant.net.stream import Listener, connect

VALUES, WORKERS, EXCHANGE_S = 1000, 4, 0.5
# What a step adds to each of the weights to train with: to those that are shared, it adds as much as their share.
MOVES = {"adpsgd": 1.0, "sgp": 0.0}
TOKEN, RUN_ID = secrets.token_bytes(32), "run"


def node_of(algorithm, partition, values=None, listener=None):
    weights = WEIGHTS[algorithm](np.full(VALUES, float(partition)) if values is None else values, np.zeros(WORKERS))
    node = GossipNode(
        weights,
        (partition, 0),
        listener or Listener.bind("127.0.0.1"),
        token=TOKEN,
        run_id=RUN_ID,
        peer_choice=CHOICES[algorithm](partition, 0),
        state=np.full(2, float(partition)),
        exchange_s=EXCHANGE_S,
    )
    return weights, node


def train(algorithm, partition, pipe, steps, sleep_s):
    """A worker: it exchanges after every step; then it tells what it holds."""
    listener = Listener.bind("127.0.0.1")
    pipe.send(listener.address)
    peers = {(other, 0): address for other, address in enumerate(pipe.recv())}
    weights, node = node_of(algorithm, partition, listener=listener)
    with node:
        node.set_peers(peers)
        for step in range(steps):
            weights.move(np.full(VALUES, MOVES[algorithm], np.float32), partition, step + 1)
            node.exchange()
            if step == 1:
                pipe.send("begun")
            time.sleep(sleep_s)
        node.leave()
        pipe.send((weights.held(), node.exchanges, node.missed, node.waited_s))
        # Others may ask it still.
        pipe.recv()


@contextlib.contextmanager
def workers(algorithm, steps, sleep_s=(0.005,) * WORKERS):
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for partition in range(WORKERS):
        here, there = context.Pipe()
        arguments = (algorithm, partition, there, steps, sleep_s[partition])
        processes.append(context.Process(target=train, args=arguments, daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
    try:
        addresses = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses)
        yield pipes, processes
    finally:
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send("end")
        for process in processes:
            process.join(10)
            process.kill()
            process.join(10)


def result_of(pipe, timeout_s=60):
    """Returns what a worker tells in the end."""
    assert pipe.poll(timeout_s)
    told = pipe.recv()
    return result_of(pipe, timeout_s) if told == "begun" else told


def total(results):
    values = np.sum([held.values for held, *_ in results], axis=0, dtype=np.float64)
    return values.mean(), float(np.ptp(values)), sum(held.share for held, *_ in results)


@pytest.mark.parametrize("algorithm", in_tiers(sorted(WEIGHTS), fast=["sgp"], slow="the same node, other averages"))
def test_nodes_when_one_is_slow_and_one_is_frozen_for_a_while_then_the_sum_is_kept_and_nobody_waits_for_them(algorithm):
    steps = 150
    with workers(algorithm, steps, sleep_s=(0.005, 0.005, 0.005, 0.02)) as (pipes, processes):
        assert pipes[1].poll(30) and pipes[1].recv() == "begun"
        os.kill(processes[1].pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            # Longer than an exchange may take, and than an answerer holds a gift.
            time.sleep(EXCHANGE_S + 3)
        finally:
            os.kill(processes[1].pid, signal.SIGCONT)
        results = [result_of(pipe) for pipe in pipes]
        assert time.monotonic() - began < 40
    mean, spread, share = total(results)
    # All steps of all workers, and what they began with, are there: no exchange has lost or doubled any.
    assert mean == pytest.approx(WORKERS * steps * MOVES[algorithm] + sum(range(WORKERS)), rel=1e-4)
    assert spread < 0.05 and share == pytest.approx(WORKERS)
    # The two that were neither slow nor frozen lost some exchanges' time, and no more.
    assert all(waited_s < 6 * EXCHANGE_S + 3 for _, _, _, waited_s in (results[0], results[2]))
    assert all(exchanges > steps / 4 for _, exchanges, _, _ in (results[0], results[2]))


@pytest.mark.parametrize("algorithm", in_tiers(sorted(WEIGHTS), fast=["sgp"], slow="the same node, other averages"))
def test_nodes_when_one_is_killed_then_the_others_go_on_and_lack_no_more_than_it_held(algorithm):
    steps = 150
    with workers(algorithm, steps) as (pipes, processes):
        assert pipes[1].poll(30) and pipes[1].recv() == "begun"
        time.sleep(0.2)
        processes[1].kill()
        results = [result_of(pipe) for partition, pipe in enumerate(pipes) if partition != 1]
    mean, _, share = total(results)
    lived = WORKERS - 1
    # It had trained no more than all of its steps, and held at most what a worker of the largest weights holds.
    most = steps * MOVES[algorithm] + WORKERS - 1
    assert lived * steps * MOVES[algorithm] * 0.8 < mean < WORKERS * most
    assert share == pytest.approx(lived, abs=1.0) and all(np.isfinite(held.values).all() for held, *_ in results)
    assert all(waited_s < 6 for _, _, _, waited_s in results)


@pytest.mark.parametrize("algorithm", in_tiers(sorted(WEIGHTS), fast=["sgp"], slow="the same node, other averages"))
def test_nodes_when_keys_are_worn_then_connections_are_made_again_and_no_exchange_is_lost_or_doubled(
    algorithm, monkeypatch
):
    """With a limit of one byte, before every message to a peer that is asked."""
    steps, dialled, dial = 40, multiprocessing.get_context("fork").Value("i"), stream.dial

    def counted(*args, **options):
        with dialled.get_lock():
            dialled.value += 1
        return dial(*args, **options)

    # Workers are forked, and have these.
    monkeypatch.setattr(tls, "RENEW_BYTES", 1)
    monkeypatch.setattr(stream, "dial", counted)
    monkeypatch.setitem(globals(), "TOKEN", tls.new_token(encryption=True))
    with workers(algorithm, steps) as (pipes, _):
        results = [result_of(pipe) for pipe in pipes]
    mean, spread, share = total(results)
    assert mean == pytest.approx(WORKERS * steps * MOVES[algorithm] + sum(range(WORKERS)), rel=1e-4)
    assert spread < 0.05 and share == pytest.approx(WORKERS)
    exchanges = sum(exchanges for _, exchanges, _, _ in results)
    assert exchanges > WORKERS * steps / 4
    # An offer and a confirmation each.
    assert dialled.value >= exchanges


def test_node_when_its_weights_are_read_then_they_are_those_to_train_with_its_steps_and_statistics():
    weights, node = node_of("sgp", 2)
    with node:
        weights.give(weights.offer())
        weights.move(np.ones(VALUES, np.float32), 2, 7)
        node.set_state(np.array([5.0, 6.0]))
        arguments = {"token": TOKEN, "run_id": RUN_ID, "num_values": VALUES, "num_partitions": WORKERS}
        model = read_model(node.address, Deadline(5, "reading"), **arguments)
        assert model.parcel.steps.tolist() == [0, 0, 7, 0] and model.state.tolist() == [5.0, 6.0]
        assert np.array_equal(model.parcel.values, np.full(VALUES, 3.0))
        with pytest.raises(ProtocolError, match="Expected float32 weights of length 3 and 4 int64 steps"):
            read_model(node.address, Deadline(5, "reading"), **{**arguments, "num_values": 3})


def test_node_when_it_has_left_then_refuses_and_when_its_peer_is_gone_then_goes_on_at_once():
    weights, node = node_of("adpsgd", 0)
    _, other = node_of("adpsgd", 1)
    with node, other:
        node.set_peers({(1, 0): other.address})
        assert node.exchange() and np.array_equal(weights.held().values, np.full(VALUES, 0.5))
        other.leave()
        assert not node.exchange() and node.missed == 1
        other.close()
        began = time.monotonic()
        assert not node.exchange() and time.monotonic() - began < 0.4
        # It is left alone for a while then.
        assert not node.exchange() and node.missed == 2


@every_case(("value", "share"), [(np.nan, 0.5), (np.inf, 0.5), (1.0, np.nan), (1.0, np.inf), (1.0, -0.5)])
def test_node_when_what_a_peer_offers_is_not_finite_then_takes_none_of_it(value, share):
    weights, node = node_of("sgp", 0)
    offer = Message(
        kind="Offer",
        fields={"partition": 1, "attempt": 0, "share": share},
        arrays=(np.full(VALUES, value, np.float32), np.zeros(WORKERS, np.int64)),
    )
    deadline = Deadline(20, "the test")
    with node, connect(node.address, TOKEN, f"gossip/{RUN_ID}", deadline) as peer:
        peer.send(offer, deadline)
        with pytest.raises(NetworkError):
            peer.send(Message(kind="Confirm"), deadline)
            peer.receive(deadline)
    assert np.isfinite(weights.held().values).all() and weights.held().share == 1.0


def test_asker_when_it_falls_silent_after_its_offer_then_its_gift_is_let_go_and_others_are_answered():
    weights, node = node_of("adpsgd", 0)
    held = weights.held()
    offer = Message(
        kind="Offer",
        fields={"partition": 1, "attempt": 0, "share": 0.0},
        arrays=(np.full(VALUES, 8.0, np.float32), np.zeros(WORKERS, np.int64)),
    )
    deadline = Deadline(20, "the test")
    with node, connect(node.address, TOKEN, f"gossip/{RUN_ID}", deadline) as silent:
        silent.send(offer, deadline)
        assert silent.receive(deadline).kind == "Reply"
        with connect(node.address, TOKEN, f"gossip/{RUN_ID}", deadline) as other:
            other.send(offer, deadline)
            refused = other.receive(deadline)
            assert (refused.kind, refused.fields["reason"]) == ("Refused", Refusal.BUSY.value)
            with pytest.raises(NetworkError):
                silent.receive(deadline)
            assert np.array_equal(weights.held().values, held.values)
            other.send(offer, deadline)
            assert other.receive(deadline).kind == "Reply"
            other.send(Message(kind="Confirm"), deadline)
            assert other.receive(deadline).kind == "Done"
    assert np.array_equal(weights.held().values, np.full(VALUES, 4.0))


def test_stranger_when_it_offers_other_weights_or_knows_no_token_then_changes_nothing():
    weights, node = node_of("adpsgd", 0)
    with node:
        deadline = Deadline(10, "the test")
        with connect(node.address, TOKEN, f"gossip/{RUN_ID}", deadline) as stream:
            fields = {"partition": 1, "attempt": 0, "share": 0.0}
            stream.send(Message(kind="Offer", fields=fields, arrays=(np.zeros(3, np.float32),)), deadline)
            with pytest.raises(NetworkError):
                stream.receive(deadline)
        with pytest.raises(NetworkError):
            connect(node.address, secrets.token_bytes(32), f"gossip/{RUN_ID}", Deadline(2, "the test"))
        with socket.create_connection(node.address) as plain:
            plain.sendall(b"offer")
        assert np.array_equal(weights.held().values, np.zeros(VALUES))
