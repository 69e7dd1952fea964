"""What the driver does about checkpoints and failures, whatever it is that trains: no cluster is needed for that."""

import io
import types

import keras
import numpy as np
import pytest

from elephant import KerasEstimator
from elephant.checkpoint.manager import CheckpointManager
from elephant.checkpoint.state import FitState, identity_of, named
from elephant.config import FitConfig
from elephant.data.schema import RowSpec, TensorSpec
from elephant.driver.coordinator import FitResult
from elephant.errors import CheckpointError, ConfigurationError, ServerFailedError, WorkerFailure
from elephant.monitor.progress import Progress
from elephant.rank.job import TrainingJob
from elephant.spark import fit
from elephant.spark.saving.streaming import start_stream
from elephant.storage.folder import LocalFolder

ROWS = RowSpec(0, (TensorSpec((2,), "float32"),))


@pytest.fixture(autouse=True)
def folders_of_this_machine(monkeypatch):
    monkeypatch.setattr(fit, "checkpoint_folder", lambda session, path: LocalFolder(path))


def lost(retryable=True):
    error = WorkerFailure("its process was killed (signal 9): often memory", rank=1, host="a")
    error.retryable = retryable
    return error


class Fit:
    """Trains by counting epochs, and fails at the end of those that it is told to, once each."""

    def __init__(self, failures=(), **options):
        self.config = FitConfig(epochs=4, **options)
        self.failures, self.epochs = dict(failures), []
        self.out = io.StringIO()

    def train(self):
        job = TrainingJob(None, (), self.config, types.SimpleNamespace(batch_fields=()))
        progress = Progress(num_workers=1, epochs=4, verbose=1, stream=self.out)
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(fit, "train_synchronously", self._attempt)
            return fit.train(types.SimpleNamespace(session=None), job, progress)

    def _attempt(self, rows, job, progress, checkpoint_writer):
        weights = float(job.first_epoch) if job.state is None else float(job.state.group("model")[0][0])
        history = [] if job.state is None else list(job.state.history["loss"])
        new = []
        for epoch in range(job.first_epoch, self.config.epochs):
            self.epochs.append(epoch)
            weights += 1
            new.append(10.0 - epoch)
            if checkpoint_writer is not None:
                facts = {"fit": identity_of(self.config), "rows": ROWS.to_json(), "stopped": False}
                facts |= {"optimizer_names": [], "callbacks": []}
                arrays = named("model", [np.full(2, weights)])
                checkpoint_writer.keep(
                    FitState(epochs=epoch + 1, history={"loss": history + new}, arrays=arrays, facts=facts)
                )
                checkpoint_writer._queue.wait()
                checkpoint_writer.check()
            if epoch in self.failures:
                raise self.failures.pop(epoch)
        return FitResult(variables=[np.full(2, weights)], rows=ROWS, history={"loss": new})


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


def test_fit_when_it_is_lost_without_checkpoints_then_begins_anew():
    fit = Fit({1: lost()}, max_restarts=1)
    require_whole(fit.train())
    assert fit.epochs == [0, 1, 0, 1, 2, 3]


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


def test_fit_when_a_checkpoint_cannot_be_written_then_ends_unless_it_was_the_last_word(tmp_path, monkeypatch):
    written = []

    def write(folder, name, fill):
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
