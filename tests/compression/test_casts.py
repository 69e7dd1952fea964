import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tables import every_case

from elephant.compression.casts import BFloat16, Float16

PIECES = hnp.arrays(np.float32, st.integers(0, 70), elements=st.floats(width=32, allow_nan=False))


def through(codec, values):
    values = np.asarray(values, np.float32)
    kept = values.copy()
    data = np.empty(codec.encoded_bytes(len(values)), np.uint8)
    codec.encode(values, data, offset=0)
    assert values.tobytes() == kept.tobytes()
    result = np.full(len(values), 7, np.float32)
    codec.decode(data, result)
    return result, data


@every_case(
    ("value", "bits"),
    [
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (1.0, 0x3F80),
        (-2.5, 0xC020),
        (1 + 2**-8, 0x3F80),  # a tie goes to the even one, which is below ...
        (1 + 3 * 2**-8, 0x3F82),  # ... or above
        (1 + 2**-8 + 2**-20, 0x3F81),
        (3.4e38, 0x7F80),  # beyond the largest
        (1e-40, 0x0001),  # subnormal
        (np.inf, 0x7F80),
        (-np.inf, 0xFF80),
    ],
)
def test_bfloat16_when_a_value_is_encoded_then_has_these_bits(value, bits):
    _, data = through(BFloat16(), [value])
    assert data.view(np.uint16).tolist() == [bits]


@given(PIECES)
def test_bfloat16_when_values_are_finite_then_the_error_is_half_a_unit_of_eight_bits(values):
    result, data = through(BFloat16(), values)
    assert len(data) == 2 * len(values)
    held = np.isfinite(result)
    assert np.all(np.abs(values[~held]) > 3.38e38)
    error = np.abs(result[held].astype(np.float64) - values[held])
    assert np.all(error <= np.abs(values[held].astype(np.float64)) * 2.0**-8 + 2.0**-133)


@pytest.mark.parametrize("codec", [BFloat16(), Float16()])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001])
def test_casts_when_a_value_is_nan_then_it_alone_stays_nan(codec, bits):
    values = np.ones(5, np.float32)
    values.view(np.uint32)[3] = bits
    result, _ = through(codec, values)
    assert np.isnan(result).tolist() == [False, False, False, True, False]
    assert result[[0, 1, 2, 4]].tolist() == [1.0] * 4


@given(PIECES)
def test_float16_when_values_are_encoded_then_has_the_bits_that_numpy_gives(values):
    _, data = through(Float16(), values)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(data.view(np.uint16), values.astype(np.float16).view(np.uint16))


def test_float16_when_values_are_near_every_number_and_every_tie_then_rounds_as_numpy_does():
    every = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = ((every[1:].astype(np.float64) + every[:-1]) / 2).astype(np.float32)
    exact = np.concatenate([every, ties])
    values = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))])
    values = np.concatenate([values, -values])
    result, data = through(Float16(), values)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(data.view(np.uint16), expected.view(np.uint16))
    np.testing.assert_array_equal(result, expected.astype(np.float32))


@every_case(
    ("value", "decoded"),
    [
        (65504.0, 65504.0),
        (65519.0, 65504.0),
        (65520.0, np.inf),
        (1e6, np.inf),
        (-1e6, -np.inf),
        (np.inf, np.inf),
        (6e-5, 6.0021877e-05),
        (2e-8, 0.0),
    ],
)
def test_float16_when_a_value_is_at_the_border_of_the_range_then_decodes_to_this(value, decoded):
    result, _ = through(Float16(), [value, 1.0])
    assert result.tolist() == [np.float32(decoded), 1.0]


@pytest.mark.parametrize("codec", [BFloat16(), Float16()])
@pytest.mark.parametrize("count", [0, 1, 3, 65_535, 65_536, 65_537, 200_001])
def test_casts_when_pieces_have_any_length_then_every_value_is_there(codec, count):
    values = np.arange(count, dtype=np.float32) % 251
    result, _ = through(codec, values)
    np.testing.assert_array_equal(result, values)


@pytest.mark.parametrize("codec", [BFloat16(), Float16()])
def test_casts_when_the_buffer_is_at_an_odd_address_then_decode_the_same(codec):
    values = np.linspace(-3, 3, 1001, dtype=np.float32)
    buffer = np.empty(codec.encoded_bytes(1001) + 1, np.uint8)
    codec.encode(values, buffer[1:], offset=0)
    result = np.empty(1001, np.float32)
    codec.decode(buffer[1:], result)
    np.testing.assert_array_equal(result, through(codec, values)[0])
