"""`elephant.ShardedEmbedding`: a layer whose table lies in the host's memory, in a fit divided over the workers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.keras_private import flat_layers
from elephant.collective import api
from elephant.errors import ConfigurationError, DataError, UnsupportedError
from elephant.tables.rank_tables import LocalTables, Tables, ZeroTables
from elephant.tables.stored import StoredTable, shape_of
from elephant.tables.table import ROWS, RULES, TableSpec, initializer_of

# Paths that are the same in every process.
_ANYWHERE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]+:")
_COMBINERS = (None, "sum", "mean", "sqrtn")
# Constants of SplitMix64 (Steele, Lea & Flood 2014, figure 16).
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(one) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class TableVariable:
    """All rows of a layer's table, or what its optimizer remembers of them, as one of the model's variables.

    It has what elephant uses of a `keras.Variable`, but is none: Keras neither trains nor counts it.

    Args:
        embedding: The layer.
        name: ``"embeddings"``, or that of a slot of the optimizer.
    """

    dtype = "float32"
    trainable = False

    def __init__(self, embedding: ShardedEmbedding, name: str) -> None:
        self._embedding = embedding
        self.name = name

    @property
    def path(self) -> str:
        """The layer's path and the name."""
        return f"{self._embedding.path}/{self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        """That of all rows: (rows, values of each)."""
        return self._embedding.table_spec.shape_of(self.name)

    def numpy(self) -> np.ndarray:
        """Returns a copy of the values, float32; within a fit, those of all ranks."""
        return self._embedding.tables.whole(self._embedding.place, self.name)

    def state(self) -> np.ndarray:
        """Returns a copy of the values, or a reference to where ranks have written them; `assign` takes both."""
        return self._embedding.tables.state(self._embedding.place, self.name)

    def assign(self, value: Any) -> None:
        """Gives it values, or those that a reference tells of.

        Raises:
            UnsupportedError: The table is divided over ranks now.
        """
        self._embedding.assign_tables({self.name: value})


@keras.saving.register_keras_serializable(package="elephant")
class ShardedEmbedding(keras.layers.Layer):
    """Turns ids into rows of a table that may be larger than one worker's memory.

    In a synchronous fit each worker has a part of the rows, in the memory of its host, and serves it to the others.
    A step gets the rows that its batch names, and sends their gradients back; each touched row is updated once, with
    the sum over all workers' rows, by an optimizer of the table's own. Rows that no batch names cost nothing. In one
    process, as in plain Keras, it has all rows.

    The table is none of the model's weights: ``count_params``, ``get_weights`` and gradient clipping know nothing of
    it. Models save it, and load it.

    Args:
        input_dim: Rows of the table: ids are whole numbers from zero to ``input_dim - 1``.
        output_dim: Values of a row.
        num_hash_buckets: Rows of the table, in place of ``input_dim``: ids are any 64-bit integers, or on TensorFlow
            strings, of which each is hashed to a row, and several may have the same.
        optimizer: ``"adagrad"`` and ``"sgd"`` update a row as Keras' optimizers of these names do;
            ``"rowwise_adagrad"`` keeps one number for each row, where Adagrad keeps as many as the row has;
            ``"lazy_adam"`` is Adam for the rows that a step touches.
        learning_rate: Of that optimizer.
        embeddings_initializer: ``"uniform"``, ``"normal"``, ``"zeros"``, ``"ones"``, or
            `keras.initializers.RandomUniform`, ``RandomNormal``, ``TruncatedNormal`` or ``Constant``. The first rows do
            not depend on the number of workers.
        combiner: ``"sum"`` or ``"mean"`` makes one row of the ids along the last axis, as of a bag of words;
            ``"sqrtn"`` divides their sum by the square root of how many there are; None gives each its own.
        mask_value: An id that stands for none, such as what sequences are padded with: its row is zeros, has no
            gradient, and does not count in a mean. None has no such id.
        path: A folder that the driver and all workers reach by this absolute path or URL. The workers of a fit write
            their parts of the table there, for each state that the fit could go on from and at its end, and models
            read the rows there. None sends the whole table to the driver, which must have the memory for it.
        seed: Of the first rows; None draws one, which `keras.utils.set_random_seed` determines.

    Input shape: ids of shape (rows, ...), integers or strings.
    Output shape: (rows, ..., output_dim), without the last axis of the ids where there is a combiner.

    Raises:
        ConfigurationError: An argument cannot be used.
        DataError: In a step: an id is none of the table's, or no whole number.

    Examples:
        >>> import numpy as np
        >>> layer = ShardedEmbedding(1000, 8, seed=1)
        >>> tuple(layer(np.array([[3, 999], [0, 3]])).shape)
        (2, 2, 8)
        >>> bag = ShardedEmbedding(num_hash_buckets=100, output_dim=4, combiner="mean", mask_value=-1)
        >>> tuple(bag(np.array([[7, 10**15, -1]])).shape)
        (1, 4)
    """

    def __init__(
        self,
        input_dim: int | None = None,
        output_dim: int | None = None,
        *,
        num_hash_buckets: int | None = None,
        optimizer: str = "adagrad",
        learning_rate: float = 0.01,
        embeddings_initializer: Any = "uniform",
        combiner: str | None = None,
        mask_value: Any = None,
        path: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        # Ids that come as floats would be other ones in 16 bits.
        super().__init__(autocast=False, **kwargs)
        _check(input_dim, output_dim, num_hash_buckets, optimizer, learning_rate, combiner)
        self.input_dim = input_dim
        self.output_dim = int(output_dim or 0)
        self.num_hash_buckets = num_hash_buckets
        self.optimizer = optimizer
        self.learning_rate = float(learning_rate)
        self.embeddings_initializer = embeddings_initializer
        self.combiner = combiner
        self.mask_value = mask_value
        self.path_of_table = None if path is None else os.fspath(path)
        if path is not None and _ANYWHERE.match(os.fspath(path)) is None:
            raise ConfigurationError(
                f"path: expected an absolute path or a URL, at which the driver and all workers see the same folder. "
                f"Received: {os.fspath(path)!r}."
            )
        self.seed = random.randint(1, 10**9) if seed is None else seed
        self.supports_jit = current().compiles_host_calls
        self._contents = _Contents()
        # The gradient has to flow to a variable, and the table is none.
        self._anchor = self.add_weight(shape=(), initializer="zeros", autocast=False, name="anchor")
        self.built = True

    @property
    def table_spec(self) -> TableSpec:
        """Form of the table."""
        draw, drawn = initializer_of(self.embeddings_initializer)
        return TableSpec(
            num_rows=int(self.input_dim or self.num_hash_buckets or 0),
            width=self.output_dim,
            rule=self.optimizer,
            learning_rate=self.learning_rate,
            draw=draw,
            drawn=drawn,
            seed=self.seed,
        )

    @functools.cached_property
    def table_variables(self) -> tuple[TableVariable, ...]:
        """All rows of the table, and what its optimizer remembers of them."""
        return tuple(TableVariable(self, name) for name in (ROWS, *self.table_spec.slots))

    @property
    def tables(self) -> Tables:
        """Tables of which this layer's is the one at `place`: its own, or within a fit those of the model."""
        contents = self._contents
        if contents.tables is None:
            contents.tables, contents.place = LocalTables([self.table_spec], [contents.arrays]), 0
            contents.arrays = {}
        return contents.tables

    @property
    def place(self) -> int:
        """Place of this layer's table among `tables`."""
        return self._contents.place

    @property
    def anchor(self) -> Any:
        """Tensor of shape () through which the gradient flows back, unless the layer is frozen."""
        value = keras.ops.multiply(self._anchor, 1.0)
        return value if self.trainable else keras.ops.stop_gradient(value)

    def divide(self, tables: Tables | None, place: int = 0) -> None:
        """Looks rows up in the tables of a fit from now on; None ends that, and leaves the table as it is drawn."""
        self._contents.tables, self._contents.arrays, self._contents.place = tables, {}, place

    def own_arrays(self) -> dict[str, np.ndarray]:
        """Returns rows and slots of the table by name, or references to them; nothing of one that is as it is drawn."""
        if self._contents.tables is None:
            return self._contents.arrays
        if isinstance(self._contents.tables, LocalTables):
            return self._contents.tables.own_arrays(self.place)
        return {one.name: one.state() for one in self.table_variables}

    def assign_tables(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Gives the table rows, or slots, by name: values, or references to where ranks have written them.

        Raises:
            UnsupportedError: The table is divided over ranks now.
            ConfigurationError: An array has another shape.
        """
        if not isinstance(self._contents.tables, LocalTables | None):
            raise UnsupportedError(
                f"{self.name}: expected no assignment to a ShardedEmbedding within a fit, whose workers have parts of "
                "its table each. Received: one, as by a callback. Do it before the fit, or after it."
            )
        copies = {}
        for name, array in arrays.items():
            copies[name] = np.array(array, None if StoredTable.from_array(array) else np.float32)
            if shape_of(copies[name]) != self.table_spec.shape_of(name):
                raise ConfigurationError(
                    f"{self.name}: expected {name} of shape {self.table_spec.shape_of(name)}. Received: "
                    f"{shape_of(copies[name])}."
                )
        given = {**self.own_arrays(), **copies}
        self._contents.tables, self._contents.arrays = None, given

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        shape = tuple(input_shape) if self.combiner is None else tuple(input_shape)[:-1]
        return (*shape, self.output_dim)

    def compute_output_spec(self, ids: Any, **kwargs: Any) -> keras.KerasTensor:
        # Not by a call: nothing is to be looked up.
        is_narrow = current().count_dtype == "float32" and not current().is_wide()
        if self.num_hash_buckets is not None and is_narrow and str(ids.dtype) in ("int64", "uint64"):
            raise ConfigurationError(
                f"{self.name}: expected ids of 32 bits on {current().title}, which cuts wider ones off before they are "
                f"hashed. Received: an input of {ids.dtype}. Set jax_enable_x64, or give the input dtype='int32'."
            )
        return keras.KerasTensor(self.compute_output_shape(ids.shape), dtype=self.compute_dtype)

    def call(self, ids: Any) -> Any:
        return rows_together([self], [ids])[0]

    def get_config(self) -> dict[str, Any]:
        initializer = self.embeddings_initializer
        if hasattr(initializer, "get_config"):
            initializer = keras.initializers.serialize(initializer)
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "num_hash_buckets": self.num_hash_buckets,
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
            "embeddings_initializer": initializer,
            "combiner": self.combiner,
            "mask_value": self.mask_value,
            "path": self.path_of_table,
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ShardedEmbedding:
        initializer = config["embeddings_initializer"]
        if isinstance(initializer, dict):
            config = {**config, "embeddings_initializer": keras.initializers.deserialize(initializer)}
        return cls(**config)

    def save_own_variables(self, store: Any) -> None:
        """Puts the table beside what Keras saves of a layer, unless its seed tells all of it."""
        super().save_own_variables(store)
        for name, array in self.own_arrays().items():
            store[name] = array

    def load_own_variables(self, store: Any) -> None:
        """Takes back what `save_own_variables` has saved."""
        saved = {name: store[name] for name in store.keys()}  # it iterates over numbers
        arrays = {one.name: np.array(saved.pop(one.name)) for one in self.table_variables if one.name in saved}
        super().load_own_variables(saved)
        self.assign_tables(arrays)

    def known(self, ids: np.ndarray) -> _Known:
        """Returns which rows of the table some ids are.

        Raises:
            DataError: An id is none of the table's, or no whole number.
        """
        present, found = None, ids.reshape(-1)
        if self.mask_value is not None:
            missing = self.mask_value.encode() if isinstance(self.mask_value, str) else self.mask_value
            present = np.asarray(ids != missing)
            found = ids[present]
        if found.dtype.kind == "f":
            whole = found.astype(np.int64)
            if (whole != found).any():
                raise DataError(f"{self.name}: expected whole numbers as ids. Received: {found[whole != found][0]}.")
            found = whole
        if self.num_hash_buckets is not None:
            return _Known(hashed(found, self.num_hash_buckets), ids.shape, present)
        if found.dtype.kind not in "iu":
            raise DataError(
                f"{self.name}: expected integers as ids. Received: {found.dtype}. Pass num_hash_buckets for strings."
            )
        found = found.astype(np.int64)
        out = found[(found < 0) | (found >= int(self.input_dim or 0))]
        if len(out):
            raise DataError(
                f"{self.name}: expected ids from 0 to {int(self.input_dim or 0) - 1:,}. Received: {out[0]}"
                f"{f' and {len(out) - 1} more outside of these' if len(out) > 1 else ''}. Make the table larger, give "
                "mask_value the id that stands for none, or pass num_hash_buckets."
            )
        return _Known(found, ids.shape, present)


class _Known(NamedTuple):
    """Ids of a feature, as rows of its table.

    Args:
        rows: int64 of shape (ids,), of those that are there.
        shape: Of all ids.
        present: Which are there, bool of that shape; None is all.
    """

    rows: np.ndarray
    shape: tuple[int, ...]
    present: np.ndarray | None

    def combined(self, values: np.ndarray, combiner: str | None) -> np.ndarray:
        """Returns the layer's output for the values of the rows."""
        every = values
        if self.present is not None:
            every = np.zeros((math.prod(self.shape), values.shape[1]), np.float32)
            every[self.present.reshape(-1)] = values
        every = every.reshape(*self.shape, values.shape[1])
        if combiner is None:
            return every
        return every[..., 0, :] if self.shape[-1] == 1 else every.sum(axis=-2) / self._divisors(combiner)

    def gradients_of(self, upstream: np.ndarray, combiner: str | None) -> np.ndarray:
        """Returns the gradients of the values for those of the output."""
        width = upstream.shape[-1]
        every = upstream
        if combiner is not None and self.shape[-1] != 1:
            every = np.broadcast_to((upstream / self._divisors(combiner))[..., None, :], (*self.shape, width))
        every = every.reshape(-1, width)
        return every if self.present is None else every[self.present.reshape(-1)]

    def _divisors(self, combiner: str) -> np.ndarray:
        """Returns a divisor of the sum of each bag, one where it is empty: float32, for the bags' shape and (1,)."""
        counts = np.float32(self.shape[-1]) if self.present is None else self.present.sum(axis=-1, keepdims=True)
        counts = np.maximum(counts, 1).astype(np.float32)
        if combiner == "sum":
            return np.ones_like(counts)
        return counts if combiner == "mean" else np.sqrt(counts)


def rows_together(embeddings: Sequence[ShardedEmbedding], ids: Sequence[Any]) -> list[Any]:
    """Puts one lookup for several features into a step, and one for their gradients.

    Args:
        embeddings: Those of the features' tables; features may share one.
        ids: Tensors of the features.
    """
    learning = [place for place, embedding in enumerate(embeddings) if embedding.trainable]

    def look_up(anchor: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        rows: list[Any] = [None] * len(embeddings)
        for tables, places in _by_tables(embeddings, range(len(embeddings))):
            with tables.noting_error():
                known = {place: embeddings[place].known(np.asarray(arrays[place])) for place in places}
                found = tables.look_up([(embeddings[place].place, known[place].rows) for place in places])
            for place, values in zip(places, found, strict=True):
                rows[place] = known[place].combined(values, embeddings[place].combiner)
        return rows

    def push(anchor: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        given, upstream = arrays[: len(embeddings)], arrays[len(embeddings) :]
        for tables, places in _by_tables(embeddings, learning):
            if isinstance(tables, LocalTables) and api.current_collective().world_size > 1:
                name = embeddings[places[0]].name
                raise UnsupportedError(
                    f"{name}: expected a ShardedEmbedding in a synchronous fit, which divides its table. Received: a "
                    "loop of one's own, or a fit of another kind, on several workers. Use KerasEstimator with "
                    "mode='synchronous', or keras.layers.Embedding."
                )
            gradients = []
            for place in places:
                embedding = embeddings[place]
                known = embedding.known(np.asarray(given[place]))
                values = known.gradients_of(np.asarray(upstream[place], np.float32), embedding.combiner)
                gradients.append((embedding.place, known.rows, values))
            tables.push(gradients)
        return [np.zeros(one.shape, one.dtype) for one in (anchor, *given) if one.dtype.kind == "f"]

    # A tensor of the values, and not the variables.
    anchor = keras.ops.stack([embedding.anchor for embedding in embeddings])
    specs = [
        (embedding.compute_output_shape(one.shape), "float32") for embedding, one in zip(embeddings, ids, strict=True)
    ]
    found = current().host_op(look_up, push, [anchor, *ids], specs)
    return [keras.ops.cast(rows, embedding.compute_dtype) for embedding, rows in zip(embeddings, found, strict=True)]


class _Contents:
    """A layer's table, in a thing that Keras does not look into."""

    def __init__(self) -> None:
        self.tables: Tables | None = None
        self.place = 0
        # Of a table of the layer's own, until somebody looks rows up; those that are missing are as they are drawn.
        self.arrays: dict[str, np.ndarray] = {}


def _check(
    input_dim: int | None,
    output_dim: int | None,
    num_hash_buckets: int | None,
    optimizer: str,
    learning_rate: float,
    combiner: str | None,
) -> None:
    if (input_dim is None) == (num_hash_buckets is None):
        raise ConfigurationError(
            "ShardedEmbedding: expected either input_dim or num_hash_buckets, the number of rows. Received: "
            f"input_dim={input_dim!r} and num_hash_buckets={num_hash_buckets!r}."
        )
    sizes = {"input_dim": input_dim, "num_hash_buckets": num_hash_buckets, "output_dim": output_dim}
    for name, size in sizes.items():
        if (size is None and name == "output_dim") or (size is not None and (int(size) != size or size < 1)):
            raise ConfigurationError(f"{name}: expected a whole number of 1 or more. Received: {size!r}.")
    if optimizer not in RULES:
        raise ConfigurationError(f"optimizer: expected one of {', '.join(RULES)}. Received: {optimizer!r}.")
    if not learning_rate > 0:
        raise ConfigurationError(f"learning_rate: expected a number above zero. Received: {learning_rate!r}.")
    if combiner not in _COMBINERS:
        raise ConfigurationError(f"combiner: expected None, 'sum', 'mean' or 'sqrtn'. Received: {combiner!r}.")


def _by_tables(embeddings: Sequence[ShardedEmbedding], places: Iterable[int]) -> list[tuple[Tables, list[int]]]:
    """Returns the places of those layers together whose tables are looked up together: all, within a fit."""
    found: dict[int, tuple[Tables, list[int]]] = {}
    for place in places:
        tables = embeddings[place].tables
        found.setdefault(id(tables), (tables, []))[1].append(place)
    return list(found.values())


def hashed(ids: np.ndarray, num_buckets: int) -> np.ndarray:
    """Returns a bucket for each id, the same in every process and version: int64 of shape (ids,).

    Args:
        ids: Integers, or strings as text or bytes; shape (ids,).

    >>> hashed(np.array([1, 2, -1, 1]), 1000).tolist()
    [465, 110, 936, 465]
    >>> hashed(np.array(["a", "b", "a"]), 1000).tolist()
    [928, 668, 928]
    """
    if ids.dtype.kind in "iu":
        with np.errstate(over="ignore"):
            mixed = ids.astype(np.uint64) + _GOLDEN
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
            mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
            mixed ^= mixed >> np.uint64(31)
    else:
        unique, places = np.unique(ids.astype(object), return_inverse=True)
        texts = (one if isinstance(one, bytes) else str(one).encode() for one in unique)
        digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
        mixed = np.frombuffer(digests, "<u8")[places]
    return (mixed % np.uint64(num_buckets)).astype(np.int64)


def sharded_embeddings(model: keras.Model) -> list[ShardedEmbedding]:
    """Returns a model's layers of this kind, each once."""
    found = {id(layer): layer for layer in flat_layers(model) if isinstance(layer, ShardedEmbedding)}
    return list(found.values())


@contextlib.contextmanager
def rows_as_zeros(model: keras.Model) -> Iterator[None]:
    """Has a model's tables give zeros for a ``with`` block: none is made for a mere look at what it computes."""
    contents = [(layer, layer._contents) for layer in sharded_embeddings(model)]
    for layer, _ in contents:
        layer._contents = _Contents()
        layer.divide(ZeroTables([layer.table_spec]))
    try:
        yield
    finally:
        for layer, own in contents:
            layer._contents = own


def table_variables(model: keras.Model) -> list[TableVariable]:
    """Returns the tables of a model's layers, and what their optimizers remember."""
    return [variable for layer in sharded_embeddings(model) for variable in layer.table_variables]
