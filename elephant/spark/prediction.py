"""What a task of ``transform`` or of a UDF runs: Arrow columns in, the model's outputs out.

Nothing here imports Keras before the first rows have come and are found to fit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from elephant.data.nested import Nest
from elephant.data.ragged import Values
from elephant.data.schema import DataSchema
from elephant.spark.arguments import VECTOR_TYPE, Arguments
from elephant.spark.loaded_models import PackedModel
from elephant.spark.model_rows import ModelBatch, ModelRows, PackedFunction
from elephant.spark.outputs import OutputColumn


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What every task that predicts needs.

    Args:
        model: The trained model.
        schema: What the prepared columns hold: inputs alone.
        outputs: How the model's outputs are nested.
        batch_size: Rows that go through the model at a time.
        function: Makes of the columns what the model takes; None where they are that.
    """

    model: PackedModel
    schema: DataSchema
    outputs: Nest
    batch_size: int
    function: PackedFunction | None = None


def predict_chunks(prediction: Prediction, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[list[list[Values]]]:
    """Yields the model's outputs for each chunk of rows of one partition.

    Args:
        prediction: What to predict with.
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


def predict_structs(
    prediction: Prediction, columns: Sequence[OutputColumn], chunks: Iterable[pa.Array | tuple[pa.Array, ...]]
) -> Iterator[pa.Array]:
    """Yields the output columns of each chunk, as one struct, or alone when there is one; an Arrow UDF runs it."""
    parts = (chunk if isinstance(chunk, tuple) else (chunk,) for chunk in chunks)
    for arrays in _output_columns(prediction, columns, parts):
        if len(arrays) == 1:
            yield arrays[0]
        else:
            yield pa.StructArray.from_arrays(arrays, [column.name for column in columns])


def predict_arguments(
    model: PackedModel,
    arguments: Arguments,
    outputs: Nest,
    batch_size: int,
    columns: Sequence[OutputColumn],
    chunks: Iterable[pa.Array | tuple[pa.Array, ...]],
) -> Iterator[pa.Array]:
    """Yields the outputs for the arguments of a UDF, whose types the first chunk tells; an Arrow UDF runs it."""
    parts = (chunk if isinstance(chunk, tuple) else (chunk,) for chunk in chunks)
    first = next(parts, None)
    if first is None:
        return
    prepared = (tuple(arguments.columns(part)) for part in itertools.chain([first], parts))
    schema = arguments.schema(arguments.columns(first))
    prediction = Prediction(model=model, schema=schema, outputs=outputs, batch_size=batch_size)
    yield from predict_structs(prediction, columns, prepared)


def predict_series(
    model: PackedModel,
    arguments: Arguments,
    outputs: Nest,
    batch_size: int,
    columns: Sequence[OutputColumn],
    chunks: Iterable[Any],
) -> Iterator[Any]:
    """Yields the same for pandas series and data frames; a pandas UDF runs it, where Spark has no Arrow UDFs."""
    parts = (tuple(map(_as_arrow, chunk if isinstance(chunk, tuple) else (chunk,))) for chunk in chunks)
    for made in predict_arguments(model, arguments, outputs, batch_size, columns, parts):
        if pa.types.is_struct(made.type):
            yield pa.Table.from_arrays(made.flatten(), [column.name for column in columns]).to_pandas()
        else:
            yield made.to_pandas()


def _as_arrow(series: Any) -> pa.Array:
    """Returns a pandas series, or a data frame that stands for a struct, as an Arrow array."""
    if hasattr(series, "columns"):
        names = list(series.columns)
        parts = [pa.Array.from_pandas(series[name]) for name in names]
        if names == VECTOR_TYPE.names:
            # Of dense vectors alone pandas does not tell which type indices would have.
            parts = [part.cast(field.type) for part, field in zip(parts, VECTOR_TYPE, strict=True)]
        return pa.StructArray.from_arrays(parts, names)
    return pa.Array.from_pandas(series)


def predict_batches(
    prediction: Prediction, columns: Sequence[OutputColumn], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Replaces the prepared columns, the last ones of each batch, by output columns; ``mapInArrow`` runs it."""
    inputs = len(prediction.schema.inputs)
    kept: list[pa.RecordBatch] = []

    def chunks() -> Iterator[Sequence[pa.Array]]:
        for batch in batches:
            kept.append(batch)
            yield batch.columns[-inputs:]

    for outputs in _output_columns(prediction, columns, chunks()):
        batch = kept.pop()
        arrays = [*batch.columns[:-inputs], *outputs]
        names = [*batch.schema.names[:-inputs], *(f"r{place}" for place in range(len(columns)))]
        yield pa.RecordBatch.from_arrays(arrays, names)


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
