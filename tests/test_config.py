"""Options are refused where they are made, with what was expected and what came."""

import pytest
from tables import every_case

from elephant.config import AsynchronousOptions, FitConfig
from elephant.errors import ConfigurationError


@every_case(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs: expected an integer of at least 1. Received: 0"),
        ({"batch_size": -1}, "batch_size: .* Received: -1"),
        ({"num_workers": 0}, "num_workers: .* Received: 0"),
        ({"validation_fraction": 1.0}, r"validation_fraction: expected in \[0, 1\). Received: 1.0"),
        ({"seed": -1}, "seed: .* Received: -1"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a positive number. Received: nan"),
        ({"verbose": 3}, "verbose: expected 0, 1, 2 or 'auto'. Received: 3"),
        (
            {"batch_size": 5, "gpus_per_worker": 2},
            "batch_size: expected a multiple of gpus_per_worker=2, .* GPUs. Received: 5",
        ),
        (
            {"gpu_transport": "nccl", "frequency": "epoch"},
            "gpu_transport: expected frequency='batch' with 'nccl', .* Received: frequency='epoch'. .*'host'",
        ),
        ({"gpu_transport": "nccl", "compression": "int8"}, "gpu_transport: expected no compression .*='int8'"),
        ({"gpu_transport": "nccl", "use_gpu": False}, "gpu_transport: expected use_gpu=True or 'auto' .*=False"),
        ({"resume": True}, "resume: expected checkpoint_path, .* Received: None"),
        ({"checkpoint_seconds": 0}, "checkpoint_seconds: expected a positive number. Received: 0"),
        ({"checkpoint_seconds": 5}, "checkpoint_seconds: expected checkpoint_path, .* Received: None, with .*=5.0"),
        ({"keep_best": "val_loss"}, "keep_best: expected checkpoint_path, .* Received: None, with .*='val_loss'"),
        ({"mode": "both"}, "mode: expected one of synchronous, asynchronous, hogwild, gossip. Received: 'both'"),
    ],
)
def test_config_when_a_value_is_out_of_range_then_says_so(options, message):
    with pytest.raises(ConfigurationError, match=message):
        FitConfig(**options)


def test_config_when_workers_have_several_gpus_then_each_is_a_rank_with_its_part_of_the_batch():
    config = FitConfig(num_workers=3, batch_size=32, gpus_per_worker=2)
    assert (config.num_ranks, config.rank_batch_size) == (6, 16)


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
@pytest.mark.parametrize(
    "option",
    [
        {"sync_batch_norm": True},
        {"shard_optimizer": True},
        {"allow_batch_coupled_loss": True},
        {"scale_learning_rate": True},
        {"gpu_transport": "nccl"},
    ],
    ids=str,
)
def test_config_when_an_option_of_ranks_is_given_with_servers_then_says_so(mode, option):
    with pytest.raises(ConfigurationError, match=f"{next(iter(option))}: expected mode='synchronous'.*mode='{mode}'"):
        FitConfig(mode=mode, **option)


def test_config_when_an_option_of_servers_is_given_without_them_then_says_so():
    with pytest.raises(ConfigurationError, match="algorithm: expected mode='asynchronous' .*algorithm='adag'"):
        FitConfig(asynchronous=AsynchronousOptions(algorithm="adag"))
    assert FitConfig(mode="hogwild", asynchronous=AsynchronousOptions(algorithm="adag")).asynchronous.port == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "easgd"}, "algorithm: expected one of downpour, .* Received: 'easgd'"),
        ({"algorithm": "adag:0.5"}, "algorithm: expected .* 'aeasgd' and 'eamsgd' may have a moving rate.*'adag:0.5'"),
        ({"algorithm": "aeasgd:1.5"}, r"algorithm: expected .* a moving rate in \(0, 1\) .* Received: 'aeasgd:1.5'"),
        ({"algorithm": "aeasgd:fast"}, "algorithm: expected .*, such as 'aeasgd:0.3'. Received: 'aeasgd:fast'"),
        ({"max_staleness": -1}, "max_staleness: expected an integer of at least 0"),
        ({"parameter_servers": 0}, "parameter_servers: expected an integer of at least 1"),
        ({"server_placement": "moon"}, "server_placement: expected one of driver, executors"),
        ({"port": 65535, "parameter_servers": 2}, "port: expected 0, or a port of at most 65534"),
        ({"snapshot_seconds": -1.0}, "snapshot_seconds: expected zero or more"),
    ],
    ids=str,
)
def test_options_of_servers_when_they_cannot_work_then_say_so(options, message):
    with pytest.raises(ConfigurationError, match=message):
        AsynchronousOptions(**options)


