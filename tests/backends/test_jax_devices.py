"""Gradients that are reduced on devices that JAX has joined: with Gloo, on processors, in the place of NCCL."""

import contextlib
import importlib.util
import multiprocessing
import os
import re
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
    classifier_data,
    fit_one_process,
    global_batches,
    job_for,
    largest_difference,
    small_model,
    split,
)
from rank_pool import WORLD, RankError, RankPool

pytestmark = [
    pytest.mark.usefixtures("by_value"),
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed"),
]

GPU_CHECK = str(Path(__file__).parents[2] / "benchmarks" / "gpu_check.py")
lost = pytest.mark.slow("three processes of its own; test_backends.py kills a rank of JAX's that has no such devices")

SIZES = (23, 0, 14)
# Soon, against the minutes of an operation's own deadline; a busy machine may take its time.
PATIENCE_S = 30.0
DEADLINE_S = 4.0


@pytest.fixture(scope="module")
def forking_pool():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELEPHANT_GPU_TRANSPORT", "gloo")
        pool = RankPool("jax")
        # The first test does not wait for imports.
        pool.run(int, [()])
        yield pool
        pool.close()


@pytest.fixture
def pool(forking_pool):
    """Ranks of its own for each test: a process joins the devices of others once."""
    for rank in range(WORLD):
        forking_pool.kill(rank)
    return forking_pool


def job_on_devices(**options):
    return job_for(lambda: small_model(keras.optimizers.Adam(0.01)), gpu_transport="nccl", **options)


@pytest.mark.slow(
    "processes of its own; the averages below are of joined devices, and test_jax_distribution.py fits on such"
)
def test_weights_when_ranks_are_uneven_then_equal_one_process(pool):
    columns = classifier_data(sum(SIZES))
    columns["weight"] = np.random.default_rng(3).uniform(0, 2, sum(SIZES)).astype("float32")
    parts, options = split(columns, SIZES), {"epochs": 3, "batch_size": 5, "shuffle": False, "weighted": True}
    recordings = pool.fit(job_on_devices(callbacks=[OnDevices()], **options), parts)
    model = small_model(keras.optimizers.Adam(0.01))
    expected, history = fit_one_process(model, list(global_batches(parts, 5, 3)), epochs=3)
    # That the ranks' weights are equal to the bit, the fit itself finds out after every epoch.
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-5
    for metric, values in history.items():
        np.testing.assert_allclose([logs[metric] for logs in recordings[0].epochs], values, rtol=1e-5)


def test_averages_when_dtypes_are_mixed_then_16_bits_are_summed_in_32_and_a_rank_without_rows_counts_for_nothing(pool):
    def averages_of(steps):
        import jax.numpy as jnp

        from elephant.backends import current
        from elephant.backends.gradient_averager import GradientAverager
        from elephant.collective.api import current_collective
        from elephant.config import FitConfig

        weights = iter([weight for weight, *_ in steps])
        collective, config = current_collective(), FitConfig(num_workers=3, gpu_transport="nccl")
        current().make_wide(True)
        current().join_devices(collective, config, "127.0.0.1")
        # SIGTERM still ends the process: nobody has put a handler in its place.
        caught = re.search(r"SigCgt:\s+(\w+)", Path("/proc/self/status").read_text())[1]
        assert not int(caught, 16) >> (signal.SIGTERM - 1) & 1
        averager, found, agreed = GradientAverager(collective, lambda: next(weights)), [], []
        with contextlib.closing(averager):
            current().reduce_on_devices(averager, config)
            for _, gradients, names, averager.stop.requested in steps:
                given = [jnp.asarray(gradient, name) for gradient, name in zip(gradients, names, strict=True)]
                averages = averager.kernel.average(given, ())
                assert [(one.dtype, one.shape) for one in averages] == [(one.dtype, one.shape) for one in given]
                found.append([np.asarray(average, np.float64) for average in averages])
                agreed.append(averager.stop.agreed)
        return found, agreed

    dtypes, weights = ["float32", "float16", "float64", "bfloat16"], (0.5, 0.3, 0.2)
    rng = np.random.default_rng(4)
    of_ranks = [[rng.normal(size=(2, 3)) for _ in dtypes] for _ in weights]
    # Of 2**-24, the smallest number of float16, three thirds are one in float32 alone.
    third = (1 / 3, [np.full((2, 3), 2.0**-24)], ["float16"], False)
    one, nan = (1.0, [np.ones(2)], ["float32"]), (0.0, [np.full(2, np.nan)], ["float32"])
    last = [(*nan, True), (*one, False), (*nan, False)]
    steps = [[(*each, dtypes, False), third, own] for *each, own in zip(weights, of_ranks, last, strict=True)]
    of_dtypes, agreements = zip(*pool.run(averages_of, [(each,) for each in steps]), strict=True)
    for place, tolerance in enumerate((1e-6, 1e-3, 1e-14, 1e-2)):
        expected = sum(w * gradients[place] for w, gradients in zip(weights, of_ranks, strict=True))
        for averages, (smallest,), (alone,) in of_dtypes:
            np.testing.assert_allclose(averages[place], expected, rtol=tolerance, atol=tolerance)
            np.testing.assert_array_equal(smallest, 2.0**-24)
            np.testing.assert_array_equal(alone, 1.0)
    assert set(map(tuple, agreements)) == {(False, False, True)}


