"""Prediction in Spark tasks: arguments, batches, and columns of the result.

Nothing here imports Keras before the first rows have come and are found to fit.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
from pyspark import cloudpickle

from elephant.cluster.row_source import rows_of_parts
from elephant.cluster.spark_job import ResultRow
from elephant.data.casting import cast_to, lists_of, prepared_batches, prepared_column
from elephant.data.file_sources import Part, PlannedFiles
from elephant.data.ragged import RaggedArray, Values, take_rows
from elephant.data.records import RecordPlan
from elephant.data.schema import DENSE, FEATURES, RAGGED, SPARSE, TEXT, DataSchema, Field, Nest, pack, role_of
from elephant.data.to_arrow import to_arrow
from elephant.data.to_numpy import is_binary, is_list
from elephant.errors import FULL_TRACEBACK, DataError, ElephantError, SchemaError
from elephant.task.model_batches import ModelBatch, ModelRows, PackedFunction
from elephant.task.model_cache import PackedModel

if TYPE_CHECKING:
    from elephant.modeling.model_info import OutputInfo

Given = ParamSpec("Given")
Result = TypeVar("Result")

# How Spark hands ml vectors on; type 1 is dense, with values alone.
VECTOR_TYPE = pa.schema(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)

# Bytes of the outputs that travel to the driver in one cell.
_PIECE_BYTES = 64 * 2**20

# What a column holds of its output.
CLASS = "class"  # the most probable class, or whether the probability is above one half
PROBABILITY = "probability"  # one probability per class
SCORES = "scores"  # one score per class, of which the probabilities are made: logits
NUMBER = "number"  # the output's one value
VALUES = "values"  # all of the output's values, laid flat


def _brief(function: Callable[Given, Iterator[Result]]) -> Callable[Given, Iterator[Result]]:
    """Decorates what Spark's Python workers run: an error of elephant shows none of its frames, of which Spark has two.

    As `elephant.errors.brief_errors`, which what raises later, and elsewhere, does not pass.
    """

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Iterator[Result]:
        try:
            yield from function(*args, **kwargs)
        except ElephantError as error:
            error.is_shown = True
            if FULL_TRACEBACK in os.environ:
                raise
            raise error.with_traceback(None) from error.__cause__

    return run


@dataclass(frozen=True)
class Argument:
    """Argument of a UDF for one input of a model.

    Args:
        name: The input's name, for messages.
        dtype: Type of its elements; ``"string"`` for strings.
        shape: Of one row; None when it is unknown.
        sparse: Whether it takes sparse tensors.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None = None
    sparse: bool = False


@dataclass(frozen=True)
class Arguments:
    """Arguments of a UDF for a model.

    Args:
        arguments: One per input, in the order of the arguments.
        nest: How the inputs are nested for Keras.
    """

    arguments: tuple[Argument, ...]
    nest: Nest

    def grouped(self, given: Sequence[pa.Array]) -> list[list[pa.Array]]:
        """Returns the arguments of each input: of one input, several arguments make one vector.

        Raises:
            SchemaError: There are more or fewer arguments than inputs.
        """
        if len(self.arguments) == 1:
            return [list(given)]
        if len(given) != len(self.arguments):
            raise SchemaError(
                f"predict_udf: expected an argument for each of the model's inputs "
                f"{', '.join(argument.name for argument in self.arguments)}. Received: {len(given)} arguments."
            )
        return [[column] for column in given]

    def schema(self, groups: Sequence[Sequence[pa.Array]]) -> DataSchema:
        """Returns the schema that the arguments become.

        Raises:
            SchemaError: One is of a type that its input does not take.
        """
        fields = (
            Field(
                role_of(FEATURES, place),
                (argument.name,),
                argument.dtype,
                SPARSE if argument.sparse else _kind([column.type for column in columns], argument),
                argument.shape,
                sparse_tensor=argument.sparse,
            )
            for place, (columns, argument) in enumerate(zip(groups, self.arguments, strict=True))
        )
        return DataSchema(inputs=tuple(fields), x=self.nest)


