"""The options of synchronous training, on executors in processes of their own."""

import json
import re
from dataclasses import fields

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, global_batches, regression_model, split, two_groups
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator
from elephant.backends import current
from elephant.config import AsynchronousOptions, FitConfig, Timeouts
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.spark.params import fit_config

SCHEMA = "features array<double>, label double"
SIZES = (22, 9)


def normalising_model(rate):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((6,)), *layers])
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
    return model


@pytest.mark.slow("a fit; test_options_when_given_to_the_estimator and tests/rank hold the parts")
def test_fit_when_scaled_synchronised_and_in_buckets_then_weights_equal_one_process(spark, capsys, monkeypatch):
    monkeypatch.setenv("ELEPHANT_BUCKET_BYTES", "64")
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
        compression="bfloat16",  # nothing crosses hosts here, so nothing is encoded
        verbose=2,
    )
    fitted = estimator.fit(frame)
    assert "the learning rate is multiplied by 2, the number of workers" in capsys.readouterr().out
    batches = list(global_batches(split(columns, SIZES), 4, 2))
    expected, _ = fit_one_process(normalising_model(0.04), batches, epochs=2)
    for value, wanted in zip(fitted.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=2e-5)


def test_fit_when_batches_are_made_by_length_then_rows_of_one_length_only_are_refused(spark):
    frame = partitioned_frame(spark, split_rows(classifier_data(4), (2, 2)), SCHEMA)
    estimator = KerasEstimator(model=regression_model("sgd"), numWorkers=2, bucketByLength=True, verbose=0)
    with pytest.raises(ConfigurationError, match="bucketByLength: expected a column of sequences"):
        estimator.fit(frame)


# Every option in a value that is not its default, by the names of `FitConfig`.
SYNCHRONOUS = {
    "num_workers": 3,
    "epochs": 4,
    "batch_size": 6,
    "validation_fraction": 0.25,
    "shuffle": False,
    "seed": 6,
    "learning_rate": 0.5,
    "scale_learning_rate": True,
    "compression": "int8",
    "sync_batch_norm": True,
    "shard_optimizer": True,
    "allow_batch_coupled_loss": True,
    "cache": "memory",
    "steps_per_epoch": 7,
    "bucket_by_length": True,
    "use_gpu": False,
    "gpus_per_worker": 2,
    "gpu_transport": "host",
    "mixed_precision": True,
    "checkpoint_path": "kept",
    "checkpoint_seconds": 30.0,
    "keep_best": "val_loss",
    "checkpoint_epochs": 8,
    "resume": True,
    "max_restarts": 9,
    "encryption": True,
    "ports": (40000, 40100),
    "verbose": 2,
    "timeouts": Timeouts(slots_s=10.0),
}
SERVERS = {
    "algorithm": "aeasgd:0.5",
    "max_staleness": 4,
    "parameter_servers": 2,
    "server_placement": "executors",
    "port": 4000,
    "snapshot_seconds": 5.0,
}


def camel_case(options):
    return {re.sub("_(.)", lambda letter: letter[1].upper(), name): value for name, value in options.items()}


def test_options_when_given_to_the_estimator_then_reach_the_fit_each_under_its_own_name():
    model = regression_model("sgd")
    given = fit_config(KerasEstimator(model=model, **camel_case(SYNCHRONOUS)))
    assert given == FitConfig(**SYNCHRONOUS)
    own = {"mode": "hogwild", "frequency": 3}
    given = fit_config(KerasEstimator(model=model, **camel_case({**own, **SERVERS})))
    assert given == FitConfig(**own, asynchronous=AsynchronousOptions(**SERVERS))
    given = fit_config(KerasEstimator(model=model, mode="asynchronous", backgroundExchange=True))
    assert given.asynchronous.background_exchange
    assert fit_config(KerasEstimator(model=model, aggregation="server")).trains_in_rounds
    stages = {"num_workers": 6, "pipeline_stages": ["deep", "head"], "micro_batches": 4}
    assert fit_config(KerasEstimator(model=model, **camel_case(stages))) == FitConfig(**stages)
    pair = fit_config(KerasEstimator(model=model, numWorkers=(2, 8)))
    assert (pair.elastic, pair.num_workers) == ((2, 8), 8) and pair == FitConfig(num_workers=(2, 8))
    others = {"aggregation", "asynchronous", "bucket_bytes", "distribution", "elastic"}
    assert {*SYNCHRONOUS, *own, *stages} | others == {field.name for field in fields(FitConfig)}
    assert {*SERVERS, "background_exchange"} == {field.name for field in fields(AsynchronousOptions)}


