import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import every_case

from elephant.compression.casts import CHUNK_VALUES, Int8


def through(values):
    values = np.asarray(values, np.float32)
    codec, kept = Int8(), values.copy()
    data = np.empty(codec.encoded_bytes(len(values)), np.uint8)
    codec.encode(values, data, offset=0)
    assert values.tobytes() == kept.tobytes()
    result = np.full(len(values), 7, np.float32)
    codec.decode(data, result)
    return result, data


def steps_of(values):
    """Half a step of a chunk is the largest error that its values may have."""
    chunks = np.split(values, range(CHUNK_VALUES, len(values), CHUNK_VALUES))
    return np.concatenate([np.full(len(chunk), np.abs(chunk).max(initial=0) / 127) for chunk in chunks])


def test_int8_when_a_chunk_is_encoded_then_has_these_bytes():
    _, data = through([127.0, -127.0, 0.0, 0.4, 1.6, -63.4])
    assert data[:4].view(np.float32)[0] == pytest.approx(1.0, rel=1e-6)
    assert data[4:].view(np.int8).tolist() == [127, -127, 0, 0, 2, -63]


@every_case(("count", "length"), [(0, 0), (1, 5), (1024, 1028), (1025, 1033), (262_144, 263_168)])
def test_int8_when_asked_for_its_length_then_counts_scales_and_values(count, length):
    assert Int8().encoded_bytes(count) == length


@given(
    count=st.sampled_from([1, 5, 1023, 1024, 1025, 3000, 65_536, 65_537, 70_000]),
    magnitude=st.sampled_from([1e-30, 1e-8, 1.0, 1e4, 1e30]),
    spread=st.sampled_from([0.1, 3.0, 12.0]),
    seed=st.integers(0, 1000),
)
def test_int8_when_values_are_finite_then_the_error_is_half_a_step_of_the_chunk(count, magnitude, spread, seed):
    generator = np.random.default_rng(seed)
    values = generator.normal(size=count) * magnitude * np.exp2(generator.uniform(-spread, spread, count))
    values = values.astype(np.float32)
    result, _ = through(values)
    error = np.abs(result.astype(np.float64) - values)
    assert np.all(error <= steps_of(values) * 0.50001)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int8_when_a_value_is_not_finite_then_nothing_in_its_chunk_is_and_all_else_is(bad):
    values = np.ones(3 * CHUNK_VALUES + 100, np.float32)
    values[CHUNK_VALUES + 17] = bad
    result, _ = through(values)
    chunk = slice(CHUNK_VALUES, 2 * CHUNK_VALUES)
    assert not np.isfinite(result[chunk]).any()
    np.testing.assert_allclose(np.delete(result, chunk), 1.0, rtol=1e-6)


@pytest.mark.parametrize("values", [np.zeros(2000), np.full(2000, 1e-45), np.full(2000, 1e-40)])
def test_int8_when_values_vanish_then_they_come_out_finite_and_as_small(values):
    result, _ = through(values)
    assert np.all(np.abs(result) <= 2.0**-126)
    assert np.all((values != 0) | (result == 0))


def test_int8_when_values_are_the_largest_then_they_stay_finite():
    largest = np.finfo(np.float32).max
    result, _ = through([largest, -largest, largest / 2])
    np.testing.assert_allclose(result, [largest, -largest, largest / 2], rtol=0.01)


def test_int8_when_the_buffer_is_at_an_odd_address_then_decodes_the_same():
    values = np.linspace(-3, 3, 3001, dtype=np.float32)
    codec = Int8()
    buffer = np.empty(codec.encoded_bytes(3001) + 1, np.uint8)
    codec.encode(values, buffer[1:], offset=0)
    result = np.empty(3001, np.float32)
    codec.decode(buffer[1:], result)
    np.testing.assert_array_equal(result, through(values)[0])
