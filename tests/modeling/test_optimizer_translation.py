"""Keras optimizers as rules of the parameter server: what JSON says, what is refused, and slots there and back."""

import dataclasses
import json

import keras
import numpy as np
import pytest
from keras_steps import LAYOUT, SHAPES, applying, built, compared, gradients, packed, step_rule
from tables import every_case

from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling import optimizer_translation
from elephant.modeling.optimizer_translation import restore_slots, slots_of, translate
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.optimizers import register_rule, rule_of, rules
from elephant.parameter_server.optimizers.base import Descent

optimizers = keras.optimizers
schedules = keras.optimizers.schedules


class Subclass(keras.optimizers.Adam):
    pass


class OwnSchedule(schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


class SubclassedSchedule(schedules.CosineDecay):
    pass


def translated(optimizer):
    built(optimizer)
    return translate(optimizer, LAYOUT)


def test_translate_when_adam_has_its_defaults_then_says_all_of_them():
    assert translated(optimizers.Adam(0.5)) == {
        "name": "adam",
        "learning_rate": 0.5,
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-7,
        "amsgrad": False,
    }


@every_case(
    ("make", "name", "slots"),
    [
        (lambda: optimizers.SGD(0.1), "sgd", ()),
        (lambda: optimizers.SGD(0.1, momentum=0.9), "sgd", ("momentum",)),
        (lambda: optimizers.Adagrad(0.1), "adagrad", ("accumulator",)),
        (lambda: optimizers.RMSprop(0.1), "rmsprop", ("velocity",)),
        (
            lambda: optimizers.RMSprop(0.1, momentum=0.5, centered=True),
            "rmsprop",
            ("velocity", "average_gradient", "momentum"),
        ),
        (lambda: optimizers.Adam(0.1, amsgrad=True), "adam", ("momentum", "velocity", "velocity_hat")),
        (lambda: optimizers.AdamW(0.1), "adamw", ("momentum", "velocity")),
    ],
)
def test_translate_when_the_spec_crosses_as_json_then_makes_a_rule_with_keras_slots(make, name, slots):
    spec = json.loads(json.dumps(translated(make())))
    assert spec["name"] == name
    assert rule_of(spec, LAYOUT).slots == slots


def test_rule_when_registered_as_documented_then_does_what_its_keras_optimizer_does(monkeypatch):
    monkeypatch.setattr(rules, "OPTIMIZERS", dict(rules.OPTIMIZERS))
    monkeypatch.setattr(optimizer_translation, "OPTIMIZERS", rules.OPTIMIZERS)

    @register_rule("lion", keras="Lion", slots={"momentum": "_momentums"})
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Lion(Descent):
        beta_1: float = 0.9
        beta_2: float = 0.99

        @property
        def slots(self):
            return ("momentum",)

        def update_block(self, scalars, start, values, gradient, slots, scratch):
            (momentum,) = slots
            values -= scalars * np.sign(self.beta_1 * momentum + (1 - self.beta_1) * gradient)
            momentum[:] = self.beta_2 * momentum + (1 - self.beta_2) * gradient

    for expected, received in compared(optimizers.Lion(0.01, beta_1=0.8), "eager", steps=3):
        np.testing.assert_allclose(received, expected, rtol=1e-6, atol=1e-7)


def test_translate_when_variables_are_excluded_from_decay_then_names_their_places():
    optimizer = optimizers.AdamW(0.1, weight_decay=0.25)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gain"])
    excluded = [[s.start, s.stop] for s in LAYOUT.segments if s.name in ("bias", "gain")]
    assert len(excluded) == 3
    assert translated(optimizer)["weight_decay"] == {"rate": 0.25, "excluded": excluded}


def test_translate_when_variables_are_excluded_as_objects_then_names_their_places():
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES]
    optimizer = optimizers.SGD(0.1, weight_decay=0.25)
    optimizer.exclude_from_weight_decay(var_list=[variables[2]])
    optimizer.build(variables)
    segment = LAYOUT.segments[2]
    assert translate(optimizer, LAYOUT)["weight_decay"]["excluded"] == [[segment.start, segment.stop]]


@every_case(
    ("options", "expected"),
    [
        ({"clipnorm": 0.5}, {"clip": {"norm": 0.5}}),
        ({"global_clipnorm": 0.5}, {"clip": {"global_norm": 0.5}}),
        ({"clipvalue": 0.5}, {"clip": {"value": 0.5}}),
        ({"clipnorm": 0.0}, {}),
        ({"weight_decay": 0.0}, {}),
        ({"loss_scale_factor": 8}, {"loss_scale": 8.0}),
    ],
)
def test_translate_when_gradients_are_clipped_or_scaled_then_says_so(options, expected):
    spec = translated(optimizers.SGD(0.5, **options))
    assert spec == {"name": "sgd", "learning_rate": 0.5, "momentum": 0.0, "nesterov": False, **expected}


def test_translate_when_the_loss_scale_is_dynamic_then_translates_the_inner_optimizer():
    outer = optimizers.LossScaleOptimizer(optimizers.Adam(0.25))
    built(outer)
    assert translate(outer, LAYOUT) == translated(optimizers.Adam(0.25))
    slots, iterations = slots_of(outer, LAYOUT)
    restore_slots(outer, LAYOUT, [np.full_like(slot, 2) for slot in slots], iterations + 7)
    assert int(outer.inner_optimizer.iterations) == 7
    assert float(outer.inner_optimizer._velocities[1][0]) == 2.0


