"""``evaluate``: each partition adds up what its rows give the metrics, and the driver adds up the partitions.

Partitions come back with their tasks' results: a task that Spark runs again counts once.
Nothing here imports Keras before the first rows have come and are found to fit.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from elephant.cluster.spark_job import ResultRow, described
from elephant.data.schema import DataSchema
from elephant.errors import DataError, warn_user
from elephant.task.model_batches import ModelRows, PackedFunction, RowShapes
from elephant.task.model_cache import PackedModel

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

    from elephant.cluster.row_source import RowSource
    from elephant.rank.metrics.metric_sums import MetricPart, MetricSums


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Order to every task that evaluates.

    Args:
        model: The trained model.
        schema: What the prepared columns hold: inputs, labels and weights, by their roles.
        batch_size: Rows that go through the model at a time; None leaves that to the model.
        function: Makes of the columns what the model takes; None where they are that.
    """

    model: PackedModel
    schema: DataSchema
    batch_size: int | None
    function: PackedFunction | None = None


def evaluate_rows(rows: RowSource, evaluation: Evaluation, profile: ResourceProfile | None = None) -> dict[str, Any]:
    """Returns the loss and the metrics over all rows, by name.

    Args:
        profile: What each task asks for; None leaves it what the application's tasks have.

    Raises:
        DataError: There are no rows.
    """
    with described(rows.session, "elephant evaluate"):
        results = rows.run(functools.partial(evaluate_batches, evaluation), barrier=False, profile=profile)
    return combined(evaluation, [bytes(result["result"]) for result in results])


def evaluate_batches(evaluation: Evaluation, batches: Iterable[pa.RecordBatch]) -> Iterator[ResultRow]:
    """Yields the part of one partition in the metrics, and nothing for one without rows; `RowSource.run` runs it."""
    chunks = (_columns(evaluation.schema, batch) for batch in batches)
    for part in evaluation.model.compute(functools.partial(evaluate_chunks, evaluation), chunks):
        yield 0, part


def evaluate_chunks(evaluation: Evaluation, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[bytes]:
    """Yields once what one partition gives the metrics, in a form that travels, unless it has no rows.

    Args:
        chunks: The prepared columns of some rows, in the order of the schema's ``batch_fields``.

    Raises:
        DataError: A row does not fit the model.
    """
    rows = _rows(evaluation, evaluation.batch_size)
    sums: MetricSums | None = None
    schema = evaluation.schema
    for columns in chunks:
        for batch in rows.batches(columns):
            if sums is None:
                sums = _metric_sums(evaluation)
                _try_out(sums, evaluation, columns, batch.num_rows)
            sums.add(batch.tensors.of(batch.values), batch.num_rows)
            schema = batch.schema
    if sums is not None:
        yield _packed(sums.part, schema, rows.model_row_shapes)


def combined(evaluation: Evaluation, parts: Sequence[bytes]) -> dict[str, Any]:
    """Returns the metrics over all partitions, by name; warns of those that do not add up.

    Args:
        parts: What `evaluate_chunks` has yielded, of all partitions.

    Raises:
        DataError: There are none.
    """
    from elephant.rank.input.preprocessing import schema_from_text
    from elephant.rank.metrics.metric_sums import MetricPart, results_of

    if not parts:
        raise DataError("evaluate: expected rows. Received: none.")
    split = [part.split(b"\n", 1) for part in parts]
    abouts = [json.loads(about) for about, _ in split]
    shapes = {role: tuple(shape) for role, shape in abouts[0]["row_shapes"].items()}
    not_sums = sorted({name for about in abouts for name in about["not_sums"]})
    if not_sums:
        warn_user(
            f"evaluate: expected metrics whose variables add up over parts of the rows. Received: "
            f"{', '.join(not_sums)}, whose values are not those of one process. See docs/exactness.md."
        )
    made = [
        MetricPart(
            sums=np.frombuffer(sums, np.float64),
            num_rows=about["num_rows"],
            names=tuple(about["names"]),
            others=about["others"],
            not_sums=tuple(about["not_sums"]),
        )
        for (_, sums), about in zip(split, abouts, strict=True)
    ]
    target_schema = evaluation.schema if evaluation.function is None else evaluation.function.target_schema
    schema = schema_from_text(abouts[0]["schema"], target_schema)
    return results_of(evaluation.model.built(), schema, shapes, made)


def _metric_sums(evaluation: Evaluation) -> MetricSums:
    predictor = evaluation.model.loaded()
    from elephant.rank.metrics.metric_sums import MetricSums

    return MetricSums(predictor.model, predictor.test_function)


def _try_out(sums: MetricSums, evaluation: Evaluation, columns: Sequence[pa.Array], num_rows: int) -> None:
    """Tries the metrics out on the first batch, of so many rows, whole and in two parts of different sizes."""
    from elephant.rank.metrics.metric_sums import may_not_add_up

    if num_rows > 1 and may_not_add_up(evaluation.model.loaded().model):
        first = [column.slice(0, num_rows) for column in columns]
        whole, parts = (_batches(evaluation, rows, first) for rows in (num_rows, num_rows - max(num_rows // 3, 1)))
        sums.try_out(whole[0], parts)


def _batches(evaluation: Evaluation, size: int, columns: Sequence[pa.Array]) -> list[Any]:
    return [batch.tensors.of(batch.values) for batch in _rows(evaluation, size).batches(columns)]


def _rows(evaluation: Evaluation, batch_size: int | None) -> ModelRows:
    return ModelRows(evaluation.schema, batch_size, evaluation.function, evaluation.model.loaded)


def _packed(part: MetricPart, schema: DataSchema, row_shapes: RowShapes) -> bytes:
    from elephant.rank.input.preprocessing import schema_text

    about = {
        "num_rows": part.num_rows,
        "names": part.names,
        "others": part.others,
        "not_sums": part.not_sums,
        "schema": schema_text(schema),
        "row_shapes": row_shapes,
    }
    return json.dumps(about).encode() + b"\n" + part.sums.tobytes()


def _columns(schema: DataSchema, batch: pa.RecordBatch) -> list[pa.Array]:
    return [batch.column(field.role) for field in schema.batch_fields]
