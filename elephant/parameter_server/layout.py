"""Layout of the weights and tables over the servers, and the settings of each server."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from elephant.errors import ConfigurationError
from elephant.net.buffers import aligned_vector
from elephant.tables.table import TableSpec

# 64 bytes: TensorFlow takes an array that begins at a multiple of them as it is, without a copy.
ALIGNED_VALUES = 16


@dataclass(frozen=True)
class Segment:
    """One variable's place.

    Args:
        name: The variable's path, such as ``dense/kernel``.
        shape: Its shape.
        start: Index of its first value in the flat vector.
    """

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Number of its values."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Index behind its last value."""
        return self.start + self.size


class Layout:
    """The places of a model's variables, in their order, each from a multiple of 16 values on.

    The values between two variables are zero, and stay so: their gradient is zero.

    Rows of tables are no part of the vector: a server has those whose number, modulo the servers, is its own.

    Args:
        variables: Name and shape of each.
        table_specs: Forms of the model's tables.

    Example:
        >>> layout = Layout([("kernel", (2, 3)), ("bias", (3,))])
        >>> layout.num_values, [segment.start for segment in layout.segments]
        (32, [0, 16])
        >>> flat = layout.pack([np.ones((2, 3)), np.full(3, 2.0)])
        >>> [view.sum() for view in layout.views(flat)]
        [np.float32(6.0), np.float32(6.0)]
    """

    def __init__(self, variables: Sequence[tuple[str, Sequence[int]]], table_specs: Sequence[TableSpec] = ()) -> None:
        self.table_specs = tuple(table_specs)
        segments = []
        start = 0
        for name, shape in variables:
            segment = Segment(str(name), tuple(int(size) for size in shape), start)
            segments.append(segment)
            start = -(-segment.stop // ALIGNED_VALUES) * ALIGNED_VALUES
        self.segments = tuple(segments)
        self.num_values = start

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ where shapes or their order do: names and seeds may, by process."""
        shapes: list[Any] = [segment.shape for segment in self.segments]
        forms = [asdict(replace(spec, seed=0)) for spec in self.table_specs]
        return hashlib.sha256(json.dumps(shapes + forms).encode()).hexdigest()[:16]

    def zeros(self) -> np.ndarray:
        """Returns a new flat vector of zeros, float32, whose memory begins at a multiple of 64 bytes."""
        return aligned_vector(self.num_values, allocate=np.zeros)

    def views(self, flat: np.ndarray) -> list[np.ndarray]:
        """Returns each variable's part of a flat vector, in its shape, without a copy."""
        return [flat[segment.start : segment.stop].reshape(segment.shape) for segment in self.segments]

    def pack(self, arrays: Sequence[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        """Writes one array per variable into a flat vector, cast to float32.

        Args:
            arrays: In the order and shapes of the variables.
            out: Where to; a new vector when None. The values between variables are left as they are.

        Raises:
            ConfigurationError: The arrays are not those of the layout.
        """
        shapes = [tuple(np.shape(array)) for array in arrays]
        expected = [segment.shape for segment in self.segments]
        if shapes != expected:
            raise ConfigurationError(f"arrays: expected the shapes {expected}. Received: {shapes}.")
        flat = self.zeros() if out is None else out
        for view, array in zip(self.views(flat), arrays, strict=True):
            np.copyto(view, array, casting="same_kind")
        return flat

    def cut(self, parts: int) -> list[slice]:
        """Returns contiguous slices of the flat vector, about equally long, each from a multiple of 16 values on.

        Args:
            parts: How many; there may be empty ones where there are fewer than 16 values for each.

        >>> Layout([("a", (100,))]).cut(2)
        [slice(0, 64, None), slice(64, 112, None)]
        """
        blocks = self.num_values // ALIGNED_VALUES
        bounds = [-(-blocks * part // parts) * ALIGNED_VALUES for part in range(parts + 1)]
        return [slice(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Returns the form that crosses process borders."""
        variables = [[segment.name, list(segment.shape)] for segment in self.segments]
        return {"variables": variables, "tables": [asdict(spec) for spec in self.table_specs]}

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Layout:
        """Reads the form of `to_json`."""
        tables = [TableSpec(**{**fields, "drawn": tuple(fields["drawn"])}) for fields in form.get("tables", ())]
        return cls([(str(name), tuple(shape)) for name, shape in form.get("variables", ())], tables)


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """Spec of one server: its weights, and the rule by which it applies pushes.

    Args:
        run_id: The fit it belongs to.
        layout: The places of all variables in the whole flat vector.
        first_value: Where this server's part of the vector begins: zero for the only one.
        num_values: Length of its part.
        part: Which of the servers it is: it has this part of each table.
        parts: How many there are.
        rule: How a push changes the weights, as a JSON value with a ``"name"``: an optimizer of
            `elephant.parameter_server.optimizers`, or ``{"name": "add"}`` for differences of weights.
        divide_by_staleness: Whether a push counts 1 / (staleness + 1), its staleness being the number of
            pushes applied since its worker last pulled.
        locked: Whether stripes of the weights are locked while they are read and written; hogwild does without.
        max_staleness: Steps that a worker may be ahead of the slowest live one; None does not limit it.
        rounds_from: The epoch, from zero, with which a fit in rounds begins, where one update is made of the pushes
            of all workers. None applies every push by itself.
        num_partitions: Workers of the fit.
        num_state_values: Length of the non-trainable state that is averaged over the workers.
        max_refused: Refused pushes (not finite) after which the fit is given up.
        snapshot_folder: Where a server makes a folder of its own for snapshots, which goes with it; None is the
            system's folder for temporary files.
        snapshot_seconds: Time between two snapshots; zero makes none by time.
        snapshot_updates: Pushes between two snapshots; zero makes none by count.
        stall_s: A connection in mid-message that sends nothing for this long is closed.
        heartbeat_s: Silence after which a server's process is ended by the one that started it, and started again.
    """

    run_id: str
    layout: Layout
    first_value: int
    num_values: int
    part: int = 0
    parts: int = 1
    rule: dict[str, Any] = field(default_factory=lambda: {"name": "add"})
    divide_by_staleness: bool = False
    locked: bool = True
    max_staleness: int | None = None
    rounds_from: int | None = None
    num_partitions: int = 1
    num_state_values: int = 0
    max_refused: int = 100
    snapshot_folder: str | None = None
    snapshot_seconds: float = 0.0
    snapshot_updates: int = 0
    stall_s: float = 60.0
    heartbeat_s: float = 60.0

    def to_json(self) -> str:
        """Returns the form that crosses process borders."""
        values = {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "layout": self.layout.to_json()}
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> ServerSpec:
        """Reads the form of `to_json`."""
        values = json.loads(text)
        return cls(**{**values, "layout": Layout.from_json(values["layout"])})
