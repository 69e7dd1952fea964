"""The parameter servers of one fit: on the driver's host, or in a Spark stage (`elephant.cluster.server_stage`).

Each is a process of its own (`elephant.parameter_server.process.ServerProcess`), which
keeps one contiguous part of the weights.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from elephant.config import FitConfig
from elephant.errors import ServerFailedError
from elephant.net.addresses import Address
from elephant.parameter_server.client import shard_specs
from elephant.parameter_server.layout import ALIGNED_VALUES, Layout, ServerSpec
from elephant.parameter_server.optimizers import without_clipping
from elephant.parameter_server.process import ServerProcess, listening_sockets
from elephant.training.algorithms import divides_by_staleness

if TYPE_CHECKING:
    from socket import socket

    from elephant.training.server_model import ServerModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerPart:
    """What one server keeps, and what it begins with.

    Args:
        spec: What it keeps, and how.
        values: Its weights, float32 of shape (num_values,).
        slots: The vectors of its rule, of the same shape.
        iterations: Updates that the rule has applied before the fit.
        state: The moving statistics, float64; those of the first server alone.
        push_log: What was pushed to it already, of a fit that goes on.
    """

    spec: ServerSpec
    values: np.ndarray
    slots: Sequence[np.ndarray]
    iterations: int
    state: np.ndarray
    push_log: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def served(self, listener: socket, token: bytes, folder: str | None = None) -> ServerProcess:
        """Starts the server's process.

        Args:
            folder: Where it keeps its snapshots; None leaves that to the system.
        """
        return ServerProcess(
            replace(self.spec, snapshot_folder=folder),
            listener,
            token,
            self.values,
            slots=self.slots,
            iterations=self.iterations,
            state=self.state,
            push_log=self.push_log,
            note=logger.info,
        )


def parts_of(model: ServerModel, config: FitConfig, run_id: str) -> list[ServerPart]:
    """Divides a model's weights over as many servers as were asked for, and as there are weights for."""
    options, layout = config.asynchronous, model.layout
    values, (slots, iterations), state = model.weights(), model.slots(), model.state()
    count = number_of_parts(layout, config)
    whole = ServerSpec(
        run_id=run_id,
        layout=layout,
        first_value=0,
        num_values=layout.num_values,
        # Of several servers none sees a whole gradient: the workers clip its norms.
        rule=model.rule if count == 1 else without_clipping(model.rule)[0],
        divide_by_staleness=divides_by_staleness(config),
        locked=config.mode != "hogwild",
        max_staleness=options.max_staleness,
        num_partitions=config.num_ranks,
        num_state_values=len(state),
        max_refused=options.max_refused_updates,
        snapshot_seconds=options.snapshot_seconds,
        snapshot_updates=options.snapshot_updates,
        heartbeat_s=config.timeouts.heartbeat_s,
    )
    specs = shard_specs(whole, count)
    return [
        ServerPart(
            spec=spec,
            values=values[spec.first_value : spec.first_value + spec.num_values],
            slots=[slot[spec.first_value : spec.first_value + spec.num_values] for slot in slots],
            iterations=iterations,
            state=state if spec.num_state_values else np.empty(0),
            push_log=ledger,
        )
        for spec, ledger in zip(specs, model.ledgers(len(specs)), strict=True)
    ]


def number_of_parts(layout: Layout, config: FitConfig) -> int:
    """Returns how many servers a model's weights are divided over."""
    return min(config.asynchronous.parameter_servers, layout.num_values // ALIGNED_VALUES)


def require_ports(bind: str, port: int, count: int) -> None:
    """Raises ClusterError when one of the ports that servers are to have on this host is taken."""
    if port:
        for listener in listening_sockets(bind, port, count):
            listener.close()


class ServerGroup(ABC):
    """The servers of one fit; leaving its ``with`` block ends them."""

    @property
    @abstractmethod
    def addresses(self) -> tuple[Address, ...]:
        """Where workers find them, in the order of their parts."""

    @property
    @abstractmethod
    def control_addresses(self) -> tuple[Address, ...]:
        """Where the driver finds them."""

    @abstractmethod
    def check(self) -> list[str]:
        """Returns what is new about them, such as that one has come back, as lines for the user.

        Raises:
            TrainingError: One is lost for good.
        """

    @property
    @abstractmethod
    def restarts(self) -> int:
        """How often one of them has come back."""

    @property
    def turned_away(self) -> Mapping[str, int]:
        """Connections to what listens here for their sake, by host, which were refused; they count their own."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Ends them, and removes what they kept on disks."""

    def __enter__(self) -> ServerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DriverServers(ServerGroup):
    """Servers beside this process: on the driver's host, or on that of the rank which hosts for the driver.

    Args:
        advertised: The address that executors reach them at; None means the one that they listen on.
        folder: Where they keep snapshots; None leaves that to the system.

    Raises:
        ClusterError: A server does not start.
    """

    def __init__(
        self,
        parts: Sequence[ServerPart],
        listeners: Sequence[socket],
        *,
        token: bytes,
        advertised: str | None = None,
        folder: str | None = None,
    ) -> None:
        self._closing = contextlib.ExitStack()
        self._watched: list[WatchedServer] = []
        bound = [(str(name[0]), int(name[1])) for name in (listener.getsockname() for listener in listeners)]
        for listener in listeners:
            self._closing.callback(listener.close)
        try:
            for index, (part, listener) in enumerate(zip(parts, listeners, strict=True)):
                server = part.served(listener, token, folder)
                self._closing.callback(server.close)
                self._watched.append(WatchedServer(server, index))
        except BaseException:
            self.close()
            raise
        self._addresses = tuple((advertised or host, port) for host, port in bound)
        # A driver behind a port that is mapped, as in a container, may not reach the address it gives to others.
        self._control_addresses = tuple(
            (advertised if advertised and is_wildcard(host) else host, port) for host, port in bound
        )

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self._addresses

    @property
    def control_addresses(self) -> tuple[Address, ...]:
        return self._control_addresses

    @property
    def restarts(self) -> int:
        return sum(watched.restarts for watched in self._watched)

    def check(self) -> list[str]:
        return [note for watched in self._watched for note in watched.check()]

    def close(self) -> None:
        self._closing.close()


class WatchedServer:
    """A server's process, and what was told of it already."""

    def __init__(self, server: ServerProcess, index: int) -> None:
        self._server = server
        self._index = index
        self.restarts = 0

    def check(self) -> list[str]:
        """Returns a line when the process has come back since the last time; raises TrainingError when it will not."""
        if self._server.failure is not None:
            raise ServerFailedError(failure_text(self._index, self._server.failure))
        if self._server.restarts == self.restarts:
            return []
        self.restarts = self._server.restarts
        return [came_back(self._index)]


def failure_text(index: int, reason: str) -> str:
    """Returns what to say of a server that is lost for good."""
    return f"parameter server {index} failed: {reason}"


def came_back(index: int) -> str:
    """Returns the line about a server that has come back."""
    return f"parameter server {index} was lost: it has been started again from its last snapshot"


def is_wildcard(host: str) -> bool:
    """Returns whether an address to listen on means all addresses of the machine.

    >>> is_wildcard("0.0.0.0"), is_wildcard("::"), is_wildcard("127.0.0.1")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
