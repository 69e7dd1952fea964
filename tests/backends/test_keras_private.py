"""Each private name of Keras that the package uses is there, in the installed version, as its entry expects it.

A test that fails is named like its entry in `elephant/backends/keras_private.py`.
"""

import inspect
import json
import re
import zipfile
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import ops

import elephant.backends.keras_private as private
from elephant.parameter_server.optimizers import OPTIMIZERS

CHECKS = {}
# Backends on which an entry is used; the others are used on all.
ONLY_ON = {"train_function": "jax", "give_layout": "jax"}


def check(function):
    CHECKS[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a compiled model of two inputs and an output that has been trained on two rows, with its parts."""
    folder = tmp_path_factory.mktemp("saved")
    inputs = {name: keras.Input((3,), name=name) for name in ("a", "b")}
    added = keras.layers.Add()
    dense, norm = keras.layers.Dense(1), keras.layers.BatchNormalization()
    inner = keras.Sequential([dense, norm])
    model = keras.Model(inputs, {"out": inner(added(list(inputs.values())))})
    model.compile(
        keras.optimizers.Adam(0.5),
        {"out": keras.losses.Huber(delta=2.0)},
        metrics={"out": ["mae"]},
        weighted_metrics={"out": ["mse"]},
        loss_weights={"out": 0.5},
    )
    rows = {name: np.ones((2, 3), "float32") for name in inputs}
    logs = model.train_on_batch(rows, {"out": np.ones((2, 1), "float32")}, return_dict=True)
    return SimpleNamespace(
        model=model, inner=inner, added=added, dense=dense, norm=norm, rows=rows, logs=logs, folder=folder
    )


@check
def flat_layers(made):
    found = private.flat_layers(made.model)
    assert found[0] is made.model and {made.inner, made.dense, made.norm} <= set(found)
    assert private.flat_layers(made.model, include_self=False) == found[1:]


@check
def own_weights(made):
    made.dense.trainable = False
    assert private.own_weights(made.dense) == [made.dense.kernel, made.dense.bias]
    made.dense.trainable = True
    assert private.own_weights(made.inner) == []


@check
def own_states(made):
    assert private.own_states(made.norm) == [made.norm.moving_mean, made.norm.moving_variance]
    assert private.own_states(made.inner) == []


@check
def own_generators(made):
    drops = keras.layers.Dropout(0.5)
    assert [id(one.state) for one in private.own_generators(drops)] == [id(one) for one in drops.variables]
    assert private.own_generators(made.norm) == []


@check
def own_layers(made):
    assert private.own_layers(made.inner)[-2:] == [made.dense, made.norm]
    assert made.inner in private.own_layers(made.model) and made.dense not in private.own_layers(made.model)


@check
def modules_apart(made):
    layer = keras.layers.Layer()
    layer.inner = keras.layers.Dense(1)
    expected = {"inner": layer.inner} if keras.config.backend() == "torch" else {}
    found = private.modules_apart(layer)
    assert {name: part for name, part in found.items() if isinstance(part, keras.layers.Layer)} == expected


@check
def is_autocast(made):
    assert private.is_autocast(keras.Variable([1.0]))
    assert not private.is_autocast(keras.Variable([1.0], autocast=False))


def without_value():
    """Returns a variable that waits for its value: Keras' next scope gives it one, unless it is made to forget it."""
    with keras.StatelessScope(initialize_variables=False):
        return keras.Variable(keras.initializers.Constant(3.0), shape=(2,))


@check
def has_value(made):
    variable = without_value()
    private.forget_waiting_variables()
    assert not private.has_value(variable) and private.has_value(made.dense.kernel)


@check
def initialize_variable(made):
    variable = without_value()
    private.forget_waiting_variables()
    private.initialize_variable(variable)
    assert private.has_value(variable) and float(ops.sum(variable.value)) == 6.0


@check
def forget_waiting_variables(made):
    variable = without_value()
    private.forget_waiting_variables()
    with keras.StatelessScope():
        pass
    assert not private.has_value(variable)


def mesh_of_one():
    return keras.distribution.DeviceMesh((1,), ["model"], devices=["cpu:0"])


@check
def give_layout(made):
    variable, mesh = keras.Variable([1.0, 2.0]), mesh_of_one()
    given = keras.distribution.TensorLayout(["model"], mesh)
    layout_of = keras.distribution.DataParallel(mesh).get_variable_layout
    private.give_layout(variable, given)
    variable.assign([3.0, 4.0])
    assert layout_of(variable) is given and variable.value.sharding.device_set == {*mesh.backend_mesh.devices}
    private.give_layout(variable, None)
    assert layout_of(variable).axes == (None,)


@check
def layout_map_of(made):
    rules = keras.distribution.LayoutMap(mesh_of_one())
    rules["kernel"] = (None, "model")
    assert private.layout_map_of(keras.distribution.ModelParallel(layout_map=rules)) is rules


@check
def functional_graph(made):
    assert private.functional_graph(made.model) is made.model
    assert len(private.functional_graph(made.inner).inputs) == 1
    assert private.functional_graph(made.dense) is None and private.functional_graph(keras.Sequential()) is None


@check
def calls_in_order(made):
    assert [node.operation for node in private.calls_in_order(made.model)] == [made.added, made.inner]


@check
def standardized_inputs(made):
    [found] = private.standardized_inputs(private.functional_graph(made.inner), [ops.ones((2, 3), "int32")])
    assert (tuple(found.shape), keras.backend.standardize_dtype(found.dtype)) == ((2, 3), "float32")


@check
def with_training(made):
    rows = ops.convert_to_tensor([[1.0], [3.0]])
    before = ops.convert_to_numpy(made.norm(rows, training=True))
    np.testing.assert_array_equal(ops.convert_to_numpy(private.with_training(made.norm, True)(rows)), before)


@check
def inbound_nodes(made):
    [node] = private.inbound_nodes(made.added)
    assert [tuple(tensor.shape) for tensor in (*node.input_tensors, *node.output_tensors)] == 3 * [(None, 3)]


@check
def input_structure(made):
    structure = private.input_structure(made.model)
    assert {name: tuple(tensor.shape) for name, tensor in structure.items()} == {"a": (None, 3), "b": (None, 3)}
    assert private.input_structure(keras.Sequential()) is None


@check
def output_structure(made):
    structure = private.output_structure(made.model)
    assert {name: tuple(tensor.shape) for name, tensor in structure.items()} == {"out": (None, 1)}


@check
def built_shape(made):
    layer = keras.layers.Normalization(axis=-1)
    layer.build((None, 4, 3))
    assert tuple(private.built_shape(layer)) == (None, 4, 3)


@check
def has_given_vocabulary(made):
    pytest.importorskip("tensorflow")
    for kind, word in ((keras.layers.StringLookup, "a"), (keras.layers.IntegerLookup, 1)):
        assert private.has_given_vocabulary(kind(vocabulary=[word]))
        assert not private.has_given_vocabulary(kind())
    assert private.has_given_vocabulary(keras.layers.TextVectorization(vocabulary=["a"]))
    assert not private.has_given_vocabulary(keras.layers.TextVectorization())


@check
def lookup_of(made):
    pytest.importorskip("tensorflow")
    lookup = private.lookup_of(keras.layers.TextVectorization(vocabulary=["a"]))
    assert isinstance(lookup, keras.layers.StringLookup) and "a" in lookup.get_vocabulary()


@check
def has_moments(made):
    assert private.has_moments(made.norm) and not private.has_moments(made.dense)


@check
def moments_of(made):
    mean, variance = private.moments_of(made.norm)(ops.convert_to_tensor([[1.0], [3.0]]), None)
    assert (float(ops.squeeze(mean)), float(ops.squeeze(variance))) == (2.0, 1.0)


@check
def replace_moments(made):
    layer, rows = keras.layers.BatchNormalization(epsilon=0.0), ops.convert_to_tensor([[1.0], [3.0]])
    layer.build((None, 1))
    private.replace_moments(layer, lambda inputs, mask: (ops.convert_to_tensor([1.0]), ops.convert_to_tensor([4.0])))
    np.testing.assert_allclose(ops.convert_to_numpy(layer(rows, training=True)), [[0.0], [1.0]])
    private.replace_moments(layer, None)
    np.testing.assert_allclose(ops.convert_to_numpy(layer(rows, training=True)), [[-1.0], [1.0]])


@check
def reduction_axes(made):
    layer = keras.layers.BatchNormalization(axis=1)
    layer.build((None, 4, 5))
    assert list(private.reduction_axes(layer)) == [0, 2]


@check
def compile_settings(made):
    settings = private.compile_settings(made.model)
    assert {"optimizer", "loss", "loss_weights", "metrics", "weighted_metrics"} <= settings.keys()
    # It is what Keras itself reads when it saves the model.
    settings["loss_weights"], before = {"out": 0.25}, settings["loss_weights"]
    try:
        assert made.model.get_compile_config()["loss_weights"] == {"out": 0.25}
    finally:
        settings["loss_weights"] = before
    assert private.compile_settings(keras.Sequential()) is None


@check
def compiled_loss(made):
    loss = private.compiled_loss(made.model)
    assert loss.built and callable(loss.build) and len(loss.output_names) == 1
    assert private.compiled_loss(keras.Sequential()) is None


@check
def compiled_metrics(made):
    metrics = private.compiled_metrics(made.model)
    assert metrics.built and callable(metrics.build) and len(metrics.output_names) == 1
    assert private.compiled_metrics(keras.Sequential()) is None


@check
def given_losses(made):
    losses, weights = private.given_losses(private.compiled_loss(made.model))
    assert isinstance(losses["out"], keras.losses.Huber) and weights == {"out": 0.5}
    assert private.given_losses(None) == (None, None)


@check
def given_metrics(made):
    given = private.given_metrics(private.compiled_metrics(made.model))
    assert given == ({"out": ["mae"]}, {"out": ["mse"]})
    assert private.given_metrics(None) == (None, None)


@check
def replace_losses(made):
    compiled = private.compiled_loss(made.model)
    before = private.replace_losses(compiled, lambda loss: loss)
    assert [type(loss) for loss in before] == [keras.losses.Huber]
    private.replace_losses(compiled, lambda _: lambda *_, **__: ops.convert_to_tensor(3.0))
    try:
        zeros = {"out": ops.zeros((2, 1))}
        # By the weight of the loss.
        assert float(compiled(zeros, zeros)) == 1.5
    finally:
        private.replace_losses(compiled, lambda _: before[0])


@check
def loss_function(made):
    rows = ops.zeros((2, 1))
    model = keras.Sequential([keras.Input((1,))])
    model.compile("sgd", "mse")
    given = {"x": rows, "y": rows, "y_pred": rows + 2, "sample_weight": None, "training": True}
    assert float(private.loss_function(model)(**given)) == 4.0
    assert private.loss_function(model).__name__ == "_compute_loss"


@check
def added_losses(made):
    layer = keras.layers.ActivityRegularization(l1=1.0)
    outer = keras.Sequential([layer])
    outer(ops.ones((1, 2)))
    assert [float(loss) for loss in private.added_losses(layer)] == [2.0]
    assert private.added_losses(outer) == []


@check
def clear_losses(made):
    layer = keras.layers.ActivityRegularization(l1=1.0)
    model = keras.Sequential([layer])
    model(ops.ones((1, 2)))
    private.clear_losses(model)
    assert private.added_losses(layer) == []


@check
def metrics_in_order(made):
    results = dict(made.logs)
    found = private.metrics_in_order(made.model, dict(reversed(results.items())))
    assert sorted(map(float, found)) == sorted(map(float, results.values())) and found[0] == results["loss"]


@check
def loss_options(made):
    assert private.loss_options(keras.losses.Huber(delta=2.0))["delta"] == 2.0
    assert private.loss_options(keras.losses.CosineSimilarity(axis=0))["axis"] == 0
    assert private.loss_options(None) == {}


@check
def function_of_metric(made):
    assert private.function_of_metric(keras.metrics.MeanMetricWrapper(fn=len)) is len
    assert private.function_of_metric(len) is len


@check
def replaced_mean_update(made):
    mean, own = keras.metrics.Mean(), keras.metrics.Mean.update_state
    with private.replaced_mean_update(
        lambda update: lambda self, values, sample_weight=None: update(self, values, 3.0)
    ):
        mean.update_state(1.0)
    mean.update_state(5.0)
    assert float(mean.result()) == 2.0 and keras.metrics.Mean.update_state is own


@check
def optimized_variables(made):
    found = private.optimized_variables(made.model.optimizer)
    assert [one.path for one in found] == [one.path for one in made.model.trainable_variables]
    assert list(private.optimized_variables(keras.optimizers.SGD())) == []


@check
def place_in_optimizer(made):
    variables = private.optimized_variables(made.model.optimizer)
    assert [private.place_in_optimizer(made.model.optimizer, one) for one in variables] == [*range(len(variables))]


@check
def rate_or_schedule(made):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    assert private.rate_or_schedule(keras.optimizers.SGD(schedule)) is schedule
    assert float(private.rate_or_schedule(keras.optimizers.SGD(0.5))) == 0.5
    assert private.rate_or_schedule(None) is None


@check
def has_schedule(made):
    assert private.has_schedule(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)))
    assert not private.has_schedule(keras.optimizers.SGD(0.5)) and not private.has_schedule(None)


