"""Exchanges with a parameter server over a link of 1 Gb/s, between two network namespaces."""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence

from namespaces import linked_namespaces
from report import Measurement, median_ratio, report
from servers import MB, client_team, in_turns, running, turn, vector_of
from streams import Streams, tunings
from team import Seat

LINK_BYTES = 40 * MB
GIGABIT = 1e9


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