def test_bucket_bytes_when_the_environment_has_them_then_are_those_of_the_fit(monkeypatch):
    assert FitConfig().bucket_bytes is None
    monkeypatch.setenv("ELEPHANT_BUCKET_BYTES", "64")
    assert FitConfig.of({"epochs": 2}).bucket_bytes == 64
    monkeypatch.setenv("ELEPHANT_BUCKET_BYTES", "-1")
    with pytest.raises(ConfigurationError, match="ELEPHANT_BUCKET_BYTES: expected an integer of at least 0"):
        FitConfig()


def test_algorithm_when_it_names_a_moving_rate_then_workers_move_by_it():
    config = FitConfig(mode="async", num_workers=3, asynchronous=AsynchronousOptions(algorithm="eamsgd:0.25"))
    assert config.new_algorithm().elasticity == 0.25
    usual = FitConfig(mode="async", num_workers=3, asynchronous=AsynchronousOptions(algorithm="eamsgd"))
    assert usual.new_algorithm().elasticity == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "async"}, "aggregation: expected mode='synchronous' with 'server', .* Received: mode='asynchronous'"),
        ({"frequency": 3}, "aggregation: expected frequency='batch' with 'server', .* Received: frequency=3"),
        ({"steps_per_epoch": 3}, "aggregation: expected epochs of all rows with 'server', .* steps_per_epoch=3"),
        (
            {"sync_batch_norm": True},
            "sync_batch_norm: expected aggregation='allreduce'. .* aggregation='server', in which",
        ),
        ({"gpu_transport": "nccl"}, "gpu_transport: expected aggregation='allreduce'"),
        ({"max_staleness": 2}, "max_staleness: expected mode='asynchronous' .* go at their own pace"),
        (
            {"background_exchange": True},
            "background_exchange: expected mode='asynchronous' .* with aggregation='server'",
        ),
        ({"algorithm": "adag"}, "algorithm: expected mode='asynchronous'"),
    ],
    ids=str,
)
def test_rounds_when_options_do_not_go_with_them_then_say_so(options, message):
    with pytest.raises(ConfigurationError, match=message):
        FitConfig.of({"aggregation": "server", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequency": 3}, "distribution: expected frequency='batch' with a model whose layers are divided .*=3"),
        ({"compression": "int8"}, "distribution: expected no compression with .* Received: compression='int8'"),
        ({"gpu_transport": "nccl"}, "distribution: expected gpu_transport='auto' with .* Leave gpu_transport or"),
        ({"num_workers": 3}, r"expected a device mesh of 3 devices, .*num_workers=3.* Received: the shape \(1, 2\)"),
        (
            {"mode": "hogwild"},
            "distribution: expected mode='synchronous'. .* no step that all workers compute together",
        ),
        ({"aggregation": "server"}, "distribution: expected aggregation='allreduce'"),
        (
            {"checkpoint_path": "kept", "checkpoint_seconds": 5},
            "checkpoint_seconds: expected None with distribution, .* before the end of an epoch. Received: 5.0",
        ),
    ],
    ids=str,
)
def test_distribution_when_options_do_not_go_with_it_then_says_so(options, message):
    rules = {"shape": (1, 2), "axis_names": ("batch", "model"), "layouts": {".*kernel": (None, "model")}}
    assert FitConfig(num_workers=2, distribution=rules).distribution["batch_dim_name"] == "batch"
    with pytest.raises(ConfigurationError, match=message):
        FitConfig.of({"num_workers": 2, "distribution": rules, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequency": 3}, "shard_optimizer: expected frequency='batch' with an optimizer whose state is divided .*=3"),
        ({"gpu_transport": "nccl"}, "shard_optimizer: expected gpu_transport='auto' or 'host' .* Received: gpu_transp"),
        (
            {"pipeline_stages": 2},
            "shard_optimizer: expected no pipeline_stages with .* Leave pipeline_stages or shard_",
        ),
        (
            {"distribution": {"shape": (1, 2), "axis_names": ("a", "b"), "layouts": {".*kernel": (None, "b")}}},
            "shard_optimizer: expected no distribution with",
        ),
        ({"mode": "gossip"}, "shard_optimizer: expected mode='synchronous'. Received: mode='gossip', in which there"),
        ({"aggregation": "server"}, "shard_optimizer: expected aggregation='allreduce'.* no update that all workers"),
    ],
    ids=str,
)
def test_divided_optimizer_when_options_do_not_go_with_it_then_says_so(options, message):
    with pytest.raises(ConfigurationError, match=message):
        FitConfig.of({"num_workers": 2, "shard_optimizer": True, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpu_transport": "nccl"},
            "encryption: expected gpu_transport='auto' or 'host' where .* NCCL's own .* or pass encryption=False",
        ),
        (
            {"distribution": {"shape": (1, 2), "axis_names": ("a", "b"), "layouts": {".*kernel": (None, "b")}}},
            "encryption: expected no distribution where connections are encrypted, because those of JAX' own",
        ),
    ],
    ids=str,
)
def test_encryption_when_options_open_connections_that_are_not_encrypted_then_says_so(options, message):
    with pytest.raises(ConfigurationError, match=message):
        FitConfig.of({"num_workers": 2, "encryption": True, **options})
    for encryption in (False, None):
        assert FitConfig.of({"num_workers": 2, "encryption": encryption, **options}).encryption is encryption


