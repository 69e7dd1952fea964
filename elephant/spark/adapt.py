"""`elephant.adapt`: Keras' preprocessing layers learn from a whole DataFrame, on the executors that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)
from pyspark.sql.types import ArrayType, DateType, StringType, TimestampNTZType, TimestampType

from elephant.backends.keras_private import (
    built_shape,
    flat_layers,
    has_given_vocabulary,
    inbound_nodes,
    input_structure,
    lookup_of,
)
from elephant.cluster.spark_job import described
from elephant.data.schema import DENSE, FEATURES, RAGGED, TEXT, Field
from elephant.errors import ConfigurationError, SchemaError, brief_errors
from elephant.spark.columns.column_statistics import (
    TokenCounts,
    moments,
    no_rows,
    sorted_sample,
    token_counts,
    token_counts_of_layer,
)
from elephant.spark.columns.column_types import (
    depth_of,
    find_column,
    is_scalar,
    quoted,
    raw_field,
    vector_kind,
    wrong_type,
)

Columns = str | Sequence[str]

_PARAM = "columns"


@brief_errors
def adapt(
    model: keras.Model | keras.layers.Layer,
    frame: DataFrame,
    columns: Columns | Mapping[str, Columns] = "features",
) -> None:
    """Adapts preprocessing layers to all rows of a DataFrame, as their own ``adapt`` does to an array.

    Executors count and sum what is in their partitions; only the sums come to the driver. Layers:
    Normalization, Discretization, StringLookup, IntegerLookup and TextVectorization. What they
    learn is what ``layer.adapt`` learns of the same rows in one process: vocabularies the same to the last token,
    equal counts in Keras' order; means and variances within the rounding of float32; boundaries of
    bins those of one array of all values.

    Args:
        model: One such layer; or a model, of which all are adapted that an input goes into directly, but
            not those that were given what they need to know. Adapt before the model goes into an estimator.
        frame: The rows.
        columns: Of a layer, or of a model with one input: one column, or several that make one vector.
            Of a model with several inputs: columns by the name of the input, or a list in their order.

    Raises:
        ConfigurationError: There is nothing to adapt, or the layer was given what it would learn.
        SchemaError: A column is missing, or of a type that the layer does not take.
        DataError: A null, or no rows.

    Examples:
        >>> words = keras.layers.TextVectorization(max_tokens=20_000)  # doctest: +SKIP
        >>> elephant.adapt(words, reviews, "text")  # doctest: +SKIP
        >>> elephant.adapt(model, houses, {"place": "city", "numbers": ["rooms", "age"]})  # doctest: +SKIP
    """
    if not isinstance(model, keras.Model):
        if not isinstance(model, _ADAPTABLE):
            raise ConfigurationError(f"adapt: expected {_LAYERS}, or a model with such. Received: {model!r}.")
        if isinstance(columns, Mapping):
            raise ConfigurationError(f"columns: expected a column, or a list of columns. Received: {columns!r}.")
        if _is_given(model):
            raise ConfigurationError(
                f"adapt: expected a layer that is to learn. Received: {model.name!r}, which was made with "
                "what it needs to know. Make it without a vocabulary, bin_boundaries, or mean and variance."
            )
        _adapt_layer(model, frame, _listed(columns), None)
        return
    found = list(_layers_of(model, columns))
    if not found:
        raise ConfigurationError(
            f"adapt: expected a model in which an input goes directly into {_LAYERS}. Received: {model.name!r} "
            "without any that is to learn."
        )
    for layer, names, shape in found:
        _adapt_layer(layer, frame, names, shape)


_ADAPTABLE = (
    keras.layers.Normalization,
    keras.layers.Discretization,
    keras.layers.StringLookup,
    keras.layers.IntegerLookup,
    keras.layers.TextVectorization,
)
_LAYERS = "Normalization, Discretization, StringLookup, IntegerLookup or TextVectorization"


def _is_given(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer was made with what it would learn."""
    if isinstance(layer, keras.layers.Normalization):
        return layer.input_mean is not None
    if isinstance(layer, keras.layers.Discretization):
        return layer.num_bins is None
    return has_given_vocabulary(layer)


def _layers_of(
    model: keras.Model, columns: Columns | Mapping[str, Columns]
) -> Iterator[tuple[keras.layers.Layer, list[str], tuple[int | None, ...]]]:
    """Yields the layers to adapt, with their columns and the shape of their input's rows."""
    inputs = list(getattr(model, "inputs", None) or [])
    by_input = {
        id(tensor): names for tensor, names in zip(inputs, _columns_of_inputs(model, inputs, columns), strict=True)
    }
    for layer in flat_layers(model):
        if not isinstance(layer, _ADAPTABLE) or _is_given(layer):
            continue
        fed = [tensor for node in inbound_nodes(layer) for tensor in node.input_tensors if id(tensor) in by_input]
        if fed:
            yield layer, by_input[id(fed[0])], tuple(fed[0].shape[1:])


def _columns_of_inputs(
    model: keras.Model, inputs: Sequence[Any], columns: Columns | Mapping[str, Columns]
) -> list[list[str]]:
    structure = input_structure(model)
    names = sorted(structure) if isinstance(structure, dict) else [str(tensor.name) for tensor in inputs]
    if isinstance(columns, Mapping):
        if set(columns) != set(names):
            raise SchemaError(
                f"columns: expected columns for each of the inputs {', '.join(names)}. "
                f"Received: columns for {', '.join(columns)}."
            )
        return [_listed(columns[name]) for name in names]
    if len(names) == 1:
        return [_listed(columns)]
    if isinstance(columns, str) or len(columns) != len(names):
        raise SchemaError(
            f"columns: expected a column for each of the inputs {', '.join(names) or '(none)'}. Received: {columns!r}."
        )
    return [[column] for column in columns]


