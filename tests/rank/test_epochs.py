"""The numbers of an epoch that workers report in parts, against Keras over all their rows; and what a retry changes."""

import dataclasses

import keras
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit
from keras_reference import classifier_data, job_for, split

from elephant.config import AsynchronousOptions
from elephant.data.schema import DataSchema, Field
from elephant.driver.driver_epochs import EpochSummaries
from elephant.monitor.events import EpochPart, StopRequested, from_message, to_message

SCHEMA = DataSchema(
    inputs=(Field("features", ("features",), "float32"),), labels=(Field("label", ("label",), "float32"),)
)


def classifier():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1, "sigmoid")])
    metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.F1Score(name="f1", threshold=0.5)]
    model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", metrics=metrics)
    return model


def test_logs_when_two_workers_report_then_equal_keras_over_all_rows(rank_pool):
    sizes = (23, 8)
    columns = classifier_data(sum(sizes))
    columns["label"] = (columns["label"] > 0).astype("float32")[:, None]
    columns["validation"] = np.arange(sum(sizes)) % 3 == 0
    parts = split(columns, sizes)
    # With a rate of zero all workers see the same weights all the time.
    job = job_for(
        classifier(), mode="asynchronous", num_workers=2, epochs=2, batch_size=5, indicated=True, label_array=True
    )
    with AsynchronousFit(rank_pool, job, parts) as fit:
        recordings = fit.train_all()
    summaries, logs = EpochSummaries(job.model.build(), job.schema, 2), []
    for recording in recordings:
        for part in recording.parts:
            logs.append(summaries.add(from_message(to_message(part))))
    assert logs[:2] == [None] * 2
    marked = columns["validation"]
    expected = {}
    for prefix, rows in (("", ~marked), ("val_", marked)):
        results = classifier().evaluate(columns["features"][rows], columns["label"][rows], verbose=0, return_dict=True)
        expected |= {prefix + name: np.asarray(value) for name, value in results.items()}
    for epoch in logs[2:]:
        assert list(epoch) == sorted(epoch)
        assert set(epoch) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(epoch[name], value, atol=1e-5, err_msg=name)


def part_of(rank, epoch, loss, rows, **more):
    values = {"rows": rows, "steps": 1, "val_rows": 0, "wait_s": 0.0, "logs": {"loss": loss}}
    arrays = (np.array([loss * rows, rows], np.float64), np.empty(0))
    return EpochPart(
        rank=rank, epoch=epoch, row_shapes={"features": [6], "label": [1]}, **{**values, "arrays": arrays, **more}
    )


# An empty list of metrics has no values, and waits for a first batch all the same.
@pytest.fixture(params=[None, []], ids=["no metrics", "an empty list of metrics"])
def summaries(request):
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=request.param)
    return EpochSummaries(model, SCHEMA, 2)


def test_reports_when_a_worker_is_run_again_then_replace_and_never_add(summaries):
    assert summaries.add(part_of(0, 0, 8.0, 10)) is None
    assert summaries.add(part_of(0, 0, 6.0, 10)) is None
    assert summaries.add(part_of(1, 0, 3.0, 20)) == {"loss": pytest.approx(4.0)}
    # Once more, after the epoch was complete: nothing is reported twice.
    assert summaries.add(part_of(0, 0, 1.0, 10)) is None
    assert summaries.add(part_of(1, 0, 1.0, 10)) is None


def test_reports_when_one_is_of_fewer_steps_then_the_longer_one_stays(summaries):
    nothing = {"steps": 0, "logs": {}, "arrays": (np.empty(0), np.empty(0))}
    summaries.add(part_of(0, 0, 8.0, 10))
    assert summaries.add(part_of(0, 0, 0.0, 0, **nothing)) is None
    assert summaries.add(part_of(1, 0, 2.0, 10)) == {"loss": pytest.approx(5.0)}


