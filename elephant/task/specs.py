"""Orders of the driver to its Spark tasks, and to the coordinator beside rank 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from elephant.checkpoint.state import FitState
from elephant.cluster.gpu_plan import NONE, ResourcePlan
from elephant.cluster.warm_workers import COLD, WarmWorkers
from elephant.config import Timeouts
from elephant.data.schema import DataSchema, RowSpec
from elephant.net.addresses import Address, Ports

if TYPE_CHECKING:
    from pyspark import Broadcast

# In the work folder of a coordinator's process that has failed: what it had heard until then.
HEARD_FILE = "heard"
_HEADER_END = b"\n"


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Order of a run to every task.

    Args:
        program: What the ranks run, by its name in `elephant.rank.program`.
        driver_versions: What of `installed_versions` all ranks must share with the driver.
        job: The pickled job of the program, which tasks only pass on; see `elephant.cluster.broadcast.for_tasks`.
        backend: The Keras backend to compute with; None leaves it to Keras.
        schema: What the rows hold; None when they are not looked at.
        timeouts: How long waits may last.
        environment: Variables of the user's for the ranks' processes.
        shows_output: Whether the driver shows what the ranks' processes print.
        plan: Where the ranks' devices come from, and how many ranks a task has.
        warm: How many processes may wait on an executor that have imported, from which ranks are forked.
        brings_files: Whether what the user's code writes to relative paths comes to the driver; else it is there.
        encryption: Whether the connections of the run are encrypted.
        ports: Those that ranks and the driver may listen on; None leaves the choice to the system.
    """

    program: str
    driver_versions: dict[str, str]
    job: bytes | Broadcast[bytes]
    backend: str | None
    schema: DataSchema | None
    timeouts: Timeouts
    environment: dict[str, str] = field(default_factory=dict)
    shows_output: bool = False
    plan: ResourcePlan = field(default_factory=lambda: ResourcePlan(devices=NONE))
    warm: WarmWorkers = COLD
    brings_files: bool = False
    encryption: bool = False
    ports: Ports = None


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One attempt at a run, and how to reach the driver in it.

    Args:
        run_id: The attempt.
        token: Its secret, with the key pair of its connections where they are encrypted; see `elephant.net.tls`.
        driver: Host and port of the driver's channel.
    """

    run_id: str
    token: bytes = field(repr=False)
    driver: tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class ServerAddresses:
    """Parameter servers of one fit, as its workers find them.

    Args:
        servers: Their addresses, in the order of their parts of the weights.
        layout: `Layout.to_json` of the weights and tables.
        num_workers: Partitions of the fit.
    """

    servers: tuple[Address, ...]
    layout: dict[str, Any]
    num_workers: int


@dataclass(frozen=True, kw_only=True)
class CoordinatorSpec:
    """Order for the coordinator beside rank 0.

    Args:
        program: What its process runs, by its name in `elephant.driver.coordinator_process`.
        extras: The pickled `AsyncFitSpec` of an asynchronous fit, as `TaskSpec.job` is; else nothing.
        servers: Parameter servers.
        port: The first one's, or zero.
        layout: `Layout.to_json` of the weights and tables; empty without servers.
    """

    program: str
    extras: bytes | Broadcast[bytes] = field(default=b"", repr=False)
    servers: int = 0
    port: int = 0
    layout: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AsyncFitSpec:
    """Needs of the coordinator of an asynchronous fit besides the workers' job.

    Args:
        callbacks: The user's Keras callbacks, which run here.
        rows: What one row of the model's input is.
        state: What the fit goes on from; None begins it.
        keeps: Whether the coordinator writes down states from which the fit could go on.
    """

    callbacks: Sequence[Any]
    rows: RowSpec
    state: FitState | None = None
    keeps: bool = False


@dataclass(frozen=True, kw_only=True)
class CoordinatorInfo:
    """The coordinator's place in a run.

    Args:
        run_id: The run.
        token: Its secret, in hexadecimal.
        num_ranks: Ranks that it hears of.
        channel_fd: Descriptor of the channel's listening socket.
        server_fds: Those of the parameter servers', in the order of their parts.
        timeouts: How long waits may last.
        extras: `CoordinatorSpec.extras`.
    """

    run_id: str
    token: str = field(repr=False)
    num_ranks: int
    channel_fd: int
    server_fds: list[int]
    timeouts: Timeouts
    extras: bytes = field(default=b"", repr=False)

    def to_bytes(self) -> bytes:
        """Returns the form that crosses the pipe: a line of JSON, then the extras as they are."""
        about = {**asdict(self), "extras": None}
        return json.dumps(about).encode() + _HEADER_END + self.extras

    @classmethod
    def from_bytes(cls, block: bytes) -> CoordinatorInfo:
        """Reads the form of `to_bytes`."""
        header, _, extras = block.partition(_HEADER_END)
        fields = json.loads(header)
        return cls(**{**fields, "timeouts": Timeouts(**fields["timeouts"]), "extras": extras})