@check
def step_counter(made):
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    private.step_counter(optimizer).assign(6)
    assert int(optimizer.iterations) == 3


@check
def decays(made):
    optimizer = keras.optimizers.AdamW(0.5)
    optimizer.exclude_from_weight_decay(var_list=[made.dense.bias])
    optimizer.build([made.dense.kernel, made.dense.bias])
    assert [private.decays(optimizer, one) for one in (made.dense.kernel, made.dense.bias)] == [True, False]
    assert private.decays(None, made.dense.kernel)


@check
def rebuild_optimizer(made):
    one, other = keras.Variable([1.0, 2.0]), keras.Variable([3.0])
    optimizer = keras.optimizers.RMSprop(0.5, momentum=0.5)
    optimizer.build([one, other])
    optimizer.iterations.assign(3)
    private.rebuild_optimizer(optimizer, [other])
    assert [tuple(variable.shape) for variable in optimizer.variables] == [(), (), (1,), (1,)]
    assert int(optimizer.iterations) == 3 and private.optimized_variables(optimizer) == [other]
    optimizer.apply([ops.convert_to_tensor([1.0])], [other])
    assert ops.convert_to_numpy(other) < 3


@check
def clipping_of(made):
    clip = private.clipping_of(keras.optimizers.SGD(0.5, global_clipnorm=1.0))
    found = clip([ops.convert_to_tensor([3.0]), ops.convert_to_tensor([4.0])])
    np.testing.assert_allclose([ops.convert_to_numpy(one) for one in found], [[0.6], [0.8]], atol=1e-6)


