"""The hook in the optimizer against a real parameter server: any model that plain ``model.fit`` trains."""

import threading
import time

import keras
import numpy as np
import pytest
from servers import Serving

from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.optimizer_translation import translate
from elephant.modeling.push_hook import GradientPusher, WeightBuffer, attach_exchange, copy_parts
from elephant.modeling.variables import layout_of, read_weights
from elephant.net.buffers import RotatingBuffers
from elephant.parameter_server.client import Reply
from elephant.parameter_server.layout import Layout


class Served:
    """A model's weights on a server, and a worker's connection to it."""

    def __init__(self, model):
        self.layout = layout_of(model)
        rule = translate(model.optimizer, self.layout)
        self._serving = Serving(self.layout, values=read_weights(model, self.layout), rule=rule)
        self.worker, self._control = self._serving.worker(), self._serving.control()

    def weights(self):
        return [np.array(view) for view in self.layout.views(self._control.fetch().values)]

    def close(self):
        self._serving.close()


@pytest.fixture
def served():
    opened = []

    def serve(model):
        model.optimizer.build(model.trainable_variables)
        opened.append(Served(model))
        return opened[-1]

    yield serve
    for one in opened:
        one.close()


class Numbered(keras.callbacks.Callback):
    """Gives the exchange its steps, as a worker's callbacks do."""

    def __init__(self, exchange):
        super().__init__()
        self.exchange, self.step = exchange, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.step += 1
        self.exchange.begin_step(self.step)


def two_inputs_and_outputs():
    keras.utils.set_random_seed(2)
    left, right = keras.Input((3,), name="left"), keras.Input((2,), name="right")
    both = keras.layers.Concatenate()([keras.layers.Dense(4, "tanh")(left), right])
    outputs = [keras.layers.Dense(1, name="value")(both), keras.layers.Dense(3, "softmax", name="kind")(both)]
    model = keras.Model([left, right], outputs)
    model.compile(keras.optimizers.Adam(0.01), ["mse", "sparse_categorical_crossentropy"], loss_weights=[1.0, 0.5])
    return model


def test_weights_when_a_model_has_two_inputs_and_outputs_then_equal_plain_fit(served):
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(22, size)).astype("float32") for size in (3, 2)]
    y = [rng.normal(size=22).astype("float32"), rng.integers(0, 3, 22)]
    model, plain = two_inputs_and_outputs(), two_inputs_and_outputs()
    server = served(model)
    exchange = GradientPusher(server.worker, server.layout)
    attach_exchange(exchange, model)
    options = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=[Numbered(exchange)], **options)
    plain.fit(x, y, **options)
    for pushed, local, expected in zip(server.weights(), model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(pushed, expected, atol=1e-6)
        np.testing.assert_array_equal(local, pushed)
    assert int(model.optimizer.iterations) == 10


@pytest.mark.parametrize("class_weight", [{0: 3.0, 1: 0.5}])
def test_weights_when_classes_have_weights_then_equal_plain_fit(served, class_weight):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(18, 4)).astype("float32"), rng.integers(0, 2, 18)

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, "softmax")])
        model.compile(keras.optimizers.SGD(0.2, momentum=0.5), "sparse_categorical_crossentropy")
        return model

    model, plain = build(), build()
    server = served(model)
    exchange = GradientPusher(server.worker, server.layout)
    attach_exchange(exchange, model)
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, "class_weight": class_weight}
    model.fit(x, y, callbacks=[Numbered(exchange)], **options)
    plain.fit(x, y, **options)
    for pushed, expected in zip(server.weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(pushed, expected, atol=1e-6)


def line(**options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    return model


def test_gradients_when_absent_then_count_as_zero_and_unknown_variables_are_refused(served):
    model = line()
    server = served(model)
    exchange = GradientPusher(server.worker, server.layout)
    attach_exchange(exchange, model)
    kernel, bias = model.trainable_variables
    before = [np.array(kernel), np.array(bias)]
    exchange.begin_step(1)
    model.optimizer.apply([np.full((2, 1), 1.0, "float32"), np.full(1, 2.0, "float32")], [kernel, bias])
    exchange.begin_step(2)
    model.optimizer.apply([None, np.full(1, 2.0, "float32")], [kernel, bias])
    np.testing.assert_allclose(server.weights()[0], before[0] - 0.1, atol=1e-7)
    np.testing.assert_allclose(server.weights()[1], before[1] - 0.4, atol=1e-7)
    with pytest.raises(ConfigurationError, match="expected trainable variables of the model. Received: 'other'"):
        model.optimizer.apply([np.zeros(1, "float32")], [keras.Variable(np.zeros(1, "float32"), name="other")])


@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="other backends' variables copy what they are given")
@pytest.mark.parametrize("background", [False, True])
def test_buffers_when_tensorflow_holds_weights_then_are_not_overwritten_and_do_not_grow(served, background):
    model = line()
    server = served(model)
    exchange = GradientPusher(server.worker, server.layout, background=background)
    attach_exchange(exchange, model)
    x, y = np.ones((40, 2), "float32"), np.zeros(40, "float32")
    held, numbered = [], Numbered(exchange)

    class Hold(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            value = model.trainable_variables[0].value.value()
            held.append((value, np.array(value)))

    model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[numbered, Hold()])
    exchange.flush()
    for value, copy in held:
        np.testing.assert_array_equal(np.array(value), copy)
    assert len({copy.tobytes() for _, copy in held}) > 10
    holding = len(exchange._buffers._buffers)
    held.clear()
    model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[numbered])
    assert len(exchange._buffers._buffers) == holding
    exchange.close()


