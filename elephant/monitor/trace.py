"""Trace of a fit in Chrome's format, which Perfetto opens: what each rank, its Spark task and the driver did, and when.

Ranks tell times of their monotonic clocks, and how these stand to the clocks of their hosts. The driver takes hosts'
clocks for equal to its own, as those of hosts that keep the time are. Where one is off by more than half a second, as
the quickest arrival of a report shows, its times are moved by that.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from elephant.monitor.events import EpochEnded, Event, RankTrace, RunNote
from elephant.monitor.listeners import Recorder
from elephant.monitor.record import Attempt

# All ranks together tell so many, over the whole fit.
MOST_STEPS = 100_000
# An epoch has so many steps at its begin in the trace, and as many at its end.
STEPS_AT_ENDS = 1000
# A host's clock is off from so much on; below that, a report may have been late.
_OFF_S = 0.5
_DRIVER, _FIRST_RANK = 1, 2
# Threads of one process: more would be as many restarts.
_THREADS = 1000
_MICROSECONDS = 1e6


class Phases:
    """Phases of a process or a task, one after the other: name, begin and end by its monotonic clock.

    Attributes:
        ended: The phases so far.
        of_task: Those of the Spark task that has started the process.
    """

    def __init__(self) -> None:
        self.of_task: Sequence[Sequence[Any]] = ()
        self.begin()

    def begin(self) -> None:
        """Forgets what was, and begins a phase."""
        self.ended: list[tuple[str, float, float]] = []
        self._began = time.monotonic()

    def end(self, name: str) -> None:
        """Ends a phase, and begins the next one."""
        began, self._began = self._began, time.monotonic()
        self.ended.append((name, began, self._began))

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds until now by name, first of the task, then of this process; nothing where it has no phase yet.

        Where both were at work, they are the task's: the process waits for it.
        """
        if not self.ended:
            return {}
        phases = [*self.of_task, *self.ended, ("preparing", self._began, time.monotonic())]
        seconds, at = dict[str, float](), float(phases[0][1])
        for name, _, ended, *_ in phases:
            if ended > at:
                seconds[name] = seconds.get(name, 0.0) + ended - at
                at = ended
        return seconds


# Those of this process; it begins them itself, because it may have been forked.
PROCESS = Phases()


class TraceFile(Recorder):
    """Writes the trace of a fit, when it has ended.

    Args:
        write: Replaces the content of the file.
        facts: What is written of the fit besides.
    """

    param = "eventsPath"

    def __init__(self, write: Callable[[bytes], None], facts: Mapping[str, Any] | None = None) -> None:
        self._write = write
        self._facts = dict(facts or {})
        self._driver: list[dict[str, Any]] = []
        self._began = self._since = time.time()

    def fit_begin(self, params: Mapping[str, Any]) -> None:
        # If the file cannot be written, it is better to hear of it now.
        self._write(self.to_json())

    def show(self, event: Event) -> None:
        if isinstance(event, RunNote):
            self._add_instant(event.text)
        elif isinstance(event, EpochEnded) and event.seconds is None:
            # An epoch of a log has its seconds, and comes when all is over.
            self._end_epoch(event, time.time())

    def _end_epoch(self, event: EpochEnded, now: float) -> None:
        begun_at = self.record.begun_at
        if begun_at is not None and begun_at > self._since:
            self._add_driver("start", self._since, begun_at)
            self._since = begun_at
        metrics = {name: value for name, value in event.logs.items() if isinstance(value, float)}
        self._add_driver(f"epoch {event.epoch + 1}", self._since, now, **metrics)
        self._since = now

    def worker_lost(self, rank: int, host: str, reason: str) -> None:
        self._add_instant("worker_lost", rank=rank, host=host, reason=reason)
        if self.record.together:
            self._since = time.time()

    def checkpoint(self, epochs: int) -> None:
        self._add_instant("checkpoint", epochs=epochs)

    def fit_end(self, fitted: Any, error: BaseException | None) -> None:
        now = time.time()
        self._add_driver("end", self._since, now)
        self._add_driver("fit", self._began, now, **({} if error is None else {"error": str(error)}))
        self._write(self.to_json())

    def _add_driver(self, name: str, began: float, ended: float, **args: Any) -> None:
        self._driver.append(_slice(_DRIVER, _DRIVER * _THREADS, name, began, ended, **args))

    def _add_instant(self, name: str, **args: Any) -> None:
        place = {"pid": _DRIVER, "tid": _DRIVER * _THREADS, "s": "g"}
        self._driver.append({"ph": "i", "name": name, "ts": time.time(), **place, "args": args})

    def to_json(self) -> bytes:
        """Returns the trace so far."""
        names = [*_names(_DRIVER, "driver", {_DRIVER * _THREADS: "fit"})]
        events = list(self._driver)
        exchanges = self._exchanges()
        for rank, attempts in sorted(self.record.attempts.items()):
            pid, threads = _FIRST_RANK + rank, dict[int, str]()
            for number, attempt in enumerate(attempts):
                again = f", attempt {number + 1}" if number else ""
                tid = pid * _THREADS + 2 * number
                threads |= {tid: f"training{again}", tid + 1: f"Spark task{again}"}
                shortest = exchanges[number] if self.record.together else None
                events += _of_attempt(attempt, pid, tid, shortest)
            place = attempts[-1].started
            names += _names(pid, f"rank {rank} ({place.host}, {place.device})", threads)
        first = min((event["ts"] for event in events), default=0.0)
        # The longest of slices that begin together holds the others.
        events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
        corrections = {
            f"rank {rank}": round(_correction_s(attempts[-1]), 3)
            for rank, attempts in sorted(self.record.attempts.items())
        }
        about = {**self._facts, "began": self._began, "clock_corrections_s": corrections}
        content = {
            "traceEvents": [*names, *(_in_microseconds(event, first) for event in events)],
            "displayTimeUnit": "ms",
            "otherData": about,
        }
        return json.dumps(content, default=str, separators=(",", ":")).encode()

    def _exchanges(self) -> list[dict[tuple[int, int], float]]:
        """Returns the seconds of each step's exchange, by attempt: the shortest wait, where all ranks tell of it."""
        of_ranks = self.record.attempts.values()
        most = max(map(len, of_ranks), default=0)
        waits: list[dict[tuple[int, int], list[float]]] = [defaultdict(list) for _ in range(most)]
        for attempts in of_ranks:
            for number, attempt in enumerate(attempts):
                for trace, row in _steps(attempt):
                    waits[number][trace.epoch or 0, int(row[0])].append(row[3])
        ranks = len(of_ranks)
        return [{step: min(own) for step, own in of.items() if len(own) == ranks} for of in waits]