def _kind(kinds: Sequence[pa.DataType], argument: Argument) -> str:
    """Returns the kind of a field, of the types of its columns."""
    kind = kinds[0]
    if argument.dtype == "string":
        return TEXT
    if len(kinds) > 1 and not all(map(_is_number, kinds)):
        raise SchemaError(
            f"predict_udf: expected one column for the input {argument.name!r}, or several of numbers, which make one "
            f"vector. Received: {len(kinds)} of type {', '.join(map(str, kinds))}. Pass the input's column alone."
        )
    if pa.types.is_struct(kind) and all(kind.get_field_index(name) >= 0 for name in VECTOR_TYPE.names):
        return SPARSE
    depth = 0
    while is_list(kind):
        depth, kind = depth + 1, kind.value_type
    if not _is_number(kind) and not is_binary(kind):
        raise SchemaError(
            f"predict_udf: expected an array of numbers, numbers, an ml vector or a binary tensor for the input "
            f"{argument.name!r}. Received: a column of type {kind}."
        )
    shape = argument.shape
    differs = depth > 0 and shape is not None and len(shape) == depth and shape[0] is None and None not in shape[1:]
    return RAGGED if differs else DENSE


def _is_number(kind: pa.DataType) -> bool:
    tests = ("integer", "floating", "boolean", "decimal", "date", "timestamp")
    return any(getattr(pa.types, f"is_{name}")(kind) for name in tests)


@dataclass(frozen=True)
class OutputColumn:
    """One column made of an output.

    Args:
        name: The column's name.
        output: Position of the model's output.
        holds: What the column holds of it: one of the constants above.
        binary: Whether the output is one number, the probability of class 1.
        from_logits: Whether it still needs its softmax or sigmoid.
    """

    name: str
    output: int
    holds: str
    binary: bool = False
    from_logits: bool = False

    @property
    def is_vector(self) -> bool:
        """True if the column becomes one of ml vectors, an element per class."""
        return self.holds in (PROBABILITY, SCORES)

    @property
    def arrow_type(self) -> pa.DataType:
        """The column's type in Arrow."""
        return pa.struct(VECTOR_TYPE) if self.is_vector else self._value_type

    def array(self, values: Values) -> pa.Array:
        """Returns the column for a batch's output, float (rows, ...)."""
        made = self._values(values)
        return _vectors(made) if self.is_vector else made

    @property
    def _value_type(self) -> pa.DataType:
        if self.holds in (CLASS, NUMBER):
            return pa.float64()
        return pa.list_(pa.float64() if self.is_vector else pa.float32())

    def _values(self, values: Values) -> pa.Array:
        if isinstance(values, RaggedArray):
            return _sequences(values, self._value_type)
        flat = values.reshape(len(values), -1)
        if self.holds == NUMBER:
            return to_arrow(flat[:, 0].astype(np.float64))
        if self.holds == VALUES:
            return _lists(flat, self._value_type)
        if self.holds == CLASS:
            chosen = self._is_positive(flat) if self.binary else flat.argmax(axis=1)
            return to_arrow(chosen.astype(np.float64))
        if self.holds == SCORES:
            return _lists(np.hstack([-flat, flat]) if self.binary else flat, self._value_type)
        return _lists(self._probabilities(flat), self._value_type)

    def _is_positive(self, flat: np.ndarray) -> np.ndarray:
        return np.asarray(self._positive(flat)[:, 0] > 0.5)

    def _positive(self, flat: np.ndarray) -> np.ndarray:
        return (_sigmoid(flat) if self.from_logits else flat).astype(np.float64)

    def _probabilities(self, flat: np.ndarray) -> np.ndarray:
        if self.binary:
            positive = self._positive(flat)
            return np.hstack([1.0 - positive, positive])
        return _softmax(flat) if self.from_logits else flat


