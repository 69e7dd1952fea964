"""`elephant.ShardedEmbeddings`: the features and tables of a Keras RS `DistributedEmbedding`, as sharded tables.

Keras RS is not imported: its configurations are read by their attributes, and what a model saves is without them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras

from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.layers.sharded_embedding import ShardedEmbedding, rows_together
from elephant.tables.table import initializer_of

# Optimizers of Keras whose updates of touched rows a table does, under these names.
_RULES = {keras.optimizers.SGD: "sgd", keras.optimizers.Adagrad: "adagrad", keras.optimizers.Adam: "lazy_adam"}
_NAMES = {kind.__name__.lower(): kind for kind in _RULES}
_OF_FEATURES = ("name", "table", "input_shape", "output_shape")
_OF_TABLES = ("name", "vocabulary_size", "embedding_dim", "initializer", "optimizer", "combiner")
# Deviation of a normal distribution that is cut off at two deviations, as in keras.initializers.VarianceScaling.
_TRUNCATED_DEVIATION = 0.87962566103423978


@dataclass(frozen=True)
class _Feature:
    """A feature, with the place of its table among the layer's."""

    name: str
    table_place: int
    input_shape: tuple[int | None, ...]


@dataclass(frozen=True)
class _Features:
    """All features, in a thing that Keras does not look into, and so does not change.

    Args:
        structure: Nested dicts, lists and tuples of the features' places.
    """

    structure: Any
    features: tuple[_Feature, ...]


