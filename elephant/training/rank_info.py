"""Rank info: the number, world, rows, devices and addresses of a rank or a worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from elephant.config import Timeouts
from elephant.parameter_server.layout import Layout


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """All ranks of one run, as one of them needs to know them.

    Args:
        rank: Which one this is.
        addresses: Host and port of every rank's listener.
        num_rows: Rows of every rank.
        num_marked: Rows of every rank that the indicator column marks for validation.
        row_shapes: Natural shape of a row of each array column, by role.
        listener_fd: File descriptor of this rank's listening socket.
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
    """

    rank: int
    addresses: list[tuple[str, int]]
    num_rows: list[int]
    num_marked: list[int]
    row_shapes: dict[str, tuple[int, ...]]
    listener_fd: int
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

    def to_bytes(self) -> bytes:
        """Returns the form that crosses the pipe."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, block: bytes) -> RankInfo:
        """Returns what `to_bytes` was made of."""
        fields = json.loads(block)
        fields["addresses"] = [(str(host), int(port)) for host, port in fields["addresses"]]
        fields["driver"] = (str(fields["driver"][0]), int(fields["driver"][1]))
        fields["row_shapes"] = {role: tuple(shape) for role, shape in fields["row_shapes"].items()}
        fields["timeouts"] = Timeouts(**fields["timeouts"])
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """One worker's part of an asynchronous fit: a partition, and the servers that keep the weights.

    Args:
        partition: Which rows these are; stays the same when Spark runs the task again.
        attempt: Spark's number of the task's attempt: the greater one is the later one.
        num_workers: Partitions of the fit.
        num_rows: Rows of this partition.
        num_marked: Those of them that the indicator column marks for validation.
        row_shapes: Natural shape of a row of each array column, by role.
        shard: Path of the partition's shard, or None when it has no rows.
        driver: Host and port of the driver's channel.
        run_id: The fit.
        token: The fit's secret, in hexadecimal.
        servers: Host and port of every parameter server, in the order of their parts of the weights.
        layout: `Layout.to_json` of the model's weights.
        host: This worker's host, for messages.
        device: What it computes on, for messages.
        devices: Its GPUs, as ``CUDA_VISIBLE_DEVICES`` names them; none for the CPU.
        note: What the user should know of them, or nothing.
        threads: Threads it computes with.
        timeouts: How long its waits may last.
    """

    partition: int
    attempt: int
    num_workers: int
    num_rows: int
    num_marked: int
    row_shapes: dict[str, tuple[int, ...]]
    shard: str | None
    driver: tuple[str, int]
    run_id: str
    token: str = field(repr=False)
    servers: list[tuple[str, int]]
    layout: list[Any]
    host: str
    device: str
    devices: list[str] = field(default_factory=list)
    note: str = ""
    threads: int
    timeouts: Timeouts

    @property
    def weights_layout(self) -> Layout:
        """The places of the model's weights."""
        return Layout.from_json(self.layout)

    def to_bytes(self) -> bytes:
        """Returns the form that crosses the pipe."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, block: bytes) -> WorkerInfo:
        """Returns what `to_bytes` was made of."""
        fields = json.loads(block)
        fields["driver"] = _address(fields["driver"])
        fields["servers"] = [_address(server) for server in fields["servers"]]
        fields["row_shapes"] = {role: tuple(shape) for role, shape in fields["row_shapes"].items()}
        fields["timeouts"] = Timeouts(**fields["timeouts"])
        return cls(**fields)


def _address(pair: Sequence[Any]) -> tuple[str, int]:
    return str(pair[0]), int(pair[1])
