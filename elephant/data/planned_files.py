"""Files whose rows are dealt out to workers, each of which reads its own part of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from elephant.data.arrow_cast import prepared_batch
from elephant.data.schema import DataSchema

# What one worker reads: pieces of row groups, or shares of files.
Part = tuple[Any, ...]


class PlannedFiles(ABC):
    """The files of one data set as they were when they were listed. The value travels to the workers."""

    @abstractmethod
    def deal(self, num_workers: int, *, seed: int | None) -> list[Part]:
        """Returns the part of each worker; every row is in one of them.

        Args:
            num_workers: Workers.
            seed: Where parts can be mixed, they are, by it; None keeps neighbours together.
        """

    @abstractmethod
    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a part, some megabytes at a time, with the columns by the user's names.

        Raises:
            DataError: A file is not there, has changed since it was listed, or cannot be read.
        """

    def first(self, columns: list[str]) -> pa.RecordBatch | None:
        """Returns some rows, for a look at the first one; None when there is none."""
        for part in self.deal(1, seed=None):
            for batch in self.read(part, columns):
                if batch.num_rows:
                    return batch
        return None

    def first_prepared(self, schema: DataSchema) -> pa.RecordBatch | None:
        """Returns the prepared columns of the first row; None when there is none."""
        batch = self.first(_columns_of(schema))
        return None if batch is None else prepared_batch(batch.slice(0, 1), schema)

    def prepared(self, part: Part, schema: DataSchema) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a part with the prepared columns."""
        return _prepared(self.read(part, _columns_of(schema)), schema)


def _columns_of(schema: DataSchema) -> list[str]:
    return list(dict.fromkeys(name for field in schema for name in field.columns))


def _prepared(batches: Iterable[pa.RecordBatch], schema: DataSchema) -> Iterator[pa.RecordBatch]:
    first_row = 0
    for batch in batches:
        yield prepared_batch(batch, schema, first_row=first_row)
        first_row += batch.num_rows
