"""One small model of each kind that users have, with rows for it; the same weights in every call."""

import keras
import numpy as np
from keras import layers, ops
from model_jobs import Ragged, Sparse
from own_step import OwnStep

ROWS = 22
WORDS = ("red", "green", "blue", "")


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype("float32")


def classes(count, *shape, seed=1, dtype="int32"):
    return np.random.default_rng(seed).integers(0, count, (ROWS, *shape)).astype(dtype)


def sequences(make, seed=2):
    rng = np.random.default_rng(seed)
    return Ragged(make(rng, rng.integers(1, 6)) for _ in range(ROWS))


OPTIMIZERS = {"adam": lambda: keras.optimizers.Adam(0.01), "sgd": lambda: keras.optimizers.SGD(0.05)}
_chosen = ["adam"]


def compiled(model, loss="mse", **options):
    model.compile(OPTIMIZERS[_chosen[0]](), loss, **options)
    return model


def lists():
    """Two inputs and three outputs as lists; the losses have weights, one is of two at once, metrics are per output."""
    first, second = keras.Input((3,), name="first"), keras.Input((2,), name="second")
    both = layers.Concatenate()([layers.Dense(4, "tanh")(first), second])
    heads = [layers.Dense(1, name="age")(both), layers.Dense(3, "softmax", name="kind")(both)]
    model = keras.Model([first, second], [*heads, layers.Dense(2, name="place")(both)])
    losses = ["mse", keras.losses.SparseCategoricalCrossentropy(), "huber"]
    model = compiled(
        model,
        losses,
        loss_weights=[0.3, 2.0, 1.0],
        metrics=[["mae"], ["accuracy"], []],
        weighted_metrics=[[], [], "mse"],
    )
    weights = tuple(np.abs(numbers(seed=seed)) for seed in (3, 4, 5))
    return model, {
        "x": (numbers(3), numbers(2, seed=6)),
        "y": (numbers(), classes(3), numbers(2, seed=7)),
        "w": weights,
    }


def dictionaries():
    """Keys that are not the layers' names; an output without a loss gives no column."""
    image, words = keras.Input((3,), name="layer_1"), keras.Input((4,), dtype="int32", name="layer_2")
    both = layers.Concatenate()([image, layers.Flatten()(layers.Embedding(9, 2)(words))])
    outputs = {
        "age": layers.Dense(1, name="head_1")(both),
        "free": layers.Dense(2, name="head_2")(both),
        "kind": layers.Dense(3, name="head_3")(both),
    }
    model = keras.Model({"picture": image, "text": words}, outputs)
    losses = {"age": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "free": None}
    model = compiled(model, losses, loss_weights={"age": 0.5, "kind": 2.0, "free": 0.0}, metrics={"age": ["mae"]})
    return model, {
        "x": {"picture": numbers(3), "text": classes(9, 4)},
        "y": {"age": numbers(), "free": numbers(2, seed=8), "kind": classes(3)},
    }


def partly_compared():
    """Outputs as a list; the middle one has neither loss nor label, and gets another's in the structure."""
    inputs = keras.Input((3,))
    heads = [layers.Dense(1, name="age")(inputs), layers.Dense(2)(inputs), layers.Dense(3, "softmax")(inputs)]
    model = compiled(keras.Model(inputs, heads), ["mse", None, "sparse_categorical_crossentropy"])
    return model, {"x": numbers(3), "y": (numbers(), classes(3)), "y_nest": (0, 0, 1)}


def nested():
    """Inputs and outputs in dictionaries of lists."""
    a, b, c = (keras.Input((size,), name=name) for size, name in ((2, "a"), (3, "b"), (1, "c")))
    both = layers.Concatenate()([a, b, c])
    outputs = {"flat": layers.Dense(1)(both), "deep": [layers.Dense(2)(both), layers.Dense(1)(both)]}
    model = keras.Model({"alone": a, "pair": [b, c]}, outputs)
    return compiled(model, {"flat": "mse", "deep": ["mae", "mse"]}), {
        "x": {"alone": numbers(2), "pair": (numbers(3, seed=1), numbers(1, seed=2))},
        "y": {"flat": numbers(), "deep": (numbers(2, seed=3), numbers(1, seed=4))},
    }


