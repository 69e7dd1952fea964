"""Traces of fits: rules of Chrome's format, times of several hosts, and what steps are made of."""

import json
from dataclasses import replace

import numpy as np
import pytest

from elephant.monitor import trace
from elephant.monitor.event_log import EventLog
from elephant.monitor.events import EpochEnded, RankTrace, RunNote, Started, unpacked
from elephant.monitor.listeners import Listeners
from elephant.monitor.trace import Phases, TraceFile

# Of the host's clock and of the rank's own, when the fit began.
NOW, UP = 1_800_000_000.0, 500.0


def started(rank):
    return Started(rank=rank, host=f"h{rank}", device="CPU", threads=1, training_rows=9, validation_rows=0)


def report(rank, epoch, steps=(), *, off_s=0.0, phases=(), task_phases=(), at=0.0):
    """Returns what a rank tells whose host's clock is off by some seconds; times are those since the fit began."""
    return RankTrace(
        rank=rank,
        epoch=epoch,
        phases=[[name, began + UP, ended + UP, *more] for name, began, ended, *more in phases],
        task_phases=[[name, began + UP, ended + UP] for name, began, ended in task_phases],
        clock_s=NOW - UP + off_s,
        sent=at + UP,
        heard=NOW + at + 0.01,
        arrays=(np.array([(n, began + UP, ended + UP, *of) for n, began, ended, *of in steps]).reshape(-1, 5),),
    )


def test_phases_when_a_task_and_its_process_work_at_once_then_their_seconds_add_up_and_none_counts_twice(monkeypatch):
    clock = iter([102.0, 108.0, 109.0, 112.0, 115.0])
    monkeypatch.setattr(trace.time, "monotonic", lambda: next(clock))
    phases = Phases()
    assert phases.seconds == {}
    for name in ("importing", "waiting", "connecting"):
        phases.end(name)
    # The process has begun while its task started it, and has imported all before its task had read its rows.
    phases.of_task = [["starting", 101.0, 103.0], ["reading", 103.0, 108.5]]
    seconds = {"starting": 2.0, "reading": 5.5, "waiting": 0.5, "connecting": 3.0, "preparing": 3.0}
    assert phases.seconds == seconds


def traced(*events, mode="synchronous", error=None, monkeypatch):
    """Returns the events of the trace that a fit of some events has."""
    written = []
    clock = iter(np.arange(NOW, NOW + 1000, 0.5))
    monkeypatch.setattr(trace.time, "time", lambda: float(next(clock)))
    with Listeners([TraceFile(written.append, {"model": "<m>"})], {"mode": mode}) as listeners:
        for event in events:
            listeners.show(event)
    content = json.loads(written[-1])
    assert len(written) == 2 and json.loads(written[0])["traceEvents"] and content["otherData"]["model"] == "<m>"
    require_rules(content)
    return content


def require_rules(content):
    """Raises AssertionError unless a trace keeps to the rules of the format's description."""
    events = content["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "i"} and content["displayTimeUnit"] == "ms"
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    by_thread = {}
    for event in events:
        if event["ph"] == "M":
            continue
        assert type(event["ts"]) is int and event["ts"] >= 0
        assert event["pid"] in processes and (event["pid"], event["tid"]) in named
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
            continue
        assert type(event["dur"]) is int and event["dur"] >= 0
        by_thread.setdefault(event["tid"], []).append(event)
    for slices in by_thread.values():
        open_ends = []
        for event in slices:
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1], event
            open_ends.append(end)


def of_rank(content, rank):
    own = [event for event in content["traceEvents"] if event["ph"] == "X" and event["pid"] == 2 + rank]
    first = min(event["ts"] for event in own)
    return [(event["name"], event["ts"] - first, event["dur"]) for event in own]


FIT = [
    started(0),
    started(1),
    report(0, None, phases=[("preparing", 0.0, 1.0)], task_phases=[("reading rows", 0.0, 0.5)], at=1.0),
    report(1, None, phases=[("preparing", 0.0, 1.0)], at=1.0),
    # Number, begin, end, seconds of exchanging and of waiting for rows.
    report(0, 0, [(1, 1.0, 2.0, 0.6, 0.1)], phases=[("epoch 1", 1.0, 3.0, ["steps", 1])], at=3.0),
    report(1, 0, [(1, 1.0, 2.0, 0.2, 0.0)], phases=[("epoch 1", 1.0, 3.0), ("validation", 2.0, 2.5)], at=3.0),
    EpochEnded(rank=0, epoch=0, logs={"loss": 0.5}),
]


def test_trace_when_ranks_step_together_then_who_waits_least_tells_what_the_exchange_takes(monkeypatch):
    content = traced(*FIT, RunNote(rank=0, text="the fit failed and starts again"), monkeypatch=monkeypatch)
    assert of_rank(content, 0)[3:] == [
        ("first step", 1_000_000, 1_000_000),
        ("waiting for rows", 1_000_000, 100_000),
        ("computing", 1_100_000, 300_000),
        ("waiting for other ranks", 1_400_000, 400_000),
        ("exchanging", 1_800_000, 200_000),
    ]
    assert of_rank(content, 1)[3:5] == [("computing", 1_000_000, 800_000), ("exchanging", 1_800_000, 200_000)]
    driver = [event for event in content["traceEvents"] if event["pid"] == 1 and event["ph"] != "M"]
    assert [event["name"] for event in driver] == [
        "fit", "start", "epoch 1", "end", "the fit failed and starts again"
    ]  # fmt: skip
    assert driver[2]["args"] == {"loss": 0.5}
    # At their own pace, workers wait for servers alone.
    content = traced(*FIT, mode="asynchronous", monkeypatch=monkeypatch)
    assert of_rank(content, 0)[-1] == ("exchanging", 1_400_000, 600_000)


@pytest.mark.parametrize(("off_s", "moved_s"), [(0.0, 0.0), (0.3, 0.0), (-90.0, 90.01), (90.0, -89.99)])
def test_trace_when_a_clock_is_off_then_is_moved_by_what_the_quickest_report_shows(off_s, moved_s, monkeypatch):
    late = report(0, 0, off_s=off_s, phases=[("epoch 1", 1.0, 3.0)], at=3.0)
    events = [started(0), report(0, None, off_s=off_s, phases=[("preparing", 0.0, 1.0)], at=1.0), late]
    content = traced(*events, monkeypatch=monkeypatch)
    assert content["otherData"]["clock_corrections_s"]["rank 0"] == pytest.approx(moved_s)


def test_trace_when_a_worker_comes_again_then_its_attempts_are_threads_of_their_own(monkeypatch):
    # The first one has not ended yet: on one thread their slices would not nest.
    first = report(0, 0, phases=[("epoch 1", 1.0, 3.0)])
    again = report(0, 0, [(4, 2.0, 2.5, 9.0, 9.0)], phases=[("epoch 1", 2.0, 4.0)])
    content = traced(started(0), first, started(0), again, mode="asynchronous", monkeypatch=monkeypatch)
    names = [event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["fit", "training", "Spark task", "training, attempt 2", "Spark task, attempt 2"]


def test_record_when_a_rank_hosts_then_has_the_steps_and_when_it_has_heard_of_them():
    recording = EventLog()
    told = replace(report(1, 0, [(1, 1.0, 2.0, 0.5, 0.1)]), heard=None)
    recording.show(told)
    (read,) = unpacked(recording.to_bytes())
    assert read.heard > NOW - 1e9 and read.clock_s == told.clock_s
    np.testing.assert_array_equal(read.arrays[0], told.arrays[0])
