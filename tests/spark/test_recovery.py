"""What the driver does about checkpoints and failures, whatever it is that trains: no cluster is needed for that."""

import contextlib
import io
import types
from dataclasses import replace

import keras
import numpy as np
import pytest

from elephant import KerasEstimator
from elephant.checkpoint.manager import CheckpointManager, CheckpointWriter
from elephant.checkpoint.state import FitState, identity_of, is_saved, named
from elephant.config import FitConfig
from elephant.data.schema import RowSpec, TensorSpec
from elephant.driver.coordinator import FitResult
from elephant.driver.elastic.fit import ElasticFit
from elephant.driver.elastic.policy import ElasticPolicy
from elephant.errors import (
    CheckpointError,
    ClusterError,
    ConfigurationError,
    PreemptedError,
    RowsMovedError,
    ServerFailedError,
    WorkerFailure,
)
from elephant.monitor.progress import Progress
from elephant.rank.job import TrainingJob
from elephant.spark import fit
from elephant.spark.saving.streaming import start_stream
from elephant.storage.folder import LocalFolder

# What a job asks of its model; no fit here builds one.
NO_MODEL = types.SimpleNamespace(
    info=types.SimpleNamespace(sharded=(), measures=None, check_tables=lambda config: None)
)

ROWS = RowSpec(0, (TensorSpec((2,), "float32"),))


@pytest.fixture(autouse=True)
def folders_of_this_machine(monkeypatch):
    monkeypatch.setattr(fit, "checkpoint_folder", lambda session, path: LocalFolder(path))


def lost(retryable=True):
    error = WorkerFailure("its process was killed (signal 9): often memory", rank=1, host="a")
    error.retryable = retryable
    return error


def left():
    error = PreemptedError("rank 1 was asked to end")
    error.retryable = True
    return error


class Fit:
    """Trains by counting epochs, and fails at the end of those that it is told to, once each.

    Args:
        failures: Errors by epoch; by epoch and a half those in the middle of an epoch, 7 steps into it.
    """

    def __init__(self, failures=(), *, epochs=4, **options):
        self.config = FitConfig(epochs=epochs, **options)
        self.failures, self.epochs, self.begun = dict(failures), [], []
        self.out = io.StringIO()

    def train(self):
        job = TrainingJob(NO_MODEL, (), self.config, types.SimpleNamespace(batch_fields=()))
        progress = Progress(num_workers=1, epochs=4, verbose=1, stream=self.out)
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(fit, "train_synchronously", self._attempt)
            return fit.train(types.SimpleNamespace(session=None), job, progress)

    def _attempt(self, rows, job, progress, checkpoint_writer, recovery):
        weights = float(job.first_epoch) if job.state is None else float(job.state.group("model")[0][0])
        history = [] if job.state is None else list(job.state.history["loss"])
        new = []
        first_step = 0 if job.state is None else job.state.step
        self.begun.append((job.first_epoch, first_step))
        for epoch in range(job.first_epoch, self.config.epochs):
            self.epochs.append(epoch)
            if not first_step and epoch + 0.5 in self.failures:
                self._keep(checkpoint_writer, FitState(epochs=epoch, step=7, history={"loss": history + new}), weights)
            if epoch + 0.5 in self.failures:
                raise self.failures.pop(epoch + 0.5)
            weights, first_step = weights + 1, 0
            new.append(10.0 - epoch)
            self._keep(checkpoint_writer, FitState(epochs=epoch + 1, history={"loss": history + new}), weights)
            if epoch in self.failures:
                raise self.failures.pop(epoch)
        return FitResult(variables=[np.full(2, weights)], rows=ROWS, history={"loss": new})

    def _keep(self, checkpoint_writer, state, weights):
        if checkpoint_writer is None:
            return
        if not state.step and not is_saved(state.epochs, self.config, stopped=False):
            return
        facts = {"fit": identity_of(self.config), "rows": ROWS.to_json(), "stopped": False}
        facts |= {"optimizer_names": [], "callbacks": []}
        arrays = named("model", [np.full(2, weights)])
        checkpoint_writer.keep(replace(state, arrays=arrays, facts=facts))
        writer = getattr(checkpoint_writer, "_writer", checkpoint_writer)
        if isinstance(writer, CheckpointWriter):
            writer._queue.wait()
        checkpoint_writer.check()


