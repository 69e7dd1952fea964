"""The options of synchronous training, on executors in processes of their own."""

import sys

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, global_batches, regression_model, split
from pyspark import cloudpickle
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator
from elephant.config import FitConfig, Timeouts
from elephant.errors import ConfigurationError

SCHEMA = "features array<double>, label double"
SIZES = (22, 9)


def normalising_model(rate):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((6,)), *layers])
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
    return model


def test_fit_when_scaled_synchronised_and_in_buckets_then_weights_equal_one_process(spark, capsys):
    columns = classifier_data(sum(SIZES))
    frame = partitioned_frame(spark, split_rows(columns, SIZES), SCHEMA)
    estimator = KerasEstimator(
        model=normalising_model(0.02),
        numWorkers=2,
        epochs=2,
        batchSize=4,
        shuffle=False,
        scaleLearningRate=True,
        syncBatchNorm=True,
        bucketBytes=64,
        compression="bfloat16",  # nothing crosses hosts here, so nothing is encoded
        verbose=2,
    )
    fitted = estimator.fit(frame)
    assert "the learning rate is multiplied by 2, the number of workers" in capsys.readouterr().out
    batches = list(global_batches(split(columns, SIZES), 4, 2))
    expected, _ = fit_one_process(normalising_model(0.04), batches, epochs=2)
    for value, wanted in zip(fitted.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=2e-5)


def test_fit_when_weights_are_averaged_once_an_epoch_then_equals_the_weighted_average(spark):
    columns = classifier_data(sum(SIZES))
    frame = partitioned_frame(spark, split_rows(columns, SIZES), SCHEMA)
    model = regression_model(keras.optimizers.SGD(0.05))
    fitted = KerasEstimator(
        model=model, numWorkers=2, epochs=1, batchSize=4, shuffle=False, frequency="epoch", verbose=0
    ).fit(frame)
    alone = [fit_one_process(model, list(global_batches([part], 4, 1)), epochs=1)[0] for part in split(columns, SIZES)]
    for value, first, second in zip(fitted.model.get_weights(), *alone, strict=True):
        np.testing.assert_allclose(value, (22 * first + 9 * second) / 31, atol=1e-5)


