"""The rows of a fit, from a DataFrame or from files: which prepared columns they have, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql.types import StructType

from elephant.cluster.file_rows import FileRows
from elephant.cluster.sessions import require_running
from elephant.cluster.sources import FrameRows, RowSource
from elephant.config import FitConfig
from elephant.data.schema import SPARSE, DataSchema
from elephant.modeling.model_info import ModelFacts
from elephant.spark.choice import ColumnChoice
from elephant.spark.columns import prepare_training, undecided_vectors
from elephant.spark.paths import Files, active_session, open_files
from elephant.spark.raw_columns import prepare_raw_training

FirstRow = dict[str, Any] | None


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a fit.

    Args:
        source: Where they come from.
        schema: What they hold.
        target: What a preprocessing function is to make of them; None where there is no such function.
    """

    source: RowSource
    schema: DataSchema
    target: DataSchema | None = None

    @property
    def trained_schema(self) -> DataSchema:
        """What the model gets."""
        return self.schema if self.target is None else self.target


def rows_of_frame(frame: DataFrame, facts: ModelFacts, choice: ColumnChoice, *, preprocessed: bool) -> TrainingRows:
    """Returns the prepared columns of a DataFrame.

    Vectors stay sparse where the first row of their column is, and become arrays else: that
    row is asked for here where there are vectors, and where the fit begins elsewhere.

    Args:
        frame: The user's DataFrame.
        facts: What the model takes.
        choice: Which columns to use.
        preprocessed: Whether a function of the user's gets the columns as they are.
    """
    require_running(frame.sparkSession)
    if preprocessed:
        raw, target, columns = prepare_raw_training(frame.schema, facts, choice)
        return TrainingRows(FrameRows(frame.select(*columns)), raw, target)

    def rows_of(schema: DataSchema, columns: list[Column], first: FirstRow = None) -> RowSource:
        return FrameRows(frame.select(*columns), first=first)

    return _decided(frame.schema, facts, choice, rows_of)


def rows_of_files(
    files: Files, facts: ModelFacts, choice: ColumnChoice, config: FitConfig, *, preprocessed: bool
) -> TrainingRows:
    """Returns the prepared columns of files, which the executors of the active session read.

    Args:
        files: Where they are.
        facts: What the model takes.
        choice: Which columns to use.
        config: Tells workers, seed and whether rows are shuffled.
        preprocessed: Whether a function of the user's gets the columns as they are.
    """
    session = active_session()
    opened = open_files(files, facts, choice)
    seed = config.seed if config.shuffle else None

    def rows_of(schema: DataSchema, columns: list[Column], first: FirstRow = None) -> RowSource:
        # The columns are Spark's casts, which the workers do by themselves here.
        return FileRows(session, opened.files, schema, number=config.num_workers, seed=seed, first=first)

    if preprocessed:
        raw, target, columns = prepare_raw_training(opened.schema, facts, choice)
        return TrainingRows(rows_of(raw, columns), raw, target)
    return _decided(opened.schema, facts, choice, rows_of)


def _decided(
    columns: StructType, facts: ModelFacts, choice: ColumnChoice, rows_of: Callable[..., RowSource]
) -> TrainingRows:
    """Returns rows whose vectors stay sparse where the first one of their column is, and become arrays else."""
    schema, selected = prepare_training(columns, facts, choice)
    vectors = undecided_vectors(columns, schema)
    if not vectors:
        return TrainingRows(rows_of(schema, selected), schema)
    looked_at, structs = prepare_training(columns, facts, choice, sparse=vectors)
    first = rows_of(looked_at, structs).first_row()
    kept = [field for field in looked_at.inputs if field.kind == SPARSE and not field.sparse_tensor]
    sparse = [field.columns[0] for field in kept if first is not None and _is_sparse(first[field.role])]
    if sparse:
        schema, selected = prepare_training(columns, facts, choice, sparse=sparse)
    return TrainingRows(rows_of(schema, selected, first), schema)


def _is_sparse(vector: Any) -> bool:
    return vector is not None and vector["type"] == 0
