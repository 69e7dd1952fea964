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

    def prepared(self, part: Part, schema: DataSchema) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a part with the prepared columns."""
        columns = list(dict.fromkeys(name for field in schema for name in field.columns))
        return _prepared(self.read(part, columns), schema)


def _prepared(batches: Iterable[pa.RecordBatch], schema: DataSchema) -> Iterator[pa.RecordBatch]:
    first_row = 0
    for batch in batches:
        yield prepared_batch(batch, schema, first_row=first_row)
        first_row += batch.num_rows
