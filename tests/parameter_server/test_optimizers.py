"""Rules: each one against Keras for 100 steps, and any cut into stripes and servers against none."""

import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.optimizers import SGD, Adagrad, Adam, AdamW, RMSprop
from keras_steps import compared
from tables import every_case
from tiers import in_tiers

from elephant.errors import ConfigurationError
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.optimizers import clipping_of, rule_of, rules, without_clipping
from elephant.parameter_server.optimizers.base import BLOCK_VALUES
from elephant.storage.filesystem import require_safe_library

schedules = keras.optimizers.schedules


def excluding(optimizer, *names):
    optimizer.exclude_from_weight_decay(var_names=list(names))
    return optimizer


# Every operation of these rounds as TensorFlow's does when it runs one by one.
SAME = {
    "momentum": lambda: SGD(0.01, momentum=0.9),
    "nesterov": lambda: SGD(0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda: Adagrad(0.1),
    "adagrad_from_zero": lambda: Adagrad(0.1, initial_accumulator_value=0.0, epsilon=1e-3),
    "rmsprop": lambda: RMSprop(0.01),
    "rmsprop_both": lambda: RMSprop(0.01, rho=0.95, momentum=0.5, centered=True),
    "adam": lambda: Adam(0.01),
    "amsgrad": lambda: Adam(0.01, amsgrad=True, beta_1=0.8, beta_2=0.9, epsilon=1e-3),
    "adamw_excluding": lambda: excluding(AdamW(0.01, weight_decay=0.1), "bias", "gain"),
    "sgd_decay_excluding": lambda: excluding(SGD(0.1, weight_decay=0.01), "kernel"),
    "rmsprop_decay_schedule": lambda: RMSprop(schedules.InverseTimeDecay(0.1, 7, 0.5), weight_decay=0.01),
    "adam_value_scale_decay": lambda: excluding(
        Adam(0.01, clipvalue=0.05, loss_scale_factor=3.0, weight_decay=0.02), "bias"
    ),
    "adam_schedule": lambda: Adam(schedules.PiecewiseConstantDecay([10, 30.5, 60], [0.1, 0.05, 0.02, 0.01])),
}
# TensorFlow sums squares in float32, in an order that depends on its threads: the norm is some ulps off.
NORMS = {
    "adam_norm_scale": lambda: Adam(0.01, clipnorm=0.1, loss_scale_factor=8.0),
    "sgd_long_norm": lambda: SGD(0.01, clipnorm=1e6),
    "adamw_global": lambda: AdamW(0.01, global_clipnorm=0.7),
    "sgd_long_global": lambda: SGD(0.01, global_clipnorm=1e6),
}


def check_near(expected, received):
    """Both differ by at most 5e-7 of the greatest weight: four times the rounding of one operation on it."""
    assert np.abs(expected - received).max() <= 5e-7 * np.abs(expected).max()


# Each rule once, each option of it once.
FAST = [
    "sgd_decay_excluding",
    "nesterov",
    "adagrad",
    "rmsprop_both",
    "amsgrad",
    "adamw_excluding",
    "adam_value_scale_decay",
    "adam_schedule",
]


@pytest.mark.parametrize("name", in_tiers(list(SAME), fast=FAST, slow="other options of the same rules"))
def test_rule_when_keras_applies_the_same_gradients_one_by_one_then_has_the_same_bits(name):
    for expected, received in compared(SAME[name](), "eager", steps=100 if name in FAST else 20):
        np.testing.assert_array_equal(received.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    "name",
    in_tiers(list(NORMS), fast=["adam_norm_scale", "adamw_global"], slow="other optimizers whose norm is clipped"),
)
def test_rule_when_norms_are_clipped_then_differs_from_keras_in_the_last_bits_only(name):
    for expected, received in compared(NORMS[name](), "eager", steps=40):
        check_near(expected, received)


# A compiled graph divides by multiplying, XLA also fuses: both round otherwise than Keras one by one.
COMPILED = {
    "nesterov, xla": ("nesterov", "xla"),
    "adagrad, graph": ("adagrad", "graph"),
    "rmsprop_both, xla": ("rmsprop_both", "xla"),
    "amsgrad, xla": ("amsgrad", "xla"),
    "adamw_excluding, graph": ("adamw_excluding", "graph"),
}


@pytest.mark.parametrize("case", in_tiers(COMPILED, fast=["nesterov, xla"], slow="other rules"))
def test_rule_when_keras_is_compiled_then_differs_from_it_in_the_last_bits_only(case):
    name, how = case
    for expected, received in compared(SAME[name](), how, steps=40):
        check_near(expected, received)


@pytest.mark.skipif(rules.one_pass_adam() is None, reason="it was not built: there was no C compiler")
@pytest.mark.parametrize("count", [0, 1, 17, BLOCK_VALUES + 3])
def test_adam_when_it_takes_one_pass_then_has_the_bits_of_numpy_s_passes(count, monkeypatch):
    rng = np.random.default_rng(count)
    rule = rules.Adam(learning_rate=lambda _: 0.01, epsilon=1e-6)
    values, momentum, velocity = rng.normal(size=(3, count)).astype(np.float32)
    states = [(values, momentum, np.square(velocity))]
    states.append([array.copy() for array in states[0]])
    for step in range(3):
        gradient = rng.normal(size=count).astype(np.float32)
        gradient[: 3 * step : 3] = (np.nan, np.inf)[step % 2]
        for (weights, *slots), passes in zip(states, (rules.one_pass_adam, lambda: None), strict=True):
            with monkeypatch.context() as patch, np.errstate(all="ignore"):
                patch.setattr(rules, "one_pass_adam", passes)
                rule.update(rule.begin(step), 0, weights, gradient.copy(), slots)
        for one, many in zip(*states, strict=True):
            np.testing.assert_array_equal(one, many)


def test_adam_when_its_library_cannot_be_loaded_then_numpy_does_it_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "adam.abi3.so").write_text("no library")
    monkeypatch.setattr(rules, "__file__", str(tmp_path / "rules.py"))
    assert rules.one_pass_adam.__wrapped__() is None
    assert "Adam is applied by numpy" in caplog.text
    (tmp_path / "native" / "adam.abi3.so").unlink()
    assert rules.one_pass_adam.__wrapped__() is None


