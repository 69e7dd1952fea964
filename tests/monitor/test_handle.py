"""Handles of fits in the background, around functions that end as they are told to."""

import threading

import pytest

from elephant.errors import JobCancelledError
from elephant.monitor.events import EpochEnded, Started, StepEnded
from elephant.monitor.handle import FitHandle, followers, require_wanted
from elephant.monitor.listeners import Listeners

DEADLINE_S = 20


class Fitted:
    history = {"loss": [3.0, 2.0]}


def started(rank):
    return Started(
        rank=rank, host="h", executor="0", device="CPU", threads=1, training_rows=10, validation_rows=0, first_step=1
    )


def fit_of(gate, told, error=None, loops=False):
    """Returns a fit that tells its listener of two epochs, and goes on when the gate is open."""

    def fit():
        with Listeners(followers(), {"epochs": 2, "mode": "synchronous"}) as listeners:
            for event in told:
                listeners.show(event)
            if loops:
                while not gate.wait(0.01):
                    require_wanted()
            assert gate.wait(DEADLINE_S)
            if error is not None:
                raise error
            listeners.fitted = Fitted()
            return listeners.fitted

    return fit


def wait_until(holds):
    pause = threading.Event()
    return any(holds() or pause.wait(0.01) for _ in range(100 * DEADLINE_S))


def test_handle_when_its_fit_goes_on_then_tells_how_far_it_is_and_has_the_model_in_the_end():
    gate = threading.Event()
    step = StepEnded(rank=0, epoch=1, step=3, steps=5, logs={"loss": 2.5}, rows=6, rows_per_s=50.0, step_s=0.1)
    epoch = EpochEnded(rank=0, epoch=0, logs={"loss": 3.0}, seconds=1.0)
    handle = FitHandle(fit_of(gate, [started(0), epoch, step]))
    assert wait_until(lambda: handle.progress["step"] == 3)
    now = handle.progress
    assert now.pop("seconds") > 0
    assert now == {"state": "training", "epoch": 2, "epochs": 2, "step": 3, "steps": 5, "rows_per_s": 50.0}
    assert handle.history == {"loss": [3.0]} and not handle.done and followers() == []
    with pytest.raises(TimeoutError, match="still runs after 0.05 s: FitHandle"):
        handle.result(0.05)
    gate.set()
    assert isinstance(handle.result(DEADLINE_S), Fitted)
    assert handle.done and handle.history == Fitted.history and handle.progress["state"] == "ended"
    # One that has ended is not cancelled any more.
    handle.cancel()
    assert handle.progress["state"] == "ended"


def test_handle_when_its_fit_is_cancelled_then_says_so_and_another_goes_on():
    gate, other_gate = threading.Event(), threading.Event()
    handle, other = (FitHandle(fit_of(one, [], loops=True)) for one in (gate, other_gate))
    assert handle.progress["state"] == "starting" and handle.history == {}
    handle.cancel()
    with pytest.raises(JobCancelledError, match="cancelled by its handle"):
        handle.result(DEADLINE_S)
    assert handle.progress["state"] == "cancelled" and "cancelled" in repr(handle)
    other_gate.set()
    assert isinstance(other.result(DEADLINE_S), Fitted)
    # Nobody has cancelled what has no handle.
    require_wanted()


def test_handle_when_its_fit_fails_then_raises_its_error():
    gate = threading.Event()
    gate.set()
    handle = FitHandle(fit_of(gate, [], error=ValueError("rows")))
    with pytest.raises(ValueError, match="rows"):
        handle.result(DEADLINE_S)
    assert handle.progress["state"] == "failed"