class Adversaries(keras.Model):
    """Two networks, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.maker, self.judge = keras.layers.Dense(6), keras.layers.Dense(1)

    def call(self, inputs):
        return self.judge(self.maker(inputs))

    def compile(self, maker_optimizer, judge_optimizer):
        super().compile()
        self.maker_optimizer, self.judge_optimizer = maker_optimizer, judge_optimizer

    def train_step(self, data):
        import tensorflow as tf

        rows = data[0]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.softplus(-self.judge(rows)) + tf.nn.softplus(self(tf.sin(rows))))
        variables = self.judge.trainable_variables
        self.judge_optimizer.apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:
            made = tf.reduce_mean(tf.nn.softplus(-self(tf.sin(rows))))
        variables = self.maker.trainable_variables
        self.maker_optimizer.apply(tape.gradient(made, variables), variables)
        return {"judge_loss": loss, "maker_loss": made}


def adversaries():
    keras.utils.set_random_seed(0)
    model = Adversaries()
    model.compile(keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01))
    model(np.zeros((1, 6), "float32"))
    return model


def test_fit_when_a_model_has_two_optimizers_then_weights_and_losses_equal_one_process(spark):
    columns = classifier_data(sum(SIZES))
    frame = partitioned_frame(spark, split_rows(columns, SIZES), SCHEMA)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        fitted = KerasEstimator(model=adversaries, numWorkers=2, epochs=2, batchSize=4, shuffle=False, verbose=0).fit(
            frame
        )
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    reference, batches = adversaries(), list(global_batches(split(columns, SIZES), 4, 2))
    history = reference.fit(
        ((batch["features"], batch["label"]) for batch in batches),
        epochs=2,
        steps_per_epoch=len(batches) // 2,
        verbose=0,
    ).history
    for value, wanted in zip(fitted.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5)
    for name, values in history.items():
        np.testing.assert_allclose(fitted.history[name], values, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"frequency": "weekly"}, "frequency: expected 'batch', 'epoch' or an integer"),
        ({"frequency": 0}, "frequency: expected 'batch', 'epoch' or an integer"),
        ({"compression": "zip"}, "compression: expected None or one of .*bfloat16.*Received: 'zip'"),
        ({"bucketBytes": -1}, "bucket_bytes: expected bytes"),
        ({"syncBatchNorm": True, "frequency": 2}, "sync_batch_norm: expected frequency='batch'"),
        ({"timeouts": {"heartbeat": 5}}, "timeouts: expected .* seconds by the names connect_s, .*'heartbeat'"),
        ({"timeouts": {"heartbeat_s": "5"}}, "timeouts: heartbeat_s: expected zero or more seconds. Received: '5'"),
        ({"timeouts": 5}, "timeouts: expected elephant.config.Timeouts"),
    ],
    ids=str,
)
def test_options_when_they_cannot_work_then_the_constructor_says_why(options, text):
    with pytest.raises(ConfigurationError, match=text):
        KerasEstimator(model=regression_model("sgd"), **options)


def test_options_when_given_then_are_those_of_the_fit():
    common = {
        "numWorkers": ("num_workers", 3),
        "epochs": ("epochs", 4),
        "batchSize": ("batch_size", 6),
        "validationFraction": ("validation_fraction", 0.25),
        "shuffle": ("shuffle", False),
        "seed": ("seed", 7),
        "learningRate": ("learning_rate", 0.5),
        "frequency": ("frequency", 8),
        "compression": ("compression", "bfloat16"),
        "cache": ("cache", "memory"),
        "stepsPerEpoch": ("steps_per_epoch", 9),
        "bucketByLength": ("bucket_by_length", True),
        "useGpu": ("use_gpu", True),
        "gpusPerWorker": ("gpus_per_worker", 2),
        "gpuResource": ("gpu_resource", "accelerator"),
        "mixedPrecision": ("mixed_precision", True),
        "checkpointPath": ("checkpoint_path", "/kept"),
        "checkpointEpochs": ("checkpoint_epochs", 2),
        "resume": ("resume", True),
        "maxRestarts": ("max_restarts", 5),
        "verbose": ("verbose", 2),
    }
    of_ranks = {
        "scaleLearningRate": ("scale_learning_rate", True),
        "bucketBytes": ("bucket_bytes", 1000),
        "syncBatchNorm": ("sync_batch_norm", True),
        "frequency": ("frequency", "batch"),
    }
    of_servers = {
        "algorithm": ("algorithm", "aeasgd"),
        "elasticity": ("elasticity", 0.3),
        "maxStaleness": ("max_staleness", 4),
        "parameterServers": ("parameter_servers", 2),
        "serverPlacement": ("server_placement", "executors"),
        "port": ("port", 5005),
        "snapshotSeconds": ("snapshot_seconds", 11.0),
        "snapshotUpdates": ("snapshot_updates", 12),
        "maxRefusedUpdates": ("max_refused_updates", 13),
    }

    def given(options):
        return {name: value for name, (_, value) in options.items()}

    model = regression_model("sgd")
    synchronous = KerasEstimator(model=model, **given(common | of_ranks)).fit_config()
    served = KerasEstimator(model=model, mode="asynchronous", **given(common | of_servers)).fit_config()
    expected = dict((common | of_ranks).values())
    assert {name: getattr(synchronous, name) for name in expected} == expected
    expected = dict(common.values())
    assert {name: getattr(served, name) for name in expected} == expected
    expected = dict(of_servers.values())
    assert {name: getattr(served.asynchronous, name) for name in expected} == expected
    beside = KerasEstimator(model=model, mode="hogwild", backgroundExchange=True).fit_config()
    assert (beside.mode, beside.asynchronous.background_exchange) == ("hogwild", True)
    # Whatever an option is called, its default must be another value, or this test would see nothing.
    for name, value in dict((common | of_ranks).values()).items():
        assert name == "frequency" or getattr(FitConfig(), name) != value, name


def test_timeouts_when_given_in_either_form_then_are_those_of_the_fit():
    estimator = KerasEstimator(model=regression_model("sgd"), timeouts={"heartbeat_s": 5})
    assert estimator.fit_config().timeouts == Timeouts(heartbeat_s=5.0)
    estimator.setTimeouts(Timeouts(slots_s=7.0, connect_s=8.0))
    assert estimator.copy().fit_config().timeouts == Timeouts(slots_s=7.0, connect_s=8.0)
    assert KerasEstimator(model=regression_model("sgd")).fit_config().timeouts == Timeouts()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"featuresCol": "x", "inputCols": ["a", "b"]}, "inputCols: expected featuresCol not to be set.*'x' beside"),
        ({"labelCol": "y", "labelCols": ["a", "b"]}, "labelCols: expected labelCol not to be set.*'y' beside"),
    ],
)
def test_columns_when_chosen_in_two_ways_then_says_so(options, text):
    estimator = KerasEstimator(model=regression_model("sgd"), **options)
    with pytest.raises(ConfigurationError, match=text):
        estimator.column_choice()
    # What is there because nobody has said otherwise is no second way.
    estimator.setFeaturesCol("features").setLabelCol("label").column_choice()


@pytest.mark.parametrize("option", [{"scaleLearningRate": True}, {"learningRate": 0.1}], ids=str)
def test_rate_when_it_follows_a_schedule_then_it_cannot_be_set_or_scaled(option):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(ConfigurationError, match=f"{next(iter(option))}: expected .* constant learning rate"):
        KerasEstimator(model=regression_model(keras.optimizers.SGD(schedule)), **option)
