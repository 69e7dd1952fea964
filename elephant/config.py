"""The options of one fit, as frozen values that are checked once, where they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from elephant.algorithms import ALGORITHMS, Algorithm
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.options import OPTION, Scope, check_values, options_of


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Limits of each wait, in seconds; each error names the wait that ended.

    Args:
        connect_s: Forming the connections between ranks, and to the driver. It covers the
            slowest rank's import of Keras.
        collective_s: One allreduce. It covers the slowest rank's longest step, tracing included. With a
            parameter server, how long it may be silent in the middle of a request.
        heartbeat_s: Silence of a rank's process, or before it of its Spark task, after which the driver gives the fit
            up, or, with a parameter server, after which it is ended for Spark to start another.
        slots_s: Waiting for executors that a cluster has promised and not started yet.
        executors_s: Having no executor at all in the middle of a fit, where the cluster could start others.
        warm_s: How long processes that have imported Keras wait on an executor for the next fit.

    Raises:
        ConfigurationError: One of them is no number of seconds.
    """

    connect_s: float = 120.0
    collective_s: float = 600.0
    heartbeat_s: float = 60.0
    slots_s: float = 30.0
    executors_s: float = 60.0
    warm_s: float = 300.0

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and value >= 0):
                raise ConfigurationError(f"timeouts: {part.name}: expected zero or more seconds. Received: {value!r}.")

    @classmethod
    def of(cls, given: Timeouts | Mapping[str, float]) -> Timeouts:
        """Returns timeouts from some of them by name; raises ConfigurationError for a name that there is not."""
        if isinstance(given, Timeouts):
            return given
        known = [part.name for part in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(known):
            raise ConfigurationError(
                f"timeouts: expected elephant.config.Timeouts, or seconds by the names {', '.join(known)}. "
                f"Received: {given!r}."
            )
        return cls(**given)

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between two signs of life of a rank: several times in the silence that is allowed."""
        return min(2.0, self.heartbeat_s / 5)


@dataclass(frozen=True, kw_only=True)
class AsynchronousOptions:
    """Options of modes with a parameter server: those of `elephant.options` that have this scope.

    Raises:
        ConfigurationError: A value is out of its range, or two of them exclude each other.
    """

    algorithm: str = OPTION["algorithm"].default
    elasticity: float | None = OPTION["elasticity"].default
    max_staleness: int | None = OPTION["max_staleness"].default
    background_exchange: bool = OPTION["background_exchange"].default
    parameter_servers: int = OPTION["parameter_servers"].default
    server_placement: str = OPTION["server_placement"].default
    port: int = OPTION["port"].default
    snapshot_seconds: float = OPTION["snapshot_seconds"].default
    snapshot_updates: int = OPTION["snapshot_updates"].default
    max_refused_updates: int = OPTION["max_refused_updates"].default

    def __post_init__(self) -> None:
        check_values(self, Scope.SERVERS)

    @property
    def is_elastic(self) -> bool:
        """True if workers keep weights of their own that are drawn towards the servers' (elastic averaging)."""
        return ALGORITHMS[self.algorithm].is_elastic


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Options of one fit: those of `elephant.options` that have this scope, and what they say of waits and servers.

    Raises:
        ConfigurationError: A value is out of its range, or two of them exclude each other.
    """

    mode: str = OPTION["mode"].default
    num_workers: int = OPTION["num_workers"].default
    epochs: int = OPTION["epochs"].default
    batch_size: int = OPTION["batch_size"].default
    validation_fraction: float = OPTION["validation_fraction"].default
    shuffle: bool = OPTION["shuffle"].default
    seed: int = OPTION["seed"].default
    learning_rate: float | None = OPTION["learning_rate"].default
    scale_learning_rate: bool = OPTION["scale_learning_rate"].default
    frequency: str | int = OPTION["frequency"].default
    compression: str | None = OPTION["compression"].default
    bucket_bytes: int | None = OPTION["bucket_bytes"].default
    sync_batch_norm: bool = OPTION["sync_batch_norm"].default
    allow_batch_coupled_loss: bool = OPTION["allow_batch_coupled_loss"].default
    cache: str = OPTION["cache"].default
    steps_per_epoch: int | None = OPTION["steps_per_epoch"].default
    bucket_by_length: bool = OPTION["bucket_by_length"].default
    use_gpu: bool | str = OPTION["use_gpu"].default
    gpus_per_worker: int = OPTION["gpus_per_worker"].default
    gpu_resource: str = OPTION["gpu_resource"].default
    gpu_transport: str = OPTION["gpu_transport"].default
    mixed_precision: bool = OPTION["mixed_precision"].default
    checkpoint_path: str | None = OPTION["checkpoint_path"].default
    checkpoint_epochs: int = OPTION["checkpoint_epochs"].default
    resume: bool = OPTION["resume"].default
    max_restarts: int = OPTION["max_restarts"].default
    verbose: int | str = OPTION["verbose"].default
    warm_workers: int | str = OPTION["warm_workers"].default
    timeouts: Timeouts = field(default_factory=Timeouts)
    asynchronous: AsynchronousOptions = field(default_factory=AsynchronousOptions)

    def __post_init__(self) -> None:
        check_values(self, Scope.FIT)
        if self.is_synchronous:
            self._refuse_options_of_servers()
        else:
            self._refuse_options_of_ranks()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> FitConfig:
        """Returns the options of a fit from values by the names of options; None leaves the default.

        Examples:
            >>> FitConfig.of({"mode": "hogwild", "port": 4000, "seed": None}).asynchronous.port
            4000
        """
        values = {name: value for name, value in given.items() if value is not None}
        of_servers = {name: values.pop(name) for name in list(values) if OPTION[name].scope is Scope.SERVERS}
        timeouts = Timeouts.of(values.pop("timeouts", {}))
        return cls(**values, timeouts=timeouts, asynchronous=AsynchronousOptions(**of_servers))

    def _refuse_options_of_servers(self) -> None:
        for option in options_of(Scope.SERVERS):
            value = getattr(self.asynchronous, option.name)
            if value != option.default:
                raise ConfigurationError(
                    f"{option.name}: expected mode='asynchronous' or 'hogwild', which have a parameter server. "
                    f"Received: {option.name}={value!r} with mode='synchronous'. Change the mode, or leave "
                    f"{option.name} out."
                )

    def _refuse_options_of_ranks(self) -> None:
        for option in options_of(Scope.FIT):
            if option.ranks_only and getattr(self, option.name) != option.default:
                raise ConfigurationError(
                    f"{option.name}: expected mode='synchronous'. Received: mode={self.mode!r}, in which there is "
                    f"{option.ranks_only}. Leave {option.name} out."
                )

    @property
    def num_ranks(self) -> int:
        """Processes that train: one of each GPU of a worker."""
        return self.num_workers * self.gpus_per_worker

    @property
    def rank_batch_size(self) -> int:
        """Rows of a rank's step: the ranks of a worker share its batch."""
        return self.batch_size // self.gpus_per_worker

    @property
    def is_synchronous(self) -> bool:
        """True if ranks exchange with each other, and not with a parameter server."""
        return self.mode == "synchronous"

    @property
    def averages_gradients(self) -> bool:
        """True if ranks exchange gradients at every step, and not weights now and then."""
        return self.frequency == "batch"

    @property
    def pushes_gradients(self) -> bool:
        """True if a parameter server's optimizer applies every step's gradient; otherwise workers push differences."""
        return self.frequency == "batch" and ALGORITHMS[self.asynchronous.algorithm].pushes_gradients

    def new_algorithm(self) -> Algorithm:
        """Returns the algorithm, which tells what the workers of an asynchronous fit push at the end of a window."""
        return ALGORITHMS[self.asynchronous.algorithm](self.num_ranks, self.asynchronous.elasticity)

    def check_background_exchange(self) -> None:
        """Raises UnsupportedError where workers exchange in the background, and push no gradients."""
        if self.asynchronous.background_exchange and not self.pushes_gradients:
            pushing = [name for name, algorithm in ALGORITHMS.items() if algorithm.pushes_gradients]
            raise UnsupportedError(
                "background_exchange: expected workers that push gradients, which is frequency='batch' with the "
                f"algorithm {', '.join(pushing[:-1])} or {pushing[-1]}. Received: frequency={self.frequency!r} with "
                f"the algorithm {self.asynchronous.algorithm}, which exchanges seldom enough. Leave "
                "background_exchange out."
            )
