"""Weights of classes: as given, or by the number of rows of each class, so that all count alike."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from elephant.cluster.row_source import RowSource
from elephant.cluster.spark_job import ResultRow, described
from elephant.data.schema import SCALAR, DataSchema
from elephant.data.to_numpy import to_values
from elephant.errors import ConfigurationError, DataError
from elephant.modeling.model_info import ARRAY
from elephant.modeling.model_spec import ModelSpec

if TYPE_CHECKING:
    import pyarrow as pa

# The most class numbers; Keras gets a weight for each.
_MOST_CLASSES = 1_000_000


def class_weights(
    given: Mapping[int, float] | str | None,
    spec: ModelSpec,
    schema: DataSchema,
    rows_of: Callable[[DataSchema], RowSource] | None,
) -> dict[int, float] | None:
    """Returns a ``class_weight`` for Keras' fit: a weight for every class of the model's output.

    Keras itself gives classes without one the weight 1 when it has arrays, and fails on them in the
    middle of an epoch when it has a dataset.

    Args:
        given: Weights by class, as the user gave them, `BALANCED`, or None.
        spec: The model.
        schema: What it trains on.
        rows_of: Returns the rows with some of their columns; None where a function makes the labels.

    Raises:
        ConfigurationError: The fit has sample weights too, or labels that are no classes: Keras refuses these as well.
        DataError: A label is null, or no number.
    """
    if given is None:
        return None
    if schema.weights:
        raise ConfigurationError(
            "classWeight: expected a fit without weightCol: Keras takes one of the two. Received: both. "
            "Multiply the column by the weight of the row's class."
        )
    if len(schema.labels) != 1 or len(spec.info.outputs) != 1:
        raise ConfigurationError(
            f"classWeight: expected a model with one output and a label column. Received: {len(spec.info.outputs)} "
            f"outputs and {len(schema.labels)} label columns. Give weightCol={{output: column}} instead."
        )
    label, shape = schema.labels[0], spec.info.outputs[0].shape
    if label.kind != SCALAR and (label.shape is None or len(label.shape) != 1):
        raise ConfigurationError(
            f"classWeight: expected labels that are class numbers or one-hot. Received: {label.title} with arrays of "
            f"shape {label.shape}. Give weightCol instead."
        )
    if isinstance(given, str):
        if rows_of is None:
            raise ConfigurationError(
                f"classWeight: expected weights by class, because preprocessing makes the labels. Received: {given!r}."
            )
        given = _balanced(rows_of, schema)
    output = spec.info.outputs[0]
    known = output.num_classes if output.label_shape is None or output.kind != ARRAY else None
    beyond = [number for number in given if known is not None and not 0 <= number < known]
    if beyond:
        raise ConfigurationError(
            f"classWeight: expected weights of the {known} classes that the loss tells apart, numbered from 0. "
            f"Received: one for class {beyond[0]}."
        )
    classes = max([*given, 1, *((shape[-1] - 1,) if shape and shape[-1] else ())]) + 1
    return {number: float(given.get(number, 1.0)) for number in range(classes)}


def _balanced(rows_of: Callable[[DataSchema], RowSource], schema: DataSchema) -> dict[int, float]:
    """Returns weights with which all classes that there are count alike, and 1 on average over the rows."""
    labelled = DataSchema(inputs=(), labels=schema.labels, validation=schema.validation)
    counts: Counter[int] = Counter()
    rows = rows_of(labelled)
    with described(rows.session, "rows per class"):
        results = rows.run(functools.partial(_count_labels, labelled), barrier=False)
    for result in results:
        counts.update({int(label): count for label, count in json.loads(bytes(result["result"])).items()})
    if counts and max(counts) >= _MOST_CLASSES:
        raise ConfigurationError(
            f"classWeight: expected class numbers below {_MOST_CLASSES:,} in {schema.labels[0].title}. "
            f"Received: {max(counts):,}."
        )
    return {label: counts.total() / (len(counts) * count) for label, count in counts.items()}


def _count_labels(schema: DataSchema, batches: Iterable[pa.RecordBatch]) -> Iterator[ResultRow]:
    """Yields how many rows of one partition, without those for validation, have each label; `RowSource.run` runs it."""
    counts, shape, first_row = Counter[str](), None, 0
    label = schema.labels[0]
    for batch in (batch for batch in batches if batch.num_rows):
        values, shape = to_values(batch.column(label.role), label, first_row=first_row, row_shape=shape)
        labels = np.asarray(values).reshape(batch.num_rows, -1)
        labels = labels[:, 0] if labels.shape[1] == 1 else labels.argmax(axis=1)
        if np.any(labels % 1):
            raise DataError(
                f"classWeight: expected class numbers in {label.title}. Received: {labels[labels % 1 != 0][0]}."
            )
        if schema.validation is not None:
            marked = batch.column(schema.validation.role).to_numpy(zero_copy_only=False)
            labels = labels[~marked.astype(bool)]
        first_row += batch.num_rows
        for value, count in zip(*np.unique(labels, return_counts=True), strict=True):
            counts[str(int(value))] += int(count)
    yield 0, json.dumps(counts).encode()