@pytest.mark.slow("two processes of its own; test_averages_when_dtypes_are_mixed has the sums")
def test_check_of_gpus_when_devices_reduce_then_has_the_sums_of_the_host(pool):
    on_devices_and_host = runpy.run_path(GPU_CHECK)["on_devices_and_host"]
    for apart, *times in pool.run(on_devices_and_host, [(40, 2)] * 2):
        assert apart <= 1e-6 and min(times) > 0


@pytest.mark.slow("three fits, and their processes")
def test_devices_when_they_cannot_be_joined_or_the_step_is_the_user_s_own_then_the_fit_says_so(pool):
    class OwnStep(keras.Model):
        def train_step(self, *args, **options):
            return super().train_step(*args, **options)

    def build():
        inputs = keras.Input((6,))
        model = OwnStep(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        return model

    def have(devices):
        os.environ["ELEPHANT_GPU_TRANSPORT"] = devices

    parts = split(classifier_data(24), (12, 12))
    # No process is asked for devices unless the option says so.
    job = job_for(lambda: small_model("sgd"), batch_size=4, callbacks=[OnDevices(False)])
    assert len(pool.fit(job, parts)[0].epochs) == 1
    # Who has looked for devices does not find those of others any more.
    with pytest.raises(RankError, match=r"expected no array of JAX.*some on rank 0, 1\."):
        pool.fit(job_on_devices(batch_size=4), parts)
    pool.run(have, [("gloo",), ("",)])
    with pytest.raises(RankError, match=r"expected a GPU for each rank.*Received: none on rank 1 of 2\."):
        pool.fit(job_on_devices(batch_size=4), parts)
    for rank in range(2):
        pool.kill(rank)
    with pytest.raises(RankError, match="expected a model with one optimizer and Keras' own train_step"):
        pool.fit(job_for(build, gpu_transport="nccl", batch_size=4), parts)


class EndsFirstRank(keras.callbacks.Callback):
    """Ends the process in which JAX' service is."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2 and multiprocessing.current_process().name == "rank-0":
            Path(self.path).write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def outcomes_of(pool, *callbacks, **limits):
    parts = split(classifier_data(60), (20, 20, 20))
    with pytest.raises(RankError) as failed:
        pool.fit(job_on_devices(batch_size=4, callbacks=[OnDevices(), *callbacks]), parts, **limits)
    return failed.value.outcomes


@lost
def test_fit_when_a_rank_is_killed_then_the_others_name_it_in_seconds(pool, tmp_path):
    outcomes = outcomes_of(pool, Signals(str(tmp_path), signal.SIGKILL))
    assert time.monotonic() - float((tmp_path / "sent").read_text()) < PATIENCE_S
    for kind, text, _ in (outcomes[0], outcomes[2]):
        assert kind == "PeerLostError", text
        assert f"rank {VICTIM}" in text and "exchange of gradients" in text and "its process died" in text


@lost
def test_fit_when_the_rank_with_jax_service_is_killed_then_the_others_end_in_seconds(pool, tmp_path):
    outcomes = outcomes_of(pool, EndsFirstRank(str(tmp_path / "sent")))
    assert time.monotonic() - float((tmp_path / "sent").read_text()) < PATIENCE_S
    # JAX ends a process that has lost its service, perhaps before it can say which rank is gone.
    for kind, text, _ in outcomes[1:]:
        assert kind == "EOFError" or (kind == "PeerLostError" and "rank 0" in text), text


@lost
def test_fit_when_a_rank_freezes_then_the_others_name_it_at_their_deadline(pool, tmp_path):
    outcomes = outcomes_of(pool, Signals(str(tmp_path), signal.SIGSTOP), collective_s=DEADLINE_S)
    assert time.monotonic() - float((tmp_path / "sent").read_text()) < DEADLINE_S + PATIENCE_S
    assert outcomes[VICTIM][0] == "Stopped"
    for kind, text, _ in (outcomes[0], outcomes[2]):
        assert kind == "DeadlineExceededError", text
        assert f"within {DEADLINE_S:g} s" in text and f"Ranks that did not arrive: {VICTIM}." in text


@lost
def test_fit_when_a_rank_raises_then_says_why_and_the_others_name_it(pool):
    outcomes = outcomes_of(pool, Fails())
    assert outcomes[VICTIM][:2] == ("ZeroDivisionError", "before the third step")
    for kind, text, _ in (outcomes[0], outcomes[2]):
        assert kind == "PeerLostError" and f"rank {VICTIM}" in text.lower()


@lost
def test_devices_when_a_rank_is_killed_while_they_are_joined_then_the_others_name_it_in_seconds(pool, tmp_path):
    sent = tmp_path / "sent"

    def join(is_killed):
        from elephant.backends import current, jax_devices
        from elephant.collective.api import current_collective
        from elephant.config import FitConfig

        def die(*_):
            sent.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        if is_killed:
            jax_devices.JaxReducer._join = die
        current().join_devices(current_collective(), FitConfig(num_workers=3, gpu_transport="nccl"), "127.0.0.1")

    with pytest.raises(RankError) as failed:
        pool.run(join, [(rank == VICTIM,) for rank in range(3)])
    assert time.monotonic() - float(sent.read_text()) < PATIENCE_S
    for kind, text, _ in (failed.value.outcomes[0], failed.value.outcomes[2]):
        assert kind == "PeerLostError" and f"rank {VICTIM}" in text.lower(), text
