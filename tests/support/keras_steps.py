"""A Keras optimizer and the rule that it translates to, given the same gradients step by step."""

import functools

import keras
import numpy as np
import pytest

from elephant.modeling.optimizer_translation import translate
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.optimizers import rule_of

tf = pytest.importorskip("tensorflow")

# The long one is cut into blocks by the rules, and into shards by TensorFlow's threads.
SHAPES = [(17, 5), (5,), (3, 4, 2), (), (1,), (70_000,)]
NAMES = ["kernel", "bias", "kernel", "gain", "bias", "embedding"]
LAYOUT = Layout(list(zip(NAMES, SHAPES, strict=True)))


@functools.cache
def gradients(step):
    rng = np.random.default_rng(100 + step)
    return [rng.normal(size=shape, scale=0.3).astype("float32") for shape in SHAPES]


def built(optimizer):
    """Returns the variables, the same in each call, that it builds the optimizer for."""
    rng = np.random.default_rng(1)
    variables = [
        keras.Variable(rng.normal(size=shape).astype("float32"), name=name)
        for shape, name in zip(SHAPES, NAMES, strict=True)
    ]
    optimizer.build(variables)
    return variables


def applying(optimizer, variables, how):
    """Returns the optimizer's own apply: "eager", "graph" as model.fit compiles it, or "xla"."""

    def apply(arrays):
        optimizer.apply(arrays, variables)

    if how != "eager":
        apply = tf.function(apply, autograph=False, jit_compile=how == "xla")
    return lambda arrays: apply([tf.constant(array) for array in arrays])


def packed(variables):
    return LAYOUT.pack([variable.numpy() for variable in variables])


def step_rule(rule, iteration, flat, slots, arrays):
    gradient = LAYOUT.pack(arrays)
    rule.prepare(gradient, LAYOUT)
    rule.update(rule.begin(iteration), 0, flat, gradient, slots)


def compared(optimizer, how, steps=100):
    """Yields the weights of Keras and of the rule after each step."""
    variables = built(optimizer)
    rule = rule_of(translate(optimizer, LAYOUT), LAYOUT)
    flat, slots = packed(variables), rule.init(LAYOUT.num_values)
    apply = applying(optimizer, variables, how)
    for iteration in range(steps):
        apply(gradients(iteration))
        step_rule(rule, iteration, flat, slots, gradients(iteration))
        yield packed(variables), flat
