"""Archives of Keras: what another backend has saved, and where one lies while it is loaded."""

import keras
import numpy as np
import pytest
from tables import every_case

from elephant.modeling.keras_archive import holds_values, save_archive, settings_for_this_backend
from elephant.modeling.model_spec import ModelSpec, model_source
from elephant.modeling.variables import read_variables


def compiled():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    return model


OF_TORCH = {
    "module": "keras.src.backend.torch.optimizers.torch_adam",
    "class_name": "Adam",
    "config": {"beta_1": 0.5},
    "registered_name": "Adam",
}
OF_ALL = {**OF_TORCH, "module": "keras.optimizers", "registered_name": None}
SCALED = {"module": "keras.optimizers", "class_name": "LossScaleOptimizer"}
GROUPS = {"module": "keras.optimizers", "class_name": "MultiOptimizer"}
SETTINGS = {
    "JAX's, on PyTorch": ("torch", "jax", (OF_ALL, True), (OF_ALL, "auto")),
    "a file of JAX or TensorFlow, on PyTorch": ("torch", None, (OF_ALL, True), (OF_ALL, "auto")),
    "a file of PyTorch, on PyTorch": ("torch", None, (OF_TORCH, True), (OF_TORCH, True)),
    "PyTorch's, on PyTorch": ("torch", "torch", (OF_ALL, True), (OF_ALL, True)),
    "PyTorch's, on JAX": ("jax", "torch", (OF_TORCH, False), (OF_ALL, "auto")),
    "a file of PyTorch, on TensorFlow": ("tensorflow", None, (OF_TORCH, False), (OF_ALL, "auto")),
    "TensorFlow's, on JAX": ("jax", "tensorflow", (OF_ALL, False), (OF_ALL, "auto")),
    "a file of JAX or TensorFlow, on JAX": ("jax", None, (OF_ALL, False), (OF_ALL, False)),
    "inside of another optimizer": (
        "jax",
        "torch",
        ({**SCALED, "config": {"inner_optimizer": OF_TORCH}}, False),
        ({**SCALED, "config": {"inner_optimizer": OF_ALL}}, "auto"),
    ),
    "several": (
        "jax",
        None,
        ({**GROUPS, "config": {"optimizers": [OF_TORCH, OF_ALL]}}, False),
        ({**GROUPS, "config": {"optimizers": [OF_ALL, OF_ALL]}}, "auto"),
    ),
}


@every_case("here, saved_on, given, expected", SETTINGS.values(), ids=SETTINGS)
def test_compile_settings_when_another_backend_has_saved_them_then_are_those_of_this_one(
    monkeypatch, here, saved_on, given, expected
):
    monkeypatch.setattr(keras.config, "backend", lambda: here)
    before, after = ({"optimizer": one, "loss": "mse", "jit_compile": jit} for one, jit in (given, expected))
    assert settings_for_this_backend(before, saved_on=saved_on) == after


def test_archive_when_a_rank_loads_it_then_lies_in_its_work_folder_which_its_task_removes(tmp_path, monkeypatch):
    source, places = model_source(compiled()), []
    load = keras.saving.load_model
    monkeypatch.setattr(keras.saving, "load_model", lambda path, **given: places.append(path) or load(path, **given))
    monkeypatch.setenv("ELEPHANT_WORK_FOLDER", str(tmp_path))
    source.build()
    assert [place.parent.parent for place in places] == [tmp_path]
    assert list(tmp_path.iterdir()) == []


def test_archive_when_the_rank_s_work_folder_is_gone_then_lies_nowhere_else(tmp_path, monkeypatch):
    # The task has ended, and so will the rank: what it put elsewhere nobody would remove.
    monkeypatch.setenv("ELEPHANT_WORK_FOLDER", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError):
        model_source(compiled()).build()


def test_archive_when_all_values_are_in_it_then_holds_them_and_each_as_often_as_they_come():
    model = compiled()
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    archive, values = save_archive(model), read_variables(model)
    assert holds_values(archive, values)
    changed = [*values[:-1], np.nextafter(values[-1], np.float32(9))]
    # The step count is the only integer.
    twice = [*values, next(value for value in values if value.dtype.kind in "iu")]
    assert not holds_values(archive, changed)
    assert not holds_values(archive, twice)


@keras.saving.register_keras_serializable(package="elephant_tests")
class Swapping(keras.layers.Layer):
    """Saves its two weights, and gives each the other's value when it is loaded."""

    def build(self, shape):
        self.a, self.b = (self.add_weight(shape=(3,), initializer="zeros", name=name) for name in "ab")

    def call(self, inputs):
        return inputs * self.a + self.b

    def save_own_variables(self, store):
        store["a"], store["b"] = self.a.numpy(), self.b.numpy()

    def load_own_variables(self, store):
        self.a.assign(store["b"])
        self.b.assign(store["a"])


def test_trained_model_when_a_layer_of_one_s_own_loads_something_else_then_keeps_its_variables_beside():
    model = keras.Sequential([keras.layers.Input((3,)), Swapping(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    source = model_source(model)
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    values = read_variables(model)
    assert holds_values(save_archive(model), values)
    for value, expected in zip(read_variables(source.with_variables(values, None).build()), values, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_trained_model_when_keras_own_layers_keep_all_then_is_built_once(monkeypatch):
    model, built, build = compiled(), [], ModelSpec.build
    source = model_source(model)
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    monkeypatch.setattr(ModelSpec, "build", lambda spec: built.append(spec) or build(spec))
    trained = source.with_variables(read_variables(model), None)
    assert (len(built), trained.variables) == (1, None)
