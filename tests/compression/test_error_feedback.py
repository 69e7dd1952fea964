import threading
import tracemalloc

import numpy as np
import pytest

from elephant.compression.casts import CHUNK_VALUES, BFloat16, Float16, Int8
from elephant.compression.codec import ErrorFeedback
from elephant.errors import ConfigurationError


def through(codec, values, offset=0):
    data = np.empty(codec.encoded_bytes(len(values)), np.uint8)
    codec.encode(values, data, offset=offset)
    result = np.empty(len(values), np.float32)
    codec.decode(data, result)
    return result


def drift(codec, gradients):
    """How far the running sum of decoded values is from the true one after the last, in all values."""
    true = np.zeros(gradients.shape[1])
    decoded = np.zeros(gradients.shape[1])
    for values in gradients:
        true += values
        decoded += through(codec, values)
    return np.abs(true - decoded)


@pytest.mark.parametrize(("make", "step"), [(Int8, 1 / 127), (BFloat16, 2.0**-7), (Float16, 2.0**-10)])
def test_feedback_when_there_are_200_operations_then_the_sum_is_off_by_one_step(make, step):
    # A constant part is what rounding without feedback gets wrong in the same direction each time.
    generator = np.random.default_rng(0)
    gradients = (generator.normal(size=(200, 3000)) * 0.3 + np.linspace(-0.2, 0.2, 3000)).astype(np.float32)
    largest = np.abs(gradients).max() + step
    with_feedback = drift(ErrorFeedback(make(), 3000), gradients)
    assert with_feedback.max() <= largest * step
    assert drift(make(), gradients).max() > 3 * with_feedback.max()


def test_feedback_when_values_are_below_half_a_step_then_they_arrive_all_the_same():
    gradient = np.full(CHUNK_VALUES, 0.001, np.float32)
    gradient[0] = 1.0
    codec, plain = ErrorFeedback(Int8(), CHUNK_VALUES), Int8()
    arrived = sum(through(codec, gradient)[1:] for _ in range(100))
    np.testing.assert_allclose(arrived, 0.1, atol=1 / 127)
    assert all(not through(plain, gradient)[1:].any() for _ in range(3))


def test_feedback_when_pieces_have_offsets_then_each_index_has_its_own_memory():
    generator = np.random.default_rng(1)
    gradients = generator.normal(size=(20, 5000)).astype(np.float32)
    codec = ErrorFeedback(Float16(), 5000)
    whole = ErrorFeedback(Float16(), 5000)
    for values in gradients:
        expected = through(whole, values)
        # In another order and with other borders each time, as the pieces of a ring may come.
        border = int(generator.integers(1, 4999))
        second = through(codec, values[border:], offset=border)
        first = through(codec, values[:border], offset=0)
        np.testing.assert_array_equal(np.concatenate([first, second]), expected)


def test_feedback_when_a_piece_is_long_then_every_value_arrives_with_what_was_kept_of_it():
    gradient = np.random.default_rng(2).normal(size=150_001).astype(np.float32)
    codec = ErrorFeedback(Int8(), 160_000)
    arrived = sum(through(codec, gradient, offset=9_000).astype(np.float64) for _ in range(50))
    # The largest of a chunk is below 5, and so half a step below 0.02.
    np.testing.assert_allclose(arrived, 50 * gradient.astype(np.float64), atol=0.02)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_feedback_when_a_value_is_not_finite_then_it_is_seen_once_and_not_remembered(bad):
    codec = ErrorFeedback(Int8(), 3 * CHUNK_VALUES)
    values = np.ones(3 * CHUNK_VALUES, np.float32)
    overflowed = values.copy()
    overflowed[5] = bad
    assert not np.isfinite(through(codec, overflowed)[5])
    for _ in range(3):
        np.testing.assert_allclose(through(codec, values), 1.0, rtol=0.01)


def test_feedback_when_a_value_overflows_the_cast_then_the_next_one_is_right():
    codec = ErrorFeedback(Float16(), 2)
    assert np.isinf(through(codec, np.array([1e6, 1.0], np.float32))[0])
    assert through(codec, np.array([2.0, 1.0], np.float32)).tolist() == [2.0, 1.0]


@pytest.mark.parametrize(("count", "offset"), [(11, 0), (5, 6), (1, -1)])
def test_feedback_when_a_piece_is_not_of_the_array_then_raises(count, offset):
    with pytest.raises(ConfigurationError, match=f"of an array of 10 values. Received: {count} values from {offset}"):
        through(ErrorFeedback(Int8(), 10), np.zeros(count, np.float32), offset)


@pytest.mark.parametrize("make", [BFloat16, Float16, Int8, lambda: ErrorFeedback(Int8(), 300_000)])
def test_codecs_when_pieces_repeat_then_memory_does_not_grow(make):
    codec = make()
    values = np.linspace(-1, 1, 300_000, dtype=np.float32)
    data, result = np.empty(codec.encoded_bytes(300_000), np.uint8), np.empty(300_000, np.float32)
    codec.encode(values, data, offset=0)
    codec.decode(data, result)
    tracemalloc.start()
    try:
        for _ in range(5):
            codec.encode(values, data, offset=0)
            codec.decode(data, result)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 20_000
    assert peak < 1_000_000


@pytest.mark.parametrize("make", [BFloat16, Float16, Int8, lambda: ErrorFeedback(Int8(), 200_000)])
def test_codecs_when_one_thread_encodes_and_another_decodes_then_both_are_right(make):
    codec = make()
    received = np.arange(200_000, dtype=np.float32) % 128
    data = np.empty(codec.encoded_bytes(200_000), np.uint8)
    codec.encode(received, data, offset=0)
    expected = np.empty(200_000, np.float32)
    codec.decode(data, expected)
    stop = threading.Event()

    def encode():
        out = np.empty_like(data)
        while not stop.is_set():
            codec.encode(-received, out, offset=0)

    sender = threading.Thread(target=encode, name="test-sender")
    sender.start()
    try:
        for _ in range(30):
            result = np.empty(200_000, np.float32)
            codec.decode(data, result)
            np.testing.assert_array_equal(result, expected)
    finally:
        stop.set()
        sender.join(30)