@pytest.mark.parametrize("place", ["native/adam.abi3.so", "native", "."])
def test_library_when_every_user_could_replace_it_then_is_refused(tmp_path, place):
    path, odd = tmp_path / "native" / "adam.abi3.so", tmp_path / place
    path.parent.mkdir(mode=0o755)
    path.touch(mode=0o755)
    require_safe_library(path)
    odd.chmod(0o777)
    with pytest.raises(PermissionError, match=rf"{odd} can be written to by every user: .* \(chmod o-w\)"):
        require_safe_library(path)
    if odd.is_dir():
        # As in /tmp, where everybody writes and nobody replaces what is another user's.
        odd.chmod(0o1777)
        require_safe_library(path)


@pytest.mark.skipif(rules.one_pass_adam() is None, reason="it was not built: there was no C compiler")
def test_adam_when_every_user_could_replace_its_library_then_numpy_does_it_and_the_log_says_so(
    tmp_path, monkeypatch, caplog
):
    library = next((Path(rules.__file__).parent / "native").glob("adam*.so"))
    (tmp_path / "native").mkdir(mode=0o755)
    shutil.copy(library, tmp_path / "native" / "adam.abi3.so")
    monkeypatch.setattr(rules, "__file__", str(tmp_path / "rules.py"))
    assert rules.one_pass_adam.__wrapped__() is not None
    (tmp_path / "native").chmod(0o777)
    assert rules.one_pass_adam.__wrapped__() is None
    assert "Adam is applied by numpy" in caplog.text and "chmod o-w" in caplog.text