def test_distribution_when_given_to_the_estimator_then_reaches_the_fit_without_devices(monkeypatch):
    mesh = keras.distribution.DeviceMesh((2, 2), ["model", "batch"], devices=[f"gpu:{place}" for place in range(4)])
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*kernel"] = (None, "model")
    rules["dense/bias"] = keras.distribution.TensorLayout(["model"])
    model, expected = regression_model("sgd"), {"shape": [2, 2], "axis_names": ["model", "batch"]}
    expected["layouts"] = {".*kernel": [None, "model"], "dense/bias": ["model"]}
    if not current().divides_models:
        with pytest.raises(
            UnsupportedError, match=r"distribution: expected the Keras backend jax, which .* KERAS_BACKEN"
        ):
            KerasEstimator(model=model, numWorkers=4, distribution=rules)
        monkeypatch.setattr(type(current()), "divides_models", True)
    both = keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="batch")
    for given, rows in ((rules, "model"), (both, "batch")):
        config = fit_config(KerasEstimator(model=model, numWorkers=4, distribution=given))
        assert (
            config.distribution == json.loads(json.dumps(config.distribution)) == {**expected, "batch_dim_name": rows}
        )
    with pytest.raises(
        ConfigurationError, match="distribution: expected keras.distribution.ModelParallel, or a LayoutM"
    ):
        KerasEstimator(model=model, numWorkers=4, distribution=keras.distribution.LayoutMap(mesh))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"frequency": "weekly"}, "frequency: expected 'batch', 'epoch' or an integer"),
        ({"frequency": 0}, "frequency: expected 'batch', 'epoch' or an integer"),
        ({"compression": "zip"}, "compression: expected None or one of .*bfloat16.*Received: 'zip'"),
        ({"gpuTransport": "ring"}, "gpuTransport: expected one of auto, host, nccl. Received: 'ring'"),
        ({"syncBatchNorm": True, "frequency": 2}, "syncBatchNorm: expected frequency='batch'"),
        ({"resume": True}, "resume: expected checkpointPath, .* Received: None"),
        ({"keepBest": "loss"}, "keepBest: expected checkpointPath, .* with keepBest='loss'. .* or leave keepBest out"),
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
        "mixedPrecision": ("mixed_precision", True),
        "checkpointPath": ("checkpoint_path", "/kept"),
        "checkpointEpochs": ("checkpoint_epochs", 2),
        "checkpointSeconds": ("checkpoint_seconds", 30.0),
        "keepBest": ("keep_best", "val_gain:max"),
        "resume": ("resume", True),
        "maxRestarts": ("max_restarts", 5),
        "encryption": ("encryption", False),
        "ports": ("ports", (9, 10)),
        "verbose": ("verbose", 2),
    }
    of_ranks = {
        "scaleLearningRate": ("scale_learning_rate", True),
        "gpuTransport": ("gpu_transport", "host"),
        "syncBatchNorm": ("sync_batch_norm", True),
        "shardOptimizer": ("shard_optimizer", True),
        "allowBatchCoupledLoss": ("allow_batch_coupled_loss", True),
        "frequency": ("frequency", "batch"),
    }
    of_servers = {
        "algorithm": ("algorithm", "aeasgd:0.3"),
        "maxStaleness": ("max_staleness", 4),
        "parameterServers": ("parameter_servers", 2),
        "serverPlacement": ("server_placement", "executors"),
        "port": ("port", 5005),
        "snapshotSeconds": ("snapshot_seconds", 11.0),
    }

    def given(options):
        return {name: value for name, (_, value) in options.items()}

    model = regression_model("sgd")
    synchronous = fit_config(KerasEstimator(model=model, **given(common | of_ranks)))
    served = fit_config(KerasEstimator(model=model, mode="asynchronous", **given(common | of_servers)))
    expected = dict((common | of_ranks).values())
    assert {name: getattr(synchronous, name) for name in expected} == expected
    expected = dict(common.values())
    assert {name: getattr(served, name) for name in expected} == expected
    expected = dict(of_servers.values())
    assert {name: getattr(served.asynchronous, name) for name in expected} == expected
    beside = fit_config(KerasEstimator(model=model, mode="hogwild", backgroundExchange=True))
    assert (beside.mode, beside.asynchronous.background_exchange) == ("hogwild", True)
    # Whatever an option is called, its default must be another value, or this test would see nothing.
    for name, value in dict((common | of_ranks).values()).items():
        assert name == "frequency" or getattr(FitConfig(), name) != value, name


def test_timeouts_when_given_in_either_form_then_are_those_of_the_fit():
    estimator = KerasEstimator(model=regression_model("sgd"), timeouts={"heartbeat_s": 5})
    assert fit_config(estimator).timeouts == Timeouts(heartbeat_s=5.0)
    estimator.setTimeouts(Timeouts(slots_s=7.0, connect_s=8.0))
    assert fit_config(estimator.copy()).timeouts == Timeouts(slots_s=7.0, connect_s=8.0)
    assert fit_config(KerasEstimator(model=regression_model("sgd"))).timeouts == Timeouts()


def test_rates_when_each_group_of_variables_has_its_own_then_none_replaces_them_and_no_server_knows_them():
    model = regression_model(two_groups())
    with pytest.raises(ConfigurationError, match=r"learningRate: expected .* one learning rate\. .* MultiOptimizer"):
        KerasEstimator(model=model, learningRate=0.1)
    for frequency in ("batch", 3):
        with pytest.raises(UnsupportedError, match="mode='asynchronous': expected an optimizer with one learning rate"):
            KerasEstimator(model=model, mode="asynchronous", frequency=frequency)
    KerasEstimator(model=model, scaleLearningRate=True)


@pytest.mark.parametrize("option", [{"scaleLearningRate": True}, {"learningRate": 0.1}], ids=str)
def test_rate_when_it_follows_a_schedule_then_it_cannot_be_set_or_scaled(option):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(ConfigurationError, match=f"{next(iter(option))}: expected .* constant learning rate"):
        KerasEstimator(model=regression_model(keras.optimizers.SGD(schedule)), **option)
