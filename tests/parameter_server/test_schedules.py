"""Learning rates by the number of updates, against Keras' own schedules."""

import keras
import numpy as np
from tables import every_case

from elephant.modeling.optimizer_translation import translate
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.optimizers import SCHEDULES, schedule_of

schedules = keras.optimizers.schedules

# The second number is how many ulps TensorFlow's float32 power, cosine and logarithm may add.
CASES = {
    "exponential": (schedules.ExponentialDecay(0.1, 10, 0.9), 2),
    "exponential_staircase": (schedules.ExponentialDecay(0.1, 10, 0.9, staircase=True), 2),
    "inverse_time": (schedules.InverseTimeDecay(0.1, 7, 0.5), 0),
    "inverse_time_staircase": (schedules.InverseTimeDecay(0.1, 7, 0.5, staircase=True), 0),
    "piecewise": (schedules.PiecewiseConstantDecay([10, 30.5, 60], [0.1, 0.05, 0.02, 0.01]), 0),
    "polynomial_line": (schedules.PolynomialDecay(0.1, 200, 0.001), 0),
    "polynomial_root": (schedules.PolynomialDecay(0.1, 200, 0.001, power=0.5), 2),
    "polynomial_cycle": (schedules.PolynomialDecay(0.1, 30, 0.001, power=2.0, cycle=True), 2),
    "cosine": (schedules.CosineDecay(0.1, 200, alpha=0.1), 4),
    "cosine_warm_up": (schedules.CosineDecay(0.01, 200, warmup_target=0.1, warmup_steps=20, alpha=0.1), 4),
    "cosine_no_warm_up_steps": (schedules.CosineDecay(0.01, 200, warmup_target=0.1, alpha=0.1), 4),
    "restarts": (schedules.CosineDecayRestarts(0.1, 10, alpha=0.1), 4),
    "restarts_equally_long": (schedules.CosineDecayRestarts(0.1, 15, t_mul=1.0, m_mul=0.8, alpha=0.05), 4),
    "restarts_lower": (schedules.CosineDecayRestarts(0.1, 7, t_mul=1.5, m_mul=0.8, alpha=0.05), 4),
}

# All where rates change their rule, and some of those after it.
UPDATES = [*range(70), *range(70, 300, 13), 199, 200, 201, 299]


def spec_of(schedule):
    optimizer = keras.optimizers.SGD(schedule)
    optimizer.build([keras.Variable(np.zeros(3, "float32"))])
    return translate(optimizer, Layout([("a", (3,))]))["learning_rate"]


@every_case("name", CASES)
def test_schedule_when_keras_is_asked_for_the_same_updates_then_agrees(name):
    schedule, ulps = CASES[name]
    rate = schedule_of(spec_of(schedule))
    iterations = keras.Variable(0, dtype="int64", trainable=False)
    for step in UPDATES:
        iterations.assign(step)
        expected = np.float32(keras.ops.convert_to_numpy(schedule(iterations)))
        received = rate(step)
        assert received == np.float32(received)
        assert abs(int(expected.view(np.int32)) - int(np.float32(received).view(np.int32))) <= ulps, step


def test_schedules_when_listed_then_are_all_that_keras_has():
    kinds = {type(schedule).__name__ for schedule, _ in CASES.values()}
    built_in = {
        name
        for name, kind in vars(schedules).items()
        if isinstance(kind, type) and kind is not schedules.LearningRateSchedule
    }
    assert kinds == built_in
    assert len(SCHEDULES) == len(built_in)


def test_rate_when_it_is_a_number_then_is_that_number_in_float32():
    assert schedule_of(0.1)(0) == schedule_of(0.1)(10**9) == float(np.float32(0.1))