def test_waiting_time_when_a_step_is_computed_beside_the_exchange_then_is_what_is_left_of_it(served):
    class Slow:
        """Servers that answer when they are told to."""

        def __init__(self):
            self.go, self.waited_s = threading.Event(), 0.0

        def push_pull(self, update, out, *, step, call, rows, contribution):
            began = time.monotonic()
            assert self.go.wait(30)
            self.waited_s += time.monotonic() - began
            return Reply(version=2, rate=0.1, stop=False, modified=True, refused=False)

    slow, layout = Slow(), Layout([("a", (2,))])
    exchange = GradientPusher(slow, layout, background=True)
    exchange.begin_step(1)
    exchange.exchange([np.ones(2, np.float32)], [0])
    time.sleep(0.5)
    slow.go.set()
    exchange.flush()
    assert exchange.waited_s < slow.waited_s / 2
    exchange.close()


def test_buffers_when_nobody_holds_old_weights_then_are_three_at_most(served):
    model = line()
    server = served(model)
    exchange = GradientPusher(server.worker, server.layout)
    attach_exchange(exchange, model)
    x, y = np.ones((200, 2), "float32"), np.zeros(200, "float32")
    model.fit(x, y, batch_size=2, verbose=0, callbacks=[Numbered(exchange)])
    assert len(exchange._buffers._buffers) <= 3


def test_errors_when_the_server_is_gone_then_are_kept_as_they_were_raised(served):
    model = line()
    server = served(model)
    exchange = GradientPusher(server.worker, server.layout)
    attach_exchange(exchange, model)
    server.worker.close(finished=False)
    with pytest.raises(Exception, match="closed"):
        model.fit(np.ones((4, 2), "float32"), np.zeros(4), verbose=0, callbacks=[Numbered(exchange)])
    assert isinstance(exchange.error, ConfigurationError)


def test_models_when_a_server_cannot_train_them_then_are_refused_by_name():
    model = line()
    model.other = keras.optimizers.Adam(0.1)
    exchange = GradientPusher(None, layout_of(model))
    with pytest.raises(UnsupportedError, match="expected one optimizer.*'sgd.*', 'adam.*'.*frequency"):
        attach_exchange(exchange, model)


def test_layout_when_a_trainable_variable_is_not_float32_then_is_refused_by_name():
    layers = [keras.layers.Input((2,)), keras.layers.Dense(1, dtype="float64", name="wide")]
    model = keras.Sequential(layers)
    with pytest.raises(UnsupportedError, match="Received: '.*wide/kernel' in float64"):
        layout_of(model)
    frozen = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, trainable=False)])
    with pytest.raises(ConfigurationError, match="expected trainable variables"):
        layout_of(frozen)


def test_layout_when_the_policy_is_mixed_then_is_of_the_float32_variables():
    layers = [keras.layers.Input((2,)), keras.layers.Dense(3, dtype="mixed_bfloat16"), keras.layers.Dense(1)]
    assert [segment.shape for segment in layout_of(keras.Sequential(layers)).segments] == [(2, 3), (3,), (3, 1), (1,)]


def test_lent_weights_when_a_view_is_held_then_are_not_used_again():
    layout = Layout([("a", (3, 2)), ("b", ())])
    buffers = RotatingBuffers(lambda: WeightBuffer(layout))
    first = buffers.unused()
    kept = first.views[0]
    assert first.in_use
    assert buffers.unused() is not first
    del kept
    assert buffers.unused() is first
    assert buffers.unused(first) is not first
    assert first.flat.ctypes.data % 64 == 0
    assert not WeightBuffer(layout).in_use


def test_parts_when_copied_then_the_places_of_the_others_are_zero():
    layout = Layout([("a", (2,)), ("b", (3,)), ("c", ())])
    flat = layout.zeros()
    flat[:] = 7
    copy_parts([np.arange(3, dtype="float32")], [1], layout.views(flat))
    assert [view.tolist() for view in layout.views(flat)] == [[0, 0], [0, 1, 2], 0]
