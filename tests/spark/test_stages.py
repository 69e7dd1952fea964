"""A model in stages on Spark: what the driver and tasks do for it; `tests/rank/test_staged.py` has the rest."""

import os
import signal
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, largest_difference
from spark_frames import partitioned_frame, split_rows

from elephant import Files, KerasEstimator
from elephant.errors import ConfigurationError, UnsupportedError

pytestmark = pytest.mark.timeout(400)

SIZES = (20, 14)
VALIDATION = 6
# Nobody looks for it.
TABLE = Files("/none.parquet")


def deep_model():
    layers = [keras.layers.Dense(8, "tanh", name=name) for name in ("first", "second")]
    model = keras.Sequential([keras.layers.Input((6,)), *layers, keras.layers.Dense(1, name="head")])
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=weight.shape, scale=0.4) for weight in model.get_weights()])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def estimator(**options):
    shared = {"numWorkers": 2, "batchSize": 8, "shuffle": False, "validationIndicatorCol": "validation"}
    return KerasEstimator(**{**shared, "model": deep_model(), "verbose": 0, **options})


def columns_of_fit():
    total = sum(SIZES)
    return {**classifier_data(total), "validation": np.arange(total) >= total - VALIDATION}


def require_undisturbed(fitted, epochs):
    columns, model = columns_of_fit(), deep_model()
    x, y = columns["features"], columns["label"]
    trained = slice(0, -VALIDATION)
    tested = (x[-VALIDATION:], y[-VALIDATION:])
    options = {"epochs": epochs, "batch_size": 8, "shuffle": False, "verbose": 0, "validation_data": tested}
    history = model.fit(x[trained], y[trained], **options).history
    assert largest_difference(fitted.model.get_weights(), model.get_weights()) <= 1e-5
    assert set(fitted.history) == set(history)
    for name, values in history.items():
        assert fitted.history[name] == pytest.approx(values, rel=1e-4)


def killing(folder):
    """Returns a callback that kills the first stage, which is rank 1, in the second epoch of the first attempt."""

    class Kills(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            import elephant

            mark = Path(folder, "killed")
            if self.epoch == 1 and batch == 1 and elephant.collective.rank() == 1 and not mark.exists():
                mark.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

    return Kills()


@pytest.mark.slow("a fit that is started twice; tests/rank/test_staged.py has the parts")
def test_fit_when_a_stage_is_killed_then_goes_on_and_equals_one_process(spark, tmp_path, capsys):
    schema = "features array<double>, label double, validation boolean"
    frame = partitioned_frame(spark, split_rows(columns_of_fit(), SIZES), schema)
    options = {"pipelineStages": 2, "microBatches": 3, "maxRestarts": 1, "callbacks": [killing(str(tmp_path))]}
    fitted = estimator(epochs=3, checkpointPath=tmp_path / "kept", verbose=1, **options).fit(frame)
    require_undisturbed(fitted, 3)
    printed = capsys.readouterr().out
    assert "starts again (1 of 1): rank 1" in printed and "going on after epoch 1 of 3" in printed


def subclass():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(1)

        def call(self, inputs):
            return self.head(inputs)

    model = Own()
    model(np.zeros((1, 6), "float32"))
    model.compile("sgd", "mse")
    return model


def shared():
    inputs, layer = keras.Input((6,)), keras.layers.Dense(6, name="twice")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(keras.layers.Dense(6, name="between")(layer(inputs)))))
    model.compile("sgd", "mse")
    return model


def in_runs():
    model = deep_model()
    model.compile("sgd", "mse", steps_per_execution=4)
    return model


@pytest.mark.parametrize(
    ("model", "stages", "error", "words"),
    [
        (subclass, 2, UnsupportedError, "expected a Sequential or functional model"),
        (shared, ["between"], UnsupportedError, "all calls of a layer on one side. .*'twice'"),
        (in_runs, 2, UnsupportedError, "one step at a time. Received: steps_per_execution=4"),
        (deep_model, ["tail"], ConfigurationError, "names of layers. Received: 'tail'. The model has first, second, h"),
        (deep_model, 4, ConfigurationError, "a number of ranks that 4 stages divide. Received: 2"),
    ],
)
def test_fit_when_a_model_cannot_be_in_stages_then_the_driver_says_so_before_it_looks_at_rows(
    spark, model, stages, error, words
):
    def fit():
        estimator(pipelineStages=stages, model=model()).fit(TABLE)

    with pytest.raises(error, match=words):
        fit()


def test_estimator_when_callbacks_or_layers_do_not_go_with_stages_then_says_so():
    with pytest.raises(UnsupportedError, match="SwapEMAWeights with pipelineStages"):
        estimator(pipelineStages=2, callbacks=[keras.callbacks.SwapEMAWeights()])
    layers = [keras.Input((6,)), keras.layers.Dense(4), keras.layers.BatchNormalization(synchronized=True)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match=r"BatchNormalization\(synchronized=True\)"):
        estimator(pipelineStages=2, model=model)
