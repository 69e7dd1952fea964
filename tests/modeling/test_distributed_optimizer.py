"""Training loops of one's own on two and three ranks give what one process gives on all rows."""

import sys

import keras
import numpy as np
import pytest
from keras_reference import classifier_data
from rank_pool import RankError

import elephant
from elephant import collective
from elephant.errors import ConfigurationError

tf = pytest.importorskip("tensorflow")

TOLERANCE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def functions_by_value():
    """The ranks of the pool have no test modules."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def dense_model(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


def batches_of(sizes_by_step):
    """Returns for each step the (features, labels) of each rank."""
    data = classifier_data(sum(map(sum, sizes_by_step)))
    bounds = np.cumsum([0, *[size for sizes in sizes_by_step for size in sizes]])
    parts = [
        (data["features"][start:stop], data["label"][start:stop, None])
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    ranks = len(sizes_by_step[0])
    return [parts[first : first + ranks] for first in range(0, len(parts), ranks)]


def together(steps):
    """Returns for each step the rows of all ranks."""
    return [tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True)) for parts in steps]


def of_rank(steps, rank):
    return [parts[rank] for parts in steps]


def train(make_model, make_optimizer, batches, *, in_graph=False, weigh=False, wrap=False):
    """Returns the weights after a loop with a GradientTape: plain Keras, or averaged over the ranks."""
    model, optimizer, rows = make_model(), make_optimizer(), [0]
    if wrap:
        elephant.broadcast_variables(model.variables)
        optimizer = elephant.DistributedOptimizer(optimizer, num_rows=(lambda: rows[0]) if weigh else None)

    def step(x, y):
        with tf.GradientTape() as tape:
            # A batch without rows has the loss zero, not nan.
            loss = tf.math.divide_no_nan(tf.reduce_sum(tf.square(model(x) - y)), tf.cast(tf.size(y), tf.float32))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run_step = tf.function(step, reduce_retracing=True) if in_graph else step
    optimizer.build(model.trainable_variables)
    for x, y in batches:
        rows[0] = len(x)
        run_step(tf.constant(x), tf.constant(y))
    return model.get_weights()


def assert_equal_weights(results, expected):
    for weights in results:
        assert max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)) <= TOLERANCE


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw, clipped": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5),
}


@pytest.mark.parametrize(
    ("optimizer", "in_graph"), [("adam", False), ("adamw, clipped", True)], ids=["eager", "tf.function"]
)
def test_loop_when_ranks_have_equal_batches_then_equals_one_process(rank_pool, optimizer, in_graph):
    steps, make_optimizer = batches_of([(4, 4)] * 6), OPTIMIZERS[optimizer]
    expected = train(dense_model, make_optimizer, together(steps))

    def on_rank(batches):
        # Ranks that start apart: rank 0 is what all take over.
        def model():
            return dense_model(seed=collective.rank())

        return train(model, make_optimizer, batches, in_graph=in_graph, wrap=True)

    assert_equal_weights(rank_pool.run(on_rank, [(of_rank(steps, rank),) for rank in range(2)]), expected)


# Run eagerly: the loops of tests/backends/test_backends.py.
def test_loop_when_batches_are_ragged_then_rows_weigh_the_average(rank_pool):
    steps = batches_of([(5, 2, 3), (1, 7, 0), (0, 0, 4), (3, 3, 2)])
    make_optimizer = OPTIMIZERS["adam"]
    expected = train(dense_model, make_optimizer, together(steps))

    def on_rank(batches):
        return train(dense_model, make_optimizer, batches, in_graph=True, weigh=True, wrap=True)

    assert_equal_weights(rank_pool.run(on_rank, [(of_rank(steps, rank),) for rank in range(3)]), expected)


def single_variable_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1, use_bias=False)])


def test_loop_when_there_is_a_single_variable_then_equals_one_process(rank_pool):
    steps, make_optimizer = batches_of([(4, 4)] * 3), OPTIMIZERS["adam"]
    expected = train(single_variable_model, make_optimizer, together(steps))

    def on_rank(batches):
        return train(single_variable_model, make_optimizer, batches, in_graph=True, wrap=True)

    assert_equal_weights(rank_pool.run(on_rank, [(of_rank(steps, rank),) for rank in range(2)]), expected)


def embedding_steps():
    rng = np.random.default_rng(5)
    return [
        [(rng.integers(0, 40, (4, 3)).astype("int32"), rng.normal(size=(4, 1)).astype("float32")) for _ in range(2)]
        for _ in range(5)
    ]


def embedding_model():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((3,), dtype="int32"), layers.Embedding(40, 3), layers.Flatten(), layers.Dense(1)]
    )


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "tf.function"])
def test_loop_when_there_are_embeddings_with_adam_then_equals_one_process(rank_pool, in_graph):
    steps, make_optimizer = embedding_steps(), OPTIMIZERS["adam"]
    expected = train(embedding_model, make_optimizer, together(steps))

    def on_rank(batches):
        return train(embedding_model, make_optimizer, batches, in_graph=in_graph, wrap=True)

    assert_equal_weights(rank_pool.run(on_rank, [(of_rank(steps, rank),) for rank in range(2)]), expected)


class OwnPlaces(keras.layers.Layer):
    """Looks the distances of its places up, and each place once for every row."""

    def build(self, shape):
        self.distances = self.add_weight(shape=(4, 3), initializer="glorot_uniform")
        self.places = self.add_weight(shape=(3, 3), initializer="glorot_uniform")

    def call(self, x):
        ops = keras.ops
        biases = ops.take(self.distances, np.abs(np.arange(3)[:, None] - np.arange(3)).reshape(-1), axis=0)
        of_rows = ops.take(self.places, ops.broadcast_to(ops.arange(3), ops.shape(x)), axis=0)
        return ops.cast(x, "float32")[..., None] * of_rows / 40 + ops.mean(biases, axis=0)


def model_of_own_places():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential([layers.Input((3,), dtype="int32"), OwnPlaces(), layers.Flatten(), layers.Dense(1)])


# Run eagerly, places of rows that are the same on all ranks cannot be told from others.
def test_loop_when_places_are_the_model_s_own_then_equals_one_process(rank_pool):
    steps, make_optimizer = embedding_steps(), OPTIMIZERS["adam"]
    expected = train(model_of_own_places, make_optimizer, together(steps))

    def on_rank(batches):
        return train(model_of_own_places, make_optimizer, batches, in_graph=True, wrap=True)

    assert_equal_weights(rank_pool.run(on_rank, [(of_rank(steps, rank),) for rank in range(2)]), expected)


def loss_scaled(gradient_sets, *, wrap):
    """Applies given gradients, and returns the variable, the loss scale and the inner steps after each."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    variable = keras.Variable(np.ones(3, "float32"))
    if wrap:
        optimizer = elephant.DistributedOptimizer(optimizer)
    step = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    optimizer.build([variable])
    states = []
    for gradient in gradient_sets:
        step(tf.constant(gradient))
        states.append((np.array(variable).tolist(), float(optimizer.dynamic_scale), int(optimizer.iterations)))
    return states