def require_whole(trained):
    np.testing.assert_array_equal(trained.variables[0], [4.0, 4.0])
    assert trained.history["loss"] == [10.0, 9.0, 8.0, 7.0]


def test_fit_when_ranks_hold_up_others_then_the_statistics_name_them(monkeypatch):
    slow = {"slow_ranks": [{"rank": 1, "host": "b", "reason": "rows"}]}
    monkeypatch.setattr("elephant.monitor.stragglers.StragglerWatch.statistics", slow)
    assert Fit().train().statistics == slow


def test_fit_when_it_is_lost_then_goes_on_from_the_checkpoint_and_counts(tmp_path):
    failed = ServerFailedError("lost")
    failed.retryable = True
    fit = Fit({1: lost(), 2: failed}, checkpoint_path=str(tmp_path), max_restarts=2)
    trained = fit.train()
    require_whole(trained)
    assert fit.epochs == [0, 1, 2, 3]
    assert trained.statistics == {"restarts": 2}
    assert "starts again (2 of 2): lost" in fit.out.getvalue()
    assert "going on after epoch 3 of 4" in fit.out.getvalue()


def test_fit_when_it_is_lost_without_a_folder_then_goes_on_from_the_driver_s_memory():
    fit = Fit({0.5: lost(), 1: lost(), 2.5: lost()}, max_restarts=3)
    require_whole(fit.train())
    assert fit.begun == [(0, 0), (0, 7), (2, 0), (2, 7)]
    assert "going on after epoch 2 of 4, from the checkpoint in the driver's memory" in fit.out.getvalue()


def test_fit_when_it_is_lost_with_a_model_that_no_rank_has_as_a_whole_then_begins_anew():
    fit = Fit({1: lost()}, max_restarts=1, num_workers=2, pipeline_stages=2)
    require_whole(fit.train())
    assert fit.epochs == [0, 1, 0, 1, 2, 3]


def test_fit_when_an_executor_was_decommissioned_then_its_loss_alone_counts_no_restart(monkeypatch):
    def lost_on(executor):
        error = WorkerFailure("its process was killed", rank=1, host="a", executor=executor)
        error.retryable = True
        return error

    asked = []
    monkeypatch.setattr(fit, "is_decommissioned", lambda session, executor: asked.append(executor) or executor == "3")
    fitting = Fit({1: lost_on("3"), 2: lost_on("3"), 3: lost_on("4")}, max_restarts=1)
    require_whole(trained := fitting.train())
    assert trained.statistics == {"restarts": 1} and asked == ["3", "3", "4"]
    with pytest.raises(WorkerFailure):
        Fit({1: lost_on("3")}).train()
    assert len(asked) == 3


class Leaving(Fit):
    """A fit whose workers leave before they have trained at all."""

    def _attempt(self, rows, job, progress, checkpoint_writer, recovery):
        self.begun.append(job.first)
        raise left()


def test_fit_when_workers_leave_then_counts_those_alone_that_leave_no_newer_state():
    fit = Fit({0.5: left(), 1.5: left()}, max_restarts=1)
    trained = fit.train()
    require_whole(trained)
    assert trained.statistics == {"restarts": 0} and fit.begun == [(0, 0), (0, 7), (1, 7)]
    leaving = Leaving(max_restarts=3)
    with pytest.raises(PreemptedError):
        leaving.train()
    assert len(leaving.begun) == 4


@pytest.mark.parametrize(("allowed", "retryable"), [(0, True), (3, False)])
def test_fit_when_it_may_not_be_started_again_then_raises(allowed, retryable):
    fit = Fit({1: lost(retryable)}, max_restarts=allowed)
    with pytest.raises(WorkerFailure):
        fit.train()
    assert fit.epochs == [0, 1]


def test_fit_when_it_is_lost_too_often_then_raises_the_last_error(tmp_path):
    fit = Fit({0: lost(), 1: lost(), 2: lost()}, checkpoint_path=str(tmp_path), max_restarts=2)
    with pytest.raises(WorkerFailure):
        fit.train()
    resumed = Fit(checkpoint_path=str(tmp_path), resume=True)
    require_whole(resumed.train())
    assert resumed.epochs == [3]


