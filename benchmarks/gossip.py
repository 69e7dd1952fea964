"""What gossip costs in accuracy: workers of which one is slow, frozen or killed, and labels that lie together.

::

    python benchmarks/gossip.py                              # five seeds of all cases: a quarter of an hour
    python benchmarks/gossip.py --seeds 1 --cases killed
    python benchmarks/gossip.py --estimator                  # KerasEstimator on Spark in place of the nodes alone

Four workers, a process each, train on a quarter of UCI's digits as scikit-learn carries them, with the nodes, exchanges
and algorithms of ``mode="gossip"``. A perceptron of 64 hidden units is written in numpy, so that a case takes seconds,
and every step sleeps as long as a gradient might take. A fifth of the rows is held out; seed by seed, initial weights
and order of rows differ. One process trains on the same rows for as many epochs with the same batch size and rate.

* ``equal``: all go at one pace.
* ``slow``: one takes four times as long for a step.
* ``frozen``: one is stopped in mid-training, for longer than an exchange may take.
* ``killed``: one is killed after a quarter of its steps. One that begins from the weights of a peer takes its place.
* ``sorted``: no two workers have the same classes.

With ``--estimator`` the same perceptron is a Keras model that `elephant.KerasEstimator` trains on four executors of
this machine, and one process is plain Keras: the cases ``equal`` and ``sorted``.

Prints one line of JSON per case: the accuracy of the average of the weights on the rows that were held out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from elephant.errors import NetworkError
from elephant.gossip.node import GossipNode, PeerModel, read_model
from elephant.gossip.peers import CHOICES
from elephant.gossip.weights import WEIGHTS, Parcel
from elephant.net.addresses import Address
from elephant.net.deadline import Deadline
from elephant.net.stream import Listener

WORKERS, EPOCHS, BATCH, HIDDEN = 4, 40, 32, 64
RATE, MOMENTUM, GRADIENT_S, SLOWER = 0.05, 0.9, 0.004, 4
CASES = ("equal", "slow", "frozen", "killed", "sorted")
# The worker that something happens to, and how long it is frozen.
ODD, FROZEN_S = 3, 4.0
RUN_ID, LONGEST_S = "gossip", 120.0


@dataclass(frozen=True)
class Rows:
    """Images as (rows, 64) float32 in [0, 1], and their digits."""

    x: np.ndarray
    y: np.ndarray

    def part(self, number: int, *, by_label: bool) -> Rows:
        """Returns the rows of one of the workers."""
        order = np.argsort(self.y, kind="stable") if by_label else np.arange(len(self.y))
        own = np.array_split(order, WORKERS)[number]
        return Rows(self.x[own], self.y[own])


def digits() -> tuple[Rows, Rows]:
    """Returns the rows to train on, in an order without meaning, and those that are held out."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    return Rows(x[:1440], y[:1440]), Rows(x[1440:], y[1440:])


class Perceptron:
    """A perceptron of one hidden layer with a momentum of its own, as one flat vector of float32."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        first = random.normal(size=(64, HIDDEN)) * np.sqrt(2 / 64)
        second = random.normal(size=(HIDDEN, 10)) * np.sqrt(1 / HIDDEN)
        parts = [first.ravel(), np.zeros(HIDDEN), second.ravel(), np.zeros(10)]
        self.values = np.concatenate(parts).astype(np.float32)
        self._velocity = np.zeros_like(self.values)

    def _scores(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ends = np.cumsum([64 * HIDDEN, HIDDEN, HIDDEN * 10])
        first, bias, second, last = np.split(self.values, ends)
        hidden = np.maximum(x @ first.reshape(64, HIDDEN) + bias, 0)
        second = second.reshape(HIDDEN, 10)
        return hidden, hidden @ second + last, second

    def step(self, x: np.ndarray, y: np.ndarray) -> None:
        """Takes a step of SGD with momentum on a batch's cross-entropy."""
        hidden, scores, second = self._scores(x)
        error = np.exp(scores - scores.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(y)), y] -= 1
        error /= len(y)
        below = (error @ second.T) * (hidden > 0)
        parts = [(x.T @ below).ravel(), below.sum(axis=0), (hidden.T @ error).ravel(), error.sum(axis=0)]
        self._velocity = MOMENTUM * self._velocity - RATE * np.concatenate(parts)
        self.values = (self.values + self._velocity).astype(np.float32)

    def accuracy(self, rows: Rows) -> float:
        """Returns the share of rows that it tells right."""
        return float(np.mean(self._scores(rows.x)[1].argmax(axis=1) == rows.y))


