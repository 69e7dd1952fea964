"""Classes and functions of the user's are found in a live model; one that Keras cannot save is taken as it is."""

import functools
import threading

import keras
import numpy as np
import pytest
from keras_reference import largest_difference
from pyspark import cloudpickle
from tiers import in_tiers

from elephant.errors import ConfigurationError
from elephant.modeling.live_model import TakenModel
from elephant.modeling.model_spec import Servable, model_source
from elephant.modeling.variables import read_variables
from elephant.testing import fit_local

tf = pytest.importorskip("tensorflow")
context = pytest.importorskip("tensorflow.python.eager.context")


X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
Y = X[:, :2] * 2 - 1


def of_every_kind():
    """Returns a compiled model of classes and functions that nothing registers and no module has."""

    class Scaled(keras.layers.Layer):
        def __init__(self, units, activation=None, **options):
            super().__init__(**options)
            self.units, self.activation = units, keras.activations.get(activation)

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], self.units), initializer=Staircase(0.1))

        def call(self, inputs):
            return self.activation(inputs @ self.kernel)

        def get_config(self):
            activation = keras.activations.serialize(self.activation)
            return {**super().get_config(), "units": self.units, "activation": activation}

    class Staircase(keras.initializers.Initializer):
        def __init__(self, step):
            self.step = step

        def __call__(self, shape, dtype=None):
            return keras.ops.reshape(keras.ops.arange(np.prod(shape), dtype=dtype) * self.step, shape)

        def get_config(self):
            return {"step": self.step}

    class Shrinking(keras.regularizers.Regularizer):
        def __call__(self, values):
            return 0.01 * keras.ops.sum(values**2)

        def get_config(self):
            return {}

    class Steered(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(keras.ops.clip(gradient, -1.0, 1.0), variable, learning_rate)

    class Falling(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1 / (1.0 + keras.ops.cast(step, "float32"))

        def get_config(self):
            return {}

    class Largest(keras.metrics.Metric):
        def __init__(self, name="largest", **options):
            super().__init__(name=name, **options)
            self.value = self.add_weight(name="value", initializer="zeros")

        def update_state(self, true, predicted, sample_weight=None):
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(keras.ops.abs(true - predicted))))

        def result(self):
            return self.value

    class Stepping(keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "doubled": 2.0 * logs["loss"]}

    def bent(values):
        return keras.ops.where(values > 0, values, 0.2 * values)

    def squared(true, predicted):
        return keras.ops.mean(keras.ops.square(true - predicted), axis=-1)

    inputs = keras.layers.Input((3,))
    hidden = Scaled(4, activation=bent)(inputs)
    output = keras.layers.Dense(2, kernel_initializer=Staircase(0.05), kernel_regularizer=Shrinking())(hidden)
    model = Stepping(inputs, output)
    model.compile(Steered(Falling()), squared, metrics=[squared, Largest()])
    return model


def test_source_when_nothing_is_registered_then_the_classes_and_functions_of_the_model_travel():
    source = model_source(of_every_kind())
    names = "Scaled Staircase Shrinking Steered Falling Largest Stepping bent squared"
    assert sorted(source.custom_objects) == sorted(names.split())
    assert sorted(Servable.of_model(of_every_kind()).custom_objects) == sorted(names.split())
    assert float(source.custom_objects["bent"](np.float32(-1.0))) == pytest.approx(-0.2)