def masked_rnn():
    """Token sequences of any length; the mask of zeros reaches the recurrent layer."""
    tokens = keras.Input((None,), dtype="int32")
    embedded = layers.Embedding(9, 3, mask_zero=True)(tokens)
    model = keras.Model(tokens, layers.Dense(1)(layers.LSTM(4)(embedded)))
    return compiled(model), {"x": sequences(lambda rng, n: rng.integers(1, 9, n).astype("int32")), "y": numbers()}


def series_rnn():
    """Sequences of vectors of any length, padded rows masked; bidirectional."""
    series = keras.Input((None, 2))
    hidden = layers.Bidirectional(layers.GRU(3))(layers.Masking()(series))
    model = keras.Model(series, layers.Dense(2)(hidden))
    return compiled(model), {"x": sequences(lambda rng, n: rng.normal(size=(n, 2)).astype("float32")), "y": numbers(2)}


def text():
    """Strings go in: a category, and words that the model splits itself."""
    lookup = layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")
    vectorization = layers.TextVectorization(vocabulary=["red", "green", "blue"], output_sequence_length=3)
    colour, sentence = (
        keras.Input((1,), dtype="string", name="colour"),
        keras.Input((), dtype="string", name="sentence"),
    )
    words = layers.GlobalAveragePooling1D()(layers.Embedding(6, 3)(vectorization(sentence)))
    model = keras.Model([colour, sentence], layers.Dense(1)(layers.Concatenate()([lookup(colour), words])))
    rng = np.random.default_rng(0)
    colours = np.array([[WORDS[place]] for place in rng.integers(0, 4, ROWS)], object)
    sentences = np.array([" ".join(rng.choice(WORDS, 3)) for _ in range(ROWS)], object)
    return compiled(model), {"x": (colours, sentences), "y": numbers()}


def sparse_input():
    """An input of sparse tensors."""
    inputs = keras.Input((12,), sparse=True)
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(3, "tanh")(inputs)))
    matrix = numbers(12) * (numbers(12, seed=9) > 0.8)
    return compiled(model), {"x": Sparse(matrix), "y": numbers()}


def sparse_rows():
    """Sparse rows for an input that is dense, and no vector."""
    model = keras.Sequential([keras.Input((3, 4)), layers.Conv1D(2, 2), layers.Flatten(), layers.Dense(1)])
    matrix = numbers(12) * (numbers(12, seed=9) > 0.5)
    return compiled(model), {"x": Sparse(matrix, as_tensor=False, shape=(3, 4)), "y": numbers()}


def autoencoder():
    """A convolutional one, on its own input."""
    inner = [layers.Conv2D(3, 3, padding="same", activation="tanh"), layers.MaxPooling2D(), layers.UpSampling2D()]
    model = keras.Sequential([keras.Input((4, 4, 1)), *inner, layers.Conv2D(1, 3, padding="same")])
    return compiled(model), {"x": numbers(4, 4, 1), "targets": 0}


def twin_autoencoder():
    """Two inputs; the outputs are named after them, in another order."""
    left, right = keras.Input((3,), name="in_1"), keras.Input((2,), name="in_2")
    code = layers.Dense(2)(layers.Concatenate()([left, right]))
    model = keras.Model({"left": left, "right": right}, {"right": layers.Dense(2)(code), "left": layers.Dense(3)(code)})
    return compiled(model), {
        "x": {"left": numbers(3), "right": numbers(2, seed=1)},
        "targets": {"left": 0, "right": 1},
    }


def frozen():
    """A pretrained part that stays as it is, with batch normalization in it."""
    base = keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh"), layers.BatchNormalization()], name="base")
    base.trainable = False
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(base(inputs)))
    return compiled(model), {"x": numbers(4), "y": numbers()}


@keras.saving.register_keras_serializable("model_zoo")
class Scale(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * self.factor


@keras.saving.register_keras_serializable("model_zoo")
def log_cosh_of(true, predicted):
    return keras.ops.mean(keras.ops.log(keras.ops.cosh(predicted - true)), axis=-1)


@keras.saving.register_keras_serializable("model_zoo")
class LargestError(keras.metrics.Mean):
    def update_state(self, true, predicted, sample_weight=None):
        return super().update_state(keras.ops.abs(true - predicted) > 1, sample_weight)


def custom():
    """Layer, loss and metric of the user's own."""
    model = keras.Sequential([keras.Input((4,)), Scale(), layers.Dense(2)])
    return compiled(model, log_cosh_of, metrics=[LargestError(name="large")]), {"x": numbers(4), "y": numbers(2)}


def one_hot_with_class_weights():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax")])
    labels = np.eye(3, dtype="float32")[classes(3)]
    options = {"class_weight": {0: 1.0, 1: 5.0, 2: 0.25}}
    return compiled(model, "categorical_crossentropy", weighted_metrics=["accuracy"]), {
        "x": numbers(4),
        "y": labels,
        **options,
    }


def binary_with_class_weights():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, "sigmoid")])
    options = {"class_weight": {0: 1.0, 1: 7.0}}
    return compiled(model, "binary_crossentropy"), {"x": numbers(4), "y": classes(2), **options}


