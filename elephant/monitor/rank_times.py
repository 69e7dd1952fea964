"""Times of ranks: what the seconds of each went into, by epoch and over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from elephant.monitor.events import RankEpoch


def rank_times(epochs: Sequence[RankEpoch], *, together: bool, began_at: float | None = None) -> list[dict[str, Any]]:
    """Returns the parts of each rank's seconds, a dictionary for each epoch and rank.

    ``epoch`` from zero, ``rank``, ``rows`` and ``rows_per_s`` of training, ``seconds`` of the epoch, and of these:
    ``compute_s`` (steps, validation and callbacks), ``exchange_s``, ``others_s`` (waiting for other ranks) and
    ``input_s`` (waiting for rows). ``first_step_s`` are those of ``compute_s`` in the first step of a process, in which
    the model is traced, and ``end_s`` those after the last step. ``bytes_sent``; ``began_s``, when the epoch began, in
    seconds since the fit did. Which rank a rank waits for it cannot know itself: of ranks that take every step
    together, nobody keeps the one waiting that waits least, and its seconds are those of the exchange.

    Args:
        epochs: Of all ranks, by epoch.
        together: Whether they take every step together.
        began_at: When the fit began, in seconds since 1970; None leaves ``began_s`` out.
    """
    times = []
    for _, group in groupby(epochs, key=lambda epoch: epoch.epoch):
        of_epoch = list(group)
        exchange_s = min(epoch.wait_s for epoch in of_epoch) if together else math.inf
        times += [{**_times(epoch, min(exchange_s, epoch.wait_s)), **_place(epoch, began_at)} for epoch in of_epoch]
    return times


def rank_starts(epochs: Sequence[RankEpoch], began_at: float) -> list[dict[str, Any]]:
    """Returns the parts of the seconds before ranks' first epochs, a dictionary for each of their processes.

    ``rank``, ``began_s``, when its Spark task began, in seconds since the fit did, and seconds by what followed.

    Args:
        epochs: Of all ranks, by epoch.
        began_at: When the fit began, in seconds since 1970.

    Examples:
        >>> epoch = RankEpoch(rank=1, epoch=0, rows=8, seconds=2.0, training_s=2.0, wait_s=0.0, input_s=0.0,
        ...                   bytes_sent=0, start={"reading rows": 3.0, "preparing": 1.0}, heard=110.0)
        >>> rank_starts([epoch], 100.0)
        [{'rank': 1, 'began_s': 4.0, 'reading rows': 3.0, 'preparing': 1.0}]
    """
    starts = []
    for epoch in epochs:
        if epoch.start and (place := _place(epoch, began_at)):
            began_s = max(place["began_s"] - sum(epoch.start.values()), 0.0)
            starts.append({"rank": epoch.rank, "began_s": began_s, **epoch.start})
    return starts


def _place(epoch: RankEpoch, began_at: float | None) -> dict[str, float]:
    if began_at is None or epoch.heard is None:
        return {}
    # Hosts' clocks may differ a little.
    return {"began_s": max(epoch.heard - epoch.seconds - began_at, 0.0)}


def _times(epoch: RankEpoch, exchange_s: float) -> dict[str, Any]:
    # Where nothing is known of it, all waiting may have been behind the last step.
    end_wait_s = epoch.wait_s - (epoch.training_wait_s or 0.0)
    return {
        "epoch": epoch.epoch,
        "rank": epoch.rank,
        "rows": epoch.rows,
        "rows_per_s": epoch.rows / epoch.training_s if epoch.training_s > 0 else 0.0,
        "seconds": epoch.seconds,
        "compute_s": max(epoch.seconds - epoch.wait_s - epoch.input_s, 0.0),
        "exchange_s": exchange_s,
        "others_s": epoch.wait_s - exchange_s,
        "input_s": epoch.input_s,
        "first_step_s": min(epoch.first_step_s, max(epoch.seconds - epoch.wait_s - epoch.input_s, 0.0)),
        "end_s": max(epoch.seconds - epoch.training_s - end_wait_s, 0.0),
        "bytes_sent": epoch.bytes_sent,
    }


def sums_by_rank(times: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the sums over the epochs, one dictionary of each rank; see `added_up`."""
    parts = sorted(times, key=lambda part: part["rank"])
    return [added_up(list(own)) for _, own in groupby(parts, key=lambda part: part["rank"])]


def added_up(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sums of parts of one rank, without ``epoch`` and ``began_s``; its rate is that of all its rows.

    Examples:
        >>> parts = [{"epoch": epoch, "rank": 1, "rows": 10, "rows_per_s": 5.0 + 5.0 * epoch} for epoch in (0, 1)]
        >>> added_up(parts)["rows_per_s"] == 20 / 3
        True
    """
    took_s = sum(part["rows"] / part["rows_per_s"] for part in parts if part["rows_per_s"])
    sums = {name: sum(part[name] for part in parts) for name in parts[0] if name not in ("epoch", "rank", "began_s")}
    return {"rank": parts[0]["rank"], **sums, "rows_per_s": sums["rows"] / took_s if took_s else 0.0}
