"""Rounds: every order, loss and repetition gives the bits of an undisturbed run, and what one process gives."""

import dataclasses
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import until

from elephant.errors import ConfigurationError, NetworkError, ProtocolError, ServerFailedError
from elephant.parameter_server.layout import Layout, ServerSpec
from elephant.parameter_server.protocol import RequestHeader, RequestKind, Status
from elephant.parameter_server.push_log import Entry
from elephant.parameter_server.rounds import Rounds
from elephant.parameter_server.server import ParameterServer
from elephant.parameter_server.store import SnapshotImage

FEATURES = 20
LAYOUT = Layout([("w", (FEATURES,))])
BATCH, EPOCHS, RATE = 4, 3, 0.01
X = np.random.default_rng(0).normal(size=(61, FEATURES)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=61).astype(np.float32)
SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(lambda sizes: 0 < sum(sizes) <= 61)


def gradient(weights, rows):
    """The mean gradient of a linear model over some rows, as a flat update."""
    flat = LAYOUT.zeros()
    flat[:FEATURES] = 2 * X[rows].T @ (X[rows] @ weights[:FEATURES] - Y[rows]) / np.float32(len(rows))
    return flat


class Partitions:
    """Rows of each partition, and what one process makes of their global batches."""

    def __init__(self, sizes):
        self.rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        self.steps = [-(-len(rows) // BATCH) for rows in self.rows]
        self.weights = {}
        weights = np.zeros(FEATURES)
        for epoch in range(EPOCHS):
            for step in range(max(self.steps)):
                self.weights[epoch, step] = weights
                rows = np.concatenate([self.batch(partition, step) for partition in range(len(sizes))])
                weights = weights - RATE * 2 * X[rows].T @ (X[rows] @ weights - Y[rows]) / len(rows)
        self.weights[EPOCHS, 0] = weights

    def batch(self, partition, step):
        return self.rows[partition][step * BATCH : (step + 1) * BATCH]


class Worker:
    """What one attempt at a partition knows."""

    def __init__(self, done):
        self.done, self.weights, self.left = done, None, False


class Fit:
    """A fit in rounds whose events come one at a time, in an order of chance, without sockets and threads.

    Args:
        lossy: Whether workers and the server are lost on the way, and pushes come twice.
    """

    def __init__(self, sizes, seed, *, lossy, most_held_bytes=None):
        self.of, self.chance, self.lossy = Partitions(sizes), random.Random(seed), lossy
        self.most_held_bytes = most_held_bytes
        self.attempts = dict.fromkeys(range(len(sizes)), 0)
        self.reported = {partition: 0 for partition, steps in enumerate(self.of.steps) if steps}
        self.opened = 1
        self.serve(SnapshotImage(values=LAYOUT.zeros(), state=np.empty(0)))
        self.kept = self.image()

    def serve(self, image):
        spec = ServerSpec(
            run_id="run", layout=LAYOUT, first_value=0, num_values=LAYOUT.num_values,
            rule={"name": "sgd", "learning_rate": RATE}, rounds_from=0, num_partitions=len(self.attempts),
        )  # fmt: skip
        self.server = ParameterServer(spec, dataclasses.replace(image, values=image.values.copy()))
        if self.most_held_bytes is not None:
            self.server.rounds = Rounds(
                len(self.attempts), LAYOUT.num_values, 0, self.server.push_log.entries(),
                most_held_bytes=self.most_held_bytes,
            )  # fmt: skip
        self.server.open_epochs(self.opened)
        self.workers = {partition: self.greet(partition) for partition in self.attempts}

    def greet(self, partition):
        entry = self.server.push_log.register(partition, self.attempts[partition], self.of.steps[partition])
        self.server.enter(partition, entry)
        return Worker(entry.step)

    def image(self):
        image = self.server.image()
        kept = {"values": image.values.copy(), "slots": tuple(slot.copy() for slot in image.slots)}
        return SnapshotImage(
            **kept, state=image.state, entries=image.entries, iterations=image.iterations, updates=image.updates
        )

    def run(self):
        while not all(worker.left for worker in self.workers.values()):
            event = self.chance.random() if self.lossy else 1.0
            partition = self.chance.choice(list(self.workers))
            if event < 0.01:
                self.serve(self.kept)
            elif event < 0.03:
                self.kept = self.image()
            elif event < 0.06:
                self.attempts[partition] += 1
                self.workers[partition] = self.greet(partition)
            else:
                self.work(partition)
        return self.server.store.values[:FEATURES].copy()

    def work(self, partition):
        worker, steps = self.workers[partition], self.of.steps[partition]
        if worker.left or (worker.weights is None and not self.server.rounds.may_go_on(partition) and steps):
            return
        if worker.weights is None:
            epoch, step = divmod(worker.done, steps) if steps else (EPOCHS, 0)
            if steps:
                np.testing.assert_allclose(self.server.store.values[:FEATURES], self.of.weights[epoch, step], atol=1e-5)
                self.reported[partition] = max(self.reported[partition], epoch)
                self.opened = max(self.opened, min(self.reported.values()) + 1)
                self.server.open_epochs(self.opened)
            if epoch == EPOCHS:
                self.server.finish(partition)
                worker.left, self.kept = True, self.image()
                return
            worker.weights = self.server.store.values.copy()
            return
        rows = self.of.batch(partition, worker.done % steps)
        for status in (Status.OK, Status.DUPLICATE)[: 1 + (self.lossy and self.chance.random() < 0.2)]:
            push = RequestHeader(
                kind=RequestKind.PUSH, partition=partition, attempt=self.attempts[partition], step=worker.done + 1,
                rate=float(len(rows)),
            )  # fmt: skip
            self.server.rounds.check(push)
            assert self.server.settle(push, gradient(worker.weights, rows), finite=True) is status
        worker.done, worker.weights = worker.done + 1, None


@given(sizes=SIZES, seed=st.integers(0, 2**32))
def test_weights_when_workers_and_the_server_are_lost_then_have_the_bits_of_a_run_without_losses(sizes, seed):
    undisturbed = Fit(sizes, 0, lossy=False)
    expected = undisturbed.run()
    np.testing.assert_allclose(expected, undisturbed.of.weights[EPOCHS, 0], atol=1e-5)
    assert undisturbed.server.updates == EPOCHS * max(undisturbed.of.steps)
    assert Fit(sizes, seed, lossy=True).run().tobytes() == expected.tobytes()


@given(sizes=SIZES, seed=st.integers(0, 2**32))
def test_weights_when_contributions_are_added_as_they_come_then_equal_one_process(sizes, seed):
    fit = Fit(sizes, seed, lossy=True, most_held_bytes=0)
    np.testing.assert_allclose(fit.run(), fit.of.weights[EPOCHS, 0], atol=1e-5)


def test_round_when_the_epoch_is_not_open_then_waits_for_the_driver():
    rounds = Rounds(1, 1, 2, {})
    rounds.enter(0, steps=5, done=0)
    rounds.add(0, 11, 2.0, np.ones(1, np.float32), Entry())
    rounds.open_epochs(2)
    assert rounds.take() is None and not rounds.may_go_on(0)
    rounds.open_epochs(3)
    assert rounds.take() == [1.0]
    rounds.close()
    assert rounds.may_go_on(0)


def test_round_when_a_gradient_is_not_finite_then_is_the_mean_of_the_others():
    rounds = Rounds(2, 1, 0, {})
    for partition in (0, 1):
        rounds.enter(partition, steps=2, done=0)
    rounds.open_epochs(1)
    rounds.add(0, 1, 0.0, np.array([np.nan], np.float32), Entry())
    rounds.add(1, 1, 4.0, np.array([3.0], np.float32), Entry())
    assert rounds.take() == [3.0]
    rounds.close()
    for partition in (0, 1):
        rounds.add(partition, 2, 0.0, np.array([np.inf], np.float32), Entry())
    assert not len(rounds.take())


@pytest.mark.parametrize(
    ("push", "message"),
    [
        ({"step": 1, "call": 1}, "one update for each batch"),
        ({"step": 1, "rate": 0.0}, "with the number of its rows"),
        ({"step": 1, "rate": float("nan")}, "with the number of its rows"),
        ({"step": 3}, "Expected step 1 of partition 0, because no batch is left out .* Received: step 3"),
    ],
    ids=str,
)
def test_push_when_it_belongs_to_no_round_then_is_refused(push, message):
    rounds = Rounds(1, 1, 0, {})
    rounds.enter(0, steps=5, done=0)
    with pytest.raises(ProtocolError, match=message):
        rounds.check(RequestHeader(kind=RequestKind.PUSH, **{"rate": 4.0, **push}))


# Servers and sockets.
def take_steps(worker, partition, of, first=0):
    """Takes the steps of a partition's first epoch, as a worker does; returns the weights at its end."""
    weights = LAYOUT.zeros()
    worker.pull(weights)
    for step in range(first, of.steps[partition]):
        rows = of.batch(partition, step)
        worker.push_pull(gradient(weights, rows), weights, step=step + 1, rows=len(rows))
    return weights[:FEATURES]


def rounds_of(serve, of, **options):
    """Returns servers of a fit in rounds whose first epoch is open, the driver's connection, and a worker of each."""
    options = {"rule": {"name": "sgd", "learning_rate": RATE}, "rounds_from": 0, **options}
    serving = serve(LAYOUT, num_partitions=len(of.rows), **options)
    control = serving.control()
    control.open_epochs(1)
    workers = [serving.worker(partition, epoch_steps=steps) for partition, steps in enumerate(of.steps)]
    return serving, control, workers


@pytest.fixture
def together():
    """Runs functions side by side."""
    with ThreadPoolExecutor(8, thread_name_prefix="test-rounds") as pool:
        yield pool.submit


def lose(serving, control):
    os.kill(serving.process.process_id, signal.SIGKILL)
    until(lambda: serving.process.restarts == 1, "the server")
    control.remind()


def waits(control, partition, step):
    until(lambda: control.statistics()["positions"].get(str(partition)) == step, "the push")


@pytest.mark.parametrize("count", [1, 2])
def test_workers_when_more_than_the_servers_have_buffers_then_all_get_the_weights_of_one_process(
    serve, together, count
):
    of = Partitions([30, 7, 24])
    _, _, workers = rounds_of(serve, of, count=count)
    calls = [together(take_steps, worker, partition, of) for partition, worker in enumerate(workers)]
    for call in calls:
        np.testing.assert_allclose(call.result(60), of.weights[1, 0], atol=1e-5)


def test_worker_when_it_is_lost_while_it_waits_then_the_next_attempt_gets_the_end_of_the_round(serve, together):
    of = Partitions([8, 8])
    serving, control, (lost, other) = rounds_of(serve, of)
    call = together(take_steps, lost, 0, of)
    waits(control, 0, 1)
    lost.interrupt()
    assert isinstance(call.exception(60), NetworkError)
    again = serving.worker(0, 2, epoch_steps=2)
    assert again.position == 1
    calls = [together(take_steps, again, 0, of, first=1), together(take_steps, other, 1, of)]
    for call in calls:
        np.testing.assert_allclose(call.result(60), of.weights[1, 0], atol=1e-5)


def test_server_when_it_is_lost_in_mid_round_then_comes_back_without_it_and_gets_it_again(serve, together):
    of = Partitions([8, 8])
    serving, control, (first, second) = rounds_of(serve, of, snapshot_seconds=0.01)
    calls = [together(take_steps, first, 0, of)]
    waits(control, 0, 1)
    lose(serving, control)
    calls.append(together(take_steps, second, 1, of))
    for call in calls:
        np.testing.assert_allclose(call.result(60), of.weights[1, 0], atol=1e-5)


def test_worker_when_it_comes_back_with_other_rows_then_is_refused(serve):
    serving, _, _ = rounds_of(serve, Partitions([8, 8]))
    with pytest.raises(ConfigurationError, match="partition 0 with the 2 steps .* Received: 3. The DataFrame is"):
        serving.worker(0, 2, epoch_steps=3)


def test_rate_when_it_is_set_between_epochs_then_a_server_that_is_lost_does_not_go_back_behind_it(serve, together):
    of = Partitions([4, 4])
    serving, control, workers = rounds_of(serve, of)
    for call in [together(take_steps, worker, partition, of) for partition, worker in enumerate(workers)]:
        call.result(60)
    control.set_rate(0.5)
    lose(serving, control)
    assert control.statistics()["updates"] == 1


def test_fit_when_it_is_kept_between_two_epochs_then_has_nothing_of_the_next_one(serve, together):
    of = Partitions([8, 8])
    _, control, workers = rounds_of(serve, of)
    for call in [together(take_steps, worker, partition, of) for partition, worker in enumerate(workers)]:
        call.result(60)
    ahead = [together(worker.push_pull, LAYOUT.zeros(), LAYOUT.zeros(), step=3, rows=4) for worker in workers]
    for partition in (0, 1):
        waits(control, partition, 3)
    kept = control.keep()
    np.testing.assert_allclose(kept.fetched.values[:FEATURES], of.weights[1, 0], atol=1e-5)
    assert kept.ledgers == ({0: (2, 0, 0), 1: (2, 0, 0)},)
    control.stop()
    assert all(call.result(60).stop for call in ahead)
    assert control.statistics()["updates"] == 2


def test_fit_when_it_is_given_up_then_workers_that_wait_get_the_reason(serve, together):
    of = Partitions([8, 8])
    _, control, (waiting, other) = rounds_of(serve, of, max_refused=0)
    call = together(take_steps, waiting, 0, of)
    waits(control, 0, 1)
    with pytest.raises(ServerFailedError, match="updates of finite numbers"):
        other.push(np.full(LAYOUT.num_values, np.nan, np.float32), step=1, rows=4)
    assert isinstance(call.exception(60), ServerFailedError)