@keras.saving.register_keras_serializable(package="elephant")
class ShardedEmbeddings(keras.layers.Layer):
    """Several features' embeddings, configured as the ``DistributedEmbedding`` of Keras RS.

    Each table is an `elephant.ShardedEmbedding` of the table's name, which features may share. A synchronous fit
    divides it over the workers, and a step looks the rows of all features up at once. Each table has an optimizer of
    its own, as on a TPU: ``"adam"`` updates the rows that a step touches. Settings of TPUs, ``placement`` and
    ``max_ids_per_partition`` among them, have no meaning here.

    Args:
        feature_configs: A ``keras_rs.layers.FeatureConfig``, or dicts, lists and tuples of them, or anything that has
            their attributes. Tables of one name are one table.
        mask_value: An id that stands for none in all features, such as what sequences are padded with.
        path: A folder to which workers write their parts of all tables; see `elephant.ShardedEmbedding`.
        seed: Of the first rows of all tables; None draws one for each.

    Input shape: ids in the structure of the configurations, each of shape (rows,) or (rows, ids).
    Output shape: embeddings in the same structure, each of shape (rows, embedding_dim).

    Raises:
        ConfigurationError: A configuration cannot be used, or ids have another structure.
        UnsupportedError: In a call: ids have weights.

    Examples:
        >>> import numpy as np
        >>> from types import SimpleNamespace  # in place of keras_rs.layers.TableConfig and FeatureConfig
        >>> sizes = {"vocabulary_size": 50, "embedding_dim": 4}
        >>> table = SimpleNamespace(name="items", initializer="uniform", optimizer="adam", combiner="mean", **sizes)
        >>> shapes = [(None,), (None, 3)]
        >>> clicked, seen = (
        ...     SimpleNamespace(name="item", table=table, input_shape=shape, output_shape=(None, 4)) for shape in shapes
        ... )
        >>> layer = ShardedEmbeddings({"clicked": clicked, "seen": seen}, seed=1)
        >>> found = layer({"clicked": np.array([3, 7]), "seen": np.array([[1, 2, 3], [4, 4, 4]])})
        >>> {name: tuple(rows.shape) for name, rows in found.items()}, len(layer.embeddings)
        ({'clicked': (2, 4), 'seen': (2, 4)}, 1)
    """

    def __init__(
        self,
        feature_configs: Any,
        *,
        mask_value: Any = None,
        path: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        # Ids that come as floats would be other ones in 16 bits.
        super().__init__(autocast=False, **kwargs)
        self.mask_value = mask_value
        self.seed = seed
        flat = keras.tree.flatten(feature_configs)
        if not flat:
            raise ConfigurationError(f"feature_configs: expected at least one feature. Received: {feature_configs!r}.")
        # Keras finds them here.
        of_all = {"mask_value": mask_value, "path": path, "dtype": self.dtype_policy}
        self._tables = _tables_of(flat, seed=seed, of_all=of_all)
        places = {layer.name: place for place, layer in enumerate(self._tables)}
        self._features = _Features(
            keras.tree.pack_sequence_as(feature_configs, range(len(flat))),
            tuple(_Feature(one.name, places[one.table.name], tuple(one.input_shape)) for one in flat),
        )
        self.built = True

    @property
    def embeddings(self) -> list[ShardedEmbedding]:
        """Layers of the tables, each once."""
        return list(self._tables)

    def compute_output_shape(self, input_shape: Any) -> Any:
        structure, features = self._features.structure, self._features.features
        return keras.tree.map_structure_up_to(
            structure,
            lambda place, shape: (*shape[: max(len(shape) - 1, 1)], self._table_of(features[place]).output_dim),
            structure,
            input_shape,
        )

    def compute_output_spec(self, ids: Any, weights: Any = None, **kwargs: Any) -> Any:
        # Not by a call: nothing is to be looked up.
        def spec_of(feature: _Feature, ids: Any) -> keras.KerasTensor:
            layer = self._table_of(feature)
            shape = (*ids.shape[: max(len(ids.shape) - 1, 1)], layer.output_dim)
            return keras.KerasTensor(shape, dtype=layer.compute_dtype)

        return self._mapped(spec_of, ids, weights)

    def call(self, ids: Any, weights: Any = None) -> Any:
        def with_axis(feature: _Feature, ids: Any) -> Any:
            # The combiner is for an axis of ids, which a feature of one id for each row has not.
            return keras.ops.expand_dims(ids, -1) if len(ids.shape) == 1 else ids

        layers = [self._table_of(feature) for feature in self._features.features]
        bags = keras.tree.flatten(self._mapped(with_axis, ids, weights))
        return keras.tree.pack_sequence_as(self._features.structure, rows_together(layers, bags))

    def get_config(self) -> dict[str, Any]:
        serialize = keras.saving.serialize_keras_object
        return {
            **super().get_config(),
            "structure": serialize(self._features.structure),
            "features": [[one.name, one.table_place, list(one.input_shape)] for one in self._features.features],
            "tables": [serialize(layer) for layer in self._tables],
            "mask_value": self.mask_value,
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ShardedEmbeddings:
        deserialize = keras.saving.deserialize_keras_object
        config = dict(config)
        tables = [deserialize(one) for one in config.pop("tables")]
        configs = [_SavedFeature(name, tables[place], shape) for name, place, shape in config.pop("features")]
        structure = deserialize(config.pop("structure"))
        return cls(keras.tree.map_structure(lambda place: configs[place], structure), **config)

    def _table_of(self, feature: _Feature) -> ShardedEmbedding:
        return self._tables[feature.table_place]

    def _mapped(self, function: Any, ids: Any, weights: Any) -> Any:
        """Maps a function of a feature and its ids over all of them; returns the results in the features' structure."""
        if weights is not None:
            raise UnsupportedError(
                f"{self.name}: expected ids without weights, of which a table knows none. Received: weights. Multiply "
                "the embeddings by them, in features of one id each."
            )
        structure, features = self._features.structure, self._features.features
        try:
            keras.tree.assert_same_structure(structure, ids)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{self.name}: expected ids in the structure of feature_configs, which is "
                f"{keras.tree.map_structure(lambda place: features[place].name, structure)}. Received: "
                f"{keras.tree.map_structure(lambda one: tuple(one.shape), ids)}."
            ) from error
        found = []
        for feature, one in zip(features, keras.tree.flatten(ids), strict=True):
            _check_shape(self.name, feature, tuple(one.shape))
            found.append(function(feature, one))
        return keras.tree.pack_sequence_as(structure, found)


@dataclass(frozen=True)
class _SavedFeature:
    """A feature of a model that is loaded, with the layer of its table."""

    name: str
    embedding: ShardedEmbedding
    input_shape: list[int | None]

    @property
    def table(self) -> ShardedEmbedding:
        """The layer, which has the table's name as the table's configuration has."""
        return self.embedding


def _check_shape(name: str, feature: _Feature, shape: tuple[int | None, ...]) -> None:
    expected = feature.input_shape
    if len(shape) not in (1, 2):
        raise ConfigurationError(
            f"{name}: expected ids of shape (rows,) or (rows, ids) for feature {feature.name!r}. Received: {shape}."
        )
    # The first number is the rows of a batch, and those of elephant's batches are no part of a model.
    if len(shape) != len(expected) or any(
        None not in (one, other) and one != other for one, other in zip(shape[1:], expected[1:], strict=True)
    ):
        raise ConfigurationError(
            f"{name}: expected ids of shape {expected} for feature {feature.name!r}, as its input_shape says, the rows "
            f"of a batch apart. Received: {shape}. Pad them, and give mask_value what they are padded with."
        )


def _tables_of(configs: list[Any], *, seed: int | None, of_all: Mapping[str, Any]) -> list[ShardedEmbedding]:
    """Returns a layer for each table of some features' configurations.

    Args:
        of_all: Arguments that all layers have.
    """
    found: dict[str, tuple[Any, ShardedEmbedding]] = {}
    for config in configs:
        if isinstance(config, _SavedFeature):
            found[config.table.name] = config.table, config.table
            continue
        _require_attributes("feature_configs", "FeatureConfig, or nested ones", config, _OF_FEATURES)
        given = config.table
        _require_attributes(f"table of feature {config.name!r}", "TableConfig", given, _OF_TABLES)
        known, layer = found.get(given.name, (None, None))
        if given is not known:
            own_seed = None if seed is None else seed + len(found)
            made = _layer_of(given, seed=own_seed, **of_all)
            if layer is not None and _settings_of(layer) != _settings_of(made):
                raise ConfigurationError(
                    "feature_configs: expected tables of different names, and one table for features that share it. "
                    f"Received: two that differ, both named {given.name!r}."
                )
            layer = layer or made
            found[given.name] = given, layer
        if tuple(config.output_shape)[-1:] not in ((None,), (given.embedding_dim,)):
            raise ConfigurationError(
                f"feature {config.name!r}: expected an output_shape that ends with {given.embedding_dim}, the "
                f"embedding_dim of table {given.name!r}. Received: {tuple(config.output_shape)}."
            )
    return [layer for _, layer in found.values()]


def _require_attributes(title: str, expected: str, config: Any, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not hasattr(config, name)]
    if missing:
        raise ConfigurationError(
            f"{title}: expected a keras_rs.layers.{expected}. Received: {config!r}, without {', '.join(missing)}."
        )


def _settings_of(embedding: ShardedEmbedding) -> dict[str, Any]:
    return {name: value for name, value in embedding.get_config().items() if name != "seed"}


def _layer_of(table_config: Any, **others: Any) -> ShardedEmbedding:
    """Returns the layer of a table.

    Args:
        table_config: A ``keras_rs.layers.TableConfig``, or what has its attributes.
        others: Arguments of the layer that it does not say.
    """
    if table_config.combiner is None:
        raise ConfigurationError(
            f"table {table_config.name!r}: expected a combiner 'mean', 'sum' or 'sqrtn'. Received: None. Use a "
            "ShardedEmbedding for a row of each id."
        )
    rule, learning_rate = rule_of(table_config.optimizer, str(table_config.name))
    rows, width = int(table_config.vocabulary_size), int(table_config.embedding_dim)
    return ShardedEmbedding(
        rows,
        width,
        optimizer=rule,
        learning_rate=learning_rate,
        embeddings_initializer=drawable(table_config.initializer, rows, width),
        combiner=table_config.combiner,
        name=table_config.name,
        **others,
    )


def rule_of(optimizer: Any, table_name: str) -> tuple[str, float]:
    """Returns a table's rule and its learning rate for an optimizer of Keras, or for its name.

    Raises:
        ConfigurationError: It is another one, or has settings that a table has not.

    >>> rule_of("adam", "users"), rule_of(keras.optimizers.SGD(0.5), "users")
    (('lazy_adam', 0.001), ('sgd', 0.5))
    """
    expected = (
        f"table {table_name!r}: expected an optimizer 'sgd', 'adagrad' or 'adam', or keras.optimizers.SGD, Adagrad or "
        "Adam"
    )
    given = optimizer
    if isinstance(optimizer, str) and optimizer.lower() in _NAMES:
        given = _NAMES[optimizer.lower()]()
    # Not by isinstance alone: AdamW is an Adam. Nor by the class: on PyTorch it is one derived from it, of its name.
    kind = next((one for one in _RULES if isinstance(given, one) and type(given).__name__ == one.__name__), None)
    if kind is None:
        raise ConfigurationError(f"{expected}. Received: {optimizer!r}. Use one of these for the table.")
    config = given.get_config()
    learning_rate = config.pop("learning_rate")
    if isinstance(learning_rate, dict):
        raise ConfigurationError(
            f"{expected}, with a number as learning_rate. Received: the schedule {learning_rate['class_name']}. Use "
            "its mean, or first, rate."
        )
    # A fraction that is none of a 32-bit number's, where it came from a variable.
    learning_rate = float(f"{learning_rate:.7g}")
    plain = kind().get_config()
    others = {name: value for name, value in config.items() if name != "name" and value != plain[name]}
    if others:
        words = ", ".join(f"{name}={value!r}" for name, value in others.items())
        raise ConfigurationError(
            f"{expected}, with a learning_rate alone. Received: {kind.__name__} with {words}. Leave that out."
        )
    return _RULES[kind], learning_rate


def drawable(initializer: Any, rows: int, width: int) -> Any:
    """Returns an initializer by which rows can be drawn part by part, for one that may ask for the table's shape.

    Raises:
        ConfigurationError: Rows cannot be drawn so.
    """
    found = keras.initializers.get(initializer)
    if not isinstance(found, keras.initializers.VarianceScaling):
        initializer_of(found)
        return found
    fans = {"fan_in": rows, "fan_out": width, "fan_avg": (rows + width) / 2}
    scale = found.scale / max(1.0, fans[found.mode])
    if found.distribution == "uniform":
        limit = math.sqrt(3.0 * scale)
        return keras.initializers.RandomUniform(-limit, limit)
    if found.distribution == "untruncated_normal":
        return keras.initializers.RandomNormal(0.0, math.sqrt(scale))
    return keras.initializers.TruncatedNormal(0.0, math.sqrt(scale) / _TRUNCATED_DEVIATION)