@check
def replace_clipping(made):
    variable, optimizer = keras.Variable([1.0]), keras.optimizers.SGD(0.5)
    optimizer.build([variable])
    private.replace_clipping(optimizer, lambda gradients: [2 * gradient for gradient in gradients])
    optimizer.apply([ops.convert_to_tensor([0.5])], [variable])
    np.testing.assert_allclose(ops.convert_to_numpy(variable), [0.5])


@check
def adam_slots(made):
    slots = private.adam_slots(made.model.optimizer)
    shapes = [tuple(one.shape) for one in made.model.trainable_variables]
    assert [[tuple(one.shape) for one in slot] for slot in slots] == [shapes, shapes]


@check
def train_function(made):
    given = []
    step = private.train_function(made.model, lambda state, data: (given.append(data), state))
    assert step(("weights",), iter([("rows",)])) == (None, ("weights",)) and given == [("rows",)]


@check
def can_be_compiled(made):
    assert private.can_be_compiled(made.model) in (True, False)


@check
def traces_batches(made):
    # Of the constructor, on TensorFlow.
    assert "self._should_trace = " in inspect.getsource(keras.callbacks.TensorBoard)
    assert not private.traces_batches(keras.callbacks.Callback())


@check
def forget_model(made):
    callback = keras.callbacks.Callback()
    callback.set_model(made.model)
    private.forget_model(callback)
    assert callback.model is None