def _correction_s(attempt: Attempt) -> float:
    """Returns by how many seconds its host's clock lags behind; zero where that may be the way of what it has told."""
    late_s = min(((trace.heard or 0.0) - trace.sent - trace.clock_s for trace in attempt.traces), default=0.0)
    return late_s if abs(late_s) > _OFF_S else 0.0


def _steps(attempt: Attempt) -> Iterator[tuple[RankTrace, list[float]]]:
    for trace in attempt.traces:
        for row in trace.arrays[0].tolist():
            yield trace, row


def _of_attempt(
    attempt: Attempt, pid: int, tid: int, shortest: Mapping[tuple[int, int], float] | None
) -> Iterator[dict[str, Any]]:
    """Yields the slices of a process and its task.

    Args:
        shortest: What the exchange of each epoch and step took; None where no rank waits for another one.
    """
    correction_s, is_first = _correction_s(attempt), True
    for trace in attempt.traces:
        to_driver_s = trace.clock_s + correction_s
        for thread, phases in ((tid, trace.phases), (tid + 1, trace.task_phases)):
            for name, began, ended, *args in phases:
                yield _slice(pid, thread, name, began + to_driver_s, ended + to_driver_s, **dict(args))
        for step, began, ended, wait_s, input_s in trace.arrays[0].tolist():
            epoch = trace.epoch or 0
            where = {"epoch": epoch + 1, "step": int(step)}
            begin, end = began + to_driver_s, ended + to_driver_s
            yield _slice(pid, tid, "first step" if is_first else "step", begin, end, **where)
            is_first = False
            # An exchange that goes on behind the step is no part of it.
            input_s = min(max(input_s, 0.0), end - begin)
            wait_s = min(max(wait_s, 0.0), end - begin - input_s)
            exchange_s = wait_s if shortest is None else min(shortest.get((epoch, int(step)), wait_s), wait_s)
            at = begin
            for name, until in (
                ("waiting for rows", begin + input_s),
                ("computing", end - wait_s),
                ("waiting for other ranks", end - exchange_s),
                ("exchanging", end),
            ):
                if until - at > 1 / _MICROSECONDS:
                    yield _slice(pid, tid, name, at, until)
                at = max(at, until)


def _slice(pid: int, tid: int, name: str, began: float, ended: float, **args: Any) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "ts": began, "dur": max(ended - began, 0.0), "pid": pid, "tid": tid}
    return {**event, "args": args} if args else event


def _in_microseconds(event: dict[str, Any], first: float) -> dict[str, Any]:
    """Returns an event with whole microseconds since the first one; slices that hold others still do."""
    begin = round((event["ts"] - first) * _MICROSECONDS)
    if "dur" not in event:
        return {**event, "ts": begin}
    end = round((event["ts"] + event["dur"] - first) * _MICROSECONDS)
    return {**event, "ts": begin, "dur": end - begin}


def _names(pid: int, name: str, threads: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Yields the names of a process and its threads, and the order in which they are shown."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": pid * _THREADS, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": pid * _THREADS, "args": {"sort_index": pid}}
    for tid, title in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": title}}
