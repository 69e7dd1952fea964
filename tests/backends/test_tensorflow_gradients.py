"""One operation for an optimizer's update, against Keras' own operations in the same process."""

import keras
import numpy as np
import pytest
from keras_reference import largest_difference

tf = pytest.importorskip("tensorflow")
if keras.config.backend() != "tensorflow":
    pytest.skip("TensorFlow's operations change TensorFlow's variables", allow_module_level=True)

from elephant.backends.tensorflow_gradients import fuse_update  # noqa: E402 - TensorFlow is known to be there

OPTIMIZERS = {
    "Adam, decaying rate": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
    "AdamW, clipped": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1, global_clipnorm=0.5, beta_1=0.7),
    "Adam, moving average": lambda: keras.optimizers.Adam(0.05, epsilon=1e-3, use_ema=True),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.8, nesterov=True),
    "float64": lambda: keras.optimizers.Adam(0.05),
}


class OwnAdam(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * learning_rate)


LEFT = {
    "SGD": keras.optimizers.SGD(0.1),
    "without a momentum": keras.optimizers.Adam(0.1, beta_1=0.0),
    "a variable": keras.optimizers.Adam(0.1, beta_2=keras.Variable(0.9)),
    "a variable that is small": keras.optimizers.Adam(0.1, epsilon=keras.Variable(1e-7)),
    "AMSGrad": keras.optimizers.Adam(0.1, amsgrad=True),
    "another rule": keras.optimizers.Nadam(0.1),
    "a rule of one's own": OwnAdam(0.1),
}


def trained(make, fused, dtype="float32", steps=6):
    """Returns weights and optimizer state after some steps of a compiled loop, and the operations of a step."""
    rng = np.random.default_rng(5)
    variables = [keras.Variable(rng.normal(size=shape), dtype=dtype) for shape in [(7, 3), (129,), (40, 2)]]
    optimizer = make()
    optimizer.build(variables)
    if fused:
        fuse_update(optimizer)
    gradients = [[tf.constant(rng.normal(size=one.shape), dtype) for one in variables] for _ in range(steps)]

    @tf.function(autograph=False)
    def step(dense, row):
        # Of an embedding: two slices of the same row.
        slices = tf.IndexedSlices(row, tf.constant([4, 4, 9]), tf.constant(tuple(variables[2].shape)))
        optimizer.apply([*dense, slices], variables)

    for first, second, third in gradients:
        step([first, second], third[:3])
    graph = step.get_concrete_function(gradients[0][:2], gradients[0][2][:3]).graph
    values = [keras.ops.convert_to_numpy(one) for one in [*variables, *optimizer.variables]]
    return values, [operation.type for operation in graph.get_operations()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_when_fused_then_is_the_same(name):
    make, dtype = OPTIMIZERS[name], name if name == "float64" else "float32"
    values, operations = trained(make, fused=True, dtype=dtype)
    expected, _ = trained(make, fused=False, dtype=dtype)
    assert largest_difference(values, expected) <= (1e-6 if dtype == "float32" else 1e-14)
    # Slices keep Keras' operations; clipping has made them dense.
    assert sum(one.startswith("ResourceApply") for one in operations) == (3 if "clipped" in name else 2)


def test_update_when_weights_are_bfloat16_then_rounds_where_keras_does():
    values, operations = trained(OPTIMIZERS["momentum"], fused=True, dtype="bfloat16")
    expected, _ = trained(OPTIMIZERS["momentum"], fused=False, dtype="bfloat16")
    assert all(np.array_equal(one, other) for one, other in zip(values, expected, strict=True))
    assert not any(one.startswith("ResourceApply") for one in operations)


@pytest.mark.parametrize("name", LEFT)
def test_update_when_tensorflow_has_no_such_rule_then_is_left(name):
    fuse_update(LEFT[name])
    assert "update_step" not in vars(LEFT[name])
