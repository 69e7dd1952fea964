"""Model specification: a Keras model as bytes that any process can load.

A model that Keras can serialize travels as a ``.keras`` archive, with the classes and
functions that it names. A model that it cannot (a subclass without a config) is taken
apart (`elephant.modeling.live_model`), or given as a function that builds it; its
weights travel beside.
"""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.keras_private import compiled_with_values, flat_layers, names_free_again
from elephant.data.schema import RowSpec
from elephant.errors import ConfigurationError
from elephant.kinds import missing_argument
from elephant.modeling.fixed_batch import take_fewer_rows
from elephant.modeling.keras_archive import (
    extract_weights,
    for_this_backend,
    has_weights_of,
    holds_values,
    load_archive,
    load_structure,
    save_archive,
    with_other_weights,
    without_optimizer,
    without_weights,
)
from elephant.modeling.keras_saving import (
    accepted_configs,
    accepted_lambdas,
    custom_objects_of,
    is_of_keras,
    named_losses,
    recorded_names,
    require_same_objects,
)
from elephant.modeling.layers.sharded_embedding import sharded_embeddings, table_variables
from elephant.modeling.live_model import TakenModel, take_apart
from elephant.modeling.model_equality import (
    are_equal,
    have_equal_weights,
    refuse_forgotten_options,
    require_same_outputs,
    require_same_places,
    require_same_switches,
)
from elephant.modeling.model_info import ModelInfo, adds_loss, check_compiled
from elephant.modeling.stages import without_values
from elephant.modeling.variables import (
    build_variables,
    on_cpu,
    read_values,
    read_variables,
    state_variables,
    write_variables,
)

# Models that sources were made of, by the sources' ids, as long as the user has them.
_given: weakref.WeakValueDictionary[str, keras.Model] = weakref.WeakValueDictionary()


