"""Several clients at once: against several servers on one machine, and against one without locks."""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from report import Measurement, median_ratio, report
from servers import MB, RUN_ID, in_turns, repetitions_of, running, serve_client, turn, update_of, vector_of
from team import ANYWHERE, Team

from elephant.parameter_server.control_client import ControlClient


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
        control = ControlClient(place.addresses, token=place.token, run_id=RUN_ID, layout=layout)
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
