"""A rank that is lost in a step of Keras: the others end in seconds, with an error that names it."""

import os
import signal
import time

import keras
import pytest
from keras import ops
from keras_reference import (
    VICTIM,
    Signals,
    classifier_data,
    fit_one_process,
    global_batches,
    is_victim,
    job_for,
    largest_difference,
    split,
)
from rank_pool import RankError
from tiers import in_tiers

from elephant.backends.tensorflow_exchange import library_path

pytestmark = pytest.mark.usefixtures("by_value")

# Of one operation, where a rank freezes.
PATIENCE_S = 8.0
# Soon, against the minutes of an operation's own deadline; a busy machine may take its time.
SOON_S = 30.0
# A square of so many rows is more than any machine has, and has no dimension of more than 32 bits.
LENGTH = 1 << 24


def squares(labels, outputs):
    return ops.mean(ops.square(outputs - ops.reshape(labels, (-1, 1))))


def raising(labels, outputs):
    if is_victim():
        raise ZeroDivisionError("in the loss of a step")
    return squares(labels, outputs)


def exhausting(labels, outputs):
    """Has the framework ask for 1 PiB, in the step and not when it is traced."""
    if is_victim():
        column = ops.broadcast_to(outputs[:1, :1], (LENGTH, 2)) * ops.cast(ops.arange(LENGTH), "float32")[:, None]
        outputs = outputs + ops.max(ops.abs(ops.matmul(column, ops.transpose(column))))
    return squares(labels, outputs)


# What the error says of each.
FAILING = {raising: ["in the loss of a step"], exhausting: ["memory", "alloc"]}


def model_with(loss):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), loss)
    return model


def outcomes_of(pool, loss, *callbacks, **limits):
    """Returns how each of three ranks ended."""
    parts = split(classifier_data(60), (20, 20, 20))
    with pytest.raises(RankError) as failed:
        pool.fit(job_for(model_with(loss), batch_size=4, callbacks=callbacks), parts, **limits)
    return failed.value.outcomes


def require_fit(pool):
    """Fails unless the pool trains again as one process does."""
    parts = split(classifier_data(24), (10, 8, 6))
    recordings = pool.fit(job_for(model_with("mse"), batch_size=4, shuffle=False), parts)
    expected, _ = fit_one_process(model_with("mse"), list(global_batches(parts, 4, 1)), epochs=1)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-6


def test_fit_when_a_rank_is_killed_then_the_others_name_it_in_seconds_and_leave_nothing(rank_pool, tmp_path):
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    outcomes = outcomes_of(rank_pool, "mse", Signals(str(tmp_path), signal.SIGKILL))
    assert time.monotonic() - float((tmp_path / "sent").read_text()) < SOON_S
    for kind, text, _ in (outcomes[0], outcomes[2]):
        assert kind == "PeerLostError"
        assert f"lost rank {VICTIM} in operation" in text and "its process died" in text
        # On TensorFlow they have waited in the kernel, where it is built.
        assert library_path() is None or keras.config.backend() != "tensorflow" or "(exchange of gradients)" in text
    if before:
        assert set(os.listdir("/dev/shm")) <= before
    require_fit(rank_pool)


@pytest.mark.slow(
    "waits for a deadline, as test_exchange_kernel.py does; tests/collective and tests/spark/test_run.py freeze ranks"
)
def test_fit_when_a_rank_freezes_then_the_others_name_it_at_their_deadline(rank_pool, tmp_path):
    outcomes = outcomes_of(rank_pool, "mse", Signals(str(tmp_path), signal.SIGSTOP), collective_s=PATIENCE_S)
    # Both have waited for as long, together.
    assert time.monotonic() - float((tmp_path / "sent").read_text()) < PATIENCE_S + SOON_S
    assert outcomes[VICTIM][0] == "Stopped"
    for kind, text, _ in (outcomes[0], outcomes[2]):
        assert kind == "DeadlineExceededError"
        assert f"within {PATIENCE_S:g} s" in text and f"Ranks that did not arrive: {VICTIM}." in text
    require_fit(rank_pool)


@pytest.mark.parametrize("loss", in_tiers([*FAILING], fast=["raising"], slow="fails at the same place, of memory"))
def test_fit_when_a_rank_fails_in_a_step_then_says_why_and_the_others_name_it(rank_pool, loss):
    began = time.monotonic()
    outcomes = outcomes_of(rank_pool, loss)
    assert time.monotonic() - began < 60
    assert any(word in outcomes[VICTIM][1].lower() for word in FAILING[loss]), outcomes[VICTIM]
    for kind, text, _ in (outcomes[0], outcomes[2]):
        assert kind == "PeerLostError" and f"rank {VICTIM}" in text.lower()
    require_fit(rank_pool)
