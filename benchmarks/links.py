"""What compression, and sending while computing, gain on a slow link between two hosts.

::

    sudo python benchmarks/links.py                       # everything; root makes the network namespaces
    sudo python benchmarks/links.py --only compression    # or overlap
    sudo python benchmarks/links.py --only overlap --backend torch
    sudo python benchmarks/links.py --only compression --megabits 100 --names bfloat16 topk powersgd

Two ranks in two network namespaces, each pinned to a core, with a link of a limited
rate between them. The contenders take turns on the same link. Prints one line of JSON
per comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import statistics
from collections.abc import Callable

import numpy as np
from namespaces import Host, linked_namespaces
from report import Measurement, median_ratio, report
from steps import Contender, speeds
from team import Member, Seat, Team, lasted, seats
from training import TIMEOUT_S, Training

# Gradients, as one matrix: what is of low rank needs one.
SHAPE = (4000, 2500)
VALUES = 10_000_000
# 500 MB/s.
FAST_LINK = 4e9
# What is asked for at 1 Gb/s.
TARGETS = {"bfloat16": 1.9, "int8": 3.5}
# How far a compressed sum may be from the true one, as a share of its largest value; one step of int8 is 1/127.
TOLERANCE = 0.03


def gradients(rank: int, count: int) -> np.ndarray:
    """Returns values of the size and spread of gradients, the same ones whoever asks."""
    return np.random.default_rng(rank).normal(0, 0.01, count).astype(np.float32)


def serve_reductions(member: Member, compression: str | None, hosts: tuple[str, ...]) -> None:
    """The work of a rank that sums gradients of `VALUES` values, once a turn."""
    from elephant.collective import form_collective
    from elephant.compression import compression_of, reduction_for
    from elephant.net import Listener

    with Listener.bind(hosts[member.rank]) as listener:
        addresses, tokens = zip(*member.exchange((listener.address, secrets.token_bytes(32))), strict=True)
        collective = form_collective(member.rank, addresses, listener, tokens[0], "benchmark", TIMEOUT_S)
    reduction = reduction_for(compression, [(0, SHAPE)])
    described = compression_of(compression)
    # What leaves values out for a while is not near the sum of one step.
    checked = described is None or described.is_codec
    own = gradients(member.rank, VALUES)
    expected = np.sum([gradients(rank, VALUES) for rank in range(member.size)], axis=0)
    flat = np.empty(VALUES, np.float32)
    with collective:
        for _ in member.turns():
            flat[...] = own
            interval = member.timed(lambda: reduction.reduce_(flat, collective))
            if checked:
                _check(flat, expected, compression)
            member.reply(interval)


def _check(received: np.ndarray, expected: np.ndarray, compression: str | None) -> None:
    tolerance = 1e-6 if compression is None else TOLERANCE
    error = float(np.abs(received - expected).max() / np.abs(expected).max())
    if error > tolerance:
        raise SystemExit(f"{compression}: expected a sum within {tolerance} of the true one. Received: {error}.")


def seats_on(ends: tuple[Host, Host]) -> list[Seat]:
    """Returns a seat in each namespace."""
    return [Seat(seat.core, end.entered) for seat, end in zip(seats(2), ends, strict=True)]


def measure_compression(options: argparse.Namespace) -> None:
    """The rate of a compressed allreduce against one in float32."""
    repetitions = options.repetitions
    with contextlib.ExitStack() as stack:
        ends = stack.enter_context(linked_namespaces(options.megabits * 1e6))
        hosts = tuple(end.address for end in ends)
        teams: dict[str | None, Team] = {}
        for name in (None, *options.names):
            teams[name] = stack.enter_context(Team(serve_reductions, seats_on(ends), name, hosts))
            teams[name].exchange()
        seconds: dict[str | None, list[float]] = {name: [] for name in teams}
        for repetition in range(repetitions + 1):
            for name, team in teams.items():
                team.ask("reduce")
                took = lasted(team.timed())
                if repetition:
                    seconds[name].append(took)
    for name in options.names:
        report(
            Measurement(
                measure=f"{name}_against_float32_on_{_rate(options.megabits)}",
                case={"values": VALUES, "ranks": 2},
                ratio=median_ratio(seconds[None], seconds[name]),
                target=TARGETS.get(name) if options.megabits == 1000 else None,
                at_least=True,
                medians={
                    "float32_ms": statistics.median(seconds[None]) * 1000,
                    f"{name}_ms": statistics.median(seconds[name]) * 1000,
                },
                repetitions=repetitions,
            )
        )


def _rate(megabits: int) -> str:
    return "1_gigabit" if megabits == 1000 else f"{megabits}_megabits"


def measure_overlap(options: argparse.Namespace) -> None:
    """Training with gradients that travel in buckets while others are computed, against all at once at the end.

    Of the one network, most gradients are those of one matrix, which travel together; those of the other are in
    eight layers.
    """
    for workload in ("mlp_24m", "mlp_24m_deep"):
        with linked_namespaces(FAST_LINK) as ends:
            hosts = tuple(end.address for end in ends)
            contenders = {
                name: Contender.of_ranks(
                    seats_on(ends),
                    Training(workload=workload, rows=512, batch_size=64, epochs=0, hosts=hosts, options=chosen),
                    options.backend,
                )
                for name, chosen in {"overlap": {}, "none": {"bucket_bytes": 0}}.items()
            }
            speed, medians = speeds(contenders, options.repetitions)
        report(
            Measurement(
                measure="overlap_against_none_on_500_megabytes_per_s",
                case={"workload": workload, "batch_size": 64, "ranks": 2, "backend": options.backend},
                ratio=median_ratio(speed["overlap"].rows_per_s, speed["none"].rows_per_s),
                target=1.15,
                at_least=True,
                medians=medians,
                repetitions=options.repetitions,
            )
        )


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "compression": measure_compression,
    "overlap": measure_overlap,
}


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--megabits", type=int, default=1000, help="rate of the link for compression (1000)")
    parser.add_argument("--backend", default="tensorflow", help="Keras' backend for overlap (tensorflow); or torch")
    parser.add_argument("--names", nargs="+", default=list(TARGETS), help="compressions to measure (bfloat16 int8)")
    options = parser.parse_args()
    for name in options.only:
        PARTS[name](options)


if __name__ == "__main__":
    main()
