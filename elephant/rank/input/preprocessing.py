"""The user's functions on batches: from raw columns to what the model takes, and from one training batch to another.

Both run in the training process, where Keras and its backend are at hand. What they are
given and what they may return is in ``docs/preprocessing.md``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from elephant.data.ragged import Values
from elephant.data.schema import RAGGED, SCALAR, DataSchema, Field, Nest, RowSpec, TensorSpec, pack
from elephant.data.shard import Shard
from elephant.errors import DataError, SchemaError, UnsupportedError
from elephant.rank.input.user_batches import as_array, fitted, label_type, natural_shapes, user_array

RowShapes = Mapping[str, Sequence[int]]

# What random numbers are for. The feed's own draws have the numbers below (`elephant.data.epoch_plan`).
PREPARE, AUGMENT, VALIDATE = 11, 12, 13


def generator(purpose: int, *place: int) -> np.random.Generator:
    """Returns the random generator of one call of a user's function."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((purpose, *place))))


class Preprocessing:
    """Makes of rows what the model takes, with a function of the user's.

    Args:
        function: From a batch, a dictionary of arrays by name, to one of what the model takes; or from a batch and a
            `numpy.random.Generator`.
        raw_schema: What rows hold before. Its nest ``x`` is a dictionary by the user's names.
        row_shapes: Natural shape of a raw row of each array column, by role.

    Example:
        >>> from elephant.data.schema import DENSE, SCALAR
        >>> raw = DataSchema(inputs=(Field("features", ("x",), "float64", SCALAR),), x={"x": 0})
        >>> target = DataSchema(inputs=(Field("features", ("x",), "float32", DENSE, (1,)),))
        >>> halved = Preprocessing(lambda batch: batch["x"] / 2, raw, target, ["numbers"], {})
        >>> halved([np.array([1.0, 3.0])], generator(PREPARE, 0))[0].tolist()
        [[0.5], [1.5]]
    """

    def __init__(
        self,
        function: Callable[..., Any],
        raw_schema: DataSchema,
        target_schema: DataSchema,
        names: Sequence[str],
        row_shapes: RowShapes,
        *,
        title: str = "preprocessing",
    ) -> None:
        self._function = function
        self._takes_generator = takes_generator(function)
        self._raw_schema = raw_schema
        self._target_schema = target_schema
        self._names = input_names(target_schema, names)
        empty = Shard(None, raw_schema, row_shapes)
        self._shapes = [empty.row_shape(field) for field in raw_schema.batch_fields]
        self._title = title
        self._settled_schema: DataSchema | None = None

    @property
    def schema(self) -> DataSchema:
        """Schema of the model's input, with nothing open; known after the first batch, or when `settle` was told."""
        if self._settled_schema is None:
            raise ValueError(f"{self._title}: expected a batch first.")
        return self._settled_schema

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Natural shape of a row of each column of the schema, by role."""
        return natural_shapes(self.schema.batch_fields)

    def settle(self, schema: DataSchema) -> None:
        """Tells what the model takes: what other ranks have found."""
        self._settled_schema = schema

    def __call__(self, values: Sequence[Values], rng: np.random.Generator) -> tuple[Values, ...]:
        """Returns the rows as the model takes them, one value per column of the schema's ``batch_fields``.

        Args:
            values: One per column of the raw rows' ``batch_fields``.

        Raises:
            DataError: What the function returned does not fit the model.
            Exception: What the function raises.
        """
        batch, num_rows = self._batch(values)
        result = self._function(dict(batch), rng) if self._takes_generator else self._function(dict(batch))
        given = self._given(result, batch)
        merged = {**batch, **given}
        fields = (self._settled_schema or self._target_schema).batch_fields
        columns = [self._column(place, field, merged, given, num_rows) for place, field in enumerate(fields)]
        if self._settled_schema is None:
            self._settled_schema = _with_fields(self._target_schema, [field for field, _ in columns])
        return tuple(made for _, made in columns)

    def _batch(self, values: Sequence[Values]) -> tuple[dict[str, Any], int]:
        """Returns a batch by the user's names, and how many rows it has."""
        fields, inputs = self._raw_schema.batch_fields, len(self._raw_schema.inputs)
        columns = zip(fields, self._shapes, values, strict=True)
        arrays = [user_array(field, shape, value) for field, shape, value in columns]
        batch: dict[str, Any] = pack(self._raw_schema.x, arrays)
        batch.update({field.columns[0]: array for field, array in zip(fields[inputs:], arrays[inputs:], strict=True)})
        return batch, len(arrays[0])

    def _given(self, result: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns by name what the function has returned."""
        names = ", ".join(self._names)
        single = len(self._names) == 1 and result is not None and not isinstance(result, tuple)
        given = result if isinstance(result, Mapping) else {self._names[0]: result} if single else None
        if given is None:
            received = "None" if result is None else f"an object of type {type(result).__name__}"
            raise SchemaError(
                f"{self._title}: expected a dictionary of arrays by the names of the model's inputs ({names})"
                f"{', or one array' if len(self._names) == 1 else ''}. Received: {received}."
            )
        columns = {*batch, *(name for field in self._target_schema.batch_fields for name in field.columns)}
        unknown = [name for name in given if name not in columns and name not in self._names]
        if unknown:
            raise SchemaError(
                f"{self._title}: expected a dictionary of the model's inputs ({names}) and of columns "
                f"({', '.join(sorted(columns))}). Received: {', '.join(map(repr, unknown))} in it."
            )
        return given

    def _column(
        self, place: int, field: Field, merged: Mapping[str, Any], given: Mapping[str, Any], num_rows: int
    ) -> tuple[Field, Values]:
        name = self._name(place)
        array = as_array(self._value(field, name, merged, given))
        first_label = len(self._target_schema.inputs)
        first_weight = first_label + len(self._target_schema.labels)
        if place >= first_weight and field.kind == SCALAR:
            # A function may make several weights of one.
            field = replace(field, shape=() if array.shape[1:] in ((), (1,)) else None)
        elif place >= first_label and self._settled_schema is None:
            # What a label looks like is for the function, and for the loss, to say.
            shape = None if array.ndim == 1 and field.kind != RAGGED else field.shape
            field = replace(field, shape=shape, dtype=label_type(array, _floatx()))
        return fitted(field, array, num_rows, f"{self._title}: {name}")

    def _value(self, field: Field, name: str, merged: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        if name in given:
            return given[name]
        if any(column not in merged for column in field.columns):
            raise SchemaError(
                f"{self._title}: expected it to return {name!r}. "
                f"Received: {', '.join(map(repr, given)) or 'an empty dictionary'}."
            )
        if len(field.columns) == 1:
            return merged[field.columns[0]]
        return np.stack([as_array(merged[column]) for column in field.columns], axis=1)

    def _name(self, place: int) -> str:
        return self._names[place] if place < len(self._names) else self._target_schema.batch_fields[place].columns[0]


def takes_generator(function: Callable[..., Any]) -> bool:
    """Returns whether a function takes a random generator after the batch.

    >>> takes_generator(lambda batch, rng: batch), takes_generator(lambda batch, size=3: batch)
    (True, False)
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (positional[1].default is positional[1].empty or positional[1].name == "rng")


def input_names(schema: DataSchema, names: Sequence[str]) -> list[str]:
    """Returns the names of the model's inputs in the user's functions."""
    if names:
        return list(names)
    if isinstance(schema.x, Mapping):
        by_place = {place: name for name, place in schema.x.items() if isinstance(place, int)}
        return [by_place.get(place, field.columns[0]) for place, field in enumerate(schema.inputs)]
    return [field.columns[0] if len(field.columns) == 1 else field.role for field in schema.inputs]


def augmentation(
    function: Callable[..., Any], schema: DataSchema, row_shapes: RowShapes, names: Sequence[str]
) -> Preprocessing:
    """Returns the function that makes other training batches of training batches.

    Args:
        row_shapes: Natural shape of a row of each array column, by role.
    """
    keys = input_names(schema, names)
    if len(schema.inputs) == 1 and len(schema.inputs[0].columns) == 1:
        (column,) = schema.inputs[0].columns
        function, keys = _by_either_name(function, keys[0], column), [column]
    nest: Nest = {key: place for place, key in enumerate(keys)}
    named = tuple(replace(field, columns=(key,)) for field, key in zip(schema.inputs, keys, strict=True))
    seen = replace(schema, inputs=named, x=nest, validation=None, piece=None)
    made = Preprocessing(function, seen, replace(schema, inputs=named), names, row_shapes, title="augmentation")
    made.settle(_with_fields(seen, [_closed(field, row_shapes) for field in seen.batch_fields]))
    return made


class _Batch(dict[str, Any]):
    """A batch whose one input is found by the input's own name as well, as in what `preprocessing` returns."""

    def __init__(self, batch: Mapping[str, Any], name: str, column: str) -> None:
        super().__init__(batch)
        self._name, self._column = name, column

    def __missing__(self, key: str) -> Any:
        if key != self._name:
            raise KeyError(key)
        return self[self._column]


def _by_either_name(function: Callable[..., Any], name: str, column: str) -> Callable[..., Any]:
    def named(batch: Mapping[str, Any], *rng: np.random.Generator) -> Any:
        return function(_Batch(batch, name, column), *rng)

    # Whether the function takes a generator is asked of its signature.
    named.__wrapped__ = function  # type: ignore[attr-defined]
    return named


def _closed(field: Field, row_shapes: RowShapes) -> Field:
    """Returns a field whose shape says what all rows have."""
    shape = field.row_shape(row_shapes.get(field.role, ()))
    return replace(field, shape=(None, *shape) if field.kind == RAGGED else shape)


def model_rows(target_schema: DataSchema) -> RowSpec:
    """Returns the spec of one row of the model's input, before any worker has preprocessed one.

    Raises:
        UnsupportedError: The model does not tell.
    """
    for field in target_schema.inputs:
        if field.shape is None:
            raise UnsupportedError(
                "preprocessing: expected a model whose inputs are known, in asynchronous modes. Received: a model "
                "that is not built. Give it keras.Input, call model.build(input_shape) in the function that makes it, "
                "or use mode='synchronous'."
            )
    return RowSpec(
        target_schema.x,
        tuple(TensorSpec(field.shape or (), field.dtype, field.sparse_tensor) for field in target_schema.inputs),
    )


def schema_text(schema: DataSchema) -> str:
    """Returns the columns of batches as ranks tell them to each other."""
    return json.dumps([asdict(field) for field in schema.batch_fields])


def schema_from_text(text: str, target_schema: DataSchema) -> DataSchema:
    """Reads the form of `schema_text`."""
    fields = [{**form, "columns": tuple(form["columns"]), "shape": _tuple(form["shape"])} for form in json.loads(text)]
    return _with_fields(target_schema, [Field(**form) for form in fields])


def require_equal_fields(own_schema: DataSchema, other_schema: DataSchema) -> None:
    """Raises DataError unless two ranks' functions have made the same of their rows."""
    for own, other in zip(own_schema.batch_fields, other_schema.batch_fields, strict=True):
        if own != other:
            raise DataError(
                f"preprocessing: expected rows of {own.title} to become the same on all workers. Received: shape "
                f"{own.shape} and type {own.dtype} on one, {other.shape} and {other.dtype} on another."
            )


def _with_fields(schema: DataSchema, fields: Sequence[Field]) -> DataSchema:
    inputs, labels = len(schema.inputs), len(schema.labels)
    return replace(
        schema,
        inputs=tuple(fields[:inputs]),
        labels=tuple(fields[inputs : inputs + labels]),
        weights=tuple(fields[inputs + labels :]),
    )


def _floatx() -> str:
    import keras

    return "float64" if keras.backend.floatx() == "float64" else "float32"


def _tuple(value: Sequence[int | None] | None) -> tuple[int | None, ...] | None:
    return None if value is None else tuple(value)
