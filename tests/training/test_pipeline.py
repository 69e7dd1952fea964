"""A pipeline of threads against one process of plain Keras, on the backend of this environment."""

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from rank_threads import run_threads
from tiers import in_tiers

from elephant.checkpoint.manager import write_arrays
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.variable_paths import assign_state, generator_paths, read_by_path, state_paths, variable_paths
from elephant.training.pipeline import ModelPipeline, one_forward_one_backward, without_values

REGULARIZER = keras.regularizers.L2(1e-2)


def mlp():
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, "tanh", kernel_regularizer=REGULARIZER),
            layers.Dense(8, "tanh"),
            layers.Dense(8, "tanh", activity_regularizer=keras.regularizers.L2(1e-2)),
            layers.Dense(3, kernel_regularizer=REGULARIZER),
        ]
    )


def residual():
    """Returns a model of which a residual and the second input cross cuts, and an output ends early."""
    first, second = keras.Input((6,), name="first"), keras.Input((6,), name="second")
    x = layers.Dense(8, "tanh")(first)
    early = layers.Dense(3, name="early")(x)
    y = layers.Add()([x, layers.Dense(8)(layers.Dense(8, "tanh")(x))])
    z = layers.Concatenate()([layers.Dense(8, "tanh")(y), x, second])
    return keras.Model([first, second], [layers.Dense(3, name="late")(layers.Dense(8, "tanh")(z)), early])


def embedding():
    return keras.Sequential(
        [
            layers.Input((6,), dtype="int32"),
            layers.Embedding(9, 4),
            layers.Flatten(),
            layers.Dense(8, "tanh"),
            layers.Dense(3),
        ]
    )


def backbone():
    inner = keras.Sequential(
        [layers.Input((8,)), layers.Dense(8, "tanh"), layers.Dense(8, "tanh", name="inside"), layers.Dense(8)]
    )
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(3)(inner(layers.Dense(8, "tanh")(inputs))))


class TokenAndPosition(layers.Layer):
    """Embedding of tokens and of their places, as transformers are published with Keras."""

    def __init__(self, length, count, width, **kwargs):
        super().__init__(**kwargs)
        self.tokens, self.positions = layers.Embedding(count, width), layers.Embedding(length, width)

    def build(self, shape):
        self.tokens.build()
        self.positions.build()

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(ops.shape(x)[-1]))


def transformer():
    """Returns an encoder of two blocks, which is cut between a block's attention and its dense layers."""
    inputs = keras.Input((6,), dtype="int32")
    x = TokenAndPosition(6, 9, 8, name="tokens")(inputs)
    for number in range(2):
        attended = layers.MultiHeadAttention(2, 4, name=f"attention{number}")(x, x)
        x = layers.LayerNormalization(name=f"norm{number}")(layers.Add(name=f"sum{number}")([x, attended]))
        dense = layers.Dense(8, name=f"narrow{number}")(layers.Dense(16, "gelu", name=f"wide{number}")(x))
        x = layers.LayerNormalization(name=f"end{number}")(layers.Add(name=f"residual{number}")([x, dense]))
    return keras.Model(inputs, layers.Dense(3, name="head")(layers.GlobalAveragePooling1D()(x)))


class Drift(layers.Layer):
    """A loss of its own, which is not a mean over rows."""

    def call(self, x):
        self.add_loss(ops.square(ops.mean(x)))
        return x


def with_losses():
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, "tanh", activity_regularizer=keras.regularizers.L2(1e-2)),
            Drift(),
            layers.Dense(8, "tanh", kernel_regularizer=REGULARIZER),
            Drift(),
            layers.Dense(3),
        ]
    )


