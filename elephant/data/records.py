"""RDD records: their leaves, and their columns in Arrow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from elephant.data.schema import RAGGED, SCALAR, SPARSE, TEXT, DataSchema, Field, Nest, unpack
from elephant.data.to_arrow import to_arrow
from elephant.errors import DataError

Shape = tuple[int, ...]

# Limits of the records that become one batch: memory is bounded however large a record is.
_BATCH_BYTES = 8 << 20
_BATCH_RECORDS = 8192


def as_array(leaf: Any) -> np.ndarray:
    """Returns one part of a record as an array: of a number it has no dimensions.

    >>> as_array([1, 2.5]), as_array(3).shape
    (array([1. , 2.5]), ())
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    # Vectors of Spark and matrices of scipy, which this layer does not know.
    if hasattr(leaf, "toArray"):
        return np.asarray(leaf.toArray())
    if hasattr(leaf, "toarray"):
        array: np.ndarray = leaf.toarray()
        return array[0] if array.ndim == 2 and len(array) == 1 else array
    try:
        return np.asarray(leaf)
    except ValueError:
        return np.array(None, dtype=object)


def sparse_parts(leaf: Any) -> tuple[int, np.ndarray, np.ndarray] | None:
    """Returns size, indices and values of a sparse vector of Spark, or of a row of a scipy matrix; None of the rest."""
    if hasattr(leaf, "tocsr"):
        return _parts_of_matrix(leaf)
    if not hasattr(leaf, "indices"):
        return None
    return int(leaf.size), np.asarray(leaf.indices, np.int32), np.asarray(leaf.values)


def _parts_of_matrix(matrix: Any) -> tuple[int, np.ndarray, np.ndarray] | None:
    """Returns the parts of a scipy matrix, in whatever form it keeps them; None when it is not one row."""
    if math.prod(matrix.shape[:-1]) != 1:
        return None
    # Other forms have other indices, and any may name a place twice, which means the sum.
    row = matrix.tocsr(copy=True)
    row.sum_duplicates()
    return int(row.shape[-1]), np.asarray(row.indices, np.int32), np.asarray(row.data)


def size_of(leaf: Any) -> int:
    """Returns about how many bytes a part of a record takes."""
    if hasattr(leaf, "nbytes"):
        return int(leaf.nbytes)
    if hasattr(leaf, "indices"):
        return 12 * len(leaf.indices)
    if isinstance(leaf, (list, tuple)):
        return sum(map(size_of, leaf[:1])) * len(leaf) if leaf else 0
    return len(leaf) if isinstance(leaf, (str, bytes)) else 8


def column_of(leaves: Sequence[Any], field: Field, natural: Shape, first_record: int) -> pa.Array:
    """Returns one part of each of several records as a column that `elephant.data.to_numpy` reads.

    Raises:
        DataError: A record has something else in this place.
    """
    if field.kind == SPARSE:
        return _sparse(leaves, field, first_record)
    if field.kind == RAGGED:
        return _ragged(leaves, field, natural, first_record)
    if field.kind == TEXT:
        return _text(leaves, field, natural, first_record)
    values = _stacked(leaves, field, natural, first_record).reshape(-1)
    if field.kind == SCALAR:
        return to_arrow(values)
    return pa.FixedSizeListArray.from_arrays(to_arrow(values), max(int(np.prod(natural, dtype=np.int64)), 1))