@dataclass(frozen=True, kw_only=True)
class KerasSettings:
    """The settings of one process.

    Args:
        backend: Fixed when Keras is imported; a training process gets it as ``KERAS_BACKEND``.
        floatx: Default floating-point type, such as ``"float32"``.
        dtype_policy: Default policy of new layers, such as ``"mixed_bfloat16"``.
        image_data_format: ``"channels_last"`` or ``"channels_first"``.
        epsilon: The fuzz factor.
        wide: Whether a backend that has no 64 bits by itself, JAX, was told to have them.
    """

    backend: str
    floatx: str
    dtype_policy: str
    image_data_format: str
    epsilon: float
    wide: bool = False

    @classmethod
    def current(cls) -> KerasSettings:
        """Returns the settings of this process."""
        return cls(
            backend=keras.config.backend(),
            floatx=keras.config.floatx(),
            dtype_policy=keras.config.dtype_policy().name,
            image_data_format=keras.config.image_data_format(),
            epsilon=keras.config.epsilon(),
            wide=current().is_wide(),
        )

    def suiting(self, model: keras.Model) -> KerasSettings:
        """Returns these settings with the policy that a model with loss scaling was compiled under."""
        scaled = isinstance(getattr(model, "optimizer", None), keras.optimizers.LossScaleOptimizer)
        return replace(self, dtype_policy="mixed_float16") if scaled else self

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Applies them for the time of a ``with`` block."""
        before = KerasSettings.current()
        self.apply()
        try:
            yield
        finally:
            before.apply()

    def apply(self) -> None:
        """Makes them the settings of this process, all but the backend."""
        keras.config.set_floatx(self.floatx)
        keras.config.set_dtype_policy(self.dtype_policy)
        keras.config.set_image_data_format(self.image_data_format)
        keras.config.set_epsilon(self.epsilon)
        current().make_wide(self.wide)


@dataclass(frozen=True, repr=False, eq=False)
class ModelSpec:
    """Recipe for one compiled model. Made by `model_source`.

    Args:
        info: What the model takes and gives.
        settings: Keras' settings where it was made; a process of its own applies them before it builds.
        archive: The bytes of a ``.keras`` file, or None when there is a builder.
        builder: A function without arguments that returns a compiled model, or None.
        variables: What replaces the built model's variables, in `read_variables`' order, or its weights alone; None
            keeps them.
        rows: What one row of its input is, for a builder whose model is not built by it.
        custom_objects: Classes and functions that the archive names, by the name it uses.
        safe_mode: Whether Keras refuses code in the archive: that of a file which nobody has trusted.
        weights_file: Where the archive's weights are, if they are not in it: then its structure alone is built.
        source_id: Tells sources apart; kept when the value is copied to another process.
    """

    info: ModelInfo
    settings: KerasSettings
    archive: bytes | None = None
    builder: Callable[[], keras.Model] | None = None
    variables: tuple[np.ndarray, ...] | None = None
    rows: RowSpec | None = None
    custom_objects: Mapping[str, Any] = field(default_factory=dict)
    safe_mode: bool = False
    weights_file: Path | None = None
    source_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def build(self) -> keras.Model:
        """Returns a new compiled model, equal to the one that this value was made of."""
        with self.settings.applied():
            if self.archive is not None:
                archive = for_this_backend(self.archive, saved_on=self.settings.backend)
                model = load_archive(archive, self.custom_objects, self.safe_mode)
            else:
                model = _call_builder(self.builder)
            if self.variables is not None:
                build_variables(model, self.rows)
                write_variables(model, self.variables)
        return model

    def build_structure(self) -> keras.Model:
        """Returns the compiled model with variables that have shapes and no values, and an optimizer without any.

        It takes no memory for weights. `elephant.training.stage_values` gives a stage the values that `build` would.
        """
        # The model that is built after it has the names of a first one: a metric's is one of the history's.
        with self.settings.applied(), names_free_again():
            if self.archive is None:
                with without_values(), compiled_with_values():
                    return _call_builder(self.builder)
            return load_structure(self.archive, self.custom_objects, self.safe_mode, saved_on=self.settings.backend)

    def with_weights_on_disk(self, folder: Path) -> ModelSpec:
        """Returns the source of the same model that has its weights in a file, and not in memory.

        It is one for `build_structure`, and stages get their values of it.

        Args:
            folder: Takes the file, and stays as long as stages are made.
        """
        if self.archive is None:
            return self
        return replace(self, archive=without_weights(self.archive), weights_file=extract_weights(self.archive, folder))

    @on_cpu()
    def with_weights(self, values: list[np.ndarray], rows: RowSpec) -> ModelSpec:
        """Returns the source of the same model with other weights, and an optimizer that has not been used.

        The whole model is not built, so that there is one copy of the weights in memory besides this source's own.

        Args:
            values: Those of its weights, in their order; what follows them is left out. The list is emptied.
        """
        model = self.build_structure()
        del values[len(model.weights) :]
        trained = replace(self, rows=rows, source_id=uuid.uuid4().hex)
        if self.archive is None or self.variables is not None:
            # Keras does not keep all weights of such a model in its archive.
            trained = replace(trained, variables=tuple(values))
            values.clear()
            return trained
        return replace(trained, archive=with_other_weights(self.archive, model, values))

    @on_cpu()
    def with_variables(self, variables: list[np.ndarray], rows: RowSpec) -> ModelSpec:
        """Returns the source of the same model with other weights and optimizer state.

        Args:
            variables: What `read_variables` of the trained model gave.
        """
        trained = replace(self, variables=tuple(variables), rows=rows, source_id=uuid.uuid4().hex)
        if self.archive is None or self.variables is not None:
            return trained
        archive = save_archive(trained.build())
        kept = replace(trained, archive=archive, variables=None)
        # It need not keep what it has kept before: of low rank factors, zeros alone. Of Keras' own classes it is known
        # which weight is which, and what the archive holds is enough to tell; other models are built once more.
        holds_all = not self.custom_objects and holds_values(archive, variables)
        return kept if holds_all or are_equal(read_variables(kept.build()), variables) else trained

    @property
    def title(self) -> str:
        """The model in words, and the user's function that returns it, where there is one."""
        if self.archive is not None or isinstance(self.builder, TakenModel):
            return self.info.title
        return f"{self.info.title}, made by {getattr(self.builder, '__qualname__', self.builder)!s}"

    def __repr__(self) -> str:
        return f"<{self.title}>"


@on_cpu()
def model_source(model: object, custom_objects: Mapping[str, Any] | None = None, *, to_train: bool = True) -> ModelSpec:
    """Returns the source of a user's model, after building it once to see that it can be built elsewhere.

    Args:
        model: A compiled `keras.Model`, or a function without arguments that returns one.
        custom_objects: Custom layers, losses and metrics by name, besides those that
            the model holds, or that are registered with `keras.saving.register_keras_serializable`.
        to_train: Whether it is to be trained; one that is not need not be compiled.

    Raises:
        ConfigurationError: It is something else, is not compiled, or cannot be rebuilt.
    """
    custom, settings = dict(custom_objects or {}), KerasSettings.current()
    if isinstance(model, ModelSpec):
        if to_train and not model.info.is_compiled:
            raise _not_compiled("a model", "optimizer and loss")
        return model
    if isinstance(model, keras.Model):
        if to_train or model.compiled:
            require_compiled(model)
        settings = settings.suiting(model)
        with named_losses(model):
            try:
                spec = _saved_source(model, settings, custom)
            except ConfigurationError as error:
                if is_of_keras(type(model)):
                    raise
                spec = _taken_source(model, settings, custom, error)
        _given[spec.source_id] = model
        return spec
    needed = _arguments_needed(model)
    if callable(model) and not needed and not isinstance(model, keras.layers.Layer):
        return ModelSpec(ModelInfo.of(_call_builder(model)), settings, builder=model, custom_objects=custom)
    raise ConfigurationError(
        "model: expected a compiled keras.Model, or a function without arguments that returns one. "
        f"Received: {type(model).__module__}.{type(model).__qualname__}{needed}."
    )