@check
def mask_of(made):
    tensor = keras.layers.Masking()(ops.convert_to_tensor([[[1.0], [0.0]]]))
    assert ops.convert_to_numpy(private.mask_of(tensor)).tolist() == [[True, False]]
    assert private.mask_of(ops.zeros((1,))) is None


@check
def give_mask(made):
    tensor, mask = ops.zeros((1, 2)), ops.convert_to_tensor([[True, False]])
    private.give_mask(tensor, mask)
    assert private.mask_of(tensor) is mask


@check
def seed_attributes(made):
    before = private.seed_attributes()
    try:
        keras.utils.set_random_seed(3)
        assert private.seed_attributes()["global_random_seed"] == 3
    finally:
        private.restore_seed_attributes(before)
    assert private.seed_attributes() == before


CHECKS["restore_seed_attributes"] = seed_attributes


@check
def names_free_again(made):
    before = keras.layers.Dense(1).name
    with private.names_free_again():
        names = [keras.layers.Dense(1).name for _ in range(2)]
    assert before not in names and keras.layers.Dense(1).name == names[0]


@check
def make_shared_generator(made):
    generator = private.make_shared_generator()
    assert tuple(generator.state.shape) == (2,)
    assert private.seed_attributes()["global_seed_generator"] is generator


@check
def replaced_draws(made):
    rows = ops.ones((2, 3))

    def drawing(own):
        return lambda shape, *_, **__: ops.full(tuple(shape), 7.0)

    with private.replaced_draws(drawing, lambda inputs, *_, **__: inputs + 1):
        noisy = keras.layers.GaussianNoise(1.0)(rows, training=True)
        dropped = keras.layers.Dropout(0.5)(rows, training=True)
    np.testing.assert_allclose(ops.convert_to_numpy(noisy), np.full((2, 3), 8.0))
    np.testing.assert_allclose(ops.convert_to_numpy(dropped), np.full((2, 3), 2.0))
    assert set(np.unique(ops.convert_to_numpy(keras.layers.Dropout(0.5, seed=1)(rows, training=True)))) <= {0.0, 2.0}


