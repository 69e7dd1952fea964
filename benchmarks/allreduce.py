"""How long an allreduce between processes of this machine takes, against others that move the same bytes.

::

    python benchmarks/allreduce.py                        # everything
    python benchmarks/allreduce.py --against gloo         # of Gloo, TensorFlow, two plain streams, the ring
    python benchmarks/allreduce.py --ranks 2 --bytes 4194304

Each contender is a team of processes pinned to cores, rank 0 to the first. The
contenders take turns, one operation after another (or ten, where they are short), so
that all meet the same machine. Prints one line of JSON per size, number of ranks and peer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from exchanges import serve
from report import Measurement, median_ratio, report
from team import Team, lasted, seats

KB, MB = 2**10, 2**20
SIZES = (256 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
# Up to these bytes an operation is timed ten at a time, and more often.
SHORT, MEDIUM = MB, 16 * MB


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row of the table of targets.

    Args:
        measure: Its name.
        ours: The contender that is measured.
        peer: What it is measured against.
        sizes: Bytes.
        ranks: Numbers of ranks.
        speed: Whether the ratio is the peer's time over ours, so that more is better; else ours over the peer's.
        targets: From (bytes, target): the last one whose bytes are no more than the size's.
    """

    measure: str
    ours: str
    peer: str
    sizes: Sequence[int]
    ranks: Sequence[int]
    speed: bool
    targets: Sequence[tuple[int, float]]

    def target(self, size: int) -> float:
        """Returns what the ratio shall be at ``size`` bytes."""
        return [target for least, target in self.targets if least <= size][-1]


COMPARISONS = {
    "gloo": Comparison(
        measure="allreduce_against_gloo",
        ours="elephant",
        peer="gloo",
        sizes=SIZES,
        ranks=(2, 3, 4),
        speed=True,
        targets=((0, 1.5), (4 * MB + 1, 1.0)),
    ),
    "tensorflow": Comparison(
        measure="allreduce_against_tensorflow",
        ours="elephant",
        peer="tensorflow",
        sizes=SIZES,
        ranks=(2, 3, 4),
        speed=True,
        targets=((0, 5.0),),
    ),
    "stream": Comparison(
        measure="tcp_allreduce_against_stream",
        ours="elephant_tcp",
        peer="stream",
        sizes=(64 * MB,),
        ranks=(2,),
        speed=False,
        targets=((0, 2.2),),
    ),
    "duplex": Comparison(
        measure="tcp_allreduce_against_duplex",
        ours="elephant_tcp",
        peer="duplex",
        sizes=SIZES[2:],
        ranks=(2, 3, 4),
        speed=True,
        targets=((0, 0.75),),
    ),
    "ring": Comparison(
        measure="rounds_against_ring",
        ours="elephant_rounds",
        peer="elephant_ring",
        # Longer ones go round the ring.
        sizes=(512 * KB, MB, 2 * MB, 4 * MB),
        ranks=(3, 4, 8),
        speed=True,
        targets=((0, 1.0),),
    ),
}
NEEDS = {"gloo": "torch", "tensorflow": "tensorflow"}


def times(teams: dict[str, Team], size: int, repetitions: int) -> dict[str, list[float]]:
    """Returns the seconds of one operation of ``size`` bytes, per contender and repetition, taken in turns."""
    burst = 10 if size <= SHORT else 1
    seconds: dict[str, list[float]] = {name: [] for name in teams}
    # The first turn is not counted: the next team finds its memory and its caches cold.
    for repetition in range(repetitions + 1):
        for name, team in teams.items():
            team.ask((size, burst))
            took = lasted(team.timed()) / burst
            if repetition:
                seconds[name].append(took)
    return seconds


def repetitions_of(size: int, asked: int | None) -> int:
    """Returns how many turns the median of a size is taken of."""
    return asked or (51 if size <= SHORT else 25 if size <= MEDIUM else 9)


def compare(peers: Sequence[str], ranks: int, sizes: Sequence[int], asked: int | None) -> None:
    """Measures all comparisons that have this number of ranks, and prints them."""
    comparisons = [COMPARISONS[peer] for peer in peers if ranks in COMPARISONS[peer].ranks]
    names = sorted({name for comparison in comparisons for name in (comparison.ours, comparison.peer)})
    with contextlib.ExitStack() as stack:
        teams = {}
        for name in names:
            teams[name] = stack.enter_context(Team(serve, seats(ranks), name, environment=environment()))
            teams[name].exchange()
            teams[name].replies()
        for size in sizes:
            wanted = [comparison for comparison in comparisons if size in comparison.sizes]
            taking_part = {name for comparison in wanted for name in (comparison.ours, comparison.peer)}
            repetitions = repetitions_of(size, asked)
            seconds = times({name: teams[name] for name in names if name in taking_part}, size, repetitions)
            for comparison in wanted:
                report(measured(comparison, ranks, size, seconds))


def measured(comparison: Comparison, ranks: int, size: int, seconds: dict[str, list[float]]) -> Measurement:
    """Returns one comparison's line."""
    ours, peers = seconds[comparison.ours], seconds[comparison.peer]
    return Measurement(
        measure=comparison.measure,
        case={"ranks": ranks, "bytes": size},
        ratio=median_ratio(peers, ours) if comparison.speed else median_ratio(ours, peers),
        target=comparison.target(size),
        at_least=comparison.speed,
        medians={
            f"{comparison.ours}_ms": statistics.median(ours) * 1000,
            f"{comparison.peer}_ms": statistics.median(peers) * 1000,
        },
        repetitions=len(ours),
    )


def environment() -> dict[str, str]:
    """Returns what keeps the peers on loopback, without GPUs, and quiet."""
    return {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def present(peers: Sequence[str]) -> list[str]:
    """Returns those of the peers that are installed, and says which are not."""
    missing = [peer for peer in peers if peer in NEEDS and importlib.util.find_spec(NEEDS[peer]) is None]
    for peer in missing:
        print(f"{peer} is left out: {NEEDS[peer]} is not installed (pip install -e '.[bench]')", file=sys.stderr)
    return [peer for peer in peers if peer not in missing]


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4, 8])
    parser.add_argument("--bytes", nargs="+", type=int, default=[512 * KB, 2 * MB, *SIZES], help="sizes of the array")
    parser.add_argument("--repetitions", type=int, help="of every size (51 of small ones to 9 of large ones)")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if cores < max(options.ranks):
        print(f"{cores} cores for up to {max(options.ranks)} ranks: some share one", file=sys.stderr)
    peers = present(options.against)
    for ranks in options.ranks:
        if any(ranks in COMPARISONS[peer].ranks for peer in peers):
            compare(peers, ranks, options.bytes, options.repetitions)


if __name__ == "__main__":
    main()