def test_source_when_constructors_take_no_options_then_is_made_again_of_what_they_take():
    class Block(keras.layers.Layer):
        def __init__(self, units, rate=0.1):
            super().__init__()
            self.inner, self.drop = keras.layers.Dense(units), keras.layers.Dropout(rate)

        def call(self, inputs):
            return self.drop(self.inner(inputs))

    class Named(keras.layers.Layer):
        def __init__(self, factor, name=None):
            super().__init__(name=name)
            self.factor = factor

        def call(self, inputs):
            return inputs * self.factor

        def get_config(self):
            return {**super().get_config(), "factor": self.factor}

    class Cubed(keras.losses.Loss):
        def __init__(self, scale=2.0):
            super().__init__(reduction="sum")
            self.scale = scale

        def call(self, true, predicted):
            return self.scale * keras.ops.mean(keras.ops.abs(true - predicted) ** 3, axis=-1)

    class Warming(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, peak, steps=10):
            self.peak, self.steps, self.pi = peak, steps, keras.ops.convert_to_tensor(3.14)

        def __call__(self, step):
            return self.peak * keras.ops.minimum(keras.ops.cast(step, "float32") / self.steps, 1.0)

    class Counted(keras.metrics.Mean):
        def __init__(self):
            super().__init__(name="counted")

        def update_state(self, true, predicted, sample_weight=None):
            return super().update_state(predicted)

    class Inside(keras.Model):
        def __init__(self, units, name=None):
            super().__init__(name=name)
            self.units, self.inner = units, keras.layers.Dense(units)

        def call(self, inputs):
            return self.inner(inputs)

    model = sequential(Block(4), keras.Sequential([Block(5), Named(3.0, name="thrice")]), Inside(2, name="inside"))
    model.compile(keras.optimizers.Adam(Warming(0.5)), Cubed(5.0), metrics=[Counted()])
    rebuilt = model_source(model).build()
    assert rebuilt.loss.scale == 5.0 and float(rebuilt.optimizer._learning_rate(5)) == 0.25
    np.testing.assert_array_equal(rebuilt.predict(X, verbose=0), model.predict(X, verbose=0))
    assert rebuilt.loss.reduction == "sum" and rebuilt.layers[1].layers[1].name == "thrice"
    assert (rebuilt.layers[2].units, rebuilt.layers[2].name) == (2, "inside")
    # Keras writes what it wrote before, to whoever else asks.
    assert {"trainable", "dtype"} <= model.layers[0].get_config().keys()


@pytest.mark.slow("two ranks; the test above holds that all of it is found")
def test_fit_local_when_nothing_is_registered_then_equals_one_process_of_keras(warm_ranks):
    model = of_every_kind()
    history, trained = fit_local(model, X, Y, epochs=2, batch_size=8, shuffle=False)
    # Rank 0 has the first half of the rows, rank 1 the second.
    order = np.concatenate([np.r_[k * 8 : k * 8 + 8, 16 + k * 8 : 24 + k * 8] for k in range(2)])
    expected = model.fit(X[order], Y[order], batch_size=16, epochs=2, shuffle=False, verbose=0).history
    assert largest_difference(trained.get_weights(), model.get_weights()) <= 1e-5
    assert type(trained) is type(model)
    for name in ("loss", "squared"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5)


def sequential(*layers, loss="mse", **options):
    model = keras.Sequential([keras.layers.Input((3,)), *layers, keras.layers.Dense(2)])
    model.compile("sgd", loss, **options)
    return model


def shifted(by):
    class Shift(keras.layers.Layer):
        def call(self, inputs):
            return inputs + by

    return Shift()


def own_relu():
    def relu(values):
        return values * 3.0

    return keras.layers.Dense(3, activation=relu)


def test_source_when_lambdas_use_their_module_then_are_rebuilt_with_it():
    layers = [keras.layers.Lambda(lambda x, k=k: keras.ops.tanh(x) * k, output_shape=(3,)) for k in (0.5, 2.0)]
    model = sequential(*layers, loss=lambda true, predicted: keras.ops.mean((true - predicted) ** 2, axis=-1))
    copy = cloudpickle.loads(cloudpickle.dumps(model_source(model))).build()
    for one in (model, copy):
        one.fit(X, Y, verbose=0, shuffle=False)
    np.testing.assert_array_equal(copy.predict(X, verbose=0), model.predict(X, verbose=0))


def lossy(delta):
    class Lossy(keras.losses.Loss):
        def __init__(self, delta=1.0, **options):
            super().__init__(**options)
            self._delta = delta

        def call(self, true, predicted):
            return self._delta * keras.ops.mean(keras.ops.abs(true - predicted), axis=-1)

    return Lossy(delta)


def closed():
    class Closed(keras.layers.Layer):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def call(self, inputs):
            return inputs + self.by

        @classmethod
        def from_config(cls, config):
            return cls(**config)

    return Closed(1.0)


def widened(factor):
    class Widened(keras.layers.Dense):
        def __init__(self, units, factor=1.0, **options):
            super().__init__(units, **options)
            self.factor = factor

        def call(self, inputs):
            return super().call(inputs) * self.factor

    return Widened(3, factor)


