"""The flat layout, against concatenation by numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.errors import ConfigurationError
from elephant.parameter_server.layout import Layout, ServerSpec

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6)


@given(SHAPES)
def test_pack_when_views_are_taken_then_gives_every_array_back_aligned(shapes):
    layout = Layout([(f"v{i}", shape) for i, shape in enumerate(shapes)])
    arrays = [np.random.default_rng(i).normal(size=shape).astype("float32") for i, shape in enumerate(shapes)]
    flat = layout.pack(arrays)
    assert layout.num_values % 16 == 0
    assert flat.ctypes.data % 64 == 0 or not flat.size
    for view, array, segment in zip(layout.views(flat), arrays, layout.segments, strict=True):
        np.testing.assert_array_equal(view, array)
        assert segment.start % 16 == 0
    assert np.isclose(flat.sum(dtype="float64"), sum(array.sum(dtype="float64") for array in arrays))


@given(SHAPES, st.integers(1, 7))
def test_cut_when_joined_then_covers_the_vector_once(shapes, parts):
    layout = Layout([(f"v{i}", shape) for i, shape in enumerate(shapes)])
    slices = layout.cut(parts)
    assert len(slices) == parts
    assert np.concatenate([np.arange(layout.num_values)[part] for part in slices]).tolist() == list(
        range(layout.num_values)
    )
    lengths = [part.stop - part.start for part in slices]
    assert max(lengths) - min(lengths) <= 16


def test_pack_when_shapes_differ_then_says_which():
    with pytest.raises(ConfigurationError, match=r"expected the shapes \[\(2,\)\]. Received: \[\(3,\)\]"):
        Layout([("a", (2,))]).pack([np.zeros(3)])


def test_digest_when_shapes_differ_then_differs_and_names_do_not_matter():
    assert Layout([("a", (2, 3))]).digest == Layout([("b", (2, 3))]).digest
    assert Layout([("a", (2, 3))]).digest != Layout([("a", (3, 2))]).digest


def test_spec_when_it_crosses_as_json_then_comes_back_equal():
    spec = ServerSpec(run_id="r", layout=Layout([("a", (2, 3))]), first_value=0, num_values=16, max_staleness=3)
    back = ServerSpec.from_json(spec.to_json())
    assert back.layout.segments == spec.layout.segments
    assert (back.run_id, back.num_values, back.max_staleness, back.rule) == ("r", 16, 3, {"name": "add"})
