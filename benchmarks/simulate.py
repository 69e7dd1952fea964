"""Simulation of synchronous training on 8 to 1,024 hosts, from constants that are measured when it starts.

::

    sudo python benchmarks/simulate.py                    # everything; root makes the network namespaces
    python benchmarks/simulate.py --only scale published  # without the check against real ranks

No cluster is measured here. An exchange is a row of messages, each of which takes a latency and a time for its bytes;
a step is a forward pass, a backward pass in which gradients become ready from the last layer on, and one exchange after
another as buckets are full. What the processor adds to messages and bytes is measured between two ranks. Which way an
array goes, and how long buckets are, is decided by the package's own functions. Prints one line of JSON per case.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from namespaces import linked_namespaces
from report import Measurement, report
from team import Member, Seat, Team, lasted, seats

from elephant.collective.fusion import LinkSpeed, automatic_bucket_bytes
from elephant.collective.link_cost import LinkCost, rounds_limit
from elephant.collective.links import rounds
from elephant.collective.operation import AlgorithmThresholds
from elephant.net import Listener

MB = 10**6
HOSTS = (8, 32, 128, 512, 1024)
TIMEOUT_S = 300.0
# Where the limit is fixed; before it was measured, it was that everywhere.
FIXED_ROUNDS_BYTES = 4 << 20
# Between two hosts of a data center, without what processors add: an assumption.
WIRE_LATENCY_S = 25e-6
# Of a nominal rate, headers leave so much.
PAYLOAD = 0.94
# Relative deviation of a step's time between ranks: an assumption.
JITTER = 0.025
_PROBE_BYTES = 16 * MB
# The check: a link so slow that the ranks' processors, which share two cores, are not what is measured.
CHECK_BITS_PER_S = 50e6
CHECK_BYTES = 4 * MB
CHECK_BURST_BYTES = 1 << 18


class TokenLink:
    """One direction of a link that passes bytes at a rate, and some at once after it was idle.

    Args:
        byte_s: Seconds of a byte.
        burst: Bytes that pass at once.
    """

    def __init__(self, byte_s: float, burst: float = 0.0) -> None:
        self._byte_s = byte_s
        self._burst = self._credit = burst
        self._idle_since = 0.0

    def passed(self, now: float, nbytes: float) -> float:
        """Returns when a message has passed that begins now."""
        self._credit = min(self._burst, self._credit + (now - self._idle_since) / self._byte_s)
        at_once = min(self._credit, nbytes)
        self._credit -= at_once
        self._idle_since = now + (nbytes - at_once) * self._byte_s
        return self._idle_since


def exchange_s(nbytes: float, size: int, cost: LinkCost, *, in_rounds: bool, burst: float = 0.0) -> float:
    """Returns the seconds of an allreduce of members that do the same at the same time, each with its own links."""
    if size == 1:
        return 0.0
    steps = rounds(size)
    links = {distance: TokenLink(cost.byte_s, burst) for distance, _ in steps}
    # The ranks agree on what they want first.
    now = len(steps) * cost.latency_s
    if not in_rounds:
        for _ in range(2 * (size - 1)):
            now = links[1].passed(now + cost.latency_s, nbytes / size)
        return now
    for distance, count in reversed(steps):
        part = nbytes * count / size
        now = links[distance].passed(now + cost.latency_s, part) + part * cost.sum_byte_s
    for distance, count in steps:
        now = links[distance].passed(now + cost.latency_s, nbytes * count / size)
    return now


@dataclass(frozen=True)
class Network:
    """Model: its gradients, and how they become ready.

    Args:
        parameters: Millions of them, in float32.
        layers: Share of the parameters and of the backward pass, from the last layer to the first.
    """

    parameters: float
    layers: tuple[tuple[float, float], ...]

    @property
    def nbytes(self) -> float:
        """Bytes of its gradients."""
        return self.parameters * 4 * MB

    def buckets(self, bucket_bytes: float) -> list[tuple[float, float]]:
        """Returns the bytes of each bucket, and after which share of the backward pass it is full."""
        buckets, filled, at = [], 0.0, 0.0
        for share, part in self.layers:
            pieces = max(1, math.ceil(share * self.nbytes / (bucket_bytes / 8)))
            for _ in range(pieces):
                filled += share * self.nbytes / pieces
                at += part / pieces
                if filled >= bucket_bytes * 0.999:
                    buckets.append((filled, at))
                    filled = 0.0
        return [*buckets, (filled, 1.0)] if filled > 1 else buckets


NETWORKS = {
    "ResNet-50": Network(25.6, ((0.08, 0.01), (0.58, 0.22), (0.28, 0.33), (0.05, 0.24), (0.01, 0.20))),
    "ResNet-101": Network(44.5, ((0.046, 0.01), (0.336, 0.15), (0.585, 0.55), (0.03, 0.16), (0.003, 0.13))),
    "Inception V3": Network(23.8, ((0.086, 0.01), (0.50, 0.20), (0.37, 0.44), (0.044, 0.35))),
    "VGG-16": Network(
        138.4,
        ((0.0296, 0.005), (0.121, 0.01), (0.743, 0.035), (0.051, 0.05), (0.043, 0.2), (0.011, 0.3), (0.0014, 0.4)),
    ),
    "BERT-base": Network(110.0, (*((0.0645, 0.0833),) * 12, (0.226, 0.0004))),
}
# Seconds of a step alone: TensorFlow's published rates of a P100 with batches of 64. ResNet-101 and BERT are estimates.
P100_S = {"ResNet-50": 0.292, "ResNet-101": 0.49, "Inception V3": 0.451, "VGG-16": 0.416, "BERT-base": 0.36}


def efficiency(network: Network, compute_s: float, bucket_bytes: float, exchange: Callable[[float], float]) -> float:
    """Returns the rate of a step with exchanges over that of one without: exchanges go on beside the backward pass."""
    forward_s, backward_s, free = compute_s / 3, compute_s * 2 / 3, 0.0
    for nbytes, ready in network.buckets(bucket_bytes):
        free = max(free, forward_s + ready * backward_s) + exchange(nbytes)
    return compute_s / max(compute_s, free)


def slowest_of(ranks: int) -> float:
    """Returns the expected time of the slowest of many ranks over the mean one (Blom)."""
    return 1 + JITTER * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def serve_allreduce(member: Member, hosts: tuple[str, ...], rounds_bytes: int) -> None:
    """The work of a rank that sums an array of as many bytes as each turn asks for."""
    from elephant.collective import form_collective

    with Listener.bind(hosts[member.rank]) as listener:
        addresses, tokens = zip(*member.exchange((listener.address, secrets.token_bytes(32))), strict=True)
        collective = form_collective(
            member.rank,
            addresses,
            listener,
            tokens[0],
            "benchmark",
            TIMEOUT_S,
            transport="tcp",
            thresholds=AlgorithmThresholds(rounds_bytes=rounds_bytes),
        )
    with collective:
        for nbytes in member.turns():
            flat = np.full(nbytes // 4, float(member.rank), np.float32)
            interval = member.timed(lambda flat=flat: collective.allreduce_(flat))
            expected = member.size * (member.size - 1) / 2
            if flat[0] != expected or flat[-1] != expected:
                raise SystemExit(f"expected a sum of {expected}. Received: {flat[0]}.")
            member.reply(interval)


def times(team: Team, nbytes: int, repetitions: int) -> list[float]:
    """Returns the times of allreduces; the first is not counted."""
    seconds = []
    for _ in range(repetitions + 1):
        team.ask(nbytes)
        seconds.append(lasted(team.timed()))
    return seconds[1:]


def measured_cost(
    team: Team, nbytes: int, repetitions: int, chosen: Callable[[Sequence[float]], float], burst: float = 0.0
) -> LinkCost:
    """Returns the cost of a link from a team of two: an array of a few bytes is one message, a long one three.

    Args:
        chosen: Makes one time of several.
    """
    latency_s = chosen(times(team, 4, 10 * repetitions))
    long_s = chosen(times(team, nbytes, repetitions))
    return LinkCost(latency_s, (long_s - 3 * latency_s) / (nbytes - burst), sum_byte_s(repetitions, chosen))


def sum_byte_s(repetitions: int, chosen: Callable[[Sequence[float]], float]) -> float:
    """Returns the seconds to add a byte, in arrays longer than the cache."""
    values, total, took = np.ones(8 * MB, np.float32), np.ones(8 * MB, np.float32), []
    for _ in range(repetitions + 1):
        began = time.perf_counter()
        np.add(total, values, out=total)
        took.append(time.perf_counter() - began)
    return chosen(took[1:]) / values.nbytes


def local_cost(options: argparse.Namespace) -> LinkCost:
    """Measures what this machine's processor takes for messages and bytes, between two ranks over the loopback.

    The least times count: others' work on this machine makes them longer, and nothing makes them shorter.
    """
    with Team(serve_allreduce, seats(2), ("127.0.0.1",) * 2, 0) as team:
        team.exchange()
        cost = measured_cost(team, _PROBE_BYTES, 4 * options.repetitions, min)
    say("constants", {"bytes": _PROBE_BYTES}, 1.0, None, medians=_shown(cost), repetitions=4 * options.repetitions)
    return cost


def _shown(cost: LinkCost) -> dict[str, float]:
    return {
        "latency_us": cost.latency_s * 1e6,
        "gigabytes_per_s": 1e-9 / cost.byte_s,
        "sums_gigabytes_per_s": 1e-9 / cost.sum_byte_s,
    }


def say(
    measure: str,
    case: dict[str, object],
    ratio: float,
    target: float | None,
    *,
    medians: dict[str, float],
    repetitions: int = 1,
    at_least: bool = True,
) -> None:
    """Prints one line."""
    line = Measurement(
        measure=measure,
        case=case,
        ratio=ratio,
        target=target,
        at_least=at_least,
        medians=medians,
        repetitions=repetitions,
    )
    report(line)


def between_hosts(local: LinkCost, gigabits: float) -> LinkCost:
    """Returns the cost of a link of a cluster: the wire's latency comes on top, its rate or the processor's counts."""
    return replace(
        local,
        latency_s=local.latency_s + WIRE_LATENCY_S,
        byte_s=max(local.byte_s, 8e-9 / (gigabits * PAYLOAD)),
    )


def simulate_scale(options: argparse.Namespace) -> None:
    """Efficiency of training with one rank per host, and of one long allreduce against the fixed limit."""
    local = local_cost(options)
    for gigabits in (10, 25, 100):
        cost = between_hosts(local, gigabits)
        for hosts in HOSTS:
            for name in ("ResNet-50", "VGG-16", "BERT-base"):
                _report_step(name, hosts, gigabits, cost)
            _report_allreduce(hosts, gigabits, cost)


def _report_step(name: str, hosts: int, gigabits: float, cost: LinkCost) -> None:
    network, compute_s = NETWORKS[name], P100_S[name]
    ratios = {}
    for label, limit in (("measured_limit", limit_of(hosts, cost)), ("fixed_limit", FIXED_ROUNDS_BYTES)):

        def exchange(nbytes: float, limit: int = limit) -> float:
            return exchange_s(nbytes, hosts, cost, in_rounds=nbytes <= limit)

        # As `elephant.collective.fusion.measure_link` finds out.
        link = LinkSpeed(len(rounds(hosts)) * cost.latency_s, (2 << 20) / exchange(2 << 20))
        bucket_bytes = automatic_bucket_bytes(int(network.nbytes), link)
        ratios[label] = efficiency(network, compute_s, bucket_bytes, exchange) / slowest_of(hosts)
    case = {"model": name, "hosts": hosts, "gigabits": gigabits}
    say("simulated_efficiency", case, ratios["measured_limit"], None, medians=ratios)


def limit_of(hosts: int, cost: LinkCost) -> int:
    """Returns the limit that the package takes on so many hosts."""
    return rounds_limit(hosts, cost) if hosts > 8 else FIXED_ROUNDS_BYTES


def _report_allreduce(hosts: int, gigabits: float, cost: LinkCost) -> None:
    total, count = 100 * MB, 6
    seconds = {
        name: count * exchange_s(total / count, hosts, cost, in_rounds=total / count <= limit)
        for name, limit in (("measured_limit", limit_of(hosts, cost)), ("fixed_limit", FIXED_ROUNDS_BYTES))
    }
    say(
        "simulated_allreduce_of_100_megabytes_in_6_buckets",
        {"hosts": hosts, "gigabits": gigabits},
        seconds["measured_limit"] / seconds["fixed_limit"],
        0.15 if (hosts, gigabits) == (1024, 25) else None,
        medians={f"{name}_ms": value * 1000 for name, value in seconds.items()},
        at_least=False,
    )


def check_published(options: argparse.Namespace) -> None:
    """The model with NCCL's constants against what Horovod published: 512 P100, four to a host, 25 Gb/s with RDMA."""
    cost = LinkCost(latency_s=10e-6, byte_s=8e-9 / (25 * PAYLOAD), sum_byte_s=0.0)
    inside_byte_s, fusion_bytes = 2 / 10e9, 64 << 20
    for name, published in (("Inception V3", 0.90), ("ResNet-101", 0.90), ("VGG-16", 0.68)):
        reached = efficiency(
            NETWORKS[name],
            P100_S[name],
            fusion_bytes,
            lambda nbytes: nbytes * inside_byte_s + exchange_s(nbytes, 128, cost, in_rounds=False),
        )
        reached /= slowest_of(512)
        say(
            "points_from_horovods_published_efficiency",
            {"model": name, "gpus": 512, "gigabits": 25},
            abs(reached - published) * 100,
            10.0,
            medians={"simulated": reached, "published": published},
            at_least=False,
        )