@check
def replaced_normalization(made):
    with private.replaced_normalization(lambda own: lambda self, inputs, training=None, mask=None: inputs + 1):
        assert float(ops.squeeze(made.norm(ops.ones((1, 1)), training=True))) == 2.0


def drawn(value):
    return value


@check
def replaced_code_functions(made):
    own, layer = [], keras.layers.Lambda(lambda value: value / 2, output_shape=(1,))
    with private.replaced_code_functions(
        naming=lambda value: own.append("name") or before.name_of(value),
        dumping=lambda function: own.append("dump") or before.dump(function),
        loading=lambda *arguments, **options: own.append("load") or before.load(*arguments, **options),
    ) as before:
        config = keras.saving.serialize_keras_object(layer)
        keras.saving.deserialize_keras_object(config, safe_mode=False)
        keras.saving.serialize_keras_object(drawn)
    assert {"name", "dump", "load"} <= set(own)


@check
def replaced_configs(made):
    class Plain(keras.layers.Layer):
        pass

    bases = (
        keras.layers.Layer,
        keras.losses.Loss,
        keras.metrics.Metric,
        keras.optimizers.schedules.LearningRateSchedule,
    )
    with private.replaced_configs({base: lambda own: lambda part: {"of": "here"} for base in bases}):
        assert Plain().get_config() == {"of": "here"}
    assert "name" in Plain().get_config()


@check
def saveable(made):
    parts = (made.dense, made.model, keras.losses.Huber(), keras.metrics.Mean(), made.model.optimizer, ops.image)
    assert [isinstance(one, private.saveable()) for one in parts] == [True] * 5 + [False]


@check
def legacy_places(made):
    layers, models = private.legacy_places()
    assert layers.Dense is keras.layers.Dense and models.Sequential is keras.Sequential


@check
def named_publicly(made):
    assert private.named_publicly("keras.layers.Dense") is keras.layers.Dense
    assert private.named_publicly("keras.layers.Absent") is None


@check
def compiled_with_values(made):
    with keras.StatelessScope(initialize_variables=False):
        with private.compiled_with_values():
            optimizer, metric = keras.optimizers.SGD(0.5), keras.metrics.Mean()
        dense = keras.layers.Dense(1)
        dense.build((None, 3))
    private.forget_waiting_variables()
    assert private.has_value(optimizer.iterations) and private.has_value(metric.total)
    assert not private.has_value(dense.kernel)


