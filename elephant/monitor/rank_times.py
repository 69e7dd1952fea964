"""Times of ranks: what the seconds of each went into, by epoch and over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from elephant.monitor.events import RankEpoch


def rank_times(epochs: Sequence[RankEpoch], *, together: bool) -> list[dict[str, Any]]:
    """Returns the parts of each rank's seconds, a dictionary for each epoch and rank.

    ``epoch`` from zero, ``rank``, ``rows`` and ``rows_per_s`` of training, ``seconds`` of the epoch, and of these:
    ``compute_s`` (steps, validation and callbacks), ``exchange_s``, ``others_s`` (waiting for other ranks) and
    ``input_s`` (waiting for rows). ``end_s`` are those of ``compute_s`` after the last step; ``bytes_sent``. Which rank
    a rank waits for it cannot know itself: of ranks that take every step together, nobody keeps the one waiting that
    waits least, and its seconds are those of the exchange.

    Args:
        epochs: Of all ranks, by epoch.
        together: Whether they take every step together.
    """
    times = []
    for _, group in groupby(epochs, key=lambda epoch: epoch.epoch):
        of_epoch = list(group)
        exchange_s = min(epoch.wait_s for epoch in of_epoch) if together else math.inf
        times += [_times(epoch, min(exchange_s, epoch.wait_s)) for epoch in of_epoch]
    return times


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
        "end_s": max(epoch.seconds - epoch.training_s - end_wait_s, 0.0),
        "bytes_sent": epoch.bytes_sent,
    }


def sums_by_rank(times: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the sums over the epochs, one dictionary of each rank; see `added_up`."""
    parts = sorted(times, key=lambda part: part["rank"])
    return [added_up(list(own)) for _, own in groupby(parts, key=lambda part: part["rank"])]


def added_up(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sums of parts of one rank, without ``epoch``; its rate is that of all its rows.

    Examples:
        >>> parts = [{"epoch": epoch, "rank": 1, "rows": 10, "rows_per_s": 5.0 + 5.0 * epoch} for epoch in (0, 1)]
        >>> added_up(parts)["rows_per_s"] == 20 / 3
        True
    """
    took_s = sum(part["rows"] / part["rows_per_s"] for part in parts if part["rows_per_s"])
    sums = {name: sum(part[name] for part in parts) for name in parts[0] if name not in ("epoch", "rank")}
    return {"rank": parts[0]["rank"], **sums, "rows_per_s": sums["rows"] / took_s if took_s else 0.0}
