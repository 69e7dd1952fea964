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
from typing import Any

import numpy as np
from elephas_peer import Cycle, ElephasPeer, environment
from namespaces import linked_namespaces
from report import Measurement, median_ratio, report
from server_memory import measure_memory
from servers import (
    ANYWHERE,
    RUN_ID,
    Place,
    Tuning,
    running,
    serve_client,
    serve_stream,
    tunings,
    update_of,
    vector_of,
)
from team import Seat, Team

from elephant.parameter_server.control import Control
from elephant.parameter_server.layout import Layout

MB = 10**6
SIZES = (MB // 2, 10 * MB, 100 * MB)
# Against a stream of the same bytes: (bytes, target).
STREAM_TARGETS: Mapping[str, Mapping[int, float]] = {
    "pull": {10 * MB: 1.5, 100 * MB: 1.3},
    "push": {10 * MB: 1.8, 100 * MB: 1.6},
}
# Widths of dense layers with about so many bytes of weights, and what is asked for against Elephas.
ELEPHAS_MODELS: Mapping[int, tuple[Sequence[int], float]] = {
    MB // 2: ((784, 128, 128, 10), 5.0),
    10 * MB: ((784, 1024, 1024, 640, 10), 4.0),
    100 * MB: ((784, 4096, 4096, 1024, 10), 8.0),
}
LINK_BYTES = 40 * MB
GIGABIT = 1e9
# So many pushes in a row are timed as one.
_ROW = 5
_CALIBRATION_TURNS = 5


def repetitions_of(size: int, asked: int | None) -> int:
    """Returns how many turns the median of a size is taken of."""
    return asked or (101 if size <= MB else 31 if size <= 10 * MB else 11)


def client_team(stack: contextlib.ExitStack, place: Place, *arguments: Any, seat: Seat = ANYWHERE) -> Team:
    """Starts one client, and waits until it has exchanged once."""
    team = stack.enter_context(Team(serve_client, [seat], place, *arguments))
    team.replies()
    return team


def turn(team: Team, operation: str, times: int = 1) -> float:
    """Lets all clients of a team do something, and returns the seconds of one operation."""
    team.ask((operation, times, True))
    intervals = team.timed()
    # From the first one's beginning: clients that begin late wait for the others' exchanges.
    return (max(end for _, end in intervals) - min(begin for begin, _ in intervals)) / times


class Streams:
    """A plain stream from one process to another, tuned.

    Args:
        stack: What ends it.
        size: Bytes.
        hosts: Addresses of the two processes.
        places: Where they run.
        tried: The tunings from which the fastest one is taken, by the median of some turns.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        size: int,
        tried: Sequence[Tuning],
        hosts: Sequence[str] | None = None,
        places: Sequence[Seat] = (ANYWHERE, ANYWHERE),
    ) -> None:
        arguments = (size, tried) if hosts is None else (size, tried, hosts)
        self._team = stack.enter_context(Team(serve_stream, places, *arguments))
        for _ in {each.buffer_bytes for each in tried}:
            self._team.exchange()
        self._team.replies()
        times = [
            statistics.median([self._turn(index) for _ in range(_CALIBRATION_TURNS + 1)][1:])
            for index in range(len(tried))
        ]
        self._best = times.index(min(times))
        self.tuning = tried[self._best]

    def turn(self) -> float:
        """Returns the seconds of one stream, from its first byte to the receiver's answer."""
        return self._turn(self._best)

    def _turn(self, index: int) -> float:
        self._team.ask((index, 1))
        began, ended = self._team.timed()[0]
        return ended - began


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
        target=STREAM_TARGETS.get(operation.partition("es_")[0], {}).get(size),
        at_least=False,
        medians={
            "ours_ms": statistics.median(ours) * 1000,
            "stream_ms": statistics.median(seconds["stream_kept"]) * 1000,
            "stream_that_drops_ms": statistics.median(seconds["stream_dropped"]) * 1000,
            "ratio_to_stream_that_drops": median_ratio(ours, seconds["stream_dropped"]),
        },
        repetitions=len(ours),
    )


