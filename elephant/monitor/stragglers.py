"""Stragglers: ranks that hold up the others, and in which way, by what the seconds of an epoch went into.

Ranks that take every step together, with the same work, are all as fast as the slowest one. Workers that go at their
own pace wait for nobody, and stages of a model have work of different kinds: of these nothing is said.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elephant.monitor.events import EpochEnded, Event, RankEpoch, Started
from elephant.monitor.rank_times import added_up, rank_times

# Part of an epoch. Two equal processes on two cores that were used by others as well differed by up to 8 % in epochs of
# five seconds: about twice as much is no noise.
MUCH_WAITING = 0.15
# Of the same processes, one in four epochs of 0.1 s and one in seven of a second differed by more than that.
_SHORTEST_S = 5.0
# With the first epoch of a process, which traces the model, and not as fast on each rank.
_SHORTEST_FIRST_S = 60.0
# A rank is named again for the same reason when it has become so many times as slow.
_SLOWER = 2.0
# Lines of an epoch about a rank each.
_MOST_LINES = 3
# Epochs, and part of all epochs, in which a slow rank has held up others.
_LEAST_EPOCHS, _LEAST_PART = 2, 0.5
# Ranks that do nothing in an epoch have a factor nevertheless.
_LEAST_S = 1e-3


class Reason(str, enum.Enum):
    """Part of an epoch in which a straggler takes the most of its time beyond that of others."""

    ROWS = "rows"  # it has more of them
    STEPS = "steps"  # it computes longer with as many rows
    INPUT = "input"  # its steps wait longer for their rows
    EPOCH_END = "epoch_end"  # its validation and its callbacks after the last step take longer


@dataclass(frozen=True)
class Straggler:
    """Rank that at least half of the others wait for.

    Args:
        own: Its times of an epoch, or the sums over several; see `elephant.monitor.rank_times`.
        usual: Those of another rank; at least half of the others are as fast as this one.
        seconds: Of the whole epoch, or of several.
    """

    own: Mapping[str, Any]
    usual: Mapping[str, Any]
    seconds: float

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return int(self.own["rank"])

    @property
    def waiting(self) -> float:
        """Part of the time in which others wait for it."""
        return (_own_s(self.own) - _own_s(self.usual)) / self.seconds if self.seconds else 0.0

    @property
    def factor(self) -> float:
        """Its seconds without waiting for other ranks, as a multiple of those of others."""
        return _own_s(self.own) / max(_own_s(self.usual), _LEAST_S)

    @property
    def reason(self) -> Reason:
        """The part in which it takes the most of its time beyond that of others."""
        rows, usual_rows = self.own["rows"], self.usual["rows"]
        longer_s = _steps_s(self.own) - _steps_s(self.usual)
        # What more rows take at the pace of others, who may have none.
        more_rows_s = _steps_s(self.usual) * (rows / usual_rows - 1) if usual_rows else longer_s if rows else 0.0
        # Those that have run out of rows go on with steps: more rows may take no longer.
        more_rows_s = min(max(more_rows_s, 0.0), max(longer_s, 0.0))
        excess_s = {
            Reason.ROWS: more_rows_s,
            Reason.STEPS: longer_s - more_rows_s,
            Reason.INPUT: self.own["input_s"] - self.usual["input_s"],
            Reason.EPOCH_END: self.own["end_s"] - self.usual["end_s"],
        }
        return max(excess_s, key=excess_s.__getitem__)

    @property
    def text(self) -> str:
        """The reason in words, with its numbers and those of others."""
        reason, rows, usual_rows = self.reason, self.own["rows"], self.usual["rows"]
        if reason is Reason.ROWS:
            return f"{rows:,} rows, where others have {usual_rows:,}"
        if reason is Reason.INPUT:
            own_s, usual_s = self.own["input_s"], self.usual["input_s"]
            return f"{own_s:.1f} s of waiting for its {rows:,} rows, others {usual_s:.1f} s"
        if reason is Reason.EPOCH_END:
            own_s, usual_s = self.own["end_s"], self.usual["end_s"]
            return f"{own_s:.1f} s of validation and callbacks, others {usual_s:.1f} s, {rows:,} rows"
        times = _steps_s(self.own) / max(_steps_s(self.usual), _LEAST_S)
        if rows and usual_rows:
            return f"{times * usual_rows / rows:.1f} times the time per row, {rows:,} rows"
        return f"{times:.1f} times the time of a step, {rows:,} rows"


def _own_s(times: Mapping[str, Any]) -> float:
    """Returns the seconds in which a rank waits for no other one."""
    return float(times["compute_s"] + times["input_s"])


def _steps_s(times: Mapping[str, Any]) -> float:
    return max(float(times["compute_s"] - times["end_s"]), 0.0)


def stragglers(times: Sequence[Mapping[str, Any]]) -> list[Straggler]:
    """Returns the ranks that at least half of the others wait for a good part of the time; the slowest is the first.

    Args:
        times: A dictionary for each rank, of an epoch or the sums over several; see `elephant.monitor.rank_times`.

    Examples:
        >>> parts = {"rows": 100, "input_s": 0.0, "end_s": 1.0}
        >>> times = [{"rank": rank, "seconds": 20.0, "compute_s": seconds, **parts} for rank, seconds in
        ...          enumerate([9.0, 11.0, 17.0])]
        >>> [(slow.rank, round(slow.waiting, 2), slow.text) for slow in stragglers(times)]
        [(2, 0.4, '2.0 times the time per row, 100 rows')]
    """
    if len(times) < 2:
        return []
    seconds, ordered = max(own["seconds"] for own in times), sorted(times, key=_own_s)
    # The median of the others, the lower one of two: it is the same rank for all that are slower than it.
    middle = (len(ordered) - 2) // 2
    slower = [Straggler(own, ordered[middle], seconds) for own in reversed(ordered[middle + 1 :])]
    return [straggler for straggler in slower if straggler.waiting > MUCH_WAITING]


class StragglerWatch:
    """Names the stragglers of a fit as its epochs end, each once for a reason, and remembers their epochs.

    Ranks have connections of their own: an epoch is judged when it has ended and all ranks have told their times.

    Args:
        waits_for_all: Whether ranks take every step together, and have the same to do in it. Else there are none.

    Attributes:
        latest_stragglers: Those of the last epoch.
    """

    def __init__(self, *, waits_for_all: bool) -> None:
        self.latest_stragglers: list[Straggler] = []
        self._waits_for_all = waits_for_all
        self._started: dict[int, Started] = {}
        self._traces = False
        self._ended: set[int] = set()
        self._rank_epochs: dict[int, dict[int, RankEpoch]] = {}
        # Of each epoch that was complete, with the places of the ranks then.
        self._stragglers_of: dict[int, list[tuple[Started, Straggler]]] = {}
        self._named_reasons: dict[tuple[int, str, str, Reason], float] = {}

    def add(self, event: Event) -> list[str]:
        """Takes an event; returns lines about the epoch that is complete with it."""
        if not self._waits_for_all:
            return []
        if isinstance(event, Started):
            self._started[event.rank] = event
            self._traces = True
            # What ranks have told before one of them was started again, they tell once more.
            self._rank_epochs.clear()
            self._ended.clear()
            self.latest_stragglers = []
            return []
        if isinstance(event, RankEpoch):
            self._rank_epochs.setdefault(event.epoch, {})[event.rank] = event
        elif isinstance(event, EpochEnded):
            self._ended.add(event.epoch)
        else:
            return []
        told = self._rank_epochs.get(event.epoch, {})
        if event.epoch not in self._ended or not told or told.keys() != self._started.keys():
            return []
        self._ended.remove(event.epoch)
        return self._judge(event.epoch, list(self._rank_epochs.pop(event.epoch).values()))

    def _judge(self, epoch: int, rank_epochs: Sequence[RankEpoch]) -> list[str]:
        seconds = max(rank_epoch.seconds for rank_epoch in rank_epochs)
        is_long = seconds >= (_SHORTEST_FIRST_S if self._traces else _SHORTEST_S)
        self._traces = False
        self.latest_stragglers = stragglers(rank_times(rank_epochs, together=True)) if is_long else []
        found = [(self._started[straggler.rank], straggler) for straggler in self.latest_stragglers]
        self._stragglers_of[epoch] = found
        new = [(started, straggler) for started, straggler in found if self._is_new(started, straggler)]
        lines = [
            f"epoch {epoch + 1}: others wait {straggler.waiting:.0%} of their time for rank {started.rank}"
            f"{_where(started)}: {straggler.text}"
            for started, straggler in new[:_MOST_LINES]
        ]
        more = len(new) - len(lines)
        return [*lines, f"epoch {epoch + 1}: others wait for {more:,} more ranks"] if more else lines

    def _is_new(self, started: Started, straggler: Straggler) -> bool:
        """Returns whether a straggler was not named for its reason yet, or is much slower now; it is named then."""
        key = (*_place(started), straggler.reason)
        if straggler.factor < _SLOWER * self._named_reasons.get(key, 0.0):
            return False
        self._named_reasons[key] = straggler.factor
        return True

    @property
    def statistics(self) -> dict[str, Any]:
        """``slow_ranks`` of `elephant.KerasModel.training_statistics`; nothing where none was slow again and again."""
        by_place: dict[tuple[int, str, str], dict[int, Straggler]] = defaultdict(dict)
        for epoch, found in sorted(self._stragglers_of.items()):
            for started, straggler in found:
                by_place[_place(started)][epoch] = straggler
        least = max(_LEAST_EPOCHS, _LEAST_PART * len(self._stragglers_of))
        slow = [_entry(*place, by_epoch) for place, by_epoch in sorted(by_place.items()) if len(by_epoch) >= least]
        return {"slow_ranks": slow} if slow else {}


def _entry(rank: int, host: str, executor: str, by_epoch: Mapping[int, Straggler]) -> dict[str, Any]:
    """Returns the entry of a rank that has held up others in several epochs."""
    of_epochs = list(by_epoch.values())
    whole = Straggler(
        own=added_up([straggler.own for straggler in of_epochs]),
        usual=added_up([straggler.usual for straggler in of_epochs]),
        seconds=sum(straggler.seconds for straggler in of_epochs),
    )
    return {
        "rank": rank,
        "host": host,
        "executor": executor,
        "rows": of_epochs[-1].own["rows"],
        "epochs": list(by_epoch),
        "factor": round(whole.factor, 2),
        "reason": whole.reason.value,
    }


def _place(started: Started) -> tuple[int, str, str]:
    return started.rank, started.host, started.executor


def _where(started: Started) -> str:
    executor = f"executor {started.executor}" if started.executor else ""
    known = [part for part in (started.host, executor) if part]
    return f" ({', '.join(known)})" if known else ""
