"""What ranks tell of their steps and epochs, and who keeps the others waiting."""

import time

import keras
from asynchronous_fit import AsynchronousFit
from keras_reference import classifier_data, job_for, regression_model, split

from elephant import collective
from elephant.monitor.events import RankEpoch, StepEnded


def told(recording, kind):
    return [event for event in recording.sent if isinstance(event, kind)]


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
            assert event.bytes_sent > 0, event
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
