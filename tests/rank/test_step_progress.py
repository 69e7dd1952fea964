"""What ranks tell of their steps and epochs, and who keeps the others waiting."""

import time
from dataclasses import replace

import keras
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit
from keras_reference import classifier_data, job_for, regression_model, split

from elephant import collective
from elephant.monitor.events import RankEpoch, RankTrace, StepEnded


def told(recording, kind):
    return [event for event in recording.sent if isinstance(event, kind)]


def require_steps(recording, rank, *, epochs, steps):
    """Raises AssertionError unless a rank has told of its steps, one after the other, and no more waiting than time."""
    first, *rest = told(recording, RankTrace)
    assert first.epoch is None and first.phases[-1][0] == "preparing" and len(first.arrays[0]) == 0
    assert [event.epoch for event in rest] == list(range(epochs))
    for event in rest:
        number, began, ended, wait_s, input_s = event.arrays[0].T
        np.testing.assert_array_equal(number, np.arange(1, steps + 1))
        assert np.all(ended > began) and np.all(began[1:] >= ended[:-1])
        assert event.rank == rank and wait_s.sum() > 0 and np.all(wait_s >= 0) and np.all(input_s >= 0)
        assert np.all(wait_s + input_s <= ended - began)
        (name, epoch_began, epoch_ended, count, left_out), *_ = event.phases
        assert (name, count, left_out) == (f"epoch {event.epoch + 1}", ["steps", steps], ["steps left out", 0])
        assert epoch_began <= began[0] and ended[-1] <= epoch_ended
        assert [phase[0] for phase in event.phases].count("validation") == 1
        assert all(epoch_began <= phase[1] <= phase[2] <= epoch_ended for phase in event.phases)


@pytest.mark.parametrize("traced", [True, False])
def test_ranks_when_a_trace_is_asked_for_then_each_tells_its_steps_and_else_none(rank_pool, traced):
    parts = split(classifier_data(30), (20, 10))
    job = job_for(regression_model("sgd"), epochs=2, batch_size=4, validation_fraction=0.2)
    for rank, recording in enumerate(rank_pool.fit(replace(job, traced=traced), parts)):
        if traced:
            require_steps(recording, rank, epochs=2, steps=4)
        else:
            assert told(recording, RankTrace) == []


def test_workers_when_a_trace_is_asked_for_then_each_tells_its_steps(rank_pool):
    parts = split(classifier_data(24), (12, 12))
    options = {"mode": "asynchronous", "num_workers": 2, "epochs": 2, "batch_size": 4, "validation_fraction": 0.2}
    with AsynchronousFit(rank_pool, replace(job_for(regression_model("sgd"), **options), traced=True), parts) as fit:
        for rank, recording in enumerate(fit.train_all()):
            require_steps(recording, rank, epochs=2, steps=3)


def lingering(rank):
    """Returns a callback that takes long on one rank."""

    def linger(batch, logs=None):
        if collective.rank() == rank:
            time.sleep(0.05)

    return keras.callbacks.LambdaCallback(on_train_batch_begin=linger)


def test_ranks_when_they_train_together_then_each_tells_its_rows_and_the_slow_one_waits_least(rank_pool):
    parts = split(classifier_data(31), (20, 11, 0))
    job = job_for(regression_model("sgd"), epochs=2, batch_size=4, callbacks=[lingering(1)])
    recordings = rank_pool.fit(job, parts)
    for rank, recording in enumerate(recordings):
        epochs = told(recording, RankEpoch)
        assert [(event.epoch, event.rank, event.rows) for event in epochs] == [
            (epoch, rank, len(parts[rank]["label"])) for epoch in (0, 1)
        ]
        for event in epochs:
            assert 0 < event.training_s <= event.seconds and 0 < event.wait_s + event.input_s < event.seconds, event
            assert event.bytes_sent > 0 and 0 < event.training_wait_s <= event.wait_s, event
        # The first step traces the model; the other ones do not.
        assert [0 < event.first_step_s < event.training_s for event in epochs] == [True, False]
        assert epochs[1].first_step_s == 0.0 and epochs[1].start == {}
        first = told(recording, StepEnded)[0]
        assert (first.rank, first.epoch, first.step, first.steps, first.rows) == (rank, 0, 1, 5, min(4, epochs[0].rows))
        # The step that is traced tells nothing of the pace.
        assert first.step_s == first.rows_per_s == 0
    waited = [told(recording, RankEpoch)[1].wait_s for recording in recordings]
    assert min(waited) == waited[1]


def test_ranks_when_weights_are_averaged_then_waiting_for_that_counts(rank_pool):
    parts = split(classifier_data(24), (12, 12))
    job = job_for(regression_model("sgd"), epochs=2, batch_size=4, frequency="epoch", callbacks=[lingering(0)])
    first, second = (told(recording, RankEpoch)[1] for recording in rank_pool.fit(job, parts))
    assert first.wait_s < second.wait_s


def test_workers_when_they_train_at_their_own_pace_then_tell_rows_and_bytes_of_their_epochs(rank_pool):
    parts = split(classifier_data(19), (11, 8))
    job = job_for(regression_model("sgd"), mode="asynchronous", num_workers=2, epochs=2, batch_size=4)
    with AsynchronousFit(rank_pool, job, parts) as fit:
        for rank, recording in enumerate(fit.train_all()):
            epochs = told(recording, RankEpoch)
            assert [(event.epoch, event.rows) for event in epochs] == [(0, (11, 8)[rank]), (1, (11, 8)[rank])]
            assert all(0 < event.wait_s < event.seconds and event.bytes_sent > 0 for event in epochs)