def _arguments_needed(model: object) -> str:
    """Returns, in words, the argument that a function misses when it is called without any; empty where none is."""
    if callable(model) and not isinstance(model, keras.layers.Layer):
        missing = missing_argument(model)
        return f" ({missing})" if missing else ""
    return ""


def given_model(spec: ModelSpec) -> keras.Model | None:
    """Returns the user's model that a source was made of in this process, while it is there."""
    return _given.get(spec.source_id)


def built_model(spec: ModelSpec) -> keras.Model:
    """Returns the user's model that a source was made of, while it is there, and else one that is built of it."""
    given = given_model(spec)
    return spec.build() if given is None else given


def _saved_source(model: keras.Model, settings: KerasSettings, custom: dict[str, Any]) -> ModelSpec:
    """Returns a model as Keras saves it; raises ConfigurationError where that is not the same model."""
    with recorded_names() as written:
        # First, because it says what to do about a model that Keras cannot save.
        archive = save_archive(model)
    found = custom_objects_of(written)
    objects = {**found, **registered_objects(model), **custom}
    spec = ModelSpec(ModelInfo.of(model), settings, archive=archive, custom_objects=objects)
    # Built once here, or the first worker would be the one to find out that it cannot be. Classes of Keras' own are
    # built without a second copy of the weights, and of the optimizer's state.
    is_plain = model.built and not objects and all(is_of_keras(type(layer)) for layer in flat_layers(model))
    rebuilt = spec.build_structure() if is_plain else spec.build()
    if is_plain and not has_weights_of(archive, model, rebuilt):
        is_plain, rebuilt = False, spec.build()
    # Keras takes a class with a compile of its own for compiled, and has not called that.
    if model.compiled and (not rebuilt.compiled or getattr(rebuilt, "optimizer", None) is None):
        raise ConfigurationError(
            f"model: expected Keras to compile {model.name!r} again when it loads the model. It did not, because the "
            "class has a compile of its own without get_compile_config and compile_from_config. Add these, or pass a "
            "function that builds and compiles the model: KerasEstimator(model=build_model)."
        )
    refuse_forgotten_options(model, rebuilt)
    if found:
        with recorded_names() as again, accepted_configs(rebuilt):
            keras.saving.serialize_keras_object(rebuilt)
        require_same_objects(written, again, custom)
    if not is_plain and not have_equal_weights(model, rebuilt):
        spec = _with_own_weights(spec, model, rebuilt)
    require_same_switches(model, rebuilt)
    if objects:
        require_same_outputs(model, rebuilt)
    return spec


def _taken_source(
    model: keras.Model, settings: KerasSettings, custom: dict[str, Any], error: ConfigurationError
) -> ModelSpec:
    """Returns a model of a user's class as it is.

    Args:
        error: Why Keras cannot save it.
    """
    with settings.applied():
        try:
            taken = take_apart(model, custom)
        except ConfigurationError as reason:
            raise ConfigurationError(
                f"{error} It cannot be taken as it is either: {reason} Or give {type(model).__qualname__} a get_config."
            ) from error
        rebuilt = taken()
    refuse_forgotten_options(model, rebuilt)
    spec = ModelSpec(ModelInfo.of(model), settings, builder=taken)
    if not model.weights or not (model.built or type(model).call is keras.Model.call):
        return spec
    build_variables(rebuilt, None)
    # An optimizer that has not been used has no state yet.
    given = state_variables(model) if getattr(model.optimizer, "built", False) else model.weights
    for variable, value in zip(state_variables(rebuilt), given, strict=False):
        variable.assign(value)
    for table, own in zip(table_variables(rebuilt), table_variables(model), strict=True):
        table.assign(own.state())
    return replace(spec, variables=tuple(read_variables(rebuilt)))


def _with_own_weights(spec: ModelSpec, model: keras.Model, rebuilt: keras.Model) -> ModelSpec:
    """Returns a source that carries weights beside its archive, in which Keras keeps others.

    Of layers with ``enable_lora`` an archive has one kernel, and a model that is made of it draws new factors.
    """
    require_same_places(model, rebuilt)
    build_variables(rebuilt, None)
    for weight, value in zip(rebuilt.weights, model.weights, strict=True):
        weight.assign(value)
    return replace(spec, variables=tuple(read_variables(rebuilt)))


