"""What the process of a rank gets from its Spark task once all ranks know each other."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from elephant.config import Timeouts


@dataclass(frozen=True, kw_only=True)
class Gang:
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
    def from_bytes(cls, block: bytes) -> Gang:
        """Returns what `to_bytes` was made of."""
        fields = json.loads(block)
        fields["addresses"] = [(str(host), int(port)) for host, port in fields["addresses"]]
        fields["driver"] = (str(fields["driver"][0]), int(fields["driver"][1]))
        fields["row_shapes"] = {role: tuple(shape) for role, shape in fields["row_shapes"].items()}
        fields["timeouts"] = Timeouts(**fields["timeouts"])
        return cls(**fields)
