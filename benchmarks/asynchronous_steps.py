"""What the exchange with a parameter server adds to a training step, and how much of it hides behind the computation.

::

    python benchmarks/asynchronous_steps.py
    python benchmarks/asynchronous_steps.py --batch-sizes 64 --repetitions 21

One worker, as a fit's training process runs it with one thread for TensorFlow, and a server on loopback that
applies Adam. Four contenders take turns, an epoch each, the first of which is not counted: the exchange before
the next step, the exchange in the background, and two that exchange nothing in a step. Of these, ``alone`` packs the
gradients and hands them to nobody; ``local`` applies its own optimizer and exchanges once an epoch. What counts
is the one that makes the background look worse. Prints one line of JSON per batch size.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import pickle
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from report import Measurement, report
from servers import RUN_ID, Place, running
from steps import Contender, epochs_in_turns
from team import ANYWHERE, Member
from training import TIMEOUT_S, Epoch, Training, pickled_source, rank_environment, rows_of, schema_of, shard_of
from workloads import WORKLOADS

from elephant.parameter_server.layout import Layout

WORKLOAD = "mlp_2m"
STEPS = 40
# Of the time that the exchange adds when it is not overlapped.
TARGET = 0.5


@dataclass(frozen=True)
class Described:
    """What a server has to know of a model: `Layout.to_json`, the rule of its optimizer, and its weights."""

    layout: Any
    rule: Mapping[str, Any]
    values: np.ndarray


@functools.cache
def described(workload: str) -> Described:
    """Returns it of a workload, from a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as driver:
        return driver.submit(_describe, workload).result(TIMEOUT_S)


def _describe(workload: str) -> Described:
    from elephant.modeling.optimizer_translation import translate
    from elephant.modeling.variables import layout_of, read_weights

    model = WORKLOADS[workload].build()
    layout = layout_of(model)
    model.optimizer.build(model.trainable_variables)
    return Described(layout.to_json(), translate(model.optimizer, layout), read_weights(model, layout))


class Nobody:
    """Stands where a worker's connections are: takes what is pushed, and has nothing newer than the first weights.

    Args:
        values: The first weights.
    """

    position = 0
    waited_s = 0.0

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def pull(self, out: np.ndarray) -> Any:
        """Gives the first weights."""
        np.copyto(out, self._values)
        return _reply(modified=True)

    def push_pull(self, update: np.ndarray, out: np.ndarray, *, step: int, call: int = 0) -> Any:
        """Does nothing."""
        return _reply(modified=False)

    def average_state(self, state: np.ndarray, weight: float) -> np.ndarray:
        """Returns the state."""
        return state

    def close(self, *, finished: bool) -> None:
        """Does nothing."""


def _reply(*, modified: bool) -> Any:
    from elephant.parameter_server.client import Reply

    return Reply(version=1, rate=float("nan"), stop=False, modified=modified, refused=False)


class Turns:
    """Stands where a worker's connection to the driver is: lets each epoch begin when the member's turn has come."""

    def __init__(self, member: Member, epochs: int) -> None:
        self._member, self._epochs = member, epochs
        self._turns = member.turns()
        self._began = self._cpu = 0.0

    def wait(self) -> None:
        """Returns when the next epoch may begin."""
        if next(self._turns, None) is None:
            raise SystemExit("the team was closed in mid-training")
        self._began, self._cpu = time.monotonic(), time.process_time()

    def epoch_part(self, part: Any) -> None:
        """An epoch has ended; all that comes before the next one is the next one's."""
        interval, cpu_s = (self._began, time.monotonic()), time.process_time() - self._cpu
        self._member.reply(Epoch(interval, cpu_s, 0))
        if part.epoch + 1 < self._epochs:
            self.wait()

    def send(self, event: Any) -> None:
        """Nobody looks."""

    def request_stop(self) -> None:
        """Nobody asks for it."""


def serve_worker(
    member: Member, training: Training, *, place: Place | None, values: np.ndarray, layout: Any, background: bool
) -> None:
    """The work of one worker, as its training process does it; a turn is an epoch."""
    from elephant.config import AsynchronousOptions, FitConfig, Timeouts
    from elephant.rank.asynchronous.worker_fit import train_worker
    from elephant.rank.job import TrainingJob
    from elephant.rank.rank_info import RankInfo

    member.exchange(None)
    config = FitConfig(
        mode="asynchronous",
        epochs=training.epochs,
        batch_size=training.batch_size,
        asynchronous=AsynchronousOptions(background_exchange=background),
        **(training.options or {}),
    )
    schema = schema_of(training)
    shard = shard_of(schema, *rows_of(member, training))
    job = TrainingJob(pickle.loads(training.source), (), config, schema)
    # Its shard, driver and servers are opened here and not by it.
    rank_info = RankInfo(
        rank=0, num_rows=[training.rows], num_marked=[0], row_shapes={}, shard=None,
        driver=("", 0), run_id=RUN_ID, token="", servers=[], layout=layout, host="", device="CPU", threads=1,
        timeouts=Timeouts(),
    )  # fmt: skip
    turns = Turns(member, training.epochs)
    with contextlib.closing(shard):
        client: Any = Nobody(values) if place is None else place.client(0)
        turns.wait()
        train_worker(job, shard, rank_info, client, turns)


def measure(batch_size: int, repetitions: int) -> None:
    """Compares the four contenders at one batch size, and prints it."""
    about = described(WORKLOAD)
    layout = Layout.from_json(about.layout)
    training = Training(
        workload=WORKLOAD, rows=STEPS * batch_size, batch_size=batch_size, epochs=0, source=pickled_source(WORKLOAD)
    )
    local = Training(**{**vars(training), "options": {"frequency": "epoch"}})
    with contextlib.ExitStack() as stack:

        def contender(training: Training, rule: Any = None, *, background: bool = False) -> Contender:
            place = rule and stack.enter_context(running(layout, rule, values=about.values))
            work = functools.partial(
                serve_worker, place=place, values=about.values, layout=about.layout, background=background
            )
            return Contender(work, [ANYWHERE], training, rank_environment())

        contenders = {
            "plain": contender(training, about.rule),
            "overlapped": contender(training, about.rule, background=True),
            "alone": contender(training),
            "local": contender(local, "add"),
        }
        told = epochs_in_turns(contenders, repetitions)
    report(added(batch_size, told, repetitions))


def added(batch_size: int, told: Mapping[str, list[list[Epoch]]], repetitions: int) -> Measurement:
    """Returns the line of one batch size."""
    ms = {name: statistics.median(team[0].seconds for team in epochs) / STEPS * 1000 for name, epochs in told.items()}
    cpu = {name: statistics.median(team[0].cpu_s for team in epochs) / STEPS * 1000 for name, epochs in told.items()}
    shares = {name: (ms["overlapped"] - ms[name]) / (ms["plain"] - ms[name]) for name in ("alone", "local")}
    return Measurement(
        measure="overlapped_exchange_added_time",
        case={"workload": WORKLOAD, "batch_size": batch_size, "optimizer": "adam"},
        ratio=max(shares.values()),
        target=TARGET,
        at_least=False,
        medians={
            **{f"{name}_ms_per_step": value for name, value in ms.items()},
            **{f"{name}_cpu_ms_per_step": value for name, value in cpu.items()},
            **{f"share_of_{name}": value for name, value in shares.items()},
        },
        repetitions=repetitions,
    )


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--repetitions", type=int, default=11)
    options = parser.parse_args()
    for batch_size in options.batch_sizes:
        measure(batch_size, options.repetitions)


if __name__ == "__main__":
    main()
