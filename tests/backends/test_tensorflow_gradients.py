"""One operation for an optimizer's update, against Keras' own operations in the same process."""

import keras
import numpy as np
import pytest
from keras_reference import largest_difference

tf = pytest.importorskip("tensorflow")
if keras.config.backend() != "tensorflow":
    pytest.skip("TensorFlow's operations change TensorFlow's variables", allow_module_level=True)

from elephant.backends.tensorflow_gradients import fuse_update, lookups_of, without_repeated  # noqa: E402 - TensorFlow is known to be there

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


# Of batches (rows, 3): places looked up, and whether they are of the model itself, whatever rows a batch has.
LOOKUPS = {
    "named by the batch": (lambda x: tf.cast(x, "int32"), False),
    "positions": (lambda x: tf.range(tf.shape(x)[1]), True),
    "positions of rows": (lambda x: tf.broadcast_to(tf.range(3), tf.shape(x)), False),
    "row numbers": (lambda x: tf.range(tf.shape(x)[0]), False),
    "distances": (lambda x: tf.abs(tf.range(3)[:, None] - tf.range(3)), True),
    "constants": (lambda x: tf.constant([2, 0, 2, 1, 1]), True),
}


@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_when_a_graph_is_traced_then_are_without_repeated(name, rows):
    places, is_own = LOOKUPS[name]
    table, found = tf.Variable(np.ones((8, 2), np.float32)), []

    @tf.function(input_signature=[tf.TensorSpec((rows, 3))], autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, places(x)))
        indices = tape.gradient(loss, table).indices
        found.append(without_repeated(indices, lookups_of(indices)[0]))

    step.get_concrete_function()
    ((number,),) = found
    # Four rows are numbered in the graph, once each.
    assert (number >= 0) == (is_own or (name == "row numbers" and rows is not None))
