"""What the prepared columns of a fit hold.

The Spark side casts and renames the user's columns to the roles below
(`elephant.spark.columns`); everything from there on knows these roles only, and
keeps the user's names for error messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

FEATURES = "features"
LABEL = "label"
WEIGHT = "weight"
VALIDATION = "validation"


@dataclass(frozen=True)
class Field:
    """One prepared column.

    Args:
        role: The column's name in the prepared data: one of the constants above.
        columns: The user's columns that it was made of.
        dtype: numpy name of an element's type, such as ``"float32"``.
        is_array: Whether a row holds a list of elements, not one element.
        shape: What one row becomes for the model, such as ``(8, 8, 1)``. At most one
            dimension may be None: it follows from the row's width. None keeps rows flat.
    """

    role: str
    columns: tuple[str, ...]
    dtype: str
    is_array: bool
    shape: tuple[int | None, ...] | None = None

    @property
    def width(self) -> int | None:
        """Elements per row, as far as the shape tells."""
        if not self.is_array:
            return 1
        if self.shape is None or None in self.shape:
            return None
        return math.prod(size for size in self.shape if size is not None)

    @property
    def title(self) -> str:
        """How error messages call the column: ``column 'x'`` or ``columns 'a', 'b', ... 'z' (9)``."""
        if len(self.columns) == 1:
            return f"column {self.columns[0]!r}"
        if len(self.columns) <= 3:
            return f"columns {', '.join(map(repr, self.columns))}"
        return f"columns {self.columns[0]!r}, {self.columns[1]!r}, ... {self.columns[-1]!r} ({len(self.columns)})"

    def row_shape(self, width: int) -> tuple[int, ...]:
        """Returns the shape of one row of ``width`` elements."""
        if not self.is_array:
            return ()
        if self.shape is None:
            return (width,)
        known = math.prod(size for size in self.shape if size is not None)
        return tuple(width // max(known, 1) if size is None else size for size in self.shape)

    def accepts(self, width: int) -> bool:
        """Whether rows of ``width`` elements fit the shape."""
        return math.prod(self.row_shape(width)) == width


@dataclass(frozen=True)
class DataSchema:
    """The prepared columns of a fit, by role."""

    features: Field
    label: Field | None = None
    weight: Field | None = None
    validation: Field | None = None

    def __iter__(self) -> Iterator[Field]:
        fields = (self.features, self.label, self.weight, self.validation)
        return (field for field in fields if field is not None)