def _served_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables without which a model does not predict: its weights, and the rows of its tables."""
    return [*model.weights, *(layer.table_variables[0] for layer in sharded_embeddings(model))]


def require_compiled(model: keras.Model) -> None:
    """Raises ConfigurationError unless the model has an optimizer, and losses and metrics that Keras can train with."""
    lossless = getattr(model, "loss", None) is None and not adds_loss(model)
    if not model.compiled or getattr(model, "optimizer", None) is None or lossless:
        missing = "optimizer and loss" if not model.compiled else "a loss" if lossless else "an optimizer"
        own = " Have its own compile call super().compile(optimizer=...)." if missing == "an optimizer" else ""
        raise _not_compiled(repr(model.name), missing, own)
    check_compiled(model)


def _not_compiled(model: str, missing: str, remedy: str = "") -> ConfigurationError:
    return ConfigurationError(
        f"model: expected a compiled model. Received: {model} without {missing}. "
        f"Call model.compile(optimizer=..., loss=...) before you pass it.{remedy}",
        topic="a-model-that-is-not-compiled",
    )


def _call_builder(builder: Callable[[], keras.Model] | None) -> keras.Model:
    model = builder() if builder is not None else None
    if not isinstance(model, keras.Model):
        raise ConfigurationError(f"model: expected a function that returns a keras.Model. It returned: {model!r}.")
    require_compiled(model)
    return model


def registered_objects(model: keras.Model) -> dict[str, Any]:
    """Returns the registered custom objects that the model's config names: other processes do not have them."""
    registered = keras.saving.get_custom_objects()
    if not registered:
        return {}
    with accepted_configs(model), accepted_lambdas():
        names = _strings(keras.saving.serialize_keras_object(model))
    return {name: registered[name] for name in registered if name in names}


def _strings(config: Any) -> set[str]:
    if isinstance(config, str):
        return {config}
    if isinstance(config, Mapping):
        config = list(config.values())
    if isinstance(config, (list, tuple)):
        return set().union(*(_strings(item) for item in config))
    return set()


@dataclass(frozen=True, repr=False, eq=False)
class Servable:
    """A model that predicts and evaluates, without the state of its optimizer.

    Args:
        settings: Keras' settings where it was made.
        archive: The bytes of a ``.keras`` file, or None when there is a builder.
        builder: A function without arguments that returns the model, or None.
        weights: What replaces the built model's weights, which travel beside the archive as well where Keras does not
            keep them in it; None keeps them.
        rows: What one row of its input is, for a model that is not built without.
        custom_objects: Classes and functions that the archive names.
        safe_mode: Whether Keras refuses code in the archive.
    """

    settings: KerasSettings
    archive: bytes | None = None
    builder: Callable[[], keras.Model] | None = None
    weights: tuple[np.ndarray, ...] | None = None
    rows: RowSpec | None = None
    custom_objects: Mapping[str, Any] = field(default_factory=dict)
    safe_mode: bool = False

    @classmethod
    @on_cpu()
    def of(cls, spec: ModelSpec) -> Servable:
        """Returns the parts of a source's model that predict; it is built for that once, unless its archive has all."""
        in_archive = spec.archive is not None and spec.variables is None
        return cls(
            spec.settings,
            archive=None if spec.archive is None else without_optimizer(spec.archive),
            builder=spec.builder,
            weights=None if in_archive else tuple(read_values(_served_variables(spec.build()))),
            rows=spec.rows,
            custom_objects=spec.custom_objects,
            safe_mode=spec.safe_mode,
        )

    @classmethod
    @on_cpu()
    def of_model(cls, model: keras.Model) -> Servable:
        """Returns the parts of a model that predict; raises ConfigurationError where it cannot travel."""
        with named_losses(model), recorded_names() as written:
            archive = without_optimizer(save_archive(model))
        objects = {**custom_objects_of(written), **registered_objects(model)}
        servable = cls(KerasSettings.current(), archive=archive, custom_objects=objects)
        rebuilt = servable.build()
        if not have_equal_weights(model, rebuilt):
            require_same_places(model, rebuilt)
            servable = replace(servable, weights=tuple(read_values(_served_variables(model))))
            rebuilt = servable.build()
        if objects:
            require_same_outputs(model, rebuilt)
        return servable

    def build(self) -> keras.Model:
        """Returns a new model; one that was compiled is compiled again, with an optimizer that keeps nothing."""
        spec = ModelSpec(
            info=None,  # type: ignore[arg-type]  # nothing of them is needed to build it
            settings=self.settings,
            archive=self.archive,
            builder=self.builder,
            custom_objects=self.custom_objects,
            safe_mode=self.safe_mode,
        )
        model = spec.build()
        if self.weights is not None:
            with self.settings.applied():
                build_variables(model, self.rows)
            for variable, value in zip(_served_variables(model), self.weights, strict=True):
                variable.assign(value)
        take_fewer_rows(model)
        # Batches are handed over one at a time.
        model.steps_per_execution = 1
        return model