@pytest.mark.parametrize(
    "options, message",
    [
        ({"frequency": 3}, "pipeline_stages: expected frequency='batch' with a model in stages. .*=3. Leave frequency"),
        ({"compression": "int8"}, "pipeline_stages: expected no compression with .* Received: compression='int8'"),
        ({"gpu_transport": "nccl"}, "pipeline_stages: expected gpu_transport='auto' or 'host' with .*'nccl'"),
        ({"sync_batch_norm": True}, "pipeline_stages: expected sync_batch_norm=False with .*=True"),
        ({"num_workers": 5}, "a number of ranks that 2 stages divide. Received: 5 .num_workers=5, gpus_per_worker=1."),
        ({"mode": "asynchronous"}, "pipeline_stages: expected mode='synchronous'. .* no step that all workers"),
        ({"aggregation": "server"}, "pipeline_stages: expected aggregation='allreduce'"),
        (
            {"checkpoint_path": "kept", "checkpoint_seconds": 5},
            "checkpoint_seconds: expected None with pipeline_stages, .* Use checkpoint_epochs, or leave pipeline_st",
        ),
        ({"pipeline_stages": 1}, "pipeline_stages: expected an integer of at least 2, or the names of layers"),
        ({"pipeline_stages": ["a", "a"]}, "pipeline_stages: expected an integer of at least 2, or the names of layers"),
        ({"pipeline_stages": None, "micro_batches": 4}, "micro_batches: expected pipeline_stages, .*=4 without it"),
        (
            {"distribution": {"shape": [4], "axis_names": ["batch"], "layouts": {".*kernel": ["batch"]}}},
            "pipeline_stages: expected no distribution",
        ),
    ],
)
def test_stages_when_options_do_not_go_with_them_then_says_so(options, message):
    given = {"num_workers": 4, "pipeline_stages": 2}
    config = FitConfig(**given, batch_size=6, gpus_per_worker=2)
    assert (config.num_stages, config.num_replicas, config.rank_batch_size, config.batches_per_step) == (2, 4, 6, 4)
    assert FitConfig(num_workers=3, pipeline_stages=["deep", "head"]).num_stages == 3
    with pytest.raises(ConfigurationError, match=message):
        FitConfig.of({**given, **options})


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2]},
        {"axis_names": ["batch", "batch"]},
        {"layouts": {}},
        {"layouts": {"k": ["rows"]}},
        {"shape": None},
    ],
    ids=str,
)
def test_distribution_when_its_mesh_or_a_rule_makes_no_sense_then_says_what_it_may_be(change):
    rules = {"shape": (1, 2), "axis_names": ("batch", "model"), "layouts": {".*kernel": (None, "model")}}
    with pytest.raises(ConfigurationError, match="distribution: expected keras.distribution.ModelParallel, or a Layou"):
        FitConfig(num_workers=2, distribution={**rules, **change})