class Lookup(layers.Layer):
    """Scores of all tokens, by the table that embeds them."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


def tied():
    """Returns a model that has a table in two layers and calls one layer twice, with a layer on each side of these."""
    inputs, table, twice = keras.Input((6,), dtype="int32"), layers.Embedding(9, 4), layers.Dense(4, "tanh")
    x = layers.GlobalAveragePooling1D()(layers.Dense(4)(table(inputs)))
    return keras.Model(inputs, layers.Dense(3, name="head")(Lookup(table, name="scores")(twice(twice(x)))))


def mixed(policy):
    return keras.Sequential(
        [
            layers.Input((6,)),
            *[layers.Dense(8, "tanh", dtype=policy) for _ in range(3)],
            layers.Dense(3, dtype="float32"),
        ]
    )


def adam():
    return keras.optimizers.Adam(0.01)


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def clipped():
    return keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.2)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=0.2), initial_scale=64.0)


def overflowing():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**16)


@dataclass(frozen=True)
class Case:
    """A fit.

    Attributes:
        rows: Of each step, by replica.
    """

    build: Any
    optimizer: Any
    stages: Any = 2
    micro_batches: int = 4
    rows: tuple = ((30,), (7,), (30,))
    weighted: bool = False
    loss: Any = "mse"
    loss_weights: Any = None
    classes: Any = None

    @property
    def num_replicas(self):
        return len(self.rows[0])

    def compiled(self):
        model = self.build()
        rng = np.random.default_rng(7)
        model.set_weights([rng.normal(size=one.shape, scale=0.4) for one in model.get_weights()])
        weighted = [["mae"] for _ in model.outputs] if self.weighted else None
        model.compile(self.optimizer(), self.loss, loss_weights=self.loss_weights, weighted_metrics=weighted)
        return model

    def batches(self):
        """Returns, by step and replica, (inputs, labels, weights)."""
        rng, model = np.random.default_rng(3), self.build()
        return [[self._batch(model, rows, rng) for rows in step] for step in self.rows]

    def _batch(self, model, rows, rng):
        inputs = [
            rng.integers(0, 9, (rows, 6)) if "int" in one.dtype else rng.normal(size=(rows, 6)) for one in model.inputs
        ]
        inputs = [one.astype(tensor.dtype) for one, tensor in zip(inputs, model.inputs, strict=True)]
        labels = [rng.normal(size=(rows, 3)).astype("float32") for _ in model.outputs]
        weights = [rng.uniform(0, 2, rows).astype("float32") for _ in labels] if self.weighted else None
        return (inputs, labels, weights) if len(labels) > 1 else (inputs[0], labels[0], weights and weights[0])


def require_close(state, variables, model, atol):
    """Compares a state by path with variables of a model of one process."""
    wanted = {id(variable) for variable in variables}
    paths = state_paths(model) | {f"random/0/{path}": one for path, one in generator_paths(model).items()}
    compared = {path: one for path, one in paths.items() if id(one) in wanted}
    assert len(compared) == len(wanted)
    for path, variable in compared.items():
        np.testing.assert_allclose(state[path], ops.convert_to_numpy(variable), atol=atol, err_msg=path)


def rank_of(case, communicator):
    """Trains one rank; returns the state of the whole model on rank 0, and the results."""
    pipeline = ModelPipeline(
        case.compiled(), stages=case.stages, micro_batches=case.micro_batches, communicator=communicator
    )
    for step in case.batches():
        x, y, weight = step[pipeline.place.replica] if pipeline.place.is_first else (None, None, None)
        pipeline.train_on_batch(x, y, weight, case.classes)
    return pipeline.state(), pipeline.results()


def alone(function):
    """Calls a function in a thread of its own, in which Keras names layers as in a new process."""
    return run_threads(1, lambda _: function())[0]


def one_process(case):
    """Trains with plain Keras on the rows of all replicas; returns the model and the mean loss."""
    model, losses = case.compiled(), []
    for step in case.batches():
        x, y, weight = keras.tree.map_structure(
            lambda *parts: None if parts[0] is None else np.concatenate(parts), *step
        )
        losses.append(
            (
                model.train_on_batch(x, y, weight, case.classes, return_dict=True)["loss"],
                sum(len(keras.tree.flatten(one)[0]) for one in step),
            )
        )
        model.reset_metrics()
    values, rows = np.array(losses).T
    return model, float(np.sum(values * rows) / np.sum(rows))


CASES = {
    "regularizers": Case(mlp, adam),
    "three stages, two replicas": Case(mlp, adam, stages=3, rows=((10, 19), (9, 0), (4, 5))),
    "norm over all stages": Case(mlp, clipped, micro_batches=3, rows=((15, 14), (1, 28))),
    "scaled loss, norm": Case(mlp, scaled),
    "residual over the cut, two outputs": Case(residual, sgd, stages=3, micro_batches=5),
    "embedding": Case(embedding, adam, micro_batches=2),
    "embedding, two replicas": Case(embedding, sgd, micro_batches=2, rows=((8, 5), (3, 9))),
    "embedding, two replicas, slices": Case(embedding, adam, micro_batches=2, rows=((8, 5), (0, 9), (4, 4))),
    "cut inside of a backbone": Case(backbone, adam, stages=["inside"]),
    "transformer, cut inside of blocks": Case(
        transformer, sgd, stages=["wide0", "attention1", "wide1"], rows=((9,), (6,))
    ),
    "weights of rows": Case(mlp, sgd, stages=4, weighted=True),
    "weights of classes": Case(mlp, sgd, classes={0: 0.2, 2: 3.0}),
    "outputs with losses and weights of their own": Case(
        residual, sgd, weighted=True, loss={"late": "mse", "early": "huber"}, loss_weights={"late": 0.3, "early": 2.0}
    ),
    "shared weights in one stage": Case(tied, sgd, stages=["head"]),
}
# Other cases, those of micro-batches below, or test_staged.py of tests/rank have their embeddings, weights and losses.
OTHERS = [
    "embedding",
    "embedding, two replicas",
    "weights of rows",
    "weights of classes",
    "cut inside of a backbone",
    "regularizers",
    "scaled loss, norm",
]
FAST = [name for name in CASES if name not in OTHERS]


@pytest.mark.parametrize(
    "name", in_tiers({name: name for name in CASES}, fast=FAST, slow="a case in make test or test_staged.py has it too")
)
def test_weights_when_a_model_trains_in_stages_then_equal_one_process(name):
    case = CASES[name]
    num_stages = case.stages if isinstance(case.stages, int) else len(case.stages) + 1
    state, results = run_threads(num_stages * case.num_replicas, functools.partial(rank_of, case))[0]
    model, loss = alone(lambda: one_process(case))
    require_close(state, model.trainable_variables, model, 1e-5)
    assert results["loss"] == pytest.approx(loss, rel=1e-4)
    # A checkpoint of a fit in one process has the same.
    assert {path for path in state if not path.startswith("random/")} == state_paths(model).keys()


def normalized():
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dropout(0.4, seed=5),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dropout(0.4, seed=6),
            layers.Dense(3),
        ]
    )


def accumulated(case):
    """Trains with plain Keras, which adds up the gradients of the micro-batches of all replicas; returns the model."""
    model = alone(case.compiled)
    num_parts = case.micro_batches * case.num_replicas
    optimizer = case.optimizer()
    getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps = num_parts
    model.compile(optimizer, case.loss)
    for step in case.batches():
        total = sum(len(x) for x, _, _ in step)
        for x, y, _ in step:
            for part in np.array_split(np.arange(len(x)), case.micro_batches):
                # Keras divides by the number of parts, whatever their rows are.
                weight = np.full(len(part), len(part) * num_parts / total, keras.config.floatx())
                model.train_on_batch(x[part], y[part], weight)
    return model


ACCUMULATED = {
    "dropout, normalization": (Case(normalized, functools.partial(keras.optimizers.SGD, 0.1)), 1e-6),
    "losses of layers": (Case(with_losses, sgd, stages=3, rows=((16, 16), (8, 8))), 1e-6),
    "float16": (Case(functools.partial(mixed, "mixed_float16"), scaled, rows=((30,), (14,))), 2e-4),
    "bfloat16": (Case(functools.partial(mixed, "mixed_bfloat16"), sgd, rows=((30,), (14,))), 2e-3),
}


@pytest.mark.parametrize(
    "name",
    in_tiers(
        {name: name for name in ACCUMULATED},
        fast=["dropout, normalization", "losses of layers", "float16"],
        slow="the other half precision",
    ),
)
def test_weights_when_micro_batches_matter_then_equal_one_process_that_takes_them_in_turn(name):
    case, tolerance = ACCUMULATED[name]
    state, _ = run_threads(case.stages * case.num_replicas, functools.partial(rank_of, case))[0]
    model = accumulated(case)
    require_close(state, model.variables, model, tolerance)


@dataclass(frozen=True)
class Images(Case):
    """A fit of images, from weights of the size that the published model begins with."""

    def compiled(self):
        model, rng = self.build(), np.random.default_rng(7)
        # Ranks are threads here, which draw from one generator of Python's.
        model.set_weights(
            [
                rng.normal(size=one.shape, scale=(2 / np.prod(one.shape[:-1])) ** 0.5) if one.ndim > 1 else one
                for one in model.get_weights()
            ]
        )
        model.compile(self.optimizer(), "mse")
        return model

    def _batch(self, model, rows, rng):
        labels = np.eye(3, dtype="float32")[rng.integers(0, 3, rows)]
        return rng.normal(size=(rows, 32, 32, 3)).astype("float32"), labels, None


def test_moving_statistics_when_replicas_have_unequal_rows_then_are_their_averages_by_rows():
    rng = np.random.default_rng(5)
    # By epoch, step and replica.
    epochs = [[[rng.normal(size=(rows, 2)).astype("float32") for rows in step] for step in ((24, 8), (0, 6))]] * 2

    def live(communicator):
        model = keras.Sequential([layers.Input((2,)), layers.BatchNormalization(momentum=0.5), layers.Dense(1)])
        model.compile("sgd", "mse")
        pipeline = ModelPipeline(model, stages=1, micro_batches=1, communicator=communicator)
        for epoch in epochs:
            for step in epoch:
                x = step[pipeline.place.replica]
                pipeline.train_on_batch(x, x[:, :1])
            pipeline.results()
        return ops.convert_to_numpy(model.layers[0].moving_mean), pipeline.state()

    expected = np.zeros(2)
    for epoch in epochs:
        own = [expected, expected]
        for step in epoch:
            own = [one if len(x) == 0 else (one + x.mean(0)) / 2 for one, x in zip(own, step, strict=True)]
        expected = np.average(own, axis=0, weights=[24, 14])
    for mean, _ in (found := run_threads(2, live)):
        np.testing.assert_allclose(mean, expected, atol=1e-6)
    [(path, mean)] = [(path, value) for path, value in found[0][1].items() if path.endswith("moving_mean")]
    np.testing.assert_allclose(mean, expected, atol=1e-6, err_msg=path)


def mobile_net():
    return keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None, classes=3)


@pytest.mark.slow("the small model with normalization does the same in two seconds: this one is as published")
def test_weights_when_a_published_network_is_cut_inside_of_blocks_then_equal_those_of_accumulated_micro_batches():
    case = Images(
        mobile_net, functools.partial(keras.optimizers.SGD, 0.01), ["block_3_project", "block_8_depthwise"], 2
    )
    case = replace(case, rows=((17,),))
    # Fifty normalizations over a few rows make of the last bit of a float32 differences of 1e-4 in a step. What is left
    # are the parts of the rows, which are in float32.
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        state, _ = run_threads(3, functools.partial(rank_of, case))[0]
        model = accumulated(case)
    finally:
        keras.config.set_floatx(before)
    require_close(state, model.variables, model, 1e-7)


def test_scale_when_gradients_overflow_in_one_stage_then_all_skip_the_step():
    def live(communicator):
        case = Case(mlp, overflowing)
        model = case.compiled()
        # Only the gradient of these weights is larger than a float: nothing depends on the number that is.
        model.layers[0].kernel.assign(ops.convert_to_numpy(model.layers[0].kernel) * np.array([[0.0], *5 * [[1.0]]]))
        pipeline = ModelPipeline(model, stages=2, micro_batches=2, communicator=communicator)
        before = [ops.convert_to_numpy(one).copy() for one in pipeline.stage.trainable_variables]
        ((x, y, _),) = case.batches()[0]
        x[0, 0] = 3e38
        pipeline.train_on_batch(*((x, y) if pipeline.place.is_first else ()))
        after = [ops.convert_to_numpy(one) for one in pipeline.stage.trainable_variables]
        same = all(np.array_equal(*pair) for pair in zip(before, after, strict=True))
        return same, float(ops.convert_to_numpy(pipeline.optimizer.dynamic_scale))

    assert run_threads(2, live) == [(True, 2.0**15)] * 2


def kept(state, path):
    """Returns the open file of a checkpoint with a state."""
    with open(path, "wb") as file:
        write_arrays(file, state)
    return np.load(path, allow_pickle=False)


# Dropout and moving statistics are those of one process where a step is one micro-batch.
GOING_ON = {
    "adam": Case(mlp, adam),
    "dropout and normalization": Case(normalized, sgd, micro_batches=1),
    "scaled loss, norm": Case(mlp, scaled),
    "cut inside of a backbone": Case(backbone, adam),
}


@pytest.mark.parametrize(
    "name",
    in_tiers({name: name for name in GOING_ON}, fast=["dropout and normalization"], slow="the state of another model"),
)
def test_state_when_it_goes_on_with_other_cuts_or_none_then_ends_as_in_one_process(name, tmp_path):
    case = GOING_ON[name]
    batches = [step[0][:2] for step in case.batches()]

    def train(stages, steps, state, communicator):
        pipeline = ModelPipeline(
            case.compiled(), stages=stages, micro_batches=case.micro_batches, communicator=communicator
        )
        if state is not None:
            pipeline.load_state(state)
        for x, y in steps:
            pipeline.train_on_batch(*((x, y) if pipeline.place.is_first else ()))
        return pipeline.state()

    def train_alone(steps, state):
        layers.Dense(1)  # so that Keras numbers the model's otherwise
        model = case.compiled()
        model.optimizer.build(model.trainable_variables)
        if state is not None:
            paths = state_paths(model)
            generators = {f"random/0/{path}": one for path, one in generator_paths(model).items()}
            assign_state(paths, state, remedy="")
            for path, variable in generators.items():
                variable.assign(state[path].astype(variable.dtype))
        for x, y in steps:
            model.train_on_batch(x, y)
        generators = {f"random/0/{path}": one for path, one in generator_paths(model).items()}
        return read_by_path(state_paths(model)) | {
            path: ops.convert_to_numpy(one).astype("int64") for path, one in generators.items()
        }

    expected = alone(lambda: train_alone(batches, None))
    first = run_threads(2, functools.partial(train, 2, batches[:1], None))[0]
    with kept(first, tmp_path / "first.npz") as state:
        second = run_threads(3, functools.partial(train, 3, batches[1:2], dict(state)))[0]
    with kept(second, tmp_path / "second.npz") as state:
        third = alone(lambda: train_alone(batches[2:], state))
    begun = alone(lambda: train_alone(batches[:2], None))
    with kept(begun, tmp_path / "begun.npz") as state:
        ended = run_threads(3, functools.partial(train, 3, batches[2:], dict(state)))[0]
    assert first.keys() == second.keys() == third.keys() == ended.keys() == expected.keys()
    for path, value in expected.items():
        for found in (third, ended):
            np.testing.assert_allclose(found[path], value, atol=1e-5, err_msg=path)


def test_generators_when_replicas_go_on_then_each_has_its_own():
    def live(state, communicator):
        model = Case(normalized, sgd).compiled()
        # Cuts by measured seconds may fall elsewhere the second time.
        pipeline = ModelPipeline(model, stages=["dense_1"], micro_batches=1, communicator=communicator)
        if state is not None:
            pipeline.load_state(state)
        drawn = [one for one in pipeline.stage.variables if one.path.endswith("seed_generator_state")]
        return pipeline.state(), [ops.convert_to_numpy(one).tolist() for one in drawn]

    first = run_threads(4, functools.partial(live, None))
    state = {path: value + 5 if path.startswith("random/") else value for path, value in first[0][0].items()}
    assert [path for path in sorted(state) if path.startswith("random/")] == [
        f"random/{replica}/dropout{end}/seed_generator_state" for replica in range(2) for end in ("", "_1")
    ]
    for (_, before), (_, after) in zip(first, run_threads(4, functools.partial(live, state)), strict=True):
        assert after == [[number + 5 for number in numbers] for numbers in before]
    assert len({str(numbers) for _, drawn in first for numbers in drawn}) == 4


class Noting(dict):
    """Arrays by path that notes which are read."""

    def __getitem__(self, path):
        self.read = {*getattr(self, "read", ()), path}
        return super().__getitem__(path)


def test_state_when_a_stage_loads_it_then_its_own_arrays_alone_are_read():
    def live(communicator):
        pipeline = ModelPipeline(
            Case(mlp, sgd).compiled(), stages=["dense_2"], micro_batches=1, communicator=communicator
        )
        state = communicator.broadcast_object(pipeline.state())
        pipeline.load_state(noting := Noting(state))
        return {path for path in noting.read if path.startswith("model/")}

    assert run_threads(2, live) == [
        {f"model/dense{end}/{name}" for end in ends for name in ("kernel", "bias")}
        for ends in (("_2", "_3"), ("", "_1"))
    ]


def test_state_when_of_another_model_then_is_refused_by_name():
    pipeline = ModelPipeline(Case(mlp, adam).compiled(), stages=1, micro_batches=1)
    state = pipeline.state()
    state["model/dense_1/bias"] = np.zeros(7)
    del state["model/dense/kernel"]
    with pytest.raises(ConfigurationError, match=r"without: model/dense/kernel; .*dense_1/bias of shape \(7,\), not"):
        pipeline.load_state(state)


def test_predictions_when_the_model_was_built_without_values_then_equal_those_of_the_whole():
    def live(communicator):
        with without_values():
            model = case.build()
        model.compile(case.optimizer(), "mse")
        pipeline = ModelPipeline(model, stages=3, micro_batches=1, communicator=communicator)
        state = pipeline.state()
        x = case.batches()[0][0][0] if pipeline.place.is_first else None
        return state, pipeline.predict_on_batch(x)

    case = Case(residual, adam)
    state, found = run_threads(3, live)[0]
    model = alone(case.build)
    assign_state(
        {f"model/{path}": one for path, one in variable_paths(model).items()}, state, remedy="", partly=("optimizer",)
    )
    for one, other in zip(found, model.predict_on_batch(case.batches()[0][0][0]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_order_when_there_are_more_micro_batches_than_stages_then_as_many_wait_as_stages_follow_and_one():
    for stage in range(4):
        waiting = np.cumsum([1 if is_forward else -1 for is_forward, _ in one_forward_one_backward(stage, 4, 9)])
        assert waiting.max() == 4 - stage and waiting[-1] == 0


def test_pipeline_when_it_does_not_fit_then_says_what_does():
    model = Case(mlp, adam).compiled()
    with pytest.raises(
        ConfigurationError, match=re.escape("a number of ranks that 2 stages divide. Received: 1 ranks")
    ):
        ModelPipeline(model, stages=2, micro_batches=2)
    with pytest.raises(ConfigurationError, match="microBatches: expected an integer of at least 1"):
        ModelPipeline(model, stages=1, micro_batches=0)
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    with pytest.raises(UnsupportedError, match="reduction='sum_over_batch_size'.*'sum'"):
        ModelPipeline(model, stages=1, micro_batches=2)
    model.compile("sgd", "mse")
    rows = np.zeros((2, 6)), np.zeros((2, 3))
    with pytest.raises(ConfigurationError, match="class_weight: expected.*no sample_weight.*Received: sample_weight"):
        ModelPipeline(model, stages=1, micro_batches=2).train_on_batch(*rows, np.ones(2), {0: 1.0})