def test_translate_when_numbers_are_of_numpy_then_says_plain_ones():
    spec = translated(optimizers.Adam(schedules.ExponentialDecay(np.float64(0.1), np.int64(10), np.float32(0.5))))
    assert json.loads(json.dumps(spec))["learning_rate"] == {
        "schedule": "exponential_decay",
        "initial_learning_rate": 0.1,
        "decay_steps": 10,
        "decay_rate": 0.5,
        "staircase": False,
    }


@every_case(
    "name",
    ["Adadelta", "Adafactor", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam", "ScheduleFreeAdamW", "Subclass"],
)
def test_translate_when_the_optimizer_is_not_known_then_names_it_and_those_that_are(name):
    kind = Subclass if name == "Subclass" else getattr(optimizers, name, None)
    if kind is None:
        pytest.skip(f"this version of Keras has no {name}")
    optimizer = kind(0.1)
    message = rf"one of SGD, Adagrad, Adam, AdamW, RMSprop, exactly.*Received: .*\.{name}\. .*frequency=k"
    with pytest.raises(UnsupportedError, match=message):
        translated(optimizer)


@every_case(
    ("optimizer", "message"),
    [
        (lambda: optimizers.SGD(0.1, use_ema=True), "without use_ema.*use_ema=True.*mode='synchronous'"),
        (lambda: optimizers.Adam(0.1, gradient_accumulation_steps=4), "without gradient_accumulation_steps.*=4"),
        (lambda: optimizers.Adam(lambda: 0.1), "learning_rate: expected a number, or one of the schedules .*lambda"),
        (lambda: optimizers.Adam(OwnSchedule()), "schedules ExponentialDecay, .*OwnSchedule"),
        (lambda: optimizers.Adam(SubclassedSchedule(0.1, 10)), "exactly.*SubclassedSchedule"),
        (lambda: optimizers.Adam(schedules.CosineDecay(0, 10)), "begins with a float.*CosineDecay.* 0, .*Write 0.0"),
        (lambda: optimizers.Adam(schedules.PiecewiseConstantDecay([5], [1, 2])), "Write 1.0"),
    ],
)
def test_translate_when_an_option_is_not_known_then_names_it(optimizer, message):
    with pytest.raises(UnsupportedError, match=message):
        translated(optimizer())


def test_translate_when_a_variable_has_a_constraint_then_names_both():
    layer = keras.layers.Dense(2, kernel_constraint=keras.constraints.NonNeg(), name="positive")
    model = keras.Sequential([keras.Input((3,)), layer])
    optimizer = optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    with pytest.raises(UnsupportedError, match="without constraints.*positive/kernel with NonNeg.*frequency=k"):
        translate(optimizer, Layout([(v.path, v.shape) for v in model.trainable_variables]))


def test_translate_when_epsilon_is_zero_then_says_why_not():
    with pytest.raises(ConfigurationError, match=r"epsilon: expected a float32 above zero. Received: 0.0"):
        translated(optimizers.Adam(0.1, epsilon=0.0))


def test_translate_when_the_optimizer_is_not_built_then_says_how():
    with pytest.raises(ConfigurationError, match="to be built. Call optimizer.build"):
        translate(optimizers.SGD(0.1), LAYOUT)


def test_translate_when_it_was_built_for_other_variables_then_shows_both():
    optimizer = optimizers.SGD(0.1)
    optimizer.build([keras.Variable(np.zeros(3, "float32"))])
    with pytest.raises(ConfigurationError, match=r"of the shapes \[\(4,\)\]. Received: \[\(3,\)\]"):
        translate(optimizer, Layout([("a", (4,))]))


@pytest.mark.parametrize("shapes", [[], [(3,)], [(LAYOUT.num_values,)] * 2])
def test_restore_slots_when_they_are_not_the_rules_then_shows_both(shapes):
    optimizer = optimizers.SGD(0.1, momentum=0.9)
    built(optimizer)
    with pytest.raises(ConfigurationError, match=rf"slots: expected .*{LAYOUT.num_values}.*Received: "):
        restore_slots(optimizer, LAYOUT, [np.zeros(shape, "float32") for shape in shapes], 3)


JOURNEYS = {
    "sgd": lambda: optimizers.SGD(schedules.PolynomialDecay(0.1, 10, 0.001)),
    "nesterov": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adam": lambda: optimizers.Adam(schedules.InverseTimeDecay(0.1, 3, 0.5), amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
}


@every_case("name", JOURNEYS)
def test_slots_when_training_moves_to_a_server_and_back_then_ends_as_so_many_steps_of_keras(name):
    reference = JOURNEYS[name]()
    expected = built(reference)
    for step in range(12):
        applying(reference, expected, "eager")(gradients(step))

    optimizer = JOURNEYS[name]()
    variables = built(optimizer)
    for step in range(4):
        applying(optimizer, variables, "eager")(gradients(step))
    rule = rule_of(translate(optimizer, LAYOUT), LAYOUT)
    (slots, iterations), flat = slots_of(optimizer, LAYOUT), packed(variables)
    assert iterations == 4 and len(slots) == len(rule.slots)
    for step in range(4, 8):
        step_rule(rule, step, flat, slots, gradients(step))

    # The fitted model's optimizer is a new one.
    last = JOURNEYS[name]()
    variables = built(last)
    for variable, view in zip(variables, LAYOUT.views(flat), strict=True):
        variable.assign(view)
    restore_slots(last, LAYOUT, slots, 8)
    for step in range(8, 12):
        applying(last, variables, "eager")(gradients(step))
    np.testing.assert_array_equal(packed(variables), packed(expected))
    assert int(last.iterations) == int(reference.iterations)
