"""How long a worker's exchange with a parameter server takes, and what the server's memory is.

::

    python benchmarks/parameter_server.py                            # everything; root for the link
    python benchmarks/parameter_server.py --only stream memory       # stream, elephas, memory, link, shards or hogwild
    python benchmarks/parameter_server.py --only elephas --elephas FOLDER   # an environment to make, or to use again

Servers are processes as a fit starts them, clients are those of its workers. Contenders take turns, operation by
operation, and what is pulled is checked. A push has been applied when it ends, and every pull brings weights
that have changed. Prints one line of JSON per comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elephas_peer import Cycle, ElephasPeer, environment
from report import Measurement, median_ratio, report
from server_link import measure_link
from server_memory import measure_memory
from server_scaling import measure_hogwild, measure_shards
from servers import MB, client_team, in_turns, repetitions_of, running, turn, vector_of
from streams import Streams, tunings

from elephant.parameter_server.layout import Layout

SIZES = (MB // 2, 10 * MB, 100 * MB)
# Against a stream of the same bytes, by rule, operation and bytes.
STREAM_TARGETS: Mapping[tuple[str, str, int], float] = {
    ("sgd", "pull", 10 * MB): 1.5,
    ("sgd", "pull", 100 * MB): 1.3,
    ("sgd", "push", 10 * MB): 1.8,
    ("sgd", "push", 100 * MB): 1.4,
    ("adam", "pull", 10 * MB): 1.5,
    ("adam", "pull", 100 * MB): 1.3,
    ("adam", "push", 10 * MB): 1.8,
    ("adam", "push", 100 * MB): 1.7,
}
# Widths of dense layers with about so many bytes of weights, and what is asked for against Elephas.
ELEPHAS_MODELS: Mapping[int, tuple[Sequence[int], float]] = {
    MB // 2: ((784, 128, 128, 10), 5.0),
    10 * MB: ((784, 1024, 1024, 640, 10), 4.0),
    100 * MB: ((784, 4096, 4096, 1024, 10), 8.0),
}
# So many pushes in a row are timed as one.
_ROW = 5
# ... and so many cycles, of Elephas as of ours: a worker makes one after the other.
CYCLES_IN_A_ROW: Mapping[int, int] = {MB // 2: 10, 10 * MB: 3, 100 * MB: 2}


def measure_stream(options: argparse.Namespace) -> None:
    """Pulls and pushes on loopback against a one-way stream of the same bytes."""
    for size in options.bytes:
        repetitions = repetitions_of(size, options.repetitions)
        with contextlib.ExitStack() as stack:
            kept, dropped = (Streams(stack, size, tunings(keeps)) for keeps in (True, False))
            actions: dict[str, Callable[[], float]] = {"stream_kept": kept.turn, "stream_dropped": dropped.turn}
            for rule in ("sgd", "adam"):
                team = client_team(stack, stack.enter_context(running(vector_of(size), rule)))
                for operation, times in (("push", 1), ("pull", 1), ("push_pull", 1), ("push", _ROW)):
                    name = f"{rule}_{operation}" + ("es_in_a_row" if times > 1 else "")
                    actions[name] = lambda team=team, operation=operation, times=times: turn(team, operation, times)
            seconds = in_turns(actions, repetitions)
        for name in actions:
            rule, _, operation = name.partition("_")
            if rule != "stream":
                report(against_streams(size, rule, operation, seconds))


def against_streams(size: int, rule: str, operation: str, seconds: Mapping[str, Sequence[float]]) -> Measurement:
    """Returns the line of one operation, judged by the stream that keeps what comes, as a client and a server must."""
    ours = seconds[f"{rule}_{operation}"]
    return Measurement(
        measure=f"{operation}_against_stream",
        case={"bytes": size, "rule": rule},
        ratio=median_ratio(ours, seconds["stream_kept"]),
        target=STREAM_TARGETS.get((rule, operation.partition("es_")[0], size)),
        at_least=False,
        medians={
            "ours_ms": statistics.median(ours) * 1000,
            "stream_ms": statistics.median(seconds["stream_kept"]) * 1000,
            "stream_that_drops_ms": statistics.median(seconds["stream_dropped"]) * 1000,
            "ratio_to_stream_that_drops": median_ratio(ours, seconds["stream_dropped"]),
        },
        repetitions=len(ours),
    )


def measure_elephas(options: argparse.Namespace) -> None:
    """A pull and a push against those of Elephas' HTTP server, on the same weights."""
    with contextlib.ExitStack() as stack:
        folder = options.elephas or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="elephant-elephas-")))
        python = environment(folder)
        for size in options.bytes:
            if size in ELEPHAS_MODELS:
                compare_with_elephas(size, python, repetitions_of(size, options.repetitions))


def compare_with_elephas(size: int, python: Path, repetitions: int) -> None:
    """Measures the weights of one model."""
    units, target = ELEPHAS_MODELS[size]
    times = CYCLES_IN_A_ROW[size]
    layout = Layout([(f"{n}/{m}", shape) for n, m in zip(units, units[1:], strict=False) for shape in ((n, m), (m,))])
    cycles: dict[str, list[Cycle]] = {"default": [], "without_debugger": []}
    with contextlib.ExitStack() as stack:
        peers = {name: stack.enter_context(ElephasPeer(python, units, debugger=name == "default")) for name in cycles}
        teams = {rule: client_team(stack, stack.enter_context(running(layout, rule))) for rule in ("add", "adam")}
        actions = {rule: lambda team=team: turn(team, "cycle", times) for rule, team in teams.items()}

        def elephas(name: str) -> float:
            cycles[name].append(peers[name].cycle(times))
            return cycles[name][-1].seconds

        seconds = in_turns({**{name: lambda name=name: elephas(name) for name in peers}, **actions}, repetitions)
    for rule in teams:
        for name in peers:
            report(
                Measurement(
                    measure="pull_and_push_against_elephas",
                    case={"bytes": peers[name].ready["bytes"], "rule": rule, "elephas": name},
                    ratio=median_ratio(seconds[name], seconds[rule]),
                    # Elephas adds differences of weights.
                    target=target if rule == "add" else None,
                    at_least=True,
                    medians={
                        "ours_ms": statistics.median(seconds[rule]) * 1000,
                        "elephas_ms": statistics.median(seconds[name]) * 1000,
                        "elephas_get_ms": statistics.median(each.get_s for each in cycles[name][1:]) * 1000,
                        "elephas_update_ms": statistics.median(each.update_s for each in cycles[name][1:]) * 1000,
                    },
                    repetitions=repetitions,
                )
            )


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "stream": measure_stream,
    "elephas": measure_elephas,
    "memory": measure_memory,
    "link": measure_link,
    "shards": measure_shards,
    "hogwild": measure_hogwild,
}


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, help="of every measurement (101 of small ones to 11 of large ones)")
    parser.add_argument("--bytes", nargs="+", type=int, default=list(SIZES), help="sizes of the weights")
    parser.add_argument("--elephas", type=Path, help="folder of an environment with Elephas; made when missing")
    options = parser.parse_args()
    for name in options.only:
        PARTS[name](options)


if __name__ == "__main__":
    main()