def transformed_columns(
    outputs: Sequence[OutputInfo], *, prediction: str, probability: str, raw_prediction: str
) -> list[OutputColumn]:
    """Returns the columns that ``transform`` adds: scores, probabilities, then predictions, output by output.

    Args:
        prediction: Name of the column of predictions; with several outputs each has its own, of this name, an
            underscore and its own name. An empty name leaves the column out, as Spark's own models do.
        probability: The same for the probabilities of classifiers.
        raw_prediction: The same for the scores that classifiers give the classes.
    """
    columns: list[OutputColumn] = []
    for place, facts in enumerate(outputs):
        suffix = f"_{facts.name}" if len(outputs) > 1 else ""
        binary = facts.kind == "binary"
        if binary or facts.kind == "classes":
            scores = SCORES if facts.from_logits else PROBABILITY
            named = [(raw_prediction, scores), (probability, PROBABILITY), (prediction, CLASS)]
        else:
            named = [(prediction, NUMBER if facts.kind == "value" else VALUES)]
        made = (OutputColumn(name + suffix, place, holds, binary, facts.from_logits) for name, holds in named if name)
        columns.extend(made)
    return columns


def raw_columns(outputs: Sequence[OutputInfo]) -> list[OutputColumn]:
    """Returns one column per output, which holds it as it is."""
    return [
        OutputColumn(facts.name, place, NUMBER if facts.shape is not None and facts.shape in ((), (1,)) else VALUES)
        for place, facts in enumerate(outputs)
    ]


def _lists(matrix: np.ndarray, kind: pa.DataType) -> pa.Array:
    return lists_of(_numbers(matrix, kind), len(matrix))


def _vectors(lists: pa.Array) -> pa.Array:
    """Returns lists of numbers as Spark's dense vectors."""
    kinds = to_arrow(np.ones(len(lists), np.int8))
    absent = [pa.nulls(len(lists), VECTOR_TYPE.field(name).type) for name in ("size", "indices")]
    return pa.StructArray.from_arrays([kinds, *absent, lists], fields=list(VECTOR_TYPE))


def _sequences(values: RaggedArray, kind: pa.DataType) -> pa.Array:
    elements = values.buffers[0].reshape(len(values.buffers[0]), -1)
    offsets = to_arrow(values.offsets * elements.shape[1], dtype="int32")
    return pa.ListArray.from_arrays(offsets, _numbers(elements, kind))


