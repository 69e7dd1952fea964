"""What one server process is asked to keep, as a value that crosses process borders as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from elephant.parameter_server.layout import Layout


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """What one server keeps, and how it applies what is pushed to it.

    Args:
        run_id: The fit it belongs to.
        layout: The places of all variables in the whole flat vector.
        first_value: Where this server's part of the vector begins: zero for the only one.
        num_values: Length of its part.
        rule: How a push changes the weights, as a JSON value with a ``"name"``: an optimizer of
            `elephant.parameter_server.optimizers`, or ``{"name": "add"}`` for differences of weights.
        divide_by_staleness: Whether a push counts 1 / (staleness + 1), its staleness being the number of
            pushes applied since its worker last pulled.
        locked: Whether stripes of the weights are locked while they are read and written; hogwild does without.
        max_staleness: Steps that a worker may be ahead of the slowest live one; None does not limit it.
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
    rule: dict[str, Any] = field(default_factory=lambda: {"name": "add"})
    divide_by_staleness: bool = False
    locked: bool = True
    max_staleness: int | None = None
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
        """Returns what ``to_json`` was made of."""
        values = json.loads(text)
        return cls(**{**values, "layout": Layout.from_json(values["layout"])})
