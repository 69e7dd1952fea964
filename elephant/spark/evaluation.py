"""``evaluate``: each partition adds up what its rows give the metrics, and the driver adds up the partitions.

Partitions come back with their tasks' results: a task that Spark runs again counts once.
Nothing here imports Keras before the first rows have come and are found to fit.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from elephant.data.schema import DataSchema
from elephant.errors import DataError
from elephant.spark.loaded_models import PackedModel
from elephant.spark.model_rows import ModelRows
from elephant.spark.preprocessed_rows import PackedPreprocessing, PreprocessedRows, rows_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from elephant.training.metric_sums import MetricPart, MetricSums

PART_SCHEMA = "sums binary, about string"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What every task that evaluates needs.

    Args:
        model: The trained model.
        schema: What the prepared columns hold: inputs, labels and weights, by their roles.
        batch_size: Rows that go through the model at a time.
        preprocessing: Makes of the columns what the model takes; None where they are that.
    """

    model: PackedModel
    schema: DataSchema
    batch_size: int
    preprocessing: PackedPreprocessing | None = None

    @property
    def model_schema(self) -> DataSchema:
        """What the model gets."""
        return self.schema if self.preprocessing is None else self.preprocessing.target

    def rows(self, size: int) -> ModelRows | PreprocessedRows:
        """Returns what cuts columns into batches of so many rows."""
        return rows_for(self.schema, size, self.preprocessing)


def evaluate_frame(frame: DataFrame, evaluation: Evaluation) -> dict[str, Any]:
    """Returns the loss and the metrics over all rows, by name.

    Args:
        frame: The prepared columns.
        evaluation: What to evaluate with.

    Raises:
        DataError: There are no rows.
    """
    parts = frame.mapInArrow(functools.partial(evaluate_batches, evaluation), PART_SCHEMA).collect()
    return combined(evaluation, [(bytes(part.sums), part.about) for part in parts])


def evaluate_batches(evaluation: Evaluation, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields what one partition gives the metrics, and nothing for one without rows; ``mapInArrow`` runs it."""
    for sums, about in evaluate_chunks(evaluation, (_columns(evaluation.schema, batch) for batch in batches)):
        yield pa.RecordBatch.from_arrays([pa.array([sums], pa.binary()), pa.array([about])], ["sums", "about"])


def evaluate_chunks(evaluation: Evaluation, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[tuple[bytes, str]]:
    """Yields once what one partition gives the metrics, in a form that travels, unless it has no rows.

    Args:
        evaluation: What to evaluate with.
        chunks: The prepared columns of some rows, in the order of the schema's ``batch_fields``.

    Raises:
        DataError: A row does not fit the model.
    """
    rows = evaluation.rows(evaluation.batch_size)
    sums: MetricSums | None = None
    for columns in chunks:
        for num_rows, values in rows.batches(columns):
            if sums is None:
                sums = _metric_sums(evaluation)
                _try_out(sums, evaluation, columns)
            sums.add(rows.tensors().of(values), num_rows)
    if sums is not None:
        yield _packed(sums.part, rows)


def combined(evaluation: Evaluation, parts: Sequence[tuple[bytes, str]]) -> dict[str, Any]:
    """Returns the metrics over all partitions, by name; warns of those that do not add up.

    Args:
        evaluation: What the parts were computed with.
        parts: What `evaluate_chunks` has yielded, of all partitions.

    Raises:
        DataError: There are none.
    """
    from elephant.training.metric_sums import MetricPart, results_of

    if not parts:
        raise DataError("evaluate: expected rows. Received: none.")
    abouts = [json.loads(about) for _, about in parts]
    shapes = {role: tuple(shape) for role, shape in abouts[0].pop("row_shapes").items()}
    not_sums = sorted({name for about in abouts for name in about["not_sums"]})
    if not_sums:
        warnings.warn(
            f"evaluate: expected metrics whose variables add up over parts of the rows. Received: "
            f"{', '.join(not_sums)}, whose values are not those of one process. See docs/exactness.md.",
            UserWarning,
            stacklevel=3,
        )
    made = [
        MetricPart(
            sums=np.frombuffer(sums, np.float64),
            num_rows=about["num_rows"],
            names=tuple(about["names"]),
            others=about["others"],
            not_sums=tuple(about["not_sums"]),
        )
        for (sums, _), about in zip(parts, abouts, strict=True)
    ]
    return results_of(evaluation.model.built(), evaluation.model_schema, shapes, made)


def _metric_sums(evaluation: Evaluation) -> MetricSums:
    model = evaluation.model.loaded().model
    from elephant.training.metric_sums import MetricSums

    return MetricSums(model)


def _try_out(sums: MetricSums, evaluation: Evaluation, columns: Sequence[pa.Array]) -> None:
    """Tries the metrics out on the first batch, whole and in two halves."""
    size = min(len(columns[0]), evaluation.batch_size)
    if size > 1:
        first = [column.slice(0, size) for column in columns]
        whole, halves = (_batches(evaluation, rows, first) for rows in (size, size - size // 2))
        sums.try_out(whole[0], halves)


def _batches(evaluation: Evaluation, size: int, columns: Sequence[pa.Array]) -> list[Any]:
    rows = evaluation.rows(size)
    return [rows.tensors().of(values) for _, values in rows.batches(columns)]


def _packed(part: MetricPart, rows: ModelRows | PreprocessedRows) -> tuple[bytes, str]:
    about = {
        "num_rows": part.num_rows,
        "names": part.names,
        "others": part.others,
        "not_sums": part.not_sums,
        "row_shapes": rows.row_shapes,
    }
    return part.sums.tobytes(), json.dumps(about)


def _columns(schema: DataSchema, batch: pa.RecordBatch) -> list[pa.Array]:
    return [batch.column(field.role) for field in schema.batch_fields]