def _numbers(elements: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Returns the elements of lists of a type, one after the other."""
    return to_arrow(elements.reshape(-1).astype(kind.value_type.to_pandas_dtype(), copy=False))


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True, initial=-np.inf))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64)))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Order to every task that predicts.

    Args:
        model: The trained model.
        schema: What the prepared columns hold: inputs alone.
        outputs: How the model's outputs are nested.
        batch_size: Rows that go through the model at a time; None leaves that to the model.
        function: Makes of the columns what the model takes; None where they are that.
    """

    model: PackedModel
    schema: DataSchema
    outputs: Nest
    batch_size: int | None
    function: PackedFunction | None = None


def predict_chunks(prediction: Prediction, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[list[list[Values]]]:
    """Yields the model's outputs for each chunk of rows of one partition.

    Args:
        chunks: The prepared columns of some rows, in the order of the schema's inputs.

    Yields:
        One item per chunk: a list of batches, each a list with one value per output, rows in order.

    Raises:
        DataError: A row does not fit the model.
    """
    rows = ModelRows(prediction.schema, prediction.batch_size, prediction.function, prediction.model.loaded)
    for columns in chunks:
        yield [_outputs(prediction, batch) for batch in rows.batches(columns)]


def _outputs(prediction: Prediction, batch: ModelBatch) -> list[Values]:
    return prediction.model.loaded().outputs(batch.tensors, batch.schema.inputs, batch.values, prediction.outputs)


def predict_arrays(prediction: Prediction, batches: Iterable[pa.RecordBatch]) -> Iterator[ResultRow]:
    """Yields the outputs of one partition's rows, in their order, as `packed_outputs`; `RowSource.run` runs it."""
    chunks = ([batch.column(field.role) for field in prediction.schema.inputs] for batch in batches)
    for packed in prediction.model.compute(functools.partial(packed_outputs, prediction), chunks):
        yield 0, packed


def packed_outputs(prediction: Prediction, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[bytes]:
    """Yields the model's outputs for each chunk of rows, in pieces that each fit a cell of Spark, 2 GiB at most."""
    rows = ModelRows(prediction.schema, prediction.batch_size, prediction.function, prediction.model.loaded)
    for columns in chunks:
        held, held_bytes = list[list[Values]](), 0
        for batch in rows.batches(columns):
            for outputs in _pieces(_outputs(prediction, batch)):
                size = _bytes_of(outputs)
                if held and held_bytes + size > _PIECE_BYTES:
                    yield _packed(held)
                    held, held_bytes = [], 0
                held.append(outputs)
                held_bytes += size
        if held:
            yield _packed(held)


def _pieces(outputs: list[Values]) -> Iterator[list[Values]]:
    """Yields the outputs of a batch, of fewer rows at a time where those of all are large."""
    num_rows, pieces = len(outputs[0]), -(-_bytes_of(outputs) // _PIECE_BYTES)
    if pieces <= 1 or any(len(values) != num_rows for values in outputs):
        yield outputs
        return
    for some in np.array_split(np.arange(num_rows), min(pieces, num_rows)):
        yield [take_rows(values, some) for values in outputs]


def _bytes_of(outputs: Sequence[Values]) -> int:
    return sum(values.buffers[0].nbytes if isinstance(values, RaggedArray) else values.nbytes for values in outputs)


def _packed(batches: Sequence[list[Values]]) -> bytes:
    packed = io.BytesIO()
    # Any for the names, one of which numpy has for itself.
    arrays: dict[str, Any] = {}
    for place, outputs in enumerate(batches):
        for number, values in enumerate(outputs):
            name = f"{place}.{number}"
            if isinstance(values, RaggedArray):
                arrays[f"{name}.offsets"], values = values.offsets, values.buffers[0]
            arrays[name] = _of_numpy(values)
    np.savez(packed, **arrays)
    return packed.getvalue()


def _of_numpy(values: np.ndarray) -> np.ndarray:
    # Files of numpy know no bfloat16, and float32 holds all of it.
    return values.astype(np.float32) if values.dtype.kind == "V" else values


def unpacked_outputs(packed: bytes, num_outputs: int) -> list[list[Values]]:
    """Returns the values of each output, batch by batch, in the form of `packed_outputs`."""
    with np.load(io.BytesIO(packed)) as arrays:
        num_batches = sum(not name.endswith(".offsets") for name in arrays.files) // num_outputs
        return [
            [_values_of(arrays, f"{place}.{number}") for place in range(num_batches)] for number in range(num_outputs)
        ]


def _values_of(arrays: Mapping[str, np.ndarray], name: str) -> Values:
    offsets = f"{name}.offsets"
    return RaggedArray(arrays[offsets], (arrays[name],)) if offsets in arrays else arrays[name]


def joined(parts: Sequence[Values]) -> np.ndarray:
    """Returns an output over all batches: one array, or one of objects, an array each, where rows differ in length."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    from elephant.rank.input.user_batches import as_array

    return as_array([row for part in parts for row in _rows(part)])


def _rows(values: Values) -> list[np.ndarray]:
    if isinstance(values, RaggedArray):
        return [values.buffers[0][start:stop] for start, stop in itertools.pairwise(values.offsets)]
    return list(values)


def predict_records(prediction: Prediction, plan: RecordPlan, records: Iterable[Any]) -> Iterator[Any]:
    """Yields the predictions for one partition of an RDD; ``mapPartitions`` runs it."""
    chunks = (batch.columns for batch in plan.batches(records))
    for batches in prediction.model.compute(functools.partial(predict_chunks, prediction), chunks):
        for outputs in batches:
            for row in zip(*map(_rows, outputs), strict=True):
                yield pack(prediction.outputs, row)


@_brief
def predict_structs(
    prediction: Prediction, columns: Sequence[OutputColumn], chunks: Iterable[pa.Array | tuple[pa.Array, ...]]
) -> Iterator[pa.Array]:
    """Yields the output columns of each chunk of the user's columns, as `_structs`; an Arrow UDF runs it."""
    names = prediction.schema.columns
    batches = (
        pa.RecordBatch.from_arrays(list(chunk) if isinstance(chunk, tuple) else [chunk], names) for chunk in chunks
    )
    prepared = (batch.columns for batch in prepared_batches(batches, prediction.schema))
    yield from _structs(prediction, columns, prepared)


def _structs(
    prediction: Prediction, columns: Sequence[OutputColumn], chunks: Iterable[Sequence[pa.Array]]
) -> Iterator[pa.Array]:
    """Yields the output columns of each chunk of prepared columns, as one struct, or alone when there is one."""
    for arrays in _output_columns(prediction, columns, chunks):
        if len(arrays) == 1:
            yield arrays[0]
        else:
            yield pa.StructArray.from_arrays(arrays, [column.name for column in columns])


@_brief
def predict_arguments(
    model: PackedModel,
    arguments: Arguments,
    outputs: Nest,
    batch_size: int | None,
    columns: Sequence[OutputColumn],
    chunks: Iterable[pa.Array | tuple[pa.Array, ...]],
) -> Iterator[pa.Array]:
    """Yields the outputs for the arguments of a UDF, whose types the first chunk tells; an Arrow UDF runs it."""
    groups = (arguments.grouped(chunk if isinstance(chunk, tuple) else (chunk,)) for chunk in chunks)
    first = next(groups, None)
    if first is None:
        return
    schema = arguments.schema(first)
    prediction = Prediction(model=model, schema=schema, outputs=outputs, batch_size=batch_size)
    yield from _structs(prediction, columns, prepared_groups(itertools.chain([first], groups), schema))


def prepared_groups(groups: Iterable[Sequence[Sequence[pa.Array]]], schema: DataSchema) -> Iterator[list[pa.Array]]:
    """Yields the prepared columns of each chunk's arguments, which are grouped by the inputs that they are for."""
    row = 0
    for group in groups:
        yield [prepared_column(given, field, first_row=row) for given, field in zip(group, schema.inputs, strict=True)]
        row += len(group[0][0])


@_brief
def predict_packed(
    model: PackedModel, content: bytes, chunks: Iterable[pa.Array | tuple[pa.Array, ...]]
) -> Iterator[pa.Array]:
    """Yields the results of a pickled function on a model and the arguments of a UDF; an Arrow UDF runs it.

    Only the process that has the model unpickles it: its code may import Keras.
    """
    columns = (list(chunk) if isinstance(chunk, tuple) else [chunk] for chunk in chunks)
    for (array,) in model.compute(functools.partial(unpacked, model, content), columns):
        yield array


def unpacked(model: PackedModel, content: bytes, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[list[pa.Array]]:
    """Yields the results of a pickled function on a model and chunks, a column each; the model's process runs it."""
    yield from cloudpickle.loads(content)(model, chunks)


def on_series(function: Callable[[Iterable[Any]], Iterator[pa.Array]], chunks: Iterable[Any]) -> Iterator[Any]:
    """Yields the results of a function on Arrow arrays for pandas series and data frames, as such."""
    for made in function(tuple(map(_as_arrow, chunk if isinstance(chunk, tuple) else (chunk,))) for chunk in chunks):
        if pa.types.is_struct(made.type):
            yield pa.Table.from_arrays(made.flatten(), [part.name for part in made.type]).to_pandas()
        else:
            yield made.to_pandas()


def _as_arrow(series: Any) -> pa.Array:
    """Returns a pandas series, or a data frame that stands for a struct, as an Arrow array."""
    if hasattr(series, "columns"):
        names = list(series.columns)
        parts = [pa.Array.from_pandas(series[name]) for name in names]
        if names == VECTOR_TYPE.names:
            # pandas does not tell the type of indices where all vectors are dense.
            parts = [part.cast(field.type) for part, field in zip(parts, VECTOR_TYPE, strict=True)]
        return pa.StructArray.from_arrays(parts, names)
    return pa.Array.from_pandas(series)


@_brief
def predict_batches(
    prediction: Prediction, columns: Sequence[OutputColumn], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Replaces the user's columns, the last ones of each batch, by output columns; ``mapInArrow`` runs it."""
    names = prediction.schema.columns
    kept: list[pa.RecordBatch] = []

    def given() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            kept.append(batch)
            yield pa.RecordBatch.from_arrays(batch.columns[-len(names) :], names)

    prepared = (batch.columns for batch in prepared_batches(given(), prediction.schema))
    for outputs in _output_columns(prediction, columns, prepared):
        batch = kept.pop()
        arrays = [*batch.columns[: -len(names)], *outputs]
        added = [f"r{place}" for place in range(len(columns))]
        yield pa.RecordBatch.from_arrays(arrays, [*batch.schema.names[: -len(names)], *added])


def predict_files(
    prediction: Prediction,
    columns: Sequence[OutputColumn],
    kept: pa.Schema,
    files: PlannedFiles,
    parts: list[Part],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Yields rows of files with output columns beside them; ``mapInArrow`` runs it on the numbers of their parts.

    Args:
        kept: The files' columns that are handed on, in the types that Spark has for them.
    """
    inputs = prediction.schema.columns
    names = list(dict.fromkeys([*kept.names, *inputs]))
    rows = (
        pa.RecordBatch.from_arrays(
            [
                *(_in_type_of(batch.column(names.index(column.name)), column) for column in kept),
                *(batch.column(names.index(name)) for name in inputs),
            ],
            [*kept.names, *inputs],
        )
        for batch in rows_of_parts(files, parts, names, batches)
    )
    yield from predict_batches(prediction, columns, rows)


def _in_type_of(column: pa.Array, kept: pa.Field) -> pa.Array:
    try:
        return cast_to(column, kept.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"column {kept.name!r}: expected what fits the type that it has in the first of the files, {kept.type}. "
            f"Received: {error}. Leave it out: transform(path, columns=[...])."
        ) from error


def _output_columns(
    prediction: Prediction, columns: Sequence[OutputColumn], chunks: Iterable[Sequence[pa.Array]]
) -> Iterator[list[pa.Array]]:
    """Yields the output columns of each chunk, computed where the model is."""
    return prediction.model.compute(functools.partial(output_columns, prediction, columns), chunks)


def output_columns(
    prediction: Prediction, columns: Sequence[OutputColumn], chunks: Iterable[Sequence[pa.Array]]
) -> Iterator[list[pa.Array]]:
    """Yields the output columns of each chunk; the process that has the model runs it."""
    for batches in predict_chunks(prediction, chunks):
        yield output_arrays(columns, batches)


def output_arrays(columns: Sequence[OutputColumn], batches: Sequence[list[Values]]) -> list[pa.Array]:
    """Returns each output column over all batches of a chunk."""
    return [
        pa.concat_arrays([column.array(outputs[column.output]) for outputs in batches])
        if batches
        else pa.array([], column.arrow_type)
        for column in columns
    ]