def test_reports_when_those_who_trained_are_lost_before_them_then_the_epoch_has_its_numbers_as_nan(summaries):
    nothing = {"steps": 0, "logs": {}, "arrays": (np.empty(0), np.empty(0))}
    for epoch in range(2):
        summaries.add(part_of(0, epoch, 0.0, 0, **nothing))
        assert summaries.add(part_of(1, epoch, 0.0, 0, **nothing)) == {"loss": pytest.approx(np.nan, nan_ok=True)}
    assert summaries.lost == {0, 1}
    for rank in range(2):
        logs = summaries.add(part_of(rank, 2, np.nan, 10))
    # A loss that is not finite is another thing.
    assert np.isnan(logs["loss"]) and 2 not in summaries.lost


def test_reports_when_workers_are_epochs_apart_then_each_epoch_is_complete_with_its_last(summaries):
    for epoch in range(3):
        assert summaries.add(part_of(0, epoch, 1.0 + epoch, 4)) is None
    for epoch in range(3):
        assert summaries.add(part_of(1, epoch, 2.0 + epoch, 4)) == {"loss": pytest.approx(1.5 + epoch)}


def test_reports_when_a_worker_has_no_rows_then_only_the_other_counts(summaries):
    empty = EpochPart(rank=0, epoch=0, rows=0, val_rows=0, steps=0, wait_s=0.0, logs={})
    assert summaries.add(empty) is None
    assert summaries.add(part_of(1, 0, 2.0, 10)) == {"loss": pytest.approx(2.0)}


def test_reports_when_a_train_step_logs_what_no_metric_tracks_then_are_averaged_by_rows(summaries):
    untracked = {"arrays": (np.zeros(2), np.empty(0))}
    summaries.add(part_of(0, 0, 0.0, 10, logs={"g_loss": 1.0, "text": [1, 2]}, **untracked))
    logs = summaries.add(part_of(1, 0, 0.0, 30, logs={"g_loss": 3.0}, **untracked))
    assert logs == {"g_loss": pytest.approx(2.5)}


def test_reports_when_workers_have_other_metrics_than_the_driver_then_logs_are_averaged_by_rows(summaries):
    other = {"arrays": (np.ones(7), np.empty(0))}
    summaries.add(part_of(0, 0, 1.0, 10, **other))
    assert summaries.add(part_of(1, 0, 3.0, 30, **other)) == {"loss": pytest.approx(2.5)}


class OwnSteps(keras.Model):
    """A model that cannot test, with a metric that waits for its first batch."""

    def __init__(self):
        super().__init__()
        self.f1 = keras.metrics.F1Score(name="f1")

    @property
    def metrics(self):
        return [self.f1]

    def train_step(self, data):
        return {}

    def test_step(self, data):
        raise NotImplementedError("tests are not for me")


def test_reports_when_the_drivers_model_cannot_take_a_batch_then_logs_are_averaged_by_rows():
    model = OwnSteps()
    model.compile("sgd")
    summaries = EpochSummaries(model, SCHEMA, 2)
    summaries.add(part_of(0, 0, 1.0, 10))
    assert summaries.add(part_of(1, 0, 3.0, 30)) == {"loss": pytest.approx(2.5)}


def test_events_when_they_cross_the_channel_then_are_the_same():
    part = part_of(1, 3, 0.5, 7, stopped=True)
    again = from_message(to_message(part))
    assert again == part
    np.testing.assert_array_equal(again.arrays[0], part.arrays[0])
    assert from_message(to_message(StopRequested(rank=2))) == StopRequested(rank=2)


def test_parts_when_a_worker_takes_windows_then_are_of_all_its_rows(rank_pool):
    columns = classifier_data(11)
    columns["label"] = (columns["label"] > 0).astype("float32")[:, None]
    options = AsynchronousOptions(algorithm="sum")
    job = job_for(classifier(), mode="asynchronous", epochs=1, batch_size=2, frequency=4, label_array=True)
    job = dataclasses.replace(job, config=dataclasses.replace(job.config, asynchronous=options))
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        (part,) = fit.train(0).parts
    assert (part.rows, part.steps, part.stopped) == (11, 6, False)
    assert part.wait_s > 0
    assert part.arrays[0][1] == 11