@check
def model_of_config(made):
    model = private.model_of_config(keras.saving.serialize_keras_object(made.model), {}, True)
    assert [type(layer) for layer in model.layers] == [type(layer) for layer in made.model.layers]


@check
def load_some_layers(made):
    file = made.folder / "model.weights.h5"
    made.model.save_weights(file)
    before = [ops.convert_to_numpy(one).copy() for one in (made.dense.kernel, made.norm.gamma)]
    for one in (made.dense.kernel, made.norm.gamma):
        one.assign(one + 1)
    private.load_some_layers(made.model, file, [made.norm, made.model.optimizer])
    np.testing.assert_array_equal(ops.convert_to_numpy(made.dense.kernel), before[0])
    np.testing.assert_array_equal(ops.convert_to_numpy(made.norm.gamma), before[1] + 1)
    made.norm.gamma.assign(before[1])


@check
def load_assets(made):
    lookup = keras.layers.StringLookup()
    lookup.adapt(["b", "b", "a"])
    file = made.folder / "model.keras"
    keras.Sequential([keras.Input((1,), dtype="string"), lookup]).save(file)
    with zipfile.ZipFile(file) as archive:
        archive.extractall(file.parent)
        config = json.loads(archive.read("config.json"))
    model = private.model_of_config(config, {}, True)
    private.load_assets(model, file.parent / "assets")
    assert model.layers[-1].get_vocabulary() == ["[UNK]", "b", "a"]


@pytest.mark.parametrize("entry", CHECKS)
def test_entry_when_keras_is_the_installed_version_then_its_private_name_is_as_expected(entry, made):
    if ONLY_ON.get(entry, keras.config.backend()) != keras.config.backend():
        pytest.skip(f"used on {ONLY_ON[entry]} alone")
    CHECKS[entry](made)


@pytest.mark.parametrize("name", private.BUILD_ATTRIBUTES)
def test_build_attributes_when_a_layer_is_called_then_are_there(name, made):
    assert name in vars(made.dense)


@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="of TensorFlow alone")
def test_tracking_prefix_when_a_layer_has_variables_then_begins_some_of_its_attributes(made):
    assert any(name.startswith(private.TRACKING_PREFIX) for name in vars(made.dense))


def test_classes_of_backends_when_an_optimizer_is_made_then_is_in_a_module_of_that_prefix():
    kinds = [kind.__module__ for kind in type(keras.optimizers.Adam()).__mro__]
    expected = {"torch": private.TORCH_OPTIMIZERS}.get(keras.config.backend(), private.BACKEND_CLASSES)
    assert any(module.startswith(expected) for module in kinds)
    assert private.TORCH_OPTIMIZERS.startswith(private.BACKEND_CLASSES)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_when_an_optimizer_is_built_then_are_attributes_of_the_registered_names(name):
    known = OPTIMIZERS[name]
    kind = getattr(keras.optimizers, known.keras)
    # With all slots that it may have.
    wanted = {"momentum": 0.5, "centered": True, "amsgrad": True}
    optimizer = kind(0.5, **{name: wanted[name] for name in wanted.keys() & inspect.signature(kind).parameters.keys()})
    optimizer.build([keras.Variable([1.0, 2.0])])
    for slot, attribute in known.slots.items():
        found = [tuple(one.shape) for one in getattr(optimizer, attribute, ())]
        assert found == [(2,)], f"{known.keras}: the slot {slot} is not in {attribute}"


def test_entries_when_they_are_walked_then_each_has_a_check_and_says_where_it_was_seen():
    entries = {name: value for name, value in vars(private).items() if inspect.isfunction(value) and name[0] != "_"}
    entries = {name: value for name, value in entries.items() if value.__module__ == private.__name__}
    assert sorted(CHECKS) == sorted(entries)
    unseen = [name for name, value in entries.items() if not re.search(r"Seen in Keras 3\.\d+\.\d+ .*`", value.__doc__)]
    assert not unseen, f"expected 'Seen in Keras VERSION as `NAME`; WHY' in the docstrings of {unseen}"
