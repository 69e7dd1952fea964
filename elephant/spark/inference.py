"""``transform``: rows pass through one Arrow map that adds the model's output to them.

Rows are never zipped or joined with predictions: each batch leaves with the
columns it came with and its own predictions beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)
from pyspark.sql.types import ArrayType, DoubleType, FloatType, StructField, StructType

from elephant.data.columns import to_numpy
from elephant.data.schema import Field
from elephant.errors import ConfigurationError, SchemaError
from elephant.modeling.facts import ARRAY, BINARY, CLASSES
from elephant.modeling.source import ModelSource
from elephant.spark.columns import ColumnChoice, prepare_inputs

_FEATURES = "__elephant_features"
_MAX_CACHED_MODELS = 2


@dataclass(frozen=True, kw_only=True)
class PredictionSpec:
    """What every task of a ``transform`` needs.

    Args:
        source: The trained model.
        model_id: Tells models apart in the cache of a Python worker.
        field: What the prepared features column, the last one, holds.
        batch_size: Rows that go through the model at a time.
    """

    source: ModelSource
    model_id: str
    field: Field
    batch_size: int


def add_predictions(
    frame: DataFrame,
    source: ModelSource,
    *,
    choice: ColumnChoice,
    prediction: str,
    probability: str,
    batch_size: int,
) -> DataFrame:
    """Returns the frame with the model's predictions beside its columns. Lazy, as all of Spark.

    Args:
        frame: Any DataFrame that has the features.
        source: The trained model.
        choice: The columns that the model was trained on.
        prediction: Name of the column to add.
        probability: Name of the column to add for classifiers.
        batch_size: Rows that go through the model at a time.

    Raises:
        SchemaError: A features column is missing or unusable, or an output column is there already.
    """
    if batch_size < 1:
        raise ConfigurationError(f"predictionBatchSize: expected an integer of at least 1. Received: {batch_size}.")
    output = source.facts.outputs[0]
    kind = output.kind
    classifies = kind in (CLASSES, BINARY)
    _refuse_taken_names(frame, [probability, prediction] if classifies else [prediction])
    prepared = prepare_inputs(frame.schema, source.facts, choice)[0][0]
    spec = PredictionSpec(
        source=source,
        model_id=source.source_id,
        field=replace(prepared.field, role=_FEATURES),
        batch_size=batch_size,
    )
    added = [DoubleType() if kind != ARRAY else ArrayType(FloatType())]
    if classifies:
        added.insert(0, ArrayType(DoubleType()))
    # By position: the frame's own names may repeat, or hold dots, and mapInArrow looks columns up by name.
    fields = [StructField(f"c{i}", f.dataType, f.nullable, f.metadata) for i, f in enumerate(frame.schema.fields)]
    results = [StructField(f"r{i}", kind_) for i, kind_ in enumerate(added)]
    wide = frame.select("*", prepared.expression.alias(_FEATURES)).toDF(*(f.name for f in fields), _FEATURES)
    predicted = wide.mapInArrow(functools.partial(predict_partition, spec), StructType([*fields, *results]))
    columns = [F.col(f.name) for f in [*fields, *results]]
    if classifies:
        columns[-2] = array_to_vector(columns[-2])
    names = [*frame.columns, *([probability] if classifies else []), prediction]
    return predicted.select(*columns).toDF(*names)


def predict_partition(spec: PredictionSpec, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Adds predictions to the batches of one partition; the function that ``mapInArrow`` runs."""
    first_row = 0
    for batch in batches:
        columns = batch.columns
        features = to_numpy(columns[-1], spec.field, first_row=first_row)
        first_row += batch.num_rows
        added = _output_columns(spec, _predict(spec, features))
        kept = columns[:-1]
        names = [*batch.schema.names[:-1], *(f"r{position}" for position in range(len(added)))]
        yield pa.RecordBatch.from_arrays([*kept, *added], names)


def _predict(spec: PredictionSpec, features: np.ndarray) -> np.ndarray | None:
    if len(features) == 0:
        return None
    model = _model(spec)
    rows = features.reshape(len(features), *spec.field.row_shape(features.shape[1:]))
    parts = [
        np.asarray(model.predict_on_batch(rows[start : start + spec.batch_size]))
        for start in range(0, len(rows), spec.batch_size)
    ]
    return np.concatenate(parts)


def _output_columns(spec: PredictionSpec, output: np.ndarray | None) -> list[pa.Array]:
    """Returns the Arrow columns of a batch's output: probability first, for classifiers, then prediction."""
    facts = spec.source.facts.outputs[0]
    if output is None:
        output = np.empty((0, 1), dtype=np.float32)
    output = output.reshape(len(output), -1)
    if facts.kind == CLASSES:
        probability = _softmax(output) if facts.from_logits else output
        return [_lists(probability, pa.float64()), pa.array(output.argmax(axis=1).astype(np.float64))]
    if facts.kind == BINARY:
        positive = _sigmoid(output) if facts.from_logits else output
        positive = positive.astype(np.float64)
        chosen = (positive[:, 0] > 0.5).astype(np.float64)
        return [_lists(np.hstack([1.0 - positive, positive]), pa.float64()), pa.array(chosen)]
    if facts.kind == ARRAY:
        return [_lists(output, pa.float32())]
    return [pa.array(output[:, 0].astype(np.float64))]


def _lists(matrix: np.ndarray, kind: pa.DataType) -> pa.Array:
    values = pa.array(np.ascontiguousarray(matrix).reshape(-1).astype(kind.to_pandas_dtype(), copy=False), kind)
    offsets = np.arange(len(matrix) + 1, dtype=np.int32) * (matrix.shape[1] if len(matrix) else 0)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True, initial=-np.inf))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64)))


_models: dict[str, object] = {}


def _model(spec: PredictionSpec):  # type: ignore[no-untyped-def]  # keras is imported on the executor, when first needed
    """Returns the model, built once in each Python worker that Spark reuses."""
    if spec.model_id not in _models:
        while len(_models) >= _MAX_CACHED_MODELS:
            _models.pop(next(iter(_models)))
        _models[spec.model_id] = spec.source.build()
    return _models[spec.model_id]


def _refuse_taken_names(frame: DataFrame, names: Sequence[str]) -> None:
    # Spark tells names apart without regard to case, unless it is told otherwise.
    taken = [name.lower() for name in frame.columns]
    for name in names:
        if name.lower() in taken:
            raise SchemaError(
                f"transform: expected a DataFrame without a column {name!r}, which it would add. "
                f"Received: columns {', '.join(frame.columns)}. Drop it, or set predictionCol or probabilityCol."
            )
        taken.append(name.lower())
