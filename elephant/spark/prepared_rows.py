"""What a fit is given, a DataFrame or files, as rows of the prepared columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql.types import StructType

from elephant.cluster.file_rows import FileRows
from elephant.cluster.sources import FrameRows, RowSource
from elephant.config import FitConfig
from elephant.data.schema import SPARSE, DataSchema
from elephant.modeling.facts import ModelFacts
from elephant.spark.choice import ColumnChoice
from elephant.spark.columns import prepare_training, undecided_vectors
from elephant.spark.paths import Files, active_session, open_files

FirstRow = dict[str, Any] | None


def frame_rows(frame: DataFrame, facts: ModelFacts, choice: ColumnChoice) -> tuple[RowSource, DataSchema]:
    """Returns the rows of a DataFrame, whose columns Spark casts.

    Raises:
        SchemaError: A column is missing or of a type that cannot be trained on.
    """

    def rows_of(schema: DataSchema, columns: list[Column], first: FirstRow = None) -> RowSource:
        return FrameRows(frame.select(*columns), first=first)

    return _decided_rows(frame.schema, facts, choice, rows_of)


def file_rows(files: Files, facts: ModelFacts, choice: ColumnChoice, config: FitConfig) -> tuple[RowSource, DataSchema]:
    """Returns the rows of files, which the workers read, and whose columns they cast, by themselves.

    Raises:
        ClusterError: There is no Spark session.
        ConfigurationError: There are no files, or of no known format.
        DataError: A file cannot be read, or a column is missing or of a type that cannot be trained on.
    """
    session, opened = active_session(), open_files(files, facts, choice)
    seed = config.seed if config.shuffle else None

    def rows_of(schema: DataSchema, columns: list[Column], first: FirstRow = None) -> RowSource:
        return FileRows(session, opened.files, schema, number=config.num_workers, seed=seed, first=first)

    return _decided_rows(opened.schema, facts, choice, rows_of)


def _decided_rows(
    columns: StructType, facts: ModelFacts, choice: ColumnChoice, rows_of: Callable[..., RowSource]
) -> tuple[RowSource, DataSchema]:
    """Returns the columns of a fit: vectors stay sparse where the first row of their column is, and become arrays else.

    That row is asked for here where there are vectors, and where the fit begins elsewhere.
    """
    schema, selected = prepare_training(columns, facts, choice)
    vectors = undecided_vectors(columns, schema)
    if not vectors:
        return rows_of(schema, selected), schema
    looked_at, structs = prepare_training(columns, facts, choice, sparse=vectors)
    first = rows_of(looked_at, structs).first_row()
    kept = [field for field in looked_at.inputs if field.kind == SPARSE and not field.sparse_tensor]
    sparse = [field.columns[0] for field in kept if first is not None and _is_sparse(first[field.role])]
    if sparse:
        schema, selected = prepare_training(columns, facts, choice, sparse=sparse)
    return rows_of(schema, selected, first), schema


def _is_sparse(vector: Any) -> bool:
    return vector is not None and vector["type"] == 0
