import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elephant.collective.communicator import LocalCommunicator
from elephant.collective.fusion import FusedBuffer
from elephant.errors import ConfigurationError

SPECS = [((2, 3), "float32"), ((), "float64"), ((4,), "float16"), ((0, 5), "float32"), ((3,), "int64")]


def arrays_of(specs, seed=0):
    generator = np.random.default_rng(seed)
    return [np.asarray(generator.normal(size=shape) * 10).astype(dtype) for shape, dtype in specs]


def test_pack_and_unpack_give_the_scaled_arrays_in_their_dtypes():
    buffer, arrays = FusedBuffer(SPECS), arrays_of(SPECS)
    buffer.pack(arrays, 2.0)
    buffer.allreduce(LocalCommunicator())
    for result, array in zip(buffer.unpack(), arrays, strict=True):
        assert result.dtype == array.dtype and result.shape == array.shape
        np.testing.assert_allclose(result, 2 * array, rtol=1e-3)


def test_scale_of_zero_writes_zeros_even_over_nan():
    buffer = FusedBuffer([((2,), "float32"), ((1,), "float16")])
    buffer.pack([np.array([np.nan, np.inf], "f4"), np.array([np.nan], "f2")], 0.0)
    for result in buffer.unpack():
        np.testing.assert_array_equal(result, np.zeros_like(result))


def test_unpack_gives_views_that_do_not_move():
    buffer = FusedBuffer([((3,), "float32")])
    first = buffer.unpack()[0]
    buffer.pack([np.ones(3, "f4")])
    assert np.shares_memory(first, buffer.unpack()[0]) and first.tolist() == [1, 1, 1]


def test_arrays_begin_where_tensorflow_takes_them_without_a_copy():
    for view in FusedBuffer([((3,), "float32"), ((5,), "float64"), ((2, 2), "float32")]).unpack():
        assert view.ctypes.data % 64 == 0


def test_buffer_is_lent_as_long_as_one_of_its_arrays_is_held():
    buffer = FusedBuffer([((3,), "float32"), ((2,), "float16"), ((0,), "float64")])
    assert not buffer.in_use
    held = buffer.unpack()
    assert buffer.in_use
    second = held[2]
    del held
    assert buffer.in_use
    del second
    assert not buffer.in_use


def test_float32_slices_say_where_the_arrays_lie():
    specs = [((2, 3), "float32"), ((4,), "int64"), ((), "float16"), ((0,), "float32"), ((5,), "float32")]
    buffer = FusedBuffer(specs)
    buffer.pack(arrays_of(specs))
    seen = []
    buffer.allreduce(LocalCommunicator(), seen.append)
    (flat,) = seen
    wanted = [array for array in arrays_of(specs) if array.dtype != "int64"]
    assert [shape for _, shape in buffer.float32_slices] == [array.shape for array in wanted]
    for (start, shape), array in zip(buffer.float32_slices, wanted, strict=True):
        np.testing.assert_array_equal(flat[start : start + array.size].reshape(shape), array.astype("f4"))


def test_bfloat16_is_summed_in_float32(run_world):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    one = np.array([1.0, 256.0], ml_dtypes.bfloat16)

    def work(collective):
        buffer = FusedBuffer([((2,), one.dtype)])
        buffer.pack([one], 1 / 3)
        buffer.allreduce(collective)
        (result,) = buffer.unpack()
        return result.dtype == one.dtype, result.astype("f4").tolist()

    assert run_world(3, work) == [(True, [1.0, 256.0])] * 3


@settings(
    max_examples=min(15, settings.default.max_examples),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    specs=st.lists(
        st.tuples(
            st.lists(st.integers(0, 6), max_size=3).map(tuple), st.sampled_from(["float32", "float64", "float16"])
        ),
        max_size=6,
    ),
    shares=st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=3),
)
def test_weighted_sums_are_those_of_numpy(run_world, specs, shares):
    def work(collective):
        buffer = FusedBuffer(specs)
        arrays = arrays_of(specs, collective.rank)
        if shares[collective.rank] == 0.0:
            arrays = [np.full_like(array, np.nan) for array in arrays]
        buffer.pack(arrays, shares[collective.rank])
        buffer.allreduce(collective)
        return [np.array(result) for result in buffer.unpack()]

    expected = [
        sum(share * arrays_of(specs, rank)[index].astype("f8") for rank, share in enumerate(shares) if share)
        for index in range(len(specs))
    ]
    for results in run_world(len(shares), work):
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, np.broadcast_to(wanted, result.shape), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("dtype", ["complex64", "uint8", "bool", "S2"])
def test_dtypes_that_cannot_be_summed_are_refused(dtype):
    with pytest.raises(ConfigurationError, match="expected dtype float16, bfloat16, float32"):
        FusedBuffer([((1,), dtype)])


@pytest.mark.parametrize(
    "arrays, text",
    [
        ([], "expected 1. Received: 0"),
        ([np.zeros(3, "f4")], r"arrays\[0\]: expected float32 of shape \(2,\). Received: float32 of shape \(3,\)"),
        ([np.zeros(2, "f8")], "Received: float64"),
    ],
)
def test_pack_of_other_arrays_raises(arrays, text):
    with pytest.raises(ConfigurationError, match=text):
        FusedBuffer([((2,), "float32")]).pack(arrays)


def test_integers_are_scaled_by_whole_numbers_only():
    buffer = FusedBuffer([((2,), "int32")])
    buffer.pack([np.array([1, 2], "i4")], 3.0)
    assert buffer.unpack()[0].tolist() == [3, 6]
    with pytest.raises(ConfigurationError, match="expected a whole number for int32. Received: 0.5"):
        buffer.pack([np.array([1, 2], "i4")], 0.5)