def in_turns(actions: Mapping[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Returns what each action took, per repetition; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for repetition in range(repetitions + 1):
        for name, action in actions.items():
            took = action()
            if repetition:
                seconds[name].append(took)
    return seconds


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
    layout = Layout([(f"{n}/{m}", shape) for n, m in zip(units, units[1:], strict=False) for shape in ((n, m), (m,))])
    cycles: dict[str, list[Cycle]] = {"default": [], "without_debugger": []}
    with contextlib.ExitStack() as stack:
        peers = {name: stack.enter_context(ElephasPeer(python, units, debugger=name == "default")) for name in cycles}
        teams = {rule: client_team(stack, stack.enter_context(running(layout, rule))) for rule in ("add", "adam")}
        actions = {rule: lambda team=team: turn(team, "cycle") for rule, team in teams.items()}

        def elephas(name: str) -> float:
            cycles[name].append(peers[name].cycle())
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


def measure_link(options: argparse.Namespace) -> None:
    """Exchanges over a link of 1 Gb/s, against what raw TCP takes on it and against each other."""
    repetitions = options.repetitions or 7
    compressions = (None, "bfloat16", "int8")
    with contextlib.ExitStack() as stack:
        ends = stack.enter_context(linked_namespaces(GIGABIT))
        there, here = (Seat(None, end.entered) for end in ends)
        hosts = [end.address for end in ends]
        tried = [each for each in tunings(keeps=True) if each.piece_bytes == 1 << 20]
        stream = Streams(stack, LINK_BYTES, tried, hosts, (there, here))
        actions: dict[str, Callable[[], float]] = {"stream": stream.turn}
        for rule in ("sgd", "adam"):
            for compression in compressions[: None if rule == "sgd" else 1]:
                with ends[0].entered():
                    place = stack.enter_context(running(vector_of(LINK_BYTES), rule, host=hosts[0]))
                team = client_team(stack, place, compression, seat=here)
                for operation in ("push", "pull", "push_pull"):
                    name = f"{rule}_{compression or 'float32'}_{operation}"
                    actions[name] = lambda team=team, operation=operation: turn(team, operation)
        seconds = in_turns(actions, repetitions)
    report_wire(seconds, repetitions)
    for name in compressions[1:]:
        for operation in ("push", "pull", "push_pull"):
            report_compressed(name, operation, seconds, repetitions)


def report_wire(seconds: Mapping[str, Sequence[float]], repetitions: int) -> None:
    """Prints how the exchanges in float32 compare with the wire."""
    nominal_s = LINK_BYTES * 8 / GIGABIT
    for rule in ("sgd", "adam"):
        for operation, times in (("push", 1), ("pull", 1), ("push_pull", 2)):
            ours = seconds[f"{rule}_float32_{operation}"]
            report(
                Measurement(
                    measure="exchange_against_wire_on_1_gigabit",
                    case={"bytes": LINK_BYTES, "operation": operation, "rule": rule},
                    ratio=median_ratio(ours, seconds["stream"]) / times,
                    target=1.05,
                    at_least=False,
                    medians={
                        "ours_ms": statistics.median(ours) * 1000,
                        "raw_tcp_ms": times * statistics.median(seconds["stream"]) * 1000,
                        "nominal_ms": times * nominal_s * 1000,
                        "ratio_to_nominal": statistics.median(ours) / nominal_s / times,
                    },
                    repetitions=repetitions,
                )
            )


def report_compressed(name: str, operation: str, seconds: Mapping[str, Sequence[float]], repetitions: int) -> None:
    """Prints how much faster a compressed exchange is."""
    plain, ours = seconds[f"sgd_float32_{operation}"], seconds[f"sgd_{name}_{operation}"]
    report(
        Measurement(
            measure=f"{name}_exchange_against_float32_on_1_gigabit",
            case={"bytes": LINK_BYTES, "operation": operation, "rule": "sgd"},
            ratio=median_ratio(plain, ours),
            target=1.9 if name == "bfloat16" else None,
            at_least=True,
            medians={"float32_ms": statistics.median(plain) * 1000, f"{name}_ms": statistics.median(ours) * 1000},
            repetitions=repetitions,
        )
    )


def measure_shards(options: argparse.Namespace) -> None:
    """Weights cut over two and four servers of this machine, against one server."""
    for size in options.bytes:
        for clients in (1, 4):
            names = {count: {"count": count} for count in (1, 2, 4)}
            seconds = clients_in_turns(size, "sgd", clients, names, options.repetitions)
            for count in (2, 4):
                report_rates("servers_against_one", {"servers": count}, size, clients, seconds[count], seconds[1])


def measure_hogwild(options: argparse.Namespace) -> None:
    """A server without locks, against one with them."""
    for size in options.bytes:
        for clients in (2, 4):
            names = {"locked": {"locked": True}, "hogwild": {"locked": False}}
            seconds = clients_in_turns(size, "sgd", clients, names, options.repetitions)
            report_rates("hogwild_against_locked", {}, size, clients, seconds["hogwild"], seconds["locked"])
    for clients in (2, 4):
        for locked in (True, False):
            report_lost_additions(clients, locked)


def report_lost_additions(clients: int, locked: bool) -> None:
    """Prints which share of what clients add, all at once, is not in the weights in the end."""
    size, times = 10 * MB, 200
    layout = vector_of(size)
    with running(layout, "add", clients=clients, locked=locked) as place:
        with Team(serve_client, [ANYWHERE] * clients, place, None, False) as team:
            team.replies()
            turn(team, "push", times)
        control = Control(place.addresses, token=place.token, run_id=RUN_ID, layout=layout)
        values = control.fetch().values
        control.close()
    update = update_of(layout.segments[-1].stop).astype(np.float64)
    # One push each came before the turn.
    pushed = clients * (times + 1)
    there = float(update @ values[: len(update)]) / float(update @ update)
    report(
        Measurement(
            measure="additions_lost",
            case={"bytes": size, "clients": clients, "mode": "asynchronous" if locked else "hogwild"},
            ratio=1 - there / pushed,
            target=0.0 if locked else None,
            at_least=False,
            medians={"pushed": pushed, "there": there},
            repetitions=1,
        )
    )


def clients_in_turns(
    size: int, rule: str, clients: int, contenders: Mapping[Any, Mapping[str, Any]], asked: int | None
) -> dict[Any, list[float]]:
    """Returns the seconds in which all clients of a contender pulled and pushed once each, all at once, in turns."""
    times = 20 if size <= MB else 5 if size <= 10 * MB else 2
    with contextlib.ExitStack() as stack:
        actions = {}
        for name, chosen in contenders.items():
            place = stack.enter_context(running(vector_of(size), rule, clients=clients, **chosen))
            team = stack.enter_context(Team(serve_client, [ANYWHERE] * clients, place, None, clients == 1))
            team.replies()
            actions[name] = lambda team=team: turn(team, "cycle", times)
        return in_turns(actions, min(15, repetitions_of(size, asked)))


def report_rates(
    measure: str, case: Mapping[str, Any], size: int, clients: int, ours: Sequence[float], one: Sequence[float]
) -> None:
    """Prints a ratio of updates per second."""
    report(
        Measurement(
            measure=measure,
            case={"bytes": size, "clients": clients, **case},
            ratio=median_ratio(one, ours),
            target=None,
            at_least=True,
            medians={
                "updates_per_s": clients / statistics.median(ours),
                "updates_per_s_of_the_other": clients / statistics.median(one),
            },
            repetitions=len(ours),
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