def _adapt_layer(
    layer: keras.layers.Layer, frame: DataFrame, names: list[str], shape: tuple[int | None, ...] | None
) -> None:
    with described(frame.sparkSession, f"elephant adapt: {layer.name}"):
        if isinstance(layer, keras.layers.Normalization):
            _adapt_normalization(layer, frame, names, shape)
        elif isinstance(layer, keras.layers.Discretization):
            _adapt_discretization(layer, frame, names)
        elif isinstance(layer, keras.layers.TextVectorization):
            _adapt_text(layer, frame, names)
        else:
            _adapt_lookup(layer, frame, names)


def _adapt_normalization(
    layer: keras.layers.Normalization, frame: DataFrame, names: list[str], shape: tuple[int | None, ...] | None
) -> None:
    field = _numbers(frame, names, "numbers, for Normalization")
    known = shape if shape is not None else tuple(built_shape(layer)[1:]) if layer.built else None
    if known is not None and None not in known:
        # Flat rows take the shape of the layer's input.
        kind = DENSE if field.kind != "scalar" else field.kind
        field = Field(FEATURES, tuple(names), field.dtype, kind, known if kind == DENSE else None)
    found, axes = moments(frame, field, layer.axis)
    if not layer.built:
        kept = iter(found.mean.shape)
        places = {place + axes if place < 0 else place for place in layer.axis}
        layer.build(tuple(next(kept) if place in places else None for place in range(axes)))
    if tuple(layer.adapt_mean.shape) != found.mean.shape:
        raise SchemaError(
            f"columns: expected rows of which layer {layer.name!r} keeps {tuple(layer.adapt_mean.shape)} means. "
            f"Received: {found.mean.shape} in {field.title}."
        )
    layer.adapt_mean.assign(found.mean)
    layer.adapt_variance.assign(found.variance)
    layer.finalize_state()


def _numbers(frame: DataFrame, names: list[str], expected: str) -> Field:
    """Returns the values of columns of numbers in their own types, or as vectors of doubles where they are several."""
    columns = [find_column(frame.schema, name, _PARAM) for name in names]
    if len(columns) > 1:
        return Field(FEATURES, tuple(names), "float64", vector_kind(columns, "float64", _PARAM))
    depth, element = depth_of(columns[0].dataType)
    if depth and isinstance(element, (DateType, TimestampType, TimestampNTZType)):
        return Field(FEATURES, tuple(names), "float64", RAGGED)
    field = raw_field(columns[0], FEATURES, _PARAM)
    if field.kind == TEXT:
        raise wrong_type(columns[0], _PARAM, expected)
    return field


def _adapt_discretization(layer: keras.layers.Discretization, frame: DataFrame, names: list[str]) -> None:
    sample = sorted_sample(frame, _numbers(frame, names, "numbers, for Discretization"), layer.epsilon)
    layer.reset_state()
    layer.update_state(sample)
    layer.finalize_state()


def _adapt_lookup(
    layer: keras.layers.StringLookup | keras.layers.IntegerLookup, frame: DataFrame, names: list[str]
) -> None:
    of_strings = isinstance(layer, keras.layers.StringLookup)
    wanted = "string" if of_strings else "bigint"
    parts = []
    for name in names:
        column = find_column(frame.schema, name, _PARAM)
        depth, element = depth_of(column.dataType)
        if of_strings != isinstance(element, StringType) or not (of_strings or is_scalar(element)):
            what = "strings, for StringLookup" if of_strings else "integers, for IntegerLookup"
            raise wrong_type(column, _PARAM, f"a column of {what}")
        cast = quoted(column).cast("array<" * depth + wanted + ">" * depth) if depth else quoted(column).cast(wanted)
        parts.append(_flat(cast, depth) if depth else F.array(cast))
    tokens = parts[0] if len(parts) == 1 else F.flatten(F.array(*parts))
    title = f"column{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
    _learn(layer, token_counts(frame, tokens, _limit(layer), title))


def _adapt_text(layer: keras.layers.TextVectorization, frame: DataFrame, names: list[str]) -> None:
    columns = [find_column(frame.schema, name, _PARAM) for name in names]
    kind = columns[0].dataType
    if len(columns) > 1 or not isinstance(kind.elementType if isinstance(kind, ArrayType) else kind, StringType):
        raise wrong_type(columns[-1], _PARAM, "one column of strings, for TextVectorization")
    of_layer = (type(layer), layer.get_config())
    lookup = lookup_of(layer)
    counts = token_counts_of_layer(frame, raw_field(columns[0], FEATURES, _PARAM), of_layer, _limit(lookup))
    _learn(lookup, counts)


def _limit(lookup: Any) -> int | None:
    """Returns how many tokens decide a vocabulary: as many as it holds, and the two that it does not learn."""
    return None if lookup.max_tokens is None else int(lookup.max_tokens) + 2


def _learn(lookup: Any, counts: TokenCounts) -> None:
    """Gives a lookup layer the counts of all rows, of which it makes its vocabulary."""
    if counts.num_rows == 0:
        raise no_rows("the DataFrame")
    lookup.reset_state()
    lookup.token_counts.insert(counts.tokens, counts.counts)
    if lookup.output_mode == "tf_idf":
        lookup.token_document_counts.insert(counts.tokens, counts.documents)
        lookup.num_documents.assign(counts.num_rows)
    lookup.finalize_state()


def _flat(column: Column, depth: int) -> Column:
    for _ in range(depth - 1):
        column = F.flatten(column)
    return column


def _listed(columns: Columns) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)
