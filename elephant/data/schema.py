"""Schema of the prepared columns of a fit.

`elephant.spark.columns.column_types` decides which of the user's columns become which role, and `elephant.data.casting`
makes them that; everything from there on knows the roles, and the user's names for error messages.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elephant.data.json_types import require_nest, require_types

# How the arrays of a batch are nested for Keras: the shape of the structure, with the position of an array in place of
# each: ``0``, ``(0, 1)`` or ``{"image": 0, "words": (1, 2)}``.
Nest = Any

FEATURES = "features"
LABEL = "label"
WEIGHT = "weight"
VALIDATION = "validation"
PIECE = "piece"

# What a row of a column holds.
SCALAR = "scalar"  # one element
DENSE = "dense"  # an array, of the same shape in every row
RAGGED = "ragged"  # a sequence, of its own length in every row
SPARSE = "sparse"  # a vector of which only some elements are kept
TEXT = "text"  # strings or bytes, as many in every row


def role_of(base: str, position: int) -> str:
    """Returns the role of one of several columns of a kind.

    >>> role_of(FEATURES, 0), role_of(FEATURES, 2)
    ('features', 'features_2')
    """
    return base if position == 0 else f"{base}_{position}"


@dataclass(frozen=True)
class Field:
    """One prepared column.

    Args:
        role: The column's name in the prepared data, of `role_of`.
        columns: The user's columns that it was made of.
        dtype: numpy name of an element's type, such as ``"float32"``; of text ``"string"`` or ``"bytes"``.
        kind: What a row holds: one of the constants above.
        shape: What one row becomes for the model, such as ``(8, 8, 1)``. A dimension that is None follows from the
            row; of several, rows have to be nested as deep. None keeps rows in the shape that they have.
            Rows of a ragged column have None first.
        sparse_tensor: Whether the model takes a sparse column as a sparse tensor.
        num_classes: Of class numbers that a loss takes, how many there are; None where any number may stand.
        ignored_class: Number beside these that the loss ignores, or None.
        is_probability: Whether the loss takes a probability of class 1 as well, between the two numbers.
    """

    role: str
    columns: tuple[str, ...]
    dtype: str
    kind: str = DENSE
    shape: tuple[int | None, ...] | None = None
    sparse_tensor: bool = False
    num_classes: int | None = None
    ignored_class: int | None = None
    is_probability: bool = False

    @property
    def is_fixed(self) -> bool:
        """True if every row takes the same number of bytes."""
        return self.kind in (SCALAR, DENSE)

    @property
    def is_array(self) -> bool:
        """True if a row holds several elements, not one."""
        return self.kind != SCALAR

    @property
    def width(self) -> int | None:
        """Elements per row, as far as the shape tells."""
        if self.kind == SCALAR:
            return 1
        if self.shape is None or None in self.shape:
            return None
        return math.prod(size for size in self.shape if size is not None)

    @property
    def title(self) -> str:
        """Name of the column in error messages: ``column 'x'`` or ``columns 'a', 'b', ... 'z' (9)``."""
        if len(self.columns) == 1:
            return f"column {self.columns[0]!r}"
        if len(self.columns) <= 3:
            return f"columns {', '.join(map(repr, self.columns))}"
        return f"columns {self.columns[0]!r}, {self.columns[1]!r}, ... {self.columns[-1]!r} ({len(self.columns)})"

    def row_shape(self, natural: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape that one row has for the model.

        Args:
            natural: The shape that it has in the data; of a ragged column that of one element of the sequence.
        """
        if self.kind == SCALAR:
            return ()
        if self.kind == RAGGED:
            inner = natural if self.shape is None or None in self.shape[1:] else self.shape[1:]
            return tuple(int(size or 0) for size in inner)
        if self.shape is None:
            return tuple(natural)
        if self.shape.count(None) > 1 and _has_sizes(natural, self.shape):
            return tuple(natural)
        known = math.prod(size for size in self.shape if size is not None)
        width = math.prod(natural)
        return tuple(width // max(known, 1) if size is None else size for size in self.shape)

    def accepts(self, width: int) -> bool:
        """Returns whether rows of ``width`` elements fit the shape."""
        return self.fits((width,))

    def fits(self, natural: Sequence[int]) -> bool:
        """Returns whether rows fit the shape that have another in the data, as nested lists have one."""
        return self.shape is None or math.prod(self.row_shape(natural)) == math.prod(natural)


def _has_sizes(natural: Sequence[int], shape: Sequence[int | None]) -> bool:
    return len(natural) == len(shape) and all(size in (None, given) for size, given in zip(shape, natural, strict=True))


@dataclass(frozen=True)
class DataSchema:
    """The prepared columns of a fit.

    Args:
        inputs: What the model takes.
        labels: What its outputs are compared with; none for a model that trains without.
        weights: Sample weights: none, one for the rows, or one for each output.
        validation: Tells which rows are for validation, or None.
        x: How the inputs are nested for Keras.
        y: How the labels are.
        w: How the weights are.
        inputs_as_labels: Whether the model is compared with its own inputs, as an autoencoder; ``y`` then
            holds positions of inputs.
        piece: Tells the virtual shard of a row (`elephant.data.virtual_shards`), or None.
    """

    inputs: tuple[Field, ...]
    labels: tuple[Field, ...] = ()
    weights: tuple[Field, ...] = ()
    validation: Field | None = None
    x: Nest = 0
    y: Nest = 0
    w: Nest = 0
    inputs_as_labels: bool = False
    piece: Field | None = None

    def __iter__(self) -> Iterator[Field]:
        yield from self.batch_fields
        yield from (field for field in (self.validation, self.piece) if field is not None)

    def in_pieces(self) -> DataSchema:
        """Returns the schema with a column behind the user's that tells the virtual shard of a row."""
        names, name = self.columns, PIECE
        while name in names:
            name += "_"
        return replace(self, piece=Field(PIECE, (name,), "int32", SCALAR))

    @property
    def columns(self) -> list[str]:
        """The user's columns that all are made of, each once."""
        return list(dict.fromkeys(name for field in self for name in field.columns))

    def with_sparse(self, columns: Collection[str]) -> DataSchema:
        """Returns the schema with some columns' vectors as they are, and not as arrays."""
        inputs = (
            replace(field, kind=SPARSE) if field.kind == DENSE and {*field.columns} <= {*columns} else field
            for field in self.inputs
        )
        return replace(self, inputs=tuple(inputs))

    @property
    def batch_fields(self) -> tuple[Field, ...]:
        """The columns that batches are made of, in the order of a batch's arrays."""
        return (*self.inputs, *self.labels, *self.weights)

    def packed(self, arrays: Sequence[Any]) -> Any:
        """Returns the arrays of a batch as Keras gives them to a ``train_step``.

        That is ``(x, y)``, ``(x, y, sample_weight)``, or without labels ``x`` itself, and ``(x,)`` of a tuple.

        Args:
            arrays: One per column of `batch_fields`.
        """
        x = pack(self.x, arrays)
        if not self.labels and not self.inputs_as_labels:
            return (x,) if isinstance(x, (tuple, list)) else x
        y = pack(self.y if self.inputs_as_labels else shifted(self.y, len(self.inputs)), arrays)
        return (x, y, pack(shifted(self.w, len(self.inputs) + len(self.labels)), arrays)) if self.weights else (x, y)

    def row_spec(self, row_shapes: Mapping[str, Sequence[int]]) -> RowSpec:
        """Returns the spec of one row.

        Args:
            row_shapes: Natural shape of a row of each array column, by role.
        """
        tensors = [_tensor_of(field, row_shapes.get(field.role, ())) for field in self.batch_fields]
        count = len(self.inputs)
        step = self.packed(range(len(tensors)))
        return RowSpec(x=self.x, tensors=tuple(tensors[:count]), targets=tuple(tensors[count:]), step=step)


@dataclass(frozen=True)
class TensorSpec:
    """One array of the model's input.

    Args:
        shape: Of one row; None where rows differ.
        dtype: numpy name of an element's type, or ``"string"``.
        sparse: Whether it is a sparse tensor.
    """

    shape: tuple[int | None, ...]
    dtype: str
    sparse: bool = False


@dataclass(frozen=True)
class RowSpec:
    """Shape and dtype of one row: enough to build the model's variables.

    Args:
        x: How the arrays of the model's input are nested.
        tensors: One per array of these.
        targets: One per array of labels and weights.
        step: How both, one after the other, are nested for a ``train_step``; None where that is not known.

    >>> rows = RowSpec({"image": 0}, (TensorSpec((8, 8), "float32"),))
    >>> RowSpec.from_json(rows.to_json()) == rows
    True
    """

    x: Nest
    tensors: tuple[TensorSpec, ...]
    targets: tuple[TensorSpec, ...] = ()
    step: Nest | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns a form that JSON holds."""
        return {
            "x": self.x,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "targets": [asdict(tensor) for tensor in self.targets],
            "step": self.step,
        }

    @classmethod
    def from_json(cls, form: dict[str, Any]) -> RowSpec:
        """Reads the form of `to_json`; raises KeyError or TypeError for any other."""
        # Those that earlier versions have saved have no targets.
        tensors, targets = (
            tuple(TensorSpec(tuple(t["shape"]), t["dtype"], t["sparse"]) for t in given)
            for given in (form["tensors"], form.get("targets", ()))
        )
        for tensor in (*tensors, *targets):
            require_types(tensor)
        require_nest(form["x"], len(tensors), "x")
        step = form.get("step")
        if step is not None:
            # The input of an autoencoder is its target as well.
            require_nest(step, len(tensors) + len(targets), "step", repeated=True)
        return cls(x=from_json(form["x"]), tensors=tensors, targets=targets, step=from_json(step))


def _tensor_of(field: Field, natural: Sequence[int]) -> TensorSpec:
    shape = field.row_shape(natural)
    if field.kind == RAGGED:
        return TensorSpec((None, *shape), field.dtype)
    return TensorSpec(shape, field.dtype, sparse=field.sparse_tensor)


def pack(nest: Nest, leaves: Sequence[Any]) -> Any:
    """Returns the leaves in the structure of a nest.

    >>> pack({"image": 0, "words": (2, 1)}, ["i", "v", "w"])
    {'image': 'i', 'words': ('w', 'v')}
    """
    if isinstance(nest, dict):
        return {name: pack(part, leaves) for name, part in nest.items()}
    if isinstance(nest, (tuple, list)):
        return tuple(pack(part, leaves) for part in nest)
    return leaves[nest]


def unpack(nest: Nest, value: Any) -> list[Any]:
    """Returns the leaves of a value that has the structure of a nest, by their positions.

    Raises:
        ValueError: The value has another structure.

    >>> unpack({"image": 0, "words": (2, 1)}, {"words": ("w", "v"), "image": "i"})
    ['i', 'v', 'w']
    """
    found: dict[int, Any] = {}
    _collect(nest, value, found)
    return [found[position] for position in range(len(found))]


def _collect(nest: Nest, value: Any, found: dict[int, Any]) -> None:
    if isinstance(nest, dict):
        if not isinstance(value, dict) or value.keys() != nest.keys():
            received = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"expected a dictionary with the keys {sorted(nest)}. Received: {received}.")
        for name, part in nest.items():
            _collect(part, value[name], found)
    elif isinstance(nest, (tuple, list)):
        if not isinstance(value, (tuple, list)) or len(value) != len(nest):
            received = f"{len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
            raise ValueError(f"expected {len(nest)} parts. Received: {received}.")
        for part, item in zip(nest, value, strict=True):
            _collect(part, item, found)
    else:
        found[nest] = value


def nest_of(value: Any) -> tuple[Nest, list[Any]]:
    """Returns the nest of a structure of dictionaries, tuples and lists, and its leaves by their positions.

    Lists of numbers are leaves, as users write rows; lists of anything else are nested.

    >>> nest_of(({"a": [1, 2], "b": 3.0}, [4]))
    (({'a': 0, 'b': 1}, 2), [[1, 2], 3.0, [4]])
    """
    leaves: list[Any] = []
    return _numbered(value, leaves), leaves


def _numbered(value: Any, leaves: list[Any]) -> Nest:
    if isinstance(value, dict):
        return {str(name): _numbered(part, leaves) for name, part in value.items()}
    if isinstance(value, tuple) or (isinstance(value, list) and any(_has_parts(part) for part in value)):
        return tuple(_numbered(part, leaves) for part in value)
    leaves.append(value)
    return len(leaves) - 1


def _has_parts(value: Any) -> bool:
    return isinstance(value, (dict, tuple)) or hasattr(value, "__array__")


def shifted(nest: Nest, by: int) -> Nest:
    """Returns the nest with every position moved up.

    >>> shifted((0, 1), 3)
    (3, 4)
    """
    return pack(nest, range(by, by + num_leaves(nest)))


def num_leaves(nest: Nest) -> int:
    """Returns the number of leaves.

    >>> num_leaves({"image": 0, "words": (1, 2)})
    3
    """
    if isinstance(nest, dict):
        return sum(num_leaves(part) for part in nest.values())
    if isinstance(nest, (tuple, list)):
        return sum(num_leaves(part) for part in nest)
    return 1


def from_json(nest: Nest) -> Nest:
    """Returns a nest that has been through JSON, which knows no tuples.

    >>> from_json({"words": [0, 1]})
    {'words': (0, 1)}
    """
    if isinstance(nest, dict):
        return {name: from_json(part) for name, part in nest.items()}
    if isinstance(nest, (tuple, list)):
        return tuple(from_json(part) for part in nest)
    return nest


@dataclass(frozen=True)
class ShardSummary:
    """Summary of a finished shard.

    Args:
        num_rows: Rows in all.
        num_validation: Rows that the validation indicator column marks.
        row_shapes: Natural shape of a row of each array column, by role; absent where there was no row to tell it.
    """

    num_rows: int
    num_validation: int
    row_shapes: dict[str, tuple[int, ...]]