LAYOUT = Layout([("a", (37,)), ("b", (5, 5)), ("c", ()), ("d", (70,)), ("e", (16,))])
SPECS = [
    {"name": "add"},
    {"name": "sgd", "learning_rate": 0.1, "clip": {"value": 0.3}},
    {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "loss_scale": 3.0},
    {"name": "adagrad", "learning_rate": 0.1, "weight_decay": {"rate": 0.1, "excluded": [[0, 37], [48, 73], [96, 96]]}},
    {"name": "rmsprop", "learning_rate": 0.1, "momentum": 0.5, "centered": True, "clip": {"global_norm": 1.0}},
    {"name": "adam", "learning_rate": 0.1, "amsgrad": True, "clip": {"norm": 0.5}},
    {"name": "adamw", "learning_rate": 0.1, "weight_decay": {"rate": 0.1, "excluded": [[48, 73], [80, 81], [96, 166]]}},
]


def random_arrays(seed):
    rng = np.random.default_rng(seed)
    return LAYOUT.pack([rng.normal(size=segment.shape) for segment in LAYOUT.segments])


def trained(rules, bounds, prepare, steps=4):
    """Returns weights and slots that the rules have updated, each its part of the vector, stripe by stripe."""
    values = random_arrays(0)
    slots = rules[0].init(LAYOUT.num_values)
    for iteration in range(steps):
        gradient = random_arrays(iteration + 1)
        prepare(gradient)
        for rule, stripes in zip(rules, bounds, strict=True):
            scalars = rule.begin(iteration)
            for start, stop in zip(stripes[:-1], stripes[1:], strict=True):
                cut = slice(start, stop)
                rule.update(scalars, start, values[cut], gradient[cut], [slot[cut] for slot in slots])
    return [values, *slots]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