def check_ranks(options: argparse.Namespace) -> None:
    """The model against real ranks, each in a network namespace of its own, on links of a limited rate."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(linked_namespaces(CHECK_BITS_PER_S, max(options.ranks)))
        taken = [Seat(None, host.entered) for host in hosts]
        addresses = tuple(host.address for host in hosts)
        with Team(serve_allreduce, taken[:2], addresses[:2], 0) as team:
            team.exchange()
            cost = measured_cost(team, CHECK_BYTES, options.repetitions, statistics.median, CHECK_BURST_BYTES)
        for size in options.ranks:
            for in_rounds in (False, True)[: 1 if size == 2 else 2]:
                with Team(serve_allreduce, taken[:size], addresses[:size], 1 << 40 if in_rounds else 0) as team:
                    team.exchange()
                    took = statistics.median(times(team, CHECK_BYTES, options.repetitions))
                _report_check(size, in_rounds, took, cost, cores, options.repetitions)


def _report_check(size: int, in_rounds: bool, took: float, cost: LinkCost, cores: int, repetitions: int) -> None:
    # Two ranks had a core each where there are two; more share them.
    shared = max(1.0, size / cores)
    here = replace(cost, latency_s=cost.latency_s * shared, sum_byte_s=cost.sum_byte_s * shared)
    expected = exchange_s(CHECK_BYTES, size, here, in_rounds=in_rounds, burst=CHECK_BURST_BYTES)
    say(
        "simulated_over_measured_time_off_by",
        {"ranks": size, "way": "rounds" if in_rounds else "ring", "bytes": CHECK_BYTES},
        abs(expected / took - 1),
        0.15,
        medians={"simulated_ms": expected * 1000, "measured_ms": took * 1000, **_shown(cost)},
        repetitions=repetitions,
        at_least=False,
    )


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "ranks": check_ranks,
    "published": check_published,
    "scale": simulate_scale,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulates and checks what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8, 16], help="of the check (2 4 8 16)")
    options = parser.parse_args(arguments)
    for name in options.only:
        PARTS[name](options)


if __name__ == "__main__":
    main()