def test_loss_scale_when_one_rank_overflows_then_all_skip_the_step(rank_pool):
    fine, overflow = np.full(3, 16.0, "float32"), np.full(3, np.inf, "float32")
    expected = loss_scaled([fine, overflow, fine], wrap=False)

    def on_rank(gradients):
        return loss_scaled(gradients, wrap=True)

    results = rank_pool.run(on_rank, [([fine, fine, fine],), ([fine, overflow, fine],)])
    assert results == [expected, expected]
    assert [iterations for _, _, iterations in expected] == [1, 1, 2]


def mixed_fit(batches, wrap):
    """Returns the weights after model.fit under mixed_float16."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = dense_model()
        # A small scale: nothing overflows, on smaller batches neither.
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
        model.compile(elephant.DistributedOptimizer(optimizer) if wrap else optimizer, "mse", jit_compile=False)
        model.fit((batch for batch in batches), steps_per_epoch=len(batches), shuffle=False, verbose=0)
        return model.get_weights()
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.slow(
    "a fit; tests/rank/test_mixed_precision.py has ranks that scale the loss, the tests above this optimizer"
)
def test_mixed_precision_when_fitted_then_ranks_agree_and_are_near_one_process(rank_pool):
    steps = batches_of([(4, 4)] * 5)
    first, second = rank_pool.run(mixed_fit, [(of_rank(steps, rank), True) for rank in range(2)])
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    expected = mixed_fit(together(steps), False)
    # Half precision in the forward pass: other batches round otherwise.
    assert max(np.abs(a - b).max() for a, b in zip(first, expected, strict=True)) <= 5e-3


def gan(batches, wrap):
    """Trains a generator and a discriminator in one compiled step; returns the weights of both."""
    keras.utils.set_random_seed(1)
    generator = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(6)])
    discriminator = keras.Sequential(
        [keras.layers.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1, "sigmoid")]
    )
    models = (generator, discriminator)
    optimizers = [keras.optimizers.Adam(0.02), keras.optimizers.Adam(0.01)]
    if wrap:
        optimizers = [elephant.DistributedOptimizer(optimizer) for optimizer in optimizers]
    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(real):
        with tf.GradientTape(persistent=True) as tape:
            judged = discriminator(generator(real[:, :2]))
            of_generator = tf.reduce_mean(tf.square(judged - 1.0))
            of_discriminator = tf.reduce_mean(tf.square(discriminator(real) - 1.0)) + tf.reduce_mean(tf.square(judged))
        for optimizer, model, loss in zip(optimizers, models, (of_generator, of_discriminator), strict=True):
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for real, _ in batches:
        step(tf.constant(real))
    return [*generator.get_weights(), *discriminator.get_weights()]


@pytest.mark.slow("two optimizers in a loop; the loop below has one, and tests/rank/test_own_steps.py two")
def test_gan_when_two_optimizers_step_in_one_graph_then_equals_one_process(rank_pool):
    steps = batches_of([(4, 4)] * 10)
    expected = gan(together(steps), False)
    assert_equal_weights(rank_pool.run(gan, [(of_rank(steps, rank), True) for rank in range(2)]), expected)


def compiled_fit(batches, wrap, jit_compile=False):
    model = dense_model()
    optimizer = keras.optimizers.Adam(0.01)
    optimizer = elephant.DistributedOptimizer(optimizer) if wrap else optimizer
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    model.fit((batch for batch in batches), steps_per_epoch=len(batches), shuffle=False, verbose=0)
    return model.get_weights()


def test_model_fit_when_compiled_with_it_then_equals_one_process(rank_pool):
    steps = batches_of([(4, 4)] * 6)
    expected = compiled_fit(together(steps), False)
    assert_equal_weights(rank_pool.run(compiled_fit, [(of_rank(steps, rank), True) for rank in range(2)]), expected)


def test_jit_compile_when_asked_for_then_says_to_leave_it(rank_pool):
    steps = batches_of([(4, 4)])
    with pytest.raises(RankError, match="Received: jit_compile=True. Pass jit_compile=False to model.compile"):
        rank_pool.run(compiled_fit, [(of_rank(steps, rank), True, True) for rank in range(2)])


def test_tf_function_when_it_is_jit_compiled_then_says_to_leave_it(rank_pool):
    def on_rank():
        optimizer = elephant.DistributedOptimizer(keras.optimizers.SGD(0.1))
        variable = keras.Variable(np.ones(3, "float32"))
        optimizer.build([variable])
        tf.function(lambda: optimizer.apply([tf.ones(3)], [variable]), jit_compile=True)()

    with pytest.raises(RankError, match="Received: jit_compile=True. Pass jit_compile=False .*or to tf.function"):
        rank_pool.run(on_rank, [()] * 2)


def test_loss_scale_when_it_is_outermost_then_says_to_wrap_it(rank_pool):
    def on_rank():
        optimizer = keras.optimizers.LossScaleOptimizer(elephant.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        variable = keras.Variable(np.ones(3, "float32"))
        optimizer.apply([tf.ones(3)], [variable])

    with pytest.raises(RankError, match=r"Pass DistributedOptimizer\(keras.optimizers.LossScaleOptimizer\(optimizer"):
        rank_pool.run(on_rank, [()] * 2)


def test_optimizer_when_wrapped_twice_then_is_refused(rank_pool):
    def on_rank(scaled):
        optimizer = elephant.DistributedOptimizer(keras.optimizers.SGD(0.1))
        elephant.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer)

    for scaled in (False, True):
        with pytest.raises(RankError, match="was given to DistributedOptimizer before. Wrap it once"):
            rank_pool.run(on_rank, [(scaled,)] * 2)


def test_peer_when_lost_in_a_compiled_step_then_is_noted_for_the_driver(rank_pool):
    def on_rank():
        from elephant.collective import api

        if collective.rank() == 1:
            return "left"
        optimizer = elephant.DistributedOptimizer(keras.optimizers.SGD(0.1))
        variable = keras.Variable(np.ones(3, "float32"))
        optimizer.build([variable])
        step = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
        try:
            step(tf.ones(3))
        except tf.errors.OpError:
            return [type(error).__name__ for error in api.failures()]

    assert rank_pool.run(on_rank, [()] * 2) == [["PeerLostError"], "left"]


def test_broadcast_variables_when_values_differ_then_all_have_the_root_s(rank_pool):
    def on_rank():
        rank = collective.rank()
        variables = [
            keras.Variable(np.full((2, 3), rank, "float32")),
            keras.Variable(rank, dtype="int32", trainable=False),
            keras.Variable(np.full(3, rank), dtype="bfloat16"),
            tf.Variable([float(rank)]),
        ]
        elephant.broadcast_variables(variables, root=1)
        return [np.array(keras.ops.cast(variable, "float32")).tolist() for variable in variables]

    assert rank_pool.run(on_rank, [()] * 2) == [[[[1.0] * 3] * 2, 1.0, [1.0] * 3, [1.0]]] * 2


@pytest.mark.parametrize(
    "shapes, dtypes", [(((2, 3), (3, 2)), ("float32", "float32")), (((2,), (1,)), ("float32", "float64"))]
)
def test_broadcast_variables_when_ranks_have_others_of_as_many_bytes_then_all_say_so(rank_pool, shapes, dtypes):
    def share():
        rank = collective.rank()
        elephant.broadcast_variables([keras.Variable(np.full(shapes[rank], float(rank)), dtype=dtypes[rank])])

    with pytest.raises(RankError, match="ProtocolError.*with the same shapes and dtypes"):
        rank_pool.run(share, [()] * 2)


def test_loop_when_a_layer_has_as_many_weights_in_another_shape_then_all_say_so(rank_pool):
    def step():
        rank = collective.rank()
        kernel = keras.Variable(np.ones((2, 3) if rank else (3, 2)), dtype="float32")
        optimizer = elephant.DistributedOptimizer(keras.optimizers.SGD(1.0))
        bias = keras.Variable(np.ones(1), dtype="float32")
        optimizer.apply([keras.ops.ones(kernel.shape), keras.ops.ones(1)], [kernel, bias])

    with pytest.raises(RankError, match=r"number 0 is \(3, 2\) float32 on rank 0, and \(2, 3\) float32 on rank 1"):
        rank_pool.run(step, [()] * 2)


def test_optimizer_when_there_is_one_rank_then_is_returned_unchanged():
    optimizer = keras.optimizers.SGD(0.1)
    apply = optimizer.apply
    assert elephant.DistributedOptimizer(optimizer, num_rows=lambda: 3) is optimizer
    assert optimizer.apply == apply
    with pytest.raises(ConfigurationError, match="optimizer: expected a keras.optimizers.Optimizer. Received: 'sgd'"):
        elephant.DistributedOptimizer("sgd")
    with pytest.raises(ConfigurationError, match=r"variables\[0\]: expected a variable. Received: 3"):
        elephant.broadcast_variables([3])