@settings(max_examples=min(25, settings.default.max_examples))
@given(cuts=st.lists(st.integers(0, LAYOUT.num_values), max_size=8), servers=st.integers(1, 3))
def test_rule_when_the_vector_is_cut_into_stripes_and_servers_then_updates_it_as_in_one(spec, cuts, servers):
    whole = rule_of(spec, LAYOUT)
    end = LAYOUT.num_values
    expected = trained([whole], [[0, end]], lambda gradient: whole.prepare(gradient, LAYOUT))
    rest, clip = without_clipping(spec)
    bounds = [
        sorted({part.start, part.stop, *(c for c in cuts if part.start < c < part.stop)})
        for part in LAYOUT.cut(servers)
    ]
    prepare = (lambda gradient: None) if clip is None else clipping_of(clip, LAYOUT).prepare
    received = trained([rule_of(rest, LAYOUT) for _ in range(servers)], bounds, prepare)
    for one, other in zip(expected, received, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("spec", SPECS[1:], ids=lambda spec: spec["name"])
def test_rule_when_values_lie_between_variables_then_leaves_them_zero(spec):
    rule = rule_of(spec, LAYOUT)
    values = trained([rule], [[0, LAYOUT.num_values]], lambda gradient: rule.prepare(gradient, LAYOUT))[0]
    between = np.ones(LAYOUT.num_values, bool)
    for view in LAYOUT.views(between):
        view[...] = False
    assert between.any() and not values[between].any()


@pytest.mark.parametrize("spec", SPECS[1:], ids=lambda spec: spec["name"])
def test_rule_when_threads_update_stripes_side_by_side_then_do_not_meet_in_scratch_memory(spec):
    layout = Layout([("a", (8 * BLOCK_VALUES,))])
    spec = {key: value for key, value in spec.items() if key != "weight_decay"}
    results = []
    for threads in (1, 4):
        rule, rng = rule_of(spec, layout), np.random.default_rng(0)
        values, slots = rng.normal(size=layout.num_values).astype("float32"), rule.init(layout.num_values)
        with ThreadPoolExecutor(threads) as pool:
            for iteration in range(5):
                gradient = rng.normal(size=layout.num_values).astype("float32")
                rule.prepare(gradient, layout)
                scalars = rule.begin(iteration)
                cuts = [slice(start, start + BLOCK_VALUES) for start in range(0, layout.num_values, BLOCK_VALUES)]
                update = partial(_update_cut, rule, scalars, values, gradient, slots)
                list(pool.map(update, cuts, timeout=60))
        results.append(values)
    np.testing.assert_array_equal(*results)


def _update_cut(rule, scalars, values, gradient, slots, cut):
    rule.update(scalars, cut.start, values[cut], gradient[cut], [slot[cut] for slot in slots])


def test_adam_when_it_updates_many_stripes_then_allocates_nothing_of_their_length():
    layout = Layout([("a", (4 * BLOCK_VALUES,))])
    rule = rule_of({"name": "adam", "learning_rate": 0.1, "weight_decay": {"rate": 0.1, "excluded": []}}, layout)
    values, gradient, slots = layout.zeros(), layout.zeros(), rule.init(layout.num_values)
    rule.update(rule.begin(0), 0, values, gradient, slots)
    tracemalloc.start()
    try:
        rule.update(rule.begin(1), 0, values, gradient, slots)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


def test_begin_when_a_rate_is_given_then_it_replaces_the_schedule_and_the_decay_follows():
    spec = {"name": "sgd", "learning_rate": 0.5, "weight_decay": {"rate": 0.5, "excluded": []}}
    rule, values = rule_of(spec, LAYOUT), np.ones(4, np.float32)
    rule.update(rule.begin(0, 0.25), 0, values, np.ones(4, np.float32))
    np.testing.assert_array_equal(values, np.full(4, 1 - 0.125 - 0.25, np.float32))
    assert rule.rate(0) == 0.5


def test_rule_when_it_is_unknown_then_says_which_are_known():
    with pytest.raises(ConfigurationError, match="expected one of add, sgd, adagrad, adam, adamw, rmsprop.*'lion'"):
        rule_of({"name": "lion", "learning_rate": 0.1}, LAYOUT)


@every_case(
    ("spec", "message"),
    [
        ({"name": "add", "learning_rate": 0.1}, "no options for 'add'"),
        ({"name": "sgd"}, "learning_rate: expected a number, or a schedule of .*None"),
        ({"name": "sgd", "learning_rate": True}, "learning_rate: expected a number"),
        ({"name": "sgd", "learning_rate": 0.1, "beta_1": 0.9}, "expected options of 'sgd'.*beta_1"),
        ({"name": "adam", "learning_rate": 0.1, "epsilon": 0.0}, "epsilon: expected a float32 above zero"),
        ({"name": "adam", "learning_rate": 0.1, "epsilon": 1e-60}, "epsilon: expected a float32 above zero"),
        ({"name": "adam", "learning_rate": {"schedule": "steps"}}, "a schedule of exponential_decay, .*'steps'"),
        ({"name": "adam", "learning_rate": {"schedule": "cosine_decay"}}, "expected arguments of cosine_decay"),
        ({"name": "sgd", "learning_rate": 0.1, "clip": {"norms": 1.0}}, "clip: expected"),
        ({"name": "sgd", "learning_rate": 0.1, "clip": {"norm": 1.0, "value": 1.0}}, "clip: expected one of norm"),
        ({"name": "sgd", "learning_rate": 0.1, "weight_decay": {}}, "weight_decay: expected its options"),
        (
            {"name": "sgd", "learning_rate": 0.1, "weight_decay": {"rate": 0.1, "excluded": [[8, 4]]}},
            "excluded: expected growing pairs",
        ),
    ],
)
def test_rule_when_an_option_is_wrong_then_says_what_was_expected(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        rule_of(spec, LAYOUT)
