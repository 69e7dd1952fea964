"""Rows that move from a slow rank to a fast one between epochs: what an elastic fit gains by it.

::

    python benchmarks/moving_rows.py                            # one rank of two with half a core, then equal ranks
    python benchmarks/moving_rows.py --only slow --repetitions 5

Two ranks train together, each on a core of its own. In the case ``slow`` a control group lets the second rank have half
of it, as Kubernetes does with a limit of 0.5: that needs root and the controller ``cpu`` of version 1. A process that
computes on that core would not do where others work, as they would leave it for the other core. Fits take turns: as
they are, and with the balance of virtual shards switched off here, so that every rank keeps the rows that it was dealt.
Compared are the rows per second of the last epochs, by their median, which are after the move where there is one. The
seconds of all epochs, and those of each rank without waiting for the other one, go to the standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import pickle
import secrets
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from report import Measurement, median_ratio, report
from team import Member, Team, seats
from training import TIMEOUT_S, Training, pickled_source, rank_environment, schema_of
from workloads import WORKLOADS, make_images

RANKS = 2
# Epochs of one to three seconds. Batches are large, as what a step takes beside its rows does not move with them.
TRAINING = Training(workload="cnn_400k", rows=2000, batch_size=128, epochs=12)
_CONTROLLER = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 20_000
# After the move: the first ones may be slower.
_COUNTED = 5


class Told:
    """Keeps where a rank's connection to the driver is what it tells of epochs and moves."""

    is_free = True
    state_wanted = False

    def __init__(self) -> None:
        self.events: list[Any] = []

    def send(self, event: Any) -> None:
        """Keeps an event."""
        self.events.append(event)

    def await_receipt(self, timeout_s: float) -> bool:
        """Returns True: nobody looks."""
        return True

    def epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Nobody looks."""

    def keep(self, state: Any) -> None:
        """Nobody looks."""

    def result(self, variables: Any, rows: Any) -> None:
        """Nobody looks."""


def fit_in_pieces(member: Member, training: Training, moves: bool, group: Path | None) -> None:
    """One rank of an elastic fit, as its training process runs it; replies its seconds by epoch, and the moves.

    Args:
        moves: Whether rows may move.
        group: Control group of the second rank; None for none.
    """
    from elephant.collective import form_collective
    from elephant.config import FitConfig
    from elephant.data.piece_balance import PieceBalance
    from elephant.data.schema import PIECE, SCALAR, Field
    from elephant.data.shard import Shard, ShardWriter
    from elephant.data.virtual_shards import number_of_pieces, owner_of
    from elephant.monitor.events import RankEpoch, ShardsMoved
    from elephant.net import Listener
    from elephant.rank.input.piece_reader import plan_of_ranks
    from elephant.rank.job import TrainingJob
    from elephant.rank.synchronous import train_rank

    if group is not None and member.rank == 1:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    # A shard gives memory back, which a team keeps.
    ctypes.CDLL(None, use_errno=True).munlockall()
    if not moves:
        PieceBalance.epoch_ended = lambda *_: None  # type: ignore[method-assign]
    schema = replace(schema_of(training), piece=Field(PIECE, ("piece",), "int32", SCALAR))
    config = FitConfig(num_workers=(1, RANKS), epochs=training.epochs, batch_size=training.batch_size)
    job = TrainingJob(pickle.loads(training.source), (), config.changed(num_workers=RANKS), schema)
    arrays, told = make_images(training.rows * RANKS), Told()
    pieces = np.random.default_rng(3).integers(0, number_of_pieces(RANKS), training.rows * RANKS).astype("int32")
    mine = np.flatnonzero(np.array([owner_of(piece, RANKS) for piece in pieces]) == member.rank)
    workload = WORKLOADS[training.workload]
    features = workload.rows_of(arrays["x_train"][mine]).reshape(len(mine), *workload.row_shape)
    columns = {"features": features, "label": arrays["y_train"][mine], PIECE: pieces[mine]}
    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as folder:
        path = Path(folder) / "shard"
        with ShardWriter(path, schema) as writer:
            writer.write_values(columns, len(mine))
        shard = Shard(path, schema, {"features": (features[0].size,)})
        with Listener.bind("127.0.0.1") as listener:
            addresses, tokens = zip(*member.exchange((listener.address, secrets.token_bytes(32))), strict=True)
            collective = form_collective(member.rank, addresses, listener, tokens[0], "benchmark", TIMEOUT_S)
        with collective:
            plan = plan_of_ranks(job, None, shard, collective)  # type: ignore[arg-type]
            train_rank(job, shard, plan, collective, told)  # type: ignore[arg-type]
        ended = [event for event in told.events if isinstance(event, RankEpoch)]
        busy = [round(event.training_s - (event.training_wait_s or 0.0), 2) for event in ended]
        print(f"rank {member.rank} alone: {busy} s", file=sys.stderr, flush=True)
        epochs = [event.seconds for event in ended]
        moved = [(event.epoch, event.rows) for event in told.events if isinstance(event, ShardsMoved)]
        member.reply((epochs, moved))


@contextlib.contextmanager
def _half_a_core() -> Iterator[Path]:
    """Yields a control group whose processes have half of a core together, for the time of a ``with`` block."""
    group = _CONTROLLER / f"elephant-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(_PERIOD_US // 2))
        yield group
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            (_CONTROLLER / "cgroup.procs").write_text(process)
        group.rmdir()


def seconds_of_fit(
    training: Training, moves: bool, group: Path | None
) -> tuple[list[float], list[tuple[int, list[int]]]]:
    """Returns the seconds of each epoch of a fit, by its slowest rank, and its moves: epoch, and rows by rank."""
    with Team(fit_in_pieces, seats(RANKS), training, moves, group, environment=rank_environment()) as team:
        team.exchange()
        told = team.replies()
    return [max(seconds) for seconds in zip(*(epochs for epochs, _ in told), strict=True)], told[0][1]


def measure(name: str, repetitions: int) -> None:
    """Reports one case."""
    training = replace(TRAINING, source=pickled_source(TRAINING.workload))
    rates: dict[bool, list[float]] = {True: [], False: []}
    counts, last_rows, moved_at = list[int](), list[float](), list[float]()
    with _half_a_core() if name == "slow" else contextlib.nullcontext() as group:
        for _ in range(repetitions):
            for moves in (True, False):
                seconds, moved = seconds_of_fit(training, moves, group)
                print(f"{name}, moves={moves}: {[round(one, 2) for one in seconds]} s, {moved}", file=sys.stderr)
                rate = training.rows * RANKS / statistics.median(seconds[-_COUNTED:])
                rates[moves].append(rate)
                if moves:
                    counts.append(len(moved))
                    last_rows.append(moved[-1][1][1] if moved else training.rows)
                    moved_at.append(moved[0][0] + 1 if moved else 0)
    is_slow = name == "slow"
    report(
        Measurement(
            measure="moving_rows",
            case={"ranks": RANKS, "second_rank": "half a core" if is_slow else "a core", "workload": training.workload},
            ratio=median_ratio(rates[True], rates[False]),
            target=1.3 if is_slow else 0.95,
            at_least=True,
            medians={
                "rows_per_s_moving": statistics.median(rates[True]),
                "rows_per_s_still": statistics.median(rates[False]),
                "moves": statistics.median(counts),
                "first_move_after_epoch": statistics.median(moved_at),
                "last_rows_of_second_rank": statistics.median(last_rows),
            },
            repetitions=repetitions,
        )
    )


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("slow", "equal"), default=["slow", "equal"])
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    for name in options.only:
        measure(name, options.repetitions)


if __name__ == "__main__":
    main()