def _stacked(leaves: Sequence[Any], field: Field, natural: Shape, first_record: int) -> np.ndarray:
    """Returns numbers of shape (records, *natural)."""
    arrays = [as_array(leaf) for leaf in leaves]
    for place, array in enumerate(arrays):
        if array.shape != natural or array.dtype.kind not in "biuf":
            raise _unlike(leaves[place], array, field, f"shape {natural}", first_record + place)
    stacked = np.stack(arrays)
    return _cast(stacked, field, stacked.size // len(leaves), first_record)


def _cast(values: np.ndarray, field: Field, per_record: int, first_record: int) -> np.ndarray:
    """Returns floats of the field's type; integers may be wider, and are checked where the shard is written."""
    dtype = np.dtype(field.dtype)
    if values.dtype.kind == "b":
        values = values.view(np.uint8)
    if dtype.kind == "f":
        return np.ascontiguousarray(values, dtype)
    if values.dtype.kind == "f":
        fit = (values >= -(2.0**63)) & (values < 2.0**63)
        wrong = np.flatnonzero(~(fit & (values == np.trunc(values))))
        if len(wrong):
            record = first_record + int(wrong[0]) // max(per_record, 1)
            raise DataError(
                f"{field.title}: expected integers, as in the first record, or as the model takes them. "
                f"Received: {values.flat[wrong[0]]} in record {record} of the partition. If these are numbers of any "
                "size, make them floats in every record."
            )
        values = values.astype(np.int64)
    return np.ascontiguousarray(values)


def _ragged(leaves: Sequence[Any], field: Field, natural: Shape, first_record: int) -> pa.Array:
    arrays = [as_array(leaf) for leaf in leaves]
    for place, array in enumerate(arrays):
        if array.shape[1:] != natural or array.ndim == 0 or (array.dtype.kind not in "biuf" and array.size):
            wanted = f"a sequence of elements of shape {natural}"
            raise _unlike(leaves[place], array, field, wanted, first_record + place)
    offsets = np.cumsum([0, *(len(array) for array in arrays)])
    # An empty list has no type of its own.
    elements = np.concatenate([array.astype(field.dtype) if not array.size else array for array in arrays])
    values = to_arrow(_cast(elements, field, 1, first_record).reshape(-1))
    if natural:
        values = pa.FixedSizeListArray.from_arrays(values, int(np.prod(natural)))
    return pa.LargeListArray.from_arrays(to_arrow(offsets, dtype="int64"), values)


def _text(leaves: Sequence[Any], field: Field, natural: Shape, first_record: int) -> pa.Array:
    items: list[Any] = []
    for place, leaf in enumerate(leaves):
        strings = [leaf] if isinstance(leaf, (str, bytes)) else np.asarray(leaf, dtype=object).ravel().tolist()
        count = int(np.prod(natural, dtype=np.int64))
        if len(strings) != count or not all(isinstance(item, (str, bytes)) for item in strings):
            raise _unlike(leaf, np.asarray(leaf, dtype=object), field, f"strings in {natural}", first_record + place)
        items += [item.encode() if isinstance(item, str) else item for item in strings]
    texts = pa.array(items, pa.large_binary())
    return pa.FixedSizeListArray.from_arrays(texts, len(items) // max(len(leaves), 1)) if natural else texts


def _sparse(leaves: Sequence[Any], field: Field, first_record: int) -> pa.Array:
    """Returns vectors as Spark writes them: structs of type (0 is sparse), size, indices and values."""
    sizes, indices, values = [], [], []
    for place, leaf in enumerate(leaves):
        size, kept, numbers = sparse_parts(leaf) or _all_elements(leaf, field, first_record + place)
        sizes.append(size)
        indices.append(kept)
        values.append(_cast(numbers, field, len(kept), first_record + place))
    offsets = to_arrow(np.cumsum([0, *map(len, values)]), dtype="int32")
    parts = {
        "type": to_arrow(np.zeros(len(leaves), np.int8)),
        "size": to_arrow(np.array(sizes), dtype="int32"),
        "indices": pa.ListArray.from_arrays(offsets, to_arrow(np.concatenate(indices))),
        "values": pa.ListArray.from_arrays(offsets, to_arrow(np.concatenate(values))),
    }
    return pa.StructArray.from_arrays(list(parts.values()), list(parts))


def _all_elements(leaf: Any, field: Field, record: int) -> tuple[int, np.ndarray, np.ndarray]:
    array = as_array(leaf)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise _unlike(leaf, array, field, "a vector", record)
    return len(array), np.arange(len(array), dtype=np.int32), array


def _unlike(leaf: Any, array: np.ndarray, field: Field, expected: str, record: int) -> DataError:
    what = type(leaf).__name__
    received = "None" if leaf is None else f"{what} of shape {array.shape}" if array.dtype.kind in "biuf" else what
    return DataError(
        f"{field.title}: expected {expected} in every record, as in the first one. "
        f"Received: {received} in record {record} of the partition."
    )


@dataclass(frozen=True, kw_only=True)
class RecordPlan:
    """Place of each prepared column in a record. Pickles, and so travels to the workers.

    Args:
        schema: What the columns hold.
        nest: The structure of a record, with the position of a column in place of each part;
            parts at positions beyond the last column are left out.
        shapes: Shape of each column's part in a record; of a ragged one that of an element of the sequence.
        cut: Where the part at position 0 is one vector that holds those of several inputs one after the
            other, the widths of these; else None.

    >>> from elephant.data.schema import FEATURES, LABEL, SCALAR, Field
    >>> schema = DataSchema((Field(FEATURES, ("x",), "float32", shape=(2,)),), (Field(LABEL, ("y",), "int64", SCALAR),))
    >>> plan = RecordPlan(schema=schema, nest=(0, 1), shapes=((2,), ()))
    >>> [batch.to_pydict() for batch in plan.batches([([1.0, 2.0], 0), ([3.0, 4.0], 1)])]
    [{'features': [[1.0, 2.0], [3.0, 4.0]], 'label': [0, 1]}]
    """

    schema: DataSchema
    nest: Nest
    shapes: tuple[tuple[int, ...], ...]
    cut: tuple[int, ...] | None = None

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Natural shape of a row of each array column in the batches, by role, as `elephant.data.to_numpy` gives it."""
        fields = zip(self.schema, self.shapes, strict=False)
        return {field.role: _flat(shape, field) for field, shape in fields if field.is_array}

    def batches(self, records: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        """Yields the records' columns, some megabytes at a time.

        Raises:
            DataError: A record is not like the first one; it is named by its position.
        """
        first = 0
        for rows in self._chunks(records):
            yield self._batch(rows, first)
            first += len(rows)

    def _chunks(self, records: Iterable[Any]) -> Iterator[list[list[Any]]]:
        rows: list[list[Any]] = []
        size = 0
        for number, record in enumerate(records):
            leaves = self._leaves(record, number)
            rows.append(leaves)
            size += sum(map(size_of, leaves))
            if size >= _BATCH_BYTES or len(rows) >= _BATCH_RECORDS:
                yield rows
                rows, size = [], 0
        if rows:
            yield rows

    def _leaves(self, record: Any, number: int) -> list[Any]:
        try:
            leaves = unpack(self.nest, record)
            if self.cut is not None:
                leaves[:1] = cut_vector(leaves[0], self.cut)
        except ValueError as error:
            raise DataError(
                f"record {number} of the partition: {error} All records must have the structure of the first one."
            ) from None
        return leaves

    def _batch(self, rows: list[list[Any]], first: int) -> pa.RecordBatch:
        fields = list(self.schema)
        columns = [
            column_of([row[place] for row in rows], field, self.shapes[place], first)
            for place, field in enumerate(fields)
        ]
        return pa.RecordBatch.from_arrays(columns, [field.role for field in fields])


def _flat(shape: tuple[int, ...], field: Field) -> tuple[int, ...]:
    if not shape and field.kind in (RAGGED, TEXT):
        return ()
    return (math.prod(shape),)


def cut_vector(vector: Any, widths: Sequence[int]) -> list[np.ndarray]:
    """Returns the parts of a vector that holds one after the other; raises ValueError when it is of another length.

    >>> cut_vector([1, 2, 3], (1, 2))
    [array([1]), array([2, 3])]
    """
    flat = as_array(vector).reshape(-1)
    if len(flat) != sum(widths):
        raise ValueError(f"expected {sum(widths)} values, which are those of all inputs. Received: {len(flat)}.")
    return np.split(flat, np.cumsum(widths)[:-1])