def batches(rows: Rows, seed: int, first: int = 0) -> Iterator[Rows]:
    """Yields the batches of all epochs in the seed's order, from one of them on."""
    steps = -(-len(rows.y) // BATCH)
    for step in range(first, EPOCHS * steps):
        epoch, place = divmod(step, steps)
        own = np.random.default_rng((seed, epoch)).permutation(len(rows.y))[place * BATCH : (place + 1) * BATCH]
        yield Rows(rows.x[own], rows.y[own])


def work(
    algorithm: str, number: int, attempt: int, rows: Rows, seed: int, case: str, token: bytes, pipe: Connection
) -> None:
    """Trains one worker; the pipe gives it its peers' addresses whenever they change."""
    listener = Listener.bind("127.0.0.1")
    pipe.send(listener.address)
    model, peers = Perceptron(seed), pipe.recv()
    started = Parcel(model.values, 1.0, np.zeros(WORKERS, np.int64))
    if attempt:
        started = _model_of_a_peer(peers, token, len(model.values)).parcel
    weights = WEIGHTS[algorithm](started.values, started.steps)
    node = GossipNode(
        weights,
        (number, attempt),
        listener,
        token=token,
        run_id=RUN_ID,
        peer_choice=CHOICES[algorithm](number, seed),
        state=np.empty(0),
        exchange_s=1.0,
    )
    first = int(started.steps[number])
    pause_s = GRADIENT_S * (SLOWER if case == "slow" and number == ODD else 1)
    with node:
        node.set_peers(peers)
        for step, batch in enumerate(batches(rows, seed * WORKERS + number, first), start=first + 1):
            model.values = weights.trained().values
            before = model.values
            model.step(batch.x, batch.y)
            weights.move(model.values - before, number, step)
            time.sleep(pause_s)
            node.exchange()
            while pipe.poll(0):
                node.set_peers(pipe.recv())
            pipe.send(("step", step))
        node.leave()
        held = weights.held()
        pipe.send(("end", held.values, held.share, node.exchanges, node.missed))
        while pipe.recv() is not None:
            pass


def _model_of_a_peer(peers: Mapping[tuple[int, int], Address], token: bytes, length: int) -> PeerModel:
    for address in peers.values():
        with contextlib.suppress(NetworkError):
            return read_model(
                address, Deadline(5, "reading"), token=token, run_id=RUN_ID, num_values=length, num_partitions=WORKERS
            )
    raise SystemExit("no peer told its weights")


class Team:
    """The workers' processes, and what they have told."""

    def __init__(self, algorithm: str, case: str, seed: int, rows: Rows) -> None:
        self._how = (algorithm, case, seed, rows)
        self._token = secrets.token_bytes(32)
        self._context = multiprocessing.get_context("fork")
        self._processes: dict[int, ForkProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._peers: dict[tuple[int, int], Address] = {}
        self._ends: dict[int, tuple[Any, ...]] = {}

    def start(self, number: int, attempt: int = 0) -> None:
        """Starts a worker, which waits for its peers."""
        algorithm, case, seed, rows = self._how
        here, there = self._context.Pipe()
        part = rows.part(number, by_label=case == "sorted")
        arguments = (algorithm, number, attempt, part, seed, case, self._token, there)
        self._processes[number] = self._context.Process(target=work, args=arguments, daemon=True)
        self._processes[number].start()
        there.close()
        self._pipes[number] = here
        self._peers = {member: address for member, address in self._peers.items() if member[0] != number}
        self._peers[number, attempt] = here.recv()

    def tell(self) -> None:
        """Tells all workers that run who their peers are."""
        for number, pipe in self._pipes.items():
            if number not in self._ends:
                pipe.send(self._peers)

    def train(self) -> list[tuple[Any, ...]]:
        """Returns what each worker has told in the end, after something has happened to one of them."""
        case, steps = self._how[1], EPOCHS * -(-len(self._how[3].y) // WORKERS // BATCH)
        for number in range(WORKERS):
            self.start(number)
        self.tell()
        end, is_over, thaw_at = time.monotonic() + LONGEST_S, case not in ("frozen", "killed"), float("inf")
        while len(self._ends) < WORKERS:
            if time.monotonic() > end:
                raise SystemExit(f"{self._how[:3]} took more than {LONGEST_S} s")
            if time.monotonic() > thaw_at:
                os.kill(self._processes[ODD].pid or 0, signal.SIGCONT)
                thaw_at = float("inf")
            for number, pipe in list(self._pipes.items()):
                told = pipe.recv() if number not in self._ends and pipe.poll(0.001) else ("", 0)
                if told[0] == "end":
                    self._ends[number] = told[1:]
                    self._peers = {member: one for member, one in self._peers.items() if member[0] != number}
                    self.tell()
                elif number == ODD and told[1] > steps / 4 and not is_over:
                    is_over = True
                    if case == "frozen":
                        os.kill(self._processes[ODD].pid or 0, signal.SIGSTOP)
                        thaw_at = time.monotonic() + FROZEN_S
                    else:
                        self._processes[ODD].kill()
                        self.start(ODD, attempt=1)
                        self.tell()
        return list(self._ends.values())

    def close(self) -> None:
        """Ends all processes."""
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes.values():
            process.join(5)
            process.kill()
            process.join(5)


def one_process(seed: int, train: Rows, held_out: Rows) -> float:
    """Returns the accuracy of one process on all rows."""
    model = Perceptron(seed)
    for batch in batches(train, seed):
        model.step(batch.x, batch.y)
    return model.accuracy(held_out)


def of_team(algorithm: str, case: str, seed: int, train: Rows, held_out: Rows) -> tuple[float, float, int, int]:
    """Returns the accuracy of the workers' average, the seconds, exchanges, and those that did not come about."""
    team = Team(algorithm, case, seed, train)
    began = time.perf_counter()
    try:
        ends = team.train()
    finally:
        team.close()
    model = Perceptron(seed)
    values = np.sum([values for values, *_ in ends], axis=0, dtype=np.float64)
    model.values = (values / sum(share for _, share, *_ in ends)).astype(np.float32)
    exchanges, missed = (sum(end[place] for end in ends) for place in (2, 3))
    return model.accuracy(held_out), time.perf_counter() - began, exchanges, missed


def perceptron_of_keras(seed: int) -> Any:
    """Returns the same perceptron as a compiled Keras model."""
    import keras

    model = keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(HIDDEN, "relu"), keras.layers.Dense(10, "softmax")]
    )
    values = np.split(Perceptron(seed).values, np.cumsum([64 * HIDDEN, HIDDEN, HIDDEN * 10]))
    model.set_weights([value.reshape(weight.shape) for value, weight in zip(values, model.weights, strict=True)])
    model.compile(keras.optimizers.SGD(RATE, MOMENTUM), "sparse_categorical_crossentropy")
    return model


class Estimators:
    """Fits of `elephant.KerasEstimator` on Spark, with an executor for each worker."""

    def __init__(self, train: Rows, held_out: Rows) -> None:
        from elephant.cluster.local import local_session

        self._spark, self._train, self._held_out = local_session(WORKERS), train, held_out

    def one_process(self, seed: int) -> float:
        """Returns the accuracy of plain Keras on all rows."""
        import keras

        keras.utils.set_random_seed(seed)
        model = perceptron_of_keras(seed)
        model.fit(self._train.x, self._train.y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
        return self._accuracy(model)

    def of_team(self, algorithm: str, case: str, seed: int) -> tuple[float, float]:
        """Returns the accuracy of a fit in gossip mode, and its seconds."""
        import elephant

        parts = [self._train.part(number, by_label=case == "sorted") for number in range(WORKERS)]
        rows = [[(part.x[row].tolist(), int(part.y[row])) for row in range(len(part.y))] for part in parts]
        given = self._spark.sparkContext.parallelize(rows, WORKERS).flatMap(list)
        frame = self._spark.createDataFrame(given, "features array<float>, label int")
        estimator = elephant.KerasEstimator(
            model=perceptron_of_keras(seed),
            mode="gossip",
            algorithm=algorithm,
            numWorkers=WORKERS,
            epochs=EPOCHS,
            batchSize=BATCH,
            seed=seed,
            verbose=0,
        )
        began = time.perf_counter()
        return self._accuracy(estimator.fit(frame).model), time.perf_counter() - began

    def _accuracy(self, model: Any) -> float:
        scores = model.predict(self._held_out.x, verbose=0)
        return float(np.mean(scores.argmax(axis=1) == self._held_out.y))

    def close(self) -> None:
        """Ends Spark."""
        self._spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--algorithms", nargs="+", choices=sorted(WEIGHTS), default=sorted(WEIGHTS))
    parser.add_argument("--estimator", action="store_true", help="KerasEstimator on Spark, cases equal and sorted")
    arguments = parser.parse_args()
    train, held_out = digits()
    seeds = range(arguments.seeds)
    if arguments.estimator:
        fits = Estimators(train, held_out)
        try:
            alone = [fits.one_process(seed) for seed in seeds]
            _tell("one_process_of_keras", alone)
            for case in [case for case in ("equal", "sorted") if case in arguments.cases]:
                for algorithm in arguments.algorithms:
                    _tell("estimator", alone, case, algorithm, [fits.of_team(algorithm, case, seed) for seed in seeds])
        finally:
            fits.close()
        return
    alone = [one_process(seed, train, held_out) for seed in seeds]
    _tell("one_process", alone)
    for case in arguments.cases:
        for algorithm in arguments.algorithms:
            got = [of_team(algorithm, case, seed, train, held_out) for seed in seeds]
            _tell("gossip", alone, case, algorithm, got, ("exchanges", "missed"))


def _tell(
    measure: str,
    alone: list[float],
    case: str = "",
    algorithm: str = "",
    got: list[Any] | None = None,
    counts: tuple[str, ...] = (),
) -> None:
    """Prints a line: accuracies of one process, or of fits that each have an accuracy, seconds and counts."""
    if got is None:
        line = {"measure": measure, "accuracy": round(statistics.mean(alone), 4), "by_seed": alone}
    else:
        accuracies = [accuracy for accuracy, *_ in got]
        line = {
            "measure": measure,
            "case": case,
            "algorithm": algorithm,
            "accuracy": round(statistics.mean(accuracies), 4),
            "less_than_one_process": round(statistics.mean(alone) - statistics.mean(accuracies), 4),
            "lowest": round(min(accuracies), 4),
            "seconds": round(statistics.median(seconds for _, seconds, *_ in got), 1),
            **{count: sum(one[place] for one in got) for place, count in enumerate(counts, 2)},
        }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