def test_fit_when_it_is_lost_after_its_last_epoch_then_only_its_end_is_made_up_for(tmp_path, recwarn):
    with pytest.raises(WorkerFailure):
        Fit({3: lost()}, checkpoint_path=str(tmp_path)).train()
    fit = Fit(checkpoint_path=str(tmp_path), resume=True)
    require_whole(fit.train())
    assert fit.epochs == [] and "all epochs are done (4 of 4): only the end" in fit.out.getvalue()
    again = Fit(checkpoint_path=str(tmp_path), resume=True)
    require_whole(again.train())
    assert "nothing is left to train" in again.out.getvalue()
    assert [str(warning.message) for warning in recwarn] == []


def test_fit_when_all_epochs_are_done_then_nothing_is_trained(tmp_path):
    Fit(checkpoint_path=str(tmp_path)).train()
    with pytest.raises(ConfigurationError, match="has one of epoch 4"):
        Fit(checkpoint_path=str(tmp_path)).train()
    fit = Fit(checkpoint_path=str(tmp_path), resume=True)
    require_whole(fit.train())
    assert fit.epochs == [] and "nothing is left to train: 4 epochs are done" in fit.out.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seed": 3}, "seed: expected 0"), ({"learning_rate": 0.5}, "learning_rate: expected None"),
     ({"mode": "asynchronous"}, "mode: expected 'synchronous'")],
)  # fmt: skip
def test_fit_when_it_goes_on_as_another_one_then_is_refused(tmp_path, change, message):
    with pytest.raises(WorkerFailure):
        Fit({1: lost()}, checkpoint_path=str(tmp_path)).train()
    with pytest.raises(ConfigurationError, match=message):
        Fit(checkpoint_path=str(tmp_path), resume=True, **change).train()


@pytest.mark.parametrize("resume", [False, True])
def test_fit_when_no_checkpoint_can_be_read_then_neither_begins_anew_nor_goes_on(tmp_path, resume):
    Fit(checkpoint_path=str(tmp_path)).train()
    for path in tmp_path.glob("*.json"):
        path.write_bytes(path.read_bytes()[:-1])
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="expected a checkpoint that is whole"):
        Fit(checkpoint_path=str(tmp_path), resume=resume).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_fit_when_it_goes_on_with_other_workers_then_says_what_changes(tmp_path):
    options = {"checkpoint_path": str(tmp_path), "validation_fraction": 0.1}
    with pytest.raises(WorkerFailure):
        Fit({1: lost()}, num_workers=3, **options).train()
    fit = Fit(num_workers=2, batch_size=8, resume=True, **options)
    require_whole(fit.train())
    assert "3 workers before, 2 now" in fit.out.getvalue()
    assert "A validationIndicatorCol keeps them apart" in fit.out.getvalue()
    assert "batches of 32 rows before, of 8 now" in fit.out.getvalue()