class TwoHeads(keras.Model):
    """A subclass that nobody has built: two inputs by name, two outputs by name."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(9, 3)
        self.recurrent = layers.LSTM(3)
        self.heads = {"age": layers.Dense(1), "kind": layers.Dense(3)}

    def call(self, inputs):
        hidden = keras.ops.concatenate([self.recurrent(self.embedding(inputs["words"])), inputs["image"]], axis=-1)
        return {name: head(hidden) for name, head in self.heads.items()}


def subclass():
    losses = {"age": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    return compiled(TwoHeads(), losses, loss_weights={"age": 1.0, "kind": 0.5}, metrics={"age": ["mae"]}), {
        "x": {"image": numbers(2), "words": classes(9, 5, dtype="float32")},
        "y": {"age": numbers(), "kind": classes(3)},
    }


class Vae(OwnStep):
    """As the Keras example has it: two models, a train_step and no call; draws follow from the rows."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(4)])
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(8, "tanh"), layers.Dense(6)])
        self.loss_tracker = keras.metrics.Mean("total_loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def step(self, data, update):
        rows, _, _ = keras.utils.unpack_x_y_sample_weight(data)

        def error():
            mean, log_variance = ops.split(self.encoder(rows, training=True), 2, axis=1)
            drawn = mean + ops.exp(0.5 * log_variance) * ops.sin(rows[:, :2] * 31.0)
            loss = ops.mean(ops.sum(ops.square(self.decoder(drawn, training=True) - rows), axis=1))
            return loss + ops.mean(-0.5 * ops.sum(1 + log_variance - mean**2 - ops.exp(log_variance), axis=1))

        loss = update(error, self.trainable_weights, self.optimizer)
        self.loss_tracker.update_state(loss, sample_weight=ops.cast(ops.shape(rows)[0], "float32"))
        return {"total_loss": self.loss_tracker.result()}


def vae():
    model = Vae()
    return compiled(model, None), {"x": numbers(6)}


class OwnLoss(keras.Model):
    """Compares its outputs with labels in a ``compute_loss`` of its own."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred[:, 0] - y)) + keras.ops.mean(keras.ops.square(self.dense.kernel))


def own_loss():
    return compiled(OwnLoss(), None), {"x": numbers(3), "y": numbers()}


class AddsLoss(layers.Layer):
    """An endpoint that adds how far its two inputs are apart."""

    def call(self, first, second):
        self.add_loss(keras.ops.mean(keras.ops.square(first - second)))
        return second


def added_loss():
    inputs = keras.Input((3,))
    outputs = layers.Dense(3)(layers.Dense(2, "tanh", kernel_regularizer="l2")(inputs))
    return compiled(keras.Model(inputs, AddsLoss()(inputs, outputs)), None), {"x": numbers(3)}


# Keras saves these; the others travel as functions.
SAVED = (
    lists,
    dictionaries,
    partly_compared,
    nested,
    masked_rnn,
    series_rnn,
    text,
    sparse_input,
    sparse_rows,
    autoencoder,
    twin_autoencoder,
    frozen,
    custom,
    one_hot_with_class_weights,
    binary_with_class_weights,
)
BUILT = (subclass, vae, own_loss, added_loss)


# Their gradients are slices, which Keras' Adam applies to the rows of an embedding that a batch has used.
SLICED = (dictionaries, masked_rnn, text, sparse_input, subclass)


def made(kind, optimizer="adam"):
    """Returns a new model of a kind, always with the same weights, and the rows for it."""
    keras.utils.set_random_seed(0)
    _chosen[0] = optimizer
    return kind()


def vae_model():
    """Returns the VAE alone, as a user's function does."""
    return made(vae)[0]