REFUSED = {
    "a closed constructor": (
        lambda: sequential(closed()),
        r"Closed.__init__\(\) got .*'trainable'\. Let it take \*\*opt",
    ),
    "two of one name": (lambda: sequential(shifted(1.0), shifted(2.0)), r"two of the name 'Shift', .*Rename one"),
    "a name of Keras": (lambda: sequential(own_relu()), r"the class or function 'relu' again by the name"),
    "a loss that forgets": (lambda: sequential(loss=lossy(5.0)), r"_delta=5.0 of Lossy .* back 1.0. Give .*get_config"),
    "a layer that forgets": (lambda: sequential(widened(2.0)), r"factor=2.0 of Widened .* back 1.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_source_when_a_name_or_a_config_does_not_tell_enough_then_refuses_rather_than_train_another_model(case):
    make, said = REFUSED[case]
    with pytest.raises(ConfigurationError, match=said):
        model_source(make())


def test_source_when_a_loss_forgets_nothing_that_it_was_given_then_takes_it():
    assert model_source(sequential(loss=lossy(1.0))).archive


class Naming(keras.layers.Layer):
    """A layer that writes the name of a function by itself."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = keras.saving.deserialize_keras_object(function) if isinstance(function, dict) else function

    def call(self, inputs):
        return self.function(inputs)

    def get_config(self):
        named = {"module": None, "class_name": "function", "config": self.function.__name__, "registered_name": None}
        return {**super().get_config(), "function": named}


def test_source_when_a_config_writes_a_name_by_itself_then_custom_objects_tell_what_it_is():
    def threefold(values):
        return values * 3.0

    model = sequential(Naming(threefold))
    with pytest.raises(ConfigurationError, match=r"Could not locate function 'threefold'.*customObjects="):
        model_source(model)
    rebuilt = model_source(model, {"threefold": threefold}).build()
    np.testing.assert_array_equal(rebuilt.predict(X, verbose=0), model.predict(X, verbose=0))


class Pair(keras.Model):
    """A model that Keras cannot save: its constructor takes layers, and its compile an optimizer for each."""

    def __init__(self, encoder, decoder, scale):
        super().__init__(name="pair")
        self.parts = {"encoder": encoder, "decoder": [decoder]}
        self.scale = np.float32(scale)
        self.noise = keras.random.SeedGenerator(3)
        self.tracker = keras.metrics.Mean(name="tracked")
        self.bias = self.add_weight(shape=(2,), name="bias", initializer="ones")

    def compile(self, optimizer, *, weight):
        super().compile(optimizer)
        self.weight = weight
        # Keras forgets the delta when it saves one.
        self.measure = keras.losses.Huber(delta=0.5)

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, inputs):
        return self.parts["decoder"][0](self.parts["encoder"](inputs)) * self.scale + self.bias

    def train_step(self, data):
        x, y = data
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.weight * self.measure(y, self(x, training=True))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}


class Block(keras.layers.Layer):
    """A layer that Keras cannot save."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs):
        return keras.ops.tanh(self.inner(inputs))


def pair(built=True, shared=False):
    encoder = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4, activation="relu"), shifted(0.5)])
    decoder = Block(keras.layers.Dense(2))
    if shared:
        decoder = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), encoder, keras.layers.Dense(2)])
    model = Pair(encoder, decoder, scale=2.0)
    model.compile(keras.optimizers.Adam(0.05), weight=3.0)
    if built:
        model(X[:1])
    return model


def test_source_when_keras_cannot_save_a_subclass_then_takes_it_as_it_is_and_goes_on_as_it_would(by_value):
    model = pair()
    model.parts["encoder"].trainable = False
    model.compile(keras.optimizers.Adam(0.05), weight=3.0)
    model.fit(X, Y, epochs=2, verbose=0, shuffle=False)
    source = cloudpickle.loads(cloudpickle.dumps(model_source(model)))
    assert isinstance(source.builder, TakenModel)
    copy = source.build()
    assert copy.optimizer is not model.optimizer and copy.weights[0] is not model.weights[0]
    for value, wanted in zip(read_variables(copy), read_variables(model), strict=True):
        np.testing.assert_array_equal(value, wanted)
    for one in (model, copy):
        one.fit(X, Y, epochs=2, verbose=0, shuffle=False)
    np.testing.assert_array_equal(copy.predict(X, verbose=0), model.predict(X, verbose=0))
    # Once it is made it no longer depends on the user's model.
    assert largest_difference(source.build().get_weights(), model.get_weights()) > 1e-3


class Weighted(keras.Model):
    """A model that Keras makes again of its constructor's arguments."""

    def __init__(self, **options):
        super().__init__(**options)
        self.head = keras.layers.Dense(2)
        self.factor = 1.0

    def call(self, inputs):
        return self.head(inputs) * self.factor


