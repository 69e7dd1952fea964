"""A step that was traced before there were rows, ranks or servers is the one that the fit takes."""

import contextlib

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, job_for
from rank_pool import write_shard

from elephant.backends import current
from elephant.backends.gradient_averager import StopSignal
from elephant.backends.tensorflow import compiled_part
from elephant.collective.communicator import LocalCommunicator
from elephant.data.epoch_plan import EpochPlan
from elephant.data.shard import Shard
from elephant.rank.input.feed import BatchFeed
from elephant.rank.keras_fit import StepRuns
from elephant.rank.rank_progress import RankWeight, StepCounter
from elephant.rank.traced_step import traced_step


class Server:
    """Stands for a worker's exchange with its servers: gives every push the same weights."""

    def __init__(self, model):
        self.pushes = 0
        self._weights = [np.full(variable.shape, 3.0, "float32") for variable in model.trainable_variables]

    def exchange(self, gradients, positions):
        self.pushes += 1
        return self._weights


@pytest.mark.skipif(not current().traces_ahead, reason="only TensorFlow's steps are traced ahead")
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_step_when_traced_ahead_then_the_fit_traces_none(mode, tmp_path):
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    job = job_for(model, mode=mode, num_workers=2, batch_size=4)
    ahead = traced_step(job)
    summary = write_shard(tmp_path / "shard", job.schema, classifier_data(12))
    server = Server(ahead.model)
    if mode == "synchronous":
        ahead.averager.bind(LocalCommunicator(), lambda: 1.0, StopSignal())
    else:
        ahead.hook.pusher = server
    with contextlib.closing(Shard(tmp_path / "shard", job.schema, summary.row_shapes)) as shard:
        plan = EpochPlan(training_rows=(12,), validation_rows=(0,), batch_size=4)
        batches = BatchFeed(shard, plan, job.config, 0).training_batches()
        callbacks = []
        if ahead.steps is not None:
            share = RankWeight(plan, 0)
            callbacks = StepRuns([StepCounter(share)], ahead.model, 1, ahead.steps, share)
        ahead.model.fit(batches, steps_per_epoch=3, shuffle=False, verbose=0, callbacks=callbacks)
    assert (ahead.steps is not None) == (mode == "synchronous")
    graphs = compiled_part(ahead.model.train_function) if ahead.steps is None else ahead.steps.taken
    assert graphs.experimental_get_tracing_count() == 1
    if mode == "asynchronous":
        assert server.pushes == 3
        assert all((variable.numpy() == 3.0).all() for variable in ahead.model.trainable_variables)