def test_rounds_when_options_go_with_them_then_are_taken():
    rounds = FitConfig.of({"aggregation": "server", "scale_learning_rate": True, "parameter_servers": 2, "port": 4000})
    assert rounds.trains_in_rounds and rounds.takes_steps_together and not rounds.is_synchronous
    assert rounds.pushes_gradients


def test_rounds_when_checkpoints_lie_within_epochs_then_several_servers_are_refused_by_name():
    options = {"aggregation": "server", "checkpoint_path": "kept", "checkpoint_seconds": 60}
    assert FitConfig.of(options).checkpoint_seconds == 60
    assert FitConfig.of({**options, "aggregation": "allreduce", "mode": "hogwild", "parameter_servers": 2})
    with pytest.raises(ConfigurationError, match="checkpoint_seconds: expected None with aggregation='server' and sev"):
        FitConfig.of({**options, "parameter_servers": 2})


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({}, True),
        ({"frequency": 8}, True),
        ({"aggregation": "server"}, True),
        ({"pipeline_stages": 2, "num_workers": 4}, False),
        ({"mode": "asynchronous"}, False),
        ({"mode": "gossip"}, False),
    ],
)
def test_fit_when_its_ranks_have_the_same_to_do_in_steps_together_then_it_waits_for_all(options, waits):
    assert FitConfig.of(options).waits_for_all == waits


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compression": "int8"}, "compression: expected no compression with mode='gossip'"),
        ({"sync_batch_norm": True}, "sync_batch_norm: expected mode='synchronous'. Received: mode='gossip'"),
        ({"scale_learning_rate": True}, "scale_learning_rate: expected mode='synchronous'. Received: mode='gossip'"),
        ({"parameter_servers": 2}, "parameter_servers: expected mode='asynchronous' or 'hogwild', which have a param"),
        ({"max_staleness": 2}, "max_staleness: expected mode='asynchronous' or 'hogwild', which have a parameter"),
        ({"aggregation": "server"}, "aggregation: expected mode='synchronous' with 'server'"),
        ({"algorithm": "adag"}, "algorithm: expected 'adpsgd' or 'sgp'. Received: algorithm='adag' with mode='gossip'"),
        ({"algorithm": "sgp", "mode": "hogwild"}, "algorithm: expected mode='gossip'. Received: algorithm='sgp' with"),
    ],
)
def test_gossip_when_an_option_does_not_go_with_it_then_is_refused_by_name(options, text):
    with pytest.raises(ConfigurationError) as caught:
        FitConfig.of({"mode": "gossip", "num_workers": 2, **options})
    assert text in str(caught.value)


def test_gossip_when_no_algorithm_is_named_then_it_is_adpsgd_and_sgp_where_that_is():
    assert FitConfig.of({"mode": "gossip"}).gossip_algorithm == "adpsgd"
    assert FitConfig.of({"mode": "gossip", "algorithm": "sgp"}).gossip_algorithm == "sgp"
    assert not FitConfig.of({"mode": "gossip"}).is_synchronous and not FitConfig.of({}).gossips