def test_source_when_an_attribute_was_set_after_construction_then_is_not_lost(by_value):
    model = Weighted()
    model.compile("sgd", "mse")
    model(X[:1])
    assert model_source(model).archive
    model.factor = 3.0
    source = model_source(model)
    assert isinstance(source.builder, TakenModel)
    np.testing.assert_array_equal(source.build().predict(X, verbose=0), model.predict(X, verbose=0))


@pytest.mark.slow("two ranks; test_source_when_keras_cannot_save_a_subclass holds that the model is the same")
def test_fit_local_when_keras_cannot_save_the_model_then_equals_one_process_of_keras(by_value, warm_ranks):
    model = pair(built=False)
    # The ranks would draw other weights than this process does.
    model.parts["decoder"][0].inner.kernel_initializer = keras.initializers.Ones()
    _, trained = fit_local(model, X, Y, epochs=2, batch_size=8, shuffle=False)
    order = np.concatenate([np.r_[k * 8 : k * 8 + 8, 16 + k * 8 : 24 + k * 8] for k in range(2)])
    model.fit(X[order], Y[order], batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert largest_difference(trained.get_weights(), model.get_weights()) <= 1e-5


def with_attribute(value):
    model = pair()
    model.extra = value
    return model


NOT_TAKEN = {
    "a shared layer": (lambda: pair(shared=True), "some are shared by layers"),
    "a lock": (lambda: with_attribute(threading.Lock()), "cannot pickle"),
    "layers out of sight": (lambda: with_attribute(Hidden()), "of Hidden holds layers"),
}


class Hidden:
    """An object in which Keras does not look for layers."""

    def __init__(self):
        self.layer = keras.layers.Dense(1)


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_source_when_a_subclass_cannot_be_taken_apart_then_says_why_and_what_to_do(case):
    make, said = NOT_TAKEN[case]
    with pytest.raises(
        ConfigurationError, match=rf"Keras cannot save 'pair'[\s\S]*Pass a function[\s\S]*{said}[\s\S]*get_config"
    ):
        model_source(make())


class ClassWeighted(keras.losses.Loss):
    """A loss whose argument is a list, and that has no ``get_config``."""

    def __init__(self, factors=None, **options):
        super().__init__(**options)
        self.factors = factors

    def call(self, wanted, given):
        factors = 1.0 if self.factors is None else keras.ops.convert_to_tensor(self.factors, "float32")
        return keras.ops.mean(factors * keras.ops.square(wanted - given), -1)


class Scaled(keras.layers.Layer):
    """A layer whose factor may be set later."""

    def __init__(self, factor=1.0, **options):
        super().__init__(**options)
        self._factor = factor

    def call(self, rows):
        return rows * self._factor


@functools.wraps(keras.losses.mean_squared_error)
def seven_times(wanted, given):
    return 7 * keras.losses.mean_squared_error(wanted, given)


def two_of(*layers, loss="mse", optimizer="sgd"):
    model = keras.Sequential([keras.layers.Input((4,)), *layers, keras.layers.Dense(3)])
    model.compile(optimizer, loss)
    return model


def set_later():
    model = two_of(Scaled(), keras.layers.Dense(3))
    model.layers[0]._factor = 5.0
    return model


def frozen_kernel():
    model = two_of(keras.layers.Dense(3))
    model.layers[0].kernel.trainable = False
    return model


def without_decay():
    model = two_of(keras.layers.Dense(3), optimizer=keras.optimizers.AdamW(0.1))
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    return model


CHANGED = {
    "a list that the loss' config has not": (lambda: two_of(loss=ClassWeighted([5.0, 1.0, 9.0])), "factors="),
    "what a layer got after its construction": (set_later, "same outputs and losses"),
    "a variable that does not train": (frozen_kernel, "trainable=False"),
    "a variable without weight decay": (without_decay, "weight decay=False"),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_model_when_keras_would_make_another_one_of_it_then_is_refused(kind):
    build, message = CHANGED[kind]
    with pytest.raises(ConfigurationError, match=message):
        model_source(build())


class Late(keras.layers.Layer):
    """Makes its weights in its first call, of which Keras knows nothing where it is inside another layer."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = keras.layers.Dense(2)

    def compute_output_shape(self, shape):
        return (*shape[:-1], 2)

    def call(self, values):
        return self.inner(values)


@pytest.mark.parametrize("kind", ["words", "dictionary", "any length"])
def test_model_when_a_layer_is_made_again_without_its_weights_then_is_refused_whatever_its_inputs(kind):
    word = keras.Input((None if kind == "any length" else 4,), dtype="string", name="word")
    vector = keras.Input((4, 5), name="vector")
    found = keras.layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=0)(word)
    hidden = keras.layers.Embedding(2, 5)(found)
    if kind == "dictionary":
        hidden = keras.layers.Add()([hidden, vector])
    hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.TimeDistributed(Late())(hidden))
    inputs = {"word": word, "vector": vector} if kind == "dictionary" else word
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse")
    with pytest.raises(ConfigurationError, match="same outputs and losses"):
        model_source(model)


def scaled_error(wanted, given, scale=1.0):
    return scale * keras.ops.mean(keras.ops.square(wanted - given), axis=-1)


class Scaling:
    """Holds a number that its loss uses."""

    def __init__(self, scale):
        self.scale = scale

    def error(self, wanted, given):
        return scaled_error(wanted, given, self.scale)

    __call__ = error


@tf.function
def traced_error(wanted, given):
    return scaled_error(wanted, given, 3.0) if tf.reduce_any(wanted < 10.0) else wanted[:, 0]


CALLABLES = {
    "a partial": functools.partial(scaled_error, scale=3.0),
    "a method": Scaling(3.0).error,
    "an object": Scaling(3.0),
    "a tf.function": traced_error,
}


@pytest.mark.parametrize(
    "kind",
    in_tiers({kind: kind for kind in CALLABLES}, fast=["an object", "a tf.function"], slow="travels as an object does"),
)
def test_source_when_a_loss_is_a_callable_object_then_it_travels_and_the_model_stays_as_it_was(kind):
    loss, rows, labels = CALLABLES[kind], np.ones((2, 3), "float32"), np.full((2, 1), 2.0, "float32")
    model = sequential(keras.layers.Dense(1), loss=[loss], metrics=[functools.partial(scaled_error, scale=2.0), loss])
    # Where it holds what it has traced, as here, it would not travel.
    before = model.evaluate(rows, labels, verbose=0, return_dict=True)
    built = cloudpickle.loads(cloudpickle.dumps(model_source(model))).build()
    assert model._compile_config.config["loss"][0] is loss
    assert built.evaluate(rows, labels, verbose=0, return_dict=True) == pytest.approx(before, rel=1e-6)
    assert before["loss"] == pytest.approx(1.5 * before["partial"], rel=1e-6)


def test_source_when_a_loss_holds_a_layer_then_says_what_to_do():
    holder = Scaling(keras.layers.Dense(1))
    with pytest.raises(ConfigurationError, match=r"losses and metrics that hold numbers alone.* subclass"):
        model_source(sequential(keras.layers.Dense(1), loss=holder.error))


def test_source_when_the_driver_has_a_gpu_then_its_copies_of_the_model_leave_it_alone():
    # A processor in the place of the GPU: what counts is the device that is asked for.
    devices = []

    def build():
        devices.append(context.context().device_name or "any")
        return sequential(keras.layers.Dense(1))

    Servable.of(model_source(build))
    assert [name.rpartition("device:")[2] for name in devices] == ["CPU:0", "CPU:0"]


def test_loss_when_it_wraps_one_of_keras_then_is_the_user_s():
    model = two_of(loss=seven_times)
    rows, labels = np.ones((2, 4), "float32"), np.ones((2, 3), "float32")
    assert model_source(model).build().evaluate(rows, labels, verbose=0) == pytest.approx(
        model.evaluate(rows, labels, verbose=0)
    )


def test_lambdas_when_they_differ_inside_alone_then_each_stays_what_it_is():
    functions = [lambda x: (lambda z: z + 1.0)(x), lambda x: (lambda z: z * 50.0)(x)]
    model = two_of(*map(keras.layers.Lambda, functions))
    rows = np.ones((2, 4), "float32")
    np.testing.assert_allclose(model_source(model).build()(rows), model(rows), rtol=1e-6)


def test_metric_when_it_counts_its_calls_then_is_taken_after_its_first_use():
    class Counts(keras.metrics.Mean):
        def __init__(self, name="counts", **options):
            super().__init__(name=name, **options)
            self.calls = 0

        def update_state(self, wanted, given, sample_weight=None):
            self.calls += 1
            return super().update_state(given)

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse", metrics=[Counts()])
    model.evaluate(np.ones((2, 4)), np.ones((2, 3)), verbose=0)
    assert model_source(model).build().compiled