OTHERS = {
    "workers": ({"num_workers": 2}, "3 workers before, 2 now: going on from the end of epoch 1, 7 steps of the next"),
    "batches": ({"batch_size": 8}, "batches of 32 rows before, of 8 now: going on from the end of epoch 1, 7 steps of"),
    "memory": ({"cache": "memory"}, "cache='disk' before, 'memory' now: going on from the end of epoch 1, 7 steps of"),
    "stages": (
        {"pipeline_stages": 3},
        "a model that is divided begins with an epoch: going on from the end of epoch 1",
    ),
    "none": ({}, "going on after epoch 1 of 4 and 7 steps of the next one, from the checkpoint"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_fit_when_it_was_lost_within_an_epoch_then_goes_on_there_with_the_same_batches_alone(tmp_path, kind):
    before = {"num_workers": 3, "checkpoint_path": str(tmp_path)}
    with pytest.raises(WorkerFailure):
        Fit({1.5: lost()}, **before).train()
    change, note = OTHERS[kind]
    fit = Fit(**{**before, **change}, resume=True)
    require_whole(fit.train())
    assert fit.begun == [(1, 0 if change else 7)] and note in fit.out.getvalue()


def test_fit_when_it_was_lost_before_the_end_of_an_epoch_and_has_other_workers_then_begins_anew(tmp_path):
    options = {"checkpoint_path": str(tmp_path), "checkpoint_epochs": 2}
    with pytest.raises(WorkerFailure):
        Fit({1.5: lost()}, **options).train()
    fit = Fit(num_workers=2, resume=True, **options)
    require_whole(fit.train())
    assert fit.begun == [(0, 0)]
    assert (
        "1 worker before, 2 now: beginning anew, without a checkpoint of the end of an epoch, 1 epoch and 7 steps are "
        "trained again" in fit.out.getvalue()
    )


def test_fit_when_fewer_epochs_are_asked_for_than_were_begun_then_what_is_beyond_them_does_not_count(tmp_path):
    with pytest.raises(WorkerFailure):
        Fit({1.5: lost()}, checkpoint_path=str(tmp_path)).train()
    fit = Fit(epochs=1, checkpoint_path=str(tmp_path), resume=True)
    np.testing.assert_array_equal(fit.train().variables[0], 1.0)
    assert fit.begun == [(1, 0)] and "trained again" not in fit.out.getvalue()


def test_fit_when_rows_have_moved_then_goes_on_from_the_end_of_an_epoch_and_counts_no_restart(tmp_path):
    class Moved(Fit):
        def _attempt(self, rows, job, progress, checkpoint_writer, recovery):
            if job.state is not None and job.state.step:
                self.begun.append((job.state.epochs, job.state.step))
                raise RowsMovedError("other rows")
            return super()._attempt(rows, job, progress, checkpoint_writer, recovery)

    fit = Moved({1.5: lost(), 2.5: lost()}, checkpoint_path=str(tmp_path), max_restarts=2)
    trained = fit.train()
    require_whole(trained)
    assert fit.begun == [(0, 0), (1, 7), (1, 0), (2, 7), (2, 0)] and trained.statistics == {"restarts": 2}
    note = "than before: going on from the end of epoch {}, 7 steps of the next one are"
    assert all(note.format(epoch) in fit.out.getvalue() for epoch in (1, 2))


def test_fit_when_rows_have_moved_and_no_checkpoint_is_to_blame_then_raises(tmp_path):
    with pytest.raises(RowsMovedError):
        Fit({0: RowsMovedError("other rows")}, checkpoint_path=str(tmp_path), max_restarts=2).train()


def test_fit_when_a_checkpoint_cannot_be_written_then_ends_unless_it_was_the_last_word(tmp_path, monkeypatch):
    written = []

    def write(folder, name, fill):
        # Before anything is trained, a trial tells whether the folder can be written.
        if ".epoch-trial" not in name:
            written.append(name)
        if len(written) in failing:
            raise OSError(28, "No space left on device")
        return plain(folder, name, fill)

    plain = LocalFolder.write
    monkeypatch.setattr(LocalFolder, "write", write)
    # Two files for each epoch, and one in the end.
    failing = {3}
    with pytest.raises(CheckpointError, match="epoch 2.*No space left.*That of epoch 1 is still there"):
        Fit(checkpoint_path=str(tmp_path), max_restarts=5).train()
    written.clear()
    failing = {7}
    fit = Fit(checkpoint_path=str(tmp_path), resume=True)
    with pytest.warns(UserWarning, match="The fit has ended well, and its last checkpoint is missing"):
        require_whole(fit.train())
    assert fit.epochs == [1, 2, 3]
    assert CheckpointManager(LocalFolder(tmp_path)).latest().state.epochs == 4


def test_stream_when_a_checkpoint_path_is_given_then_is_refused(tmp_path):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    estimator = KerasEstimator(model=model, checkpointPath=tmp_path)
    frame = types.SimpleNamespace(isStreaming=True)
    with pytest.raises(ConfigurationError, match="checkpointPath: expected it not to be set.*checkpointLocation"):
        start_stream(estimator, frame, checkpoint=str(tmp_path), trigger={}, query_name=None, min_rows_per_worker=1)


class Elastic(Fit):
    """A fit of one or two workers, with so many slots before each attempt, and at the end of each epoch."""

    def __init__(self, failures=(), *, slots, **options):
        super().__init__(failures, num_workers=(1, 2), timeouts={"slots_s": 0.0}, **options)
        self.slots, self.sizes = list(slots), []

    def train(self):
        progress = Progress(num_workers=2, epochs=4, verbose=1, stream=self.out)
        elastic = ElasticFit(
            ElasticPolicy(1, 2, slots_s=0.0, max_restarts=self.config.max_restarts),
            progress,
            slots=lambda own: self.slots.pop(0) if len(self.slots) > 1 else self.slots[0],
            asked=lambda number: contextlib.nullcontext(),
            is_dynamic=False,
        )
        schema = types.SimpleNamespace(batch_fields=(), in_pieces=lambda: types.SimpleNamespace(batch_fields=()))
        job = TrainingJob(NO_MODEL, (), self.config, schema)
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(fit, "train_synchronously", self._attempt)
            patching.setattr(fit, "in_virtual_shards", lambda rows, number: rows)
            patching.setattr(fit.ElasticFit, "of", lambda *_: elastic)
            return fit.train(types.SimpleNamespace(session=None), job, progress)

    def _attempt(self, rows, job, progress, checkpoint_writer, recovery):
        self.sizes.append(job.config.num_workers)
        return super()._attempt(rows, job, progress, checkpoint_writer, recovery)


def test_elastic_fit_when_workers_are_lost_then_goes_on_with_fewer_as_long_as_it_comes_further():
    # Before the first attempt, at the end of epoch 0, and before each of the next attempts.
    trained = (elastic := Elastic({0.5: lost(), 1.5: lost(), 2.5: lost()}, slots=[2, 1])).train()
    require_whole(trained)
    assert elastic.sizes == [2, 1, 1, 1] and elastic.begun == [(0, 0), (0, 7), (1, 7), (2, 7)]
    assert trained.statistics == {"restarts": 3, "workers": [2, 1, 1, 1]}
    assert "the fit has lost workers, and goes on from its last state: rank 1 on a failed" in elastic.out.getvalue()


def test_elastic_fit_when_slots_are_freed_then_grows_at_the_end_of_the_epoch_and_counts_no_restart():
    trained = (elastic := Elastic(slots=[1, 1, 2])).train()
    require_whole(trained)
    assert elastic.sizes == [1, 2] and elastic.begun == [(0, 0), (2, 0)]
    assert trained.statistics == {"restarts": 0, "workers": [1, 2]}


@pytest.mark.parametrize("allowed", [0, 2])
def test_elastic_fit_when_it_comes_no_further_or_restarts_are_used_up_then_raises(allowed):
    class Lost(Elastic):
        def _attempt(self, rows, job, progress, checkpoint_writer, recovery):
            self.sizes.append(job.config.num_workers)
            raise lost()

    elastic = Lost(slots=[2], max_restarts=allowed)
    with pytest.raises(WorkerFailure):
        elastic.train()
    assert len(elastic.sizes) == 3


def test_elastic_fit_when_slots_go_as_an_attempt_begins_then_it_is_sized_anew():
    class Refused(Elastic):
        def _attempt(self, rows, job, progress, checkpoint_writer, recovery):
            if job.config.num_workers == 2:
                self.sizes.append(2)
                raise ClusterError("numWorkers=2: expected 2 task slots. Received: 1.")
            return super()._attempt(rows, job, progress, checkpoint_writer, recovery)

    elastic = Refused(slots=[2, 1])
    require_whole(elastic.train())
    assert elastic.sizes == [2, 1]
    with pytest.raises(ClusterError):
        Refused(slots=[2]).train()


def test_elastic_fit_when_resumed_with_another_most_or_another_kind_then_begins_with_an_epoch(tmp_path):
    with pytest.raises(WorkerFailure):
        Elastic({1.5: lost(retryable=False)}, slots=[2], checkpoint_path=str(tmp_path)).train()
    fixed = Fit(num_workers=2, checkpoint_path=str(tmp_path), resume=True)
    require_whole(fixed.train())
    assert fixed.begun == [(1, 0)] and "rows are in virtual shards before or now, and not both" in fixed.out.getvalue()


def test_elastic_fit_when_resumed_with_other_workers_then_goes_on_at_the_very_step(tmp_path):
    with pytest.raises(WorkerFailure):
        Elastic({1.5: lost(retryable=False)}, slots=[2], checkpoint_path=str(tmp_path)).train()
    elastic = Elastic(slots=[1], checkpoint_path=str(tmp_path), resume=True)
    require_whole(elastic.train())
    assert elastic.begun == [(1, 7)] and elastic.sizes == [1]
