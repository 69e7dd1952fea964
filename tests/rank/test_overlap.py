"""Gradients in several buckets, exchanged while the next ones are computed: the sums stay the same."""

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, global_batches, job_for, largest_difference, split
from rank_pool import RankError
from tiers import in_tiers

from elephant.backends.gradient_averager import GradientAverager
from elephant.collective.communicator import LocalCommunicator
from elephant.errors import UnsupportedError
from elephant.rank.traced_step import average_gradients

TOLERANCE = 1e-5


def deep_model(**options):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "tanh") for _ in range(5)]
    model = keras.Sequential([keras.layers.Input((6,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", **options)
    return model


LOOPS = [{}, {"run_eagerly": True}]


@pytest.mark.parametrize("options", in_tiers(LOOPS, fast=["{}"], slow="another of Keras' loops"))
def test_weights_when_every_layer_is_a_bucket_then_equal_one_process(rank_pool, options):
    sizes = (13, 0) if options else (21, 12, 0)
    parts = split(classifier_data(sum(sizes)), sizes)
    job = job_for(deep_model(**options), epochs=2, batch_size=5, shuffle=False, bucket_bytes=200)
    recordings = rank_pool.fit(job, parts)
    expected, _ = fit_one_process(deep_model(), list(global_batches(parts, 5, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


@pytest.mark.skipif(
    keras.config.backend() != "torch", reason="TensorFlow's graph orders it, and JAX sends nothing early"
)
def test_buckets_when_the_backward_pass_is_at_the_first_layer_then_those_of_the_others_have_left():
    averager = GradientAverager(LocalCommunicator(), lambda: 1.0, bucket_bytes=200)
    model, submit, left = deep_model(), averager.exchange.submit, []
    average_gradients(model, averager)
    averager.exchange.submit = lambda work: (left.append("bucket"), submit(work))
    model.layers[0].kernel.value.register_hook(lambda _: left.append("first layer"))
    columns = classifier_data(15)
    try:
        model.fit(columns["features"], columns["label"], batch_size=5, shuffle=False, verbose=0)
    finally:
        averager.close()
    # The first step shows what is trained. The last two buckets have gradients of the first layer.
    assert left == ["first layer", *["bucket"] * 6, *(["bucket"] * 4 + ["first layer"] + ["bucket"] * 2) * 2]


class Saliency(keras.callbacks.Callback):
    """Has gradients of its own between two steps."""

    def on_train_batch_end(self, batch, logs=None):
        self.model(np.ones((2, 6), "float32")).sum().backward()


class TwoPasses(keras.Sequential):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if loss.requires_grad:
            (0.5 * loss).backward(retain_graph=True)
        return 0.5 * loss


def two_passes():
    keras.utils.set_random_seed(0)
    model = TwoPasses(
        [keras.layers.Input((6,)), *(keras.layers.Dense(8, "tanh") for _ in range(4)), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@pytest.mark.skipif(keras.config.backend() != "torch", reason="only PyTorch has passes that nobody has asked for")
@pytest.mark.parametrize(
    ("build", "callbacks"), [(deep_model, [Saliency()]), (two_passes, [])], ids=["callback", "two"]
)
def test_weights_when_there_are_more_backward_passes_than_steps_then_equal_one_process(
    rank_pool, by_value, build, callbacks
):
    parts = split(classifier_data(43), (31, 12))
    job = job_for(build, epochs=2, batch_size=5, shuffle=False, bucket_bytes=200, callbacks=callbacks)
    recordings = rank_pool.fit(job, parts)
    expected, _ = fit_one_process(build(), list(global_batches(parts, 5, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


@pytest.mark.skipif(keras.config.backend() != "torch", reason="only PyTorch adds to gradients that have left")
def test_step_when_a_later_one_adds_to_gradients_that_have_left_then_is_refused():
    averager = GradientAverager(LocalCommunicator(), lambda: 1.0, bucket_bytes=200)
    model, columns = deep_model(), classifier_data(15)
    average_gradients(model, averager)
    compute_loss = model.compute_loss

    def compute_loss_with_another_pass(*args, **kwargs):
        loss = compute_loss(*args, **kwargs)
        if int(model.optimizer.iterations):
            loss.backward(retain_graph=True)
        return loss

    model.compute_loss = compute_loss_with_another_pass
    try:
        with pytest.raises(UnsupportedError, match="ELEPHANT_BUCKET_BYTES: .* Set it to 0 in the driver's environment"):
            model.fit(columns["features"], columns["label"], batch_size=5, shuffle=False, verbose=0)
    finally:
        averager.close()


def test_embeddings_when_dense_gradients_travel_in_buckets_then_equal_one_process(rank_pool):
    rng = np.random.default_rng(5)
    columns = {
        "features": rng.integers(0, 40, (33, 4)).astype("int32"),
        "label": rng.normal(size=33).astype("float32"),
    }
    parts = split(columns, (17, 16))
    embedded = [keras.layers.Input((4,), dtype="int32"), keras.layers.Embedding(40, 3), keras.layers.Flatten()]
    model = keras.Sequential([*embedded, keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    recordings = rank_pool.fit(
        job_for(model, epochs=2, batch_size=4, shuffle=False, dtype="int32", bucket_bytes=8), parts
    )
    expected, _ = fit_one_process(model, list(global_batches(parts, 4, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


class RaiseInStep(keras.callbacks.Callback):
    """Fails on one rank in the third step."""

    def __init__(self, claim):
        super().__init__()
        self.claim = claim

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            try:
                open(self.claim, "x").close()
            except FileExistsError:
                return
            raise RuntimeError("no such luck")


def test_fit_when_a_rank_fails_between_buckets_then_the_others_hear_of_it(rank_pool, tmp_path, by_value):
    job = job_for(deep_model(), batch_size=2, bucket_bytes=200, callbacks=[RaiseInStep(str(tmp_path / "claim"))])
    with pytest.raises(RankError) as failure:
        rank_pool.fit(job, split(classifier_data(20), (10, 10)))
    kinds = sorted(kind for kind, *_ in failure.value.outcomes)
    assert kinds == ["PeerLostError", "RuntimeError"]
