"""What a model's outputs are compared with: columns of labels, its own inputs, and how much each row counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pyspark.sql.types import StringType, StructType

from elephant.data.nested import Nest, num_leaves, pack
from elephant.data.schema import LABEL, RAGGED, SCALAR, SPARSE, TEXT, WEIGHT, Field, role_of
from elephant.errors import SchemaError
from elephant.modeling.model_info import ModelFacts, OutputFacts
from elephant.spark.choice import ColumnChoice, Prepared, by_name
from elephant.spark.expressions import array, depth_of, find_column, integer_type, is_scalar, scalar, wrong_type


def prepare_labels(schema: StructType, facts: ModelFacts, choice: ColumnChoice) -> tuple[list[Prepared], Nest]:
    """Returns a column for each output that is compared with one, and how these are nested for Keras.

    An output that is compared with nothing gets the first label in the nest: Keras wants the structure whole.

    Raises:
        SchemaError: A column is missing or unusable, or the params do not fit the model's outputs.
    """
    param = "labelCol" if choice.labels is None else "labelCols"
    chosen, nest = chosen_labels(facts, choice)
    prepared = [
        _prepare_label(schema, output, facts.dtype, name, role_of(LABEL, position), param)
        for position, (output, name) in enumerate(chosen)
    ]
    return prepared, nest


def chosen_labels(facts: ModelFacts, choice: ColumnChoice) -> tuple[list[tuple[OutputFacts, str]], Nest]:
    """Returns the outputs that are compared with a column and its name, and how the labels are nested for Keras."""
    compared = [output for output in facts.outputs if output.needs_label]
    if choice.labels is not None:
        return _chosen_by_name(facts, choice.labels, [output.name for output in compared])
    if choice.label is None:
        return [], 0
    if facts.own_step and len(facts.outputs) > 1:
        return [(_unknown(facts), choice.label)], 0
    if len(compared) > 1:
        names = ", ".join(output.name for output in compared)
        raise SchemaError(
            f"labelCols: expected a column for each of the model's outputs {names}. Received: "
            f"labelCol={choice.label!r}. Set labelCols={{{compared[0].name!r}: 'column', ...}}."
        )
    if not compared and not facts.own_step:
        raise SchemaError(
            f"labelCol: expected None, because none of the model's outputs has a loss. Received: {choice.label!r}."
        )
    output = compared[0] if compared else facts.outputs[0]
    return [(output, choice.label)], pack(facts.y, [0] * len(facts.outputs))


def _chosen_by_name(
    facts: ModelFacts, labels: Mapping[str, str | Sequence[str]] | Sequence[str], required: Sequence[str]
) -> tuple[list[tuple[OutputFacts, str]], Nest]:
    names = [output.name for output in facts.outputs]
    if facts.own_step or not facts.knows_outputs:
        given = by_name(labels, [], "labelCols")
        if not set(given) <= set(names):
            # Keras, or the model's own step, knows what it compares them with.
            nest: Nest = tuple(range(len(given)))
            if isinstance(labels, Mapping):
                nest = {name: position for position, name in enumerate(given)}
            return [(_unknown(facts), columns[0]) for columns in given.values()], nest
        required = [] if facts.own_step else required
    given = by_name(labels, names, "labelCols", required=required)
    places = {name: position for position, name in enumerate(given)}
    chosen = [(facts.outputs[names.index(name)], columns[0]) for name, columns in given.items()]
    return chosen, pack(facts.y, [places.get(name, 0) for name in names])


def _unknown(facts: ModelFacts) -> OutputFacts:
    """Returns an output of which nothing is known."""
    return replace(facts.outputs[0], shape=None, label_shape=None)


def _prepare_label(schema: StructType, output: OutputFacts, floatx: str, name: str, role: str, param: str) -> Prepared:
    column = find_column(schema, name, param)
    if is_scalar(column.dataType):
        cast = scalar(column, integer_type(column.dataType) or floatx, param)
        return Prepared(Field(role, (name,), cast.dtype, SCALAR), cast.expression)
    depth, element = depth_of(column.dataType)
    if isinstance(element, StringType):
        raise wrong_type(column, param, "numbers, such as pyspark.ml.feature.StringIndexer makes of strings")
    sparse_classes = output.label_shape is None and integer_type(element) is not None
    cast = array(column, "int32" if sparse_classes and depth else floatx, param, ragged=_labels_differ(output, depth))
    shape = (None,) * depth if cast.kind == RAGGED and output.label_shape is None else output.label_shape
    return Prepared(Field(role, (name,), cast.dtype, cast.kind, shape), cast.expression)


def _labels_differ(output: OutputFacts, depth: int) -> bool:
    """Whether a label belongs to every element of a sequence of any length."""
    return depth > 0 and output.shape is not None and len(output.shape) > 1 and output.shape[0] is None


def nest_of_targets(inputs: Sequence[Field], x: Nest, facts: ModelFacts) -> Nest:
    """Returns which input every output of an autoencoder is compared with: of the same name, or of the same place.

    Args:
        inputs: The prepared inputs.
        x: How they are nested.
        facts: Tells the model's outputs.

    Raises:
        SchemaError: They cannot be told apart, or an input is none that a loss takes.
    """
    for field in inputs:
        if field.kind == TEXT or field.kind == SPARSE and field.sparse_tensor:
            raise SchemaError(
                f"labelCol: expected a column to compare the model's output with, because its input ({field.title}) "
                f"is {'text' if field.kind == TEXT else 'a sparse tensor'}. Received: none. Set labelCol or labelCols."
            )
    if not facts.knows_outputs:
        return x
    names, sources = [output.name for output in facts.outputs], [known.name for known in facts.inputs]
    needed = [output.name for output in facts.outputs if output.needs_label]
    if len(inputs) == 1:
        places = [0] * len(names)
    elif set(needed) <= set(sources):
        places = [sources.index(name) if name in sources else 0 for name in names]
    elif len(names) == num_leaves(x):
        places = list(range(len(names)))
    else:
        raise SchemaError(
            f"labelCols: expected a column for each of the outputs {', '.join(needed)}, because they are neither named "
            f"nor as many as the inputs {', '.join(sources)}. Received: none. Set labelCols."
        )
    return pack(facts.y, places)


def prepare_weights(
    schema: StructType, facts: ModelFacts, choice: ColumnChoice, y: Nest
) -> tuple[list[Prepared], Nest]:
    """Returns the columns of sample weights: none, one for all outputs, or one for each, nested as the labels are.

    Args:
        schema: The DataFrame's.
        facts: Tells the model's outputs.
        choice: Names the columns.
        y: How the labels are nested.

    Raises:
        SchemaError: A column is missing or not numeric, or an output has none.
    """
    if choice.weight is None:
        return [], 0
    if isinstance(choice.weight, str):
        return [_prepare_weight(schema, facts, choice.weight, WEIGHT)], 0
    names = [output.name for output in facts.outputs] if facts.knows_outputs else []
    required = [output.name for output in facts.outputs if output.needs_label] if names else []
    given = by_name(choice.weight, names, "weightCol", required=required)
    prepared = [
        _prepare_weight(schema, facts, columns[0], role_of(WEIGHT, position))
        for position, columns in enumerate(given.values())
    ]
    places = {name: position for position, name in enumerate(given)}
    if not names:
        return prepared, places if isinstance(y, dict) else pack(y, range(len(given)))
    return prepared, pack(facts.y, [places.get(name, 0) for name in names])


def _prepare_weight(schema: StructType, facts: ModelFacts, name: str, role: str) -> Prepared:
    cast = scalar(find_column(schema, name, "weightCol"), facts.dtype, "weightCol")
    return Prepared(Field(role, (name,), cast.dtype, SCALAR), cast.expression)
