"""Rank info: the number, world, rows, devices and addresses of a rank or a worker."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from elephant.config import Timeouts
from elephant.net.addresses import Ports
from elephant.parameter_server.layout import Layout


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One rank's place in a run.

    A rank of synchronous training knows the others' addresses and rows. One that trains at its own pace, whose number
    is that of its partition, knows the servers that keep the weights, and of rows its own: the others count as zero.

    Args:
        rank: Which one this is; stays the same when Spark runs the task again.
        num_rows: Rows of every rank.
        num_marked: Rows of every rank that the indicator column marks for validation.
        row_shapes: Natural shape of a row of each array column, by role.
        shard: Path of this rank's shard, or None when it has no rows.
        driver: Host and port of the driver's channel.
        run_id: The run.
        token: The run's secret, in hexadecimal.
        host: This rank's host, for messages.
        device: What it computes on, for messages.
        devices: Its GPUs, as ``CUDA_VISIBLE_DEVICES`` names them; none for the CPU.
        note: What the user should know of them, or nothing.
        threads: Threads it computes with.
        timeouts: How long its waits may last.
        addresses: Host and port of every rank's listener.
        listener_fd: File descriptor of this rank's listening socket.
        attempt: Spark's number of the task's attempt: the greater one is the later one.
        servers: Host and port of every parameter server, in the order of their parts of the weights.
        layout: `Layout.to_json` of the model's weights and tables.
        generation: Of ranks, from zero, where these form anew after losses, and the task keeps the rows; else None.
        goes_on: Whether the generation goes on from a state that the driver has.
        ports: Those that it may listen on, the first and the last; None leaves the choice to the system.
        phases: What its Spark task has done so far; see `elephant.monitor.trace.Phases`.
    """

    rank: int
    num_rows: list[int]
    num_marked: list[int]
    row_shapes: dict[str, tuple[int, ...]]
    shard: str | None
    driver: tuple[str, int]
    run_id: str
    token: str = field(repr=False)
    host: str
    device: str
    devices: list[str] = field(default_factory=list)
    note: str = ""
    threads: int
    timeouts: Timeouts
    addresses: list[tuple[str, int]] = field(default_factory=list)
    listener_fd: int = -1
    attempt: int = 0
    servers: list[tuple[str, int]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    generation: int | None = None
    goes_on: bool = False
    ports: Ports = None
    phases: list[Any] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """Number of ranks, or workers."""
        return len(self.num_rows)

    @property
    def weights_layout(self) -> Layout:
        """The places of the model's weights, and the forms of its tables."""
        return Layout.from_json(self.layout)

    def to_bytes(self) -> bytes:
        """Returns the form that crosses the pipe."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, block: bytes) -> RankInfo:
        """Reads the form of `to_bytes`."""
        fields = json.loads(block)
        fields["driver"] = tuple(fields["driver"])
        for name in ("addresses", "servers"):
            fields[name] = [(str(host), int(port)) for host, port in fields[name]]
        fields["row_shapes"] = {role: tuple(shape) for role, shape in fields["row_shapes"].items()}
        fields["ports"] = None if fields["ports"] is None else tuple(fields["ports"])
        fields["timeouts"] = Timeouts(**fields["timeouts"])
        return cls(**fields)
