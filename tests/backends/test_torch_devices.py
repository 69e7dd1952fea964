"""Gradients that are reduced on devices, by PyTorch: with Gloo, on processors, in the place of NCCL."""

import contextlib
import importlib.util
import os
import runpy
import signal
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from keras_reference import (
    VICTIM,
    Fails,
    OnDevices,
    Signals,
    StopOnOneRank,
    classifier_data,
    fit_one_process,
    global_batches,
    job_for,
    largest_difference,
    small_model,
    split,
    two_groups,
)
from rank_pool import WORLD, RankError, RankPool

pytestmark = [
    pytest.mark.usefixtures("by_value"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

GPU_CHECK = str(Path(__file__).parents[2] / "benchmarks" / "gpu_check.py")
SIZES = (23, 0, 14)
# Soon, against the minutes of an operation's own deadline; a busy machine may take its time.
PATIENCE_S = 30.0
DEADLINE_S = 4.0
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw, clipped": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5),
    "adam, accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "by variable": two_groups,
}


@pytest.fixture(scope="module")
def pool():
    with pytest.MonkeyPatch.context() as patch:
        # Processes that take a lost one's place have it too.
        patch.setenv("ELEPHANT_GPU_TRANSPORT", "gloo")
        pool = RankPool("torch")
        # The first test does not wait for imports.
        pool.run(int, [()] * WORLD)
        yield pool
        pool.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_when_ranks_are_uneven_then_equal_one_process(pool, name):
    columns = classifier_data(sum(SIZES))
    columns["weight"] = np.random.default_rng(3).uniform(0, 2, sum(SIZES)).astype("float32")
    parts, make = split(columns, SIZES), OPTIMIZERS[name]
    options = {"epochs": 3, "batch_size": 5, "shuffle": False, "weighted": True}
    recordings = pool.fit(job_for(lambda: small_model(make()), callbacks=[OnDevices()], **options), parts)
    expected, history = fit_one_process(small_model(make()), list(global_batches(parts, 5, 3)), epochs=3)
    # That the ranks' weights are equal to the bit, the fit itself finds out after every epoch.
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-5
    for metric, values in history.items():
        np.testing.assert_allclose([logs[metric] for logs in recordings[0].epochs], values, rtol=1e-5)


@pytest.mark.parametrize(
    "options, on_devices",
    [
        ({}, True),
        ({"gpu_transport": "nccl"}, True),
        ({"gpu_transport": "host"}, False),
        ({"compression": "bfloat16"}, False),
        ({"use_gpu": False}, False),
        ({"frequency": 2}, False),
        ({"transport": "tcp"}, False),
        ({"transport": "tcp", "gpu_transport": "nccl"}, True),
    ],
    ids=str,
)
def test_transport_when_chosen_or_left_open_then_devices_reduce_where_they_may(pool, options, on_devices):
    transport = options.pop("transport", "auto")
    job = job_for(lambda: small_model("sgd"), batch_size=4, callbacks=[OnDevices(on_devices)], **options)
    assert len(pool.fit(job, split(classifier_data(24), (12, 12)), transport)[0].epochs) == 1


def test_transport_when_a_rank_has_no_device_then_all_refuse_it_or_take_the_host(pool):
    def choose(transport, without):
        from elephant import collective
        from elephant.backends import current
        from elephant.backends.gradient_averager import GradientAverager
        from elephant.collective.api import current_collective
        from elephant.config import FitConfig
        from elephant.errors import ConfigurationError

        before = os.environ["ELEPHANT_GPU_TRANSPORT"]
        os.environ["ELEPHANT_GPU_TRANSPORT"] = "" if without else before
        averager = GradientAverager(current_collective(), lambda: 0.5)
        try:
            current().reduce_on_devices(averager, FitConfig(num_workers=2, gpu_transport=transport))
        except ConfigurationError as error:
            return str(error)
        else:
            return averager.uses_kernel
        finally:
            averager.close()
            collective.barrier()
            os.environ["ELEPHANT_GPU_TRANSPORT"] = before

    assert pool.run(choose, [("auto", False), ("auto", True)]) == [False, False]
    refused = pool.run(choose, [("nccl", False), ("nccl", True)])
    assert refused[0] == refused[1]
    assert refused[0].startswith("gpuTransport: expected a GPU for each rank")
    assert "Received: none on rank 1 of 2." in refused[0]


def test_transport_when_the_devices_of_a_rank_add_up_wrong_then_all_refuse_it_or_take_the_host(pool):
    def choose(transport, is_wrong):
        import torch

        from elephant import collective
        from elephant.backends.gradient_averager import GradientAverager
        from elephant.backends.torch_devices import TorchReducer, reduce_on_devices
        from elephant.collective.api import current_collective
        from elephant.config import FitConfig
        from elephant.errors import ConfigurationError

        averager, right = GradientAverager(current_collective(), lambda: 0.5), TorchReducer._sum
        if is_wrong:
            TorchReducer._sum = lambda *given: [right(*given)[0] + torch.ones(1)]
        try:
            reduce_on_devices(averager, FitConfig(num_workers=2, gpu_transport=transport))
        except ConfigurationError as error:
            return str(error)
        else:
            return averager.uses_kernel, averager.kernel
        finally:
            TorchReducer._sum = right
            averager.close()
            collective.barrier()

    assert pool.run(choose, [("auto", False), ("auto", True)]) == [(False, None)] * 2
    refused = pool.run(choose, [("nccl", False), ("nccl", True)])
    assert refused[0] == refused[1] and "expected NCCL to add up a number of each rank" in refused[0]


def averages_of(steps):
    """Returns this rank's averages of steps, and whether it knew after each that the ranks are to stop.

    Args:
        steps: Of each its weight, gradients or None, their dtypes, and whether this rank wants to stop.
    """
    import torch

    from elephant import collective
    from elephant.backends import current
    from elephant.backends.gradient_averager import GradientAverager
    from elephant.collective.api import current_collective
    from elephant.config import FitConfig

    weights = iter([weight for weight, *_ in steps])
    averager = GradientAverager(current_collective(), lambda: next(weights))
    found, agreed = [], []
    with contextlib.closing(averager):
        current().reduce_on_devices(averager, FitConfig(num_workers=2, gpu_transport="nccl"))
        for _, gradients, names, stop in steps:
            averager.stop.requested = stop
            dtypes = [getattr(torch, name) for name in names]
            given = [
                None if gradient is None else torch.tensor(gradient, dtype=dtype)
                for gradient, dtype in zip(gradients, dtypes, strict=True)
            ]
            averages = averager.kernel.average(given, [keras.Variable(np.zeros((2, 3)), dtype=name) for name in names])
            agreed.append(averager.stop.agreed)
            for average, dtype in zip(averages, dtypes, strict=True):
                assert average is None or (average.dtype == dtype and average.shape == (2, 3))
            found.append([None if average is None else average.double().numpy() for average in averages])
        collective.barrier()
    return found, agreed


def test_averages_when_dtypes_are_mixed_then_16_bits_are_summed_in_32(pool):
    dtypes = ["float32", "float16", "float64", "bfloat16"]
    rng = np.random.default_rng(4)
    of_ranks = [[rng.normal(size=(2, 3)) for _ in dtypes] for _ in range(3)]
    weights = (0.5, 0.3, 0.2)
    found = pool.run(averages_of, [([(w, g, dtypes, False)],) for w, g in zip(weights, of_ranks, strict=True)])
    tolerances = (1e-6, 1e-3, 1e-14, 1e-2)
    for place, tolerance in enumerate(tolerances):
        expected = sum(w * gradients[place] for w, gradients in zip(weights, of_ranks, strict=True))
        for (averages,), _ in found:
            np.testing.assert_allclose(averages[place], expected, rtol=tolerance, atol=tolerance)
            np.testing.assert_array_equal(averages[place], found[0][0][0][place])
    # Of 2**-24, the smallest number of float16, three thirds are one in float32 alone.
    thirds = [(1 / 3, [np.full((2, 3), 2.0**-24)], ["float16"], False)]
    ((only,), _), *_ = pool.run(averages_of, [(thirds,)] * 3)
    np.testing.assert_array_equal(only[0], 2.0**-24)


def test_averages_when_a_rank_has_no_rows_then_its_nan_counts_for_nothing(pool):
    own, nan = np.full((2, 3), 2.0), np.full((2, 3), np.nan)
    steps = [(1.0, [own], ["float32"], False)], [(0.0, [nan], ["float32"], False)]
    for averages, _ in pool.run(averages_of, [(one,) for one in steps]):
        np.testing.assert_array_equal(averages[0][0], own)
    # Without rows of anybody, nothing is to change, and nothing is absent.
    idle = [(0.0, [nan, None], ["float32"] * 2, False)]
    for averages, _ in pool.run(averages_of, [(idle,), (idle,)]):
        np.testing.assert_array_equal(averages[0], np.zeros((2, 2, 3)))


def test_stand_in_rows_when_they_give_nan_then_the_fit_goes_on(pool):
    class LogOfNorm(keras.layers.Layer):
        def call(self, inputs):
            return keras.ops.log(keras.ops.sum(inputs**2, axis=-1, keepdims=True)) * 0 + inputs

    def build():
        model = keras.Sequential([keras.layers.Input((6,)), LogOfNorm(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    job = job_for(build, epochs=3, batch_size=4, callbacks=[OnDevices(), keras.callbacks.TerminateOnNaN()])
    recording, *_ = pool.fit(job, split(classifier_data(20), (20, 0)))
    assert len(recording.epochs) == 3
    assert all(np.isfinite(logs["loss"]) for logs in recording.epochs)


def test_averages_when_gradients_are_absent_then_those_of_others_count_and_nobody_s_stay_absent(pool):
    one, dtypes = np.ones((2, 3)), ["float32"] * 4
    # There on both, on one, on none, and on one alone that has no rows.
    steps = [(0.75, [one, one, None, None], dtypes, False), (1.0, [one, one, one, one], dtypes, False)]
    others = [(0.25, [5 * one, None, None, None], dtypes, False), (0.0, [None, None, None, one], dtypes, False)]
    for (first, second), _ in pool.run(averages_of, [(steps,), (others,)]):
        np.testing.assert_array_equal(first[0], 2 * one)
        np.testing.assert_array_equal(first[1], 0.75 * one)
        assert first[2] is None and first[3] is None
        np.testing.assert_array_equal(second, [one, one, one, one])


def test_stop_when_a_rank_asks_for_it_then_all_hear_it_at_the_next_step(pool):
    gradients = [np.ones((2, 3))], ["float32"]
    # A rank without rows may have asked before it ran out of them.
    asking = [(0.0, *gradients, False), (0.0, *gradients, True), (0.0, *gradients, True), (0.0, *gradients, True)]
    other = [(1.0, *gradients, False)] * 4
    assert [agreed for _, agreed in pool.run(averages_of, [(asking,), (other,)])] == [[False, False, True, True]] * 2


@pytest.mark.parametrize("batch, steps", [(1, 2), (4, 5), (5, 6)])
def test_fit_when_a_callback_of_one_rank_stops_it_then_all_stop_at_the_same_step(pool, tmp_path, batch, steps):
    parts = split(classifier_data(36), (18, 18))
    callbacks = [OnDevices(), StopOnOneRank(str(tmp_path / "claim"), batch)]
    job = job_for(lambda: small_model("sgd"), epochs=3, batch_size=3, shuffle=False, callbacks=callbacks)
    recordings = pool.fit(job, parts)
    batches = list(global_batches(parts, 3, 1))[:steps]
    expected, _ = fit_one_process(small_model("sgd"), batches, epochs=1)
    assert len(recordings[0].epochs) == 1
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-6


def test_fit_when_a_rank_overflows_then_all_skip_the_step_and_have_one_loss_scale(pool):
    def scaled():
        keras.config.set_dtype_policy("mixed_float16")
        try:
            inner = keras.optimizers.SGD(0.05, momentum=0.9)
            return small_model(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**12))
        finally:
            keras.config.set_dtype_policy("float32")

    columns = classifier_data(40)
    # Of the first rank's second batch alone.
    columns["label"][5:7] = 6e4
    job = job_for(scaled, epochs=2, batch_size=4, shuffle=False, callbacks=[OnDevices()])
    recordings = pool.fit(job, split(columns, (20, 20)))
    assert len(recordings[0].epochs) == 2
    assert all(np.isfinite(value).all() for value in recordings[0].variables)
    # 4096 is halved in each epoch.
    assert any(value.size == 1 and value.item() == 1024.0 for value in recordings[0].variables)


class TwoOptimizers(keras.Model):
    """A model whose own step applies one optimizer twice, the second time without a gradient on some ranks."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.second = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 4))

    def call(self, inputs):
        return self.second(self.first(inputs))

    def train_step(self, data):
        import torch

        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        for skips in (False, True):
            self.zero_grad()
            loss = keras.ops.mean((keras.ops.squeeze(self(x), -1) - y) ** 2)
            loss.backward()
            gradients = [variable.value.grad for variable in self.trainable_variables]
            if skips and float(y[0]) > 0:
                gradients[:2] = [None, None]
            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss.detach()}


def test_fit_when_gradients_differ_between_ranks_in_an_own_step_then_ranks_stay_equal(pool):
    def build():
        keras.utils.set_random_seed(0)
        model = TwoOptimizers()
        model.build((None, 6))
        model.compile(keras.optimizers.Adam(0.01))
        return model

    def trained(**options):
        job = job_for(build, epochs=2, batch_size=4, shuffle=False, **options)
        return pool.fit(job, split(classifier_data(30), (14, 6, 10)))[0].variables

    on_devices = trained(callbacks=[OnDevices()])
    assert largest_difference(on_devices, trained(gpu_transport="host", callbacks=[OnDevices(False)])) <= 1e-6


class Summed(keras.Sequential):
    """A model whose own step takes the sum of its rows' losses."""

    def train_step(self, data):
        import torch

        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        loss = keras.ops.sum((keras.ops.squeeze(self(x), -1) - y) ** 2)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([variable.value.grad for variable in self.trainable_variables])
        return {"loss": loss.detach()}


def test_fit_when_an_own_step_adds_up_its_loss_then_equals_one_process(pool):
    def build():
        keras.utils.set_random_seed(0)
        model = Summed([keras.layers.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.002))
        return model

    parts = split(classifier_data(30), (14, 6, 10))
    job = job_for(build, epochs=2, batch_size=4, shuffle=False, callbacks=[OnDevices()])
    variables, model, batches = pool.fit(job, parts)[0].variables, build(), list(global_batches(parts, 4, 2))
    tuples = ((batch["features"], batch["label"]) for batch in batches)
    model.fit(tuples, epochs=2, steps_per_epoch=len(batches) // 2, verbose=0)
    expected = [keras.ops.convert_to_numpy(weight) for weight in model.weights]
    assert largest_difference(variables[: len(expected)], expected) <= 1e-5


def test_check_of_gpus_when_devices_reduce_then_has_the_sums_of_the_host(pool):
    on_devices_and_host = runpy.run_path(GPU_CHECK)["on_devices_and_host"]
    for apart, *times in pool.run(on_devices_and_host, [(40, 2)] * 2):
        assert apart <= 1e-6 and min(times) > 0


def test_layouts_when_ranks_have_other_variables_then_all_say_so(pool):
    steps = [[(0.5, [np.ones((2, 3))] * count, ["float32"] * count, False)] for count in (1, 2)]
    with pytest.raises(RankError) as failed:
        pool.run(averages_of, [(one,) for one in steps])
    for kind, text, _ in failed.value.outcomes:
        assert kind == "ProtocolError" and "Expected gradients of the same variables from all ranks" in text


def outcomes_of(pool, *callbacks, **limits):
    parts = split(classifier_data(60), (20, 20, 20))
    job = job_for(lambda: small_model("sgd"), batch_size=4, callbacks=[OnDevices(), *callbacks])
    with pytest.raises(RankError) as failed:
        pool.fit(job, parts, **limits)
    return failed.value.outcomes


def test_fit_when_a_rank_is_killed_then_the_others_name_it_in_seconds(pool, tmp_path):
    outcomes = outcomes_of(pool, Signals(str(tmp_path), signal.SIGKILL))
    assert time.monotonic() - float((tmp_path / "sent").read_text()) < PATIENCE_S
    for kind, text, _ in (outcomes[0], outcomes[2]):
        assert kind == "PeerLostError", text
        assert f"rank {VICTIM}" in text and "exchange of gradients" in text and "its process died" in text


def test_group_when_a_rank_is_killed_while_it_is_formed_then_the_others_name_it_in_seconds(pool, tmp_path):
    sent = tmp_path / "sent"

    def form(is_killed):
        from elephant.backends import torch_devices
        from elephant.backends.gradient_averager import GradientAverager
        from elephant.collective.api import current_collective
        from elephant.config import FitConfig

        def die(*_):
            sent.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        if is_killed:
            torch_devices._process_group = die
        averager = GradientAverager(current_collective(), lambda: 0.5)
        try:
            torch_devices.reduce_on_devices(averager, FitConfig(num_workers=3, gpu_transport="nccl"))
        finally:
            averager.close()

    with pytest.raises(RankError) as failed:
        pool.run(form, [(rank == VICTIM,) for rank in range(3)])
    assert time.monotonic() - float(sent.read_text()) < PATIENCE_S
    for kind, text, _ in (failed.value.outcomes[0], failed.value.outcomes[2]):
        assert kind == "PeerLostError" and f"rank {VICTIM}" in text.lower(), text


def test_fit_when_a_rank_freezes_then_the_others_name_it_at_their_deadline(pool, tmp_path):
    outcomes = outcomes_of(pool, Signals(str(tmp_path), signal.SIGSTOP), collective_s=DEADLINE_S)
    assert time.monotonic() - float((tmp_path / "sent").read_text()) < DEADLINE_S + PATIENCE_S
    assert outcomes[VICTIM][0] == "Stopped"
    for kind, text, _ in (outcomes[0], outcomes[2]):
        assert kind == "DeadlineExceededError", text
        assert f"within {DEADLINE_S:g} s" in text and f"Ranks that did not arrive: {VICTIM}." in text


def test_fit_when_a_rank_raises_then_says_why_and_the_others_name_it(pool):
    began = time.monotonic()
    outcomes = outcomes_of(pool, Fails())
    assert time.monotonic() - began < 60
    assert outcomes[VICTIM][:2] == ("ZeroDivisionError", "before the third step")
    for kind, text, _ in (outcomes[0], outcomes[2]):
        assert kind == "PeerLostError" and f"rank {VICTIM}" in text.lower()
