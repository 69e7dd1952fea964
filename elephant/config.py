"""The options of one fit, as frozen values that are checked once, where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from elephant.errors import ConfigurationError

MODES = ("synchronous", "asynchronous", "hogwild")
ALGORITHMS = ("downpour", "adag", "dynsgd", "aeasgd", "eamsgd", "sum")
PLACEMENTS = ("driver", "executors")
CACHES = ("disk", "memory")


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long each wait may last, in seconds; each error names the wait that ended.

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
            _expect(is_number and value >= 0, f"timeouts: {part.name}", "zero or more seconds", value)

    @property
    def heartbeat_interval_s(self) -> float:
        """How often a rank says that it lives: several times in the silence that is allowed."""
        return min(2.0, self.heartbeat_s / 5)


@dataclass(frozen=True, kw_only=True)
class AsynchronousOptions:
    """What modes with a parameter server are asked to do besides.

    Args:
        algorithm: What workers push and how servers apply it; see `elephant.training.algorithms`.
        elasticity: The moving rate of elastic averaging, in (0, 1); None means 0.9 / num_workers.
        max_staleness: Steps that a worker may be ahead of the slowest live one; None does not limit it.
        background_exchange: Whether a worker computes its next step while the last one's exchange goes on.
        parameter_servers: Processes that the weights are divided over.
        server_placement: ``"driver"`` starts them on the driver's host, ``"executors"`` as a Spark stage.
        port: The first server's port; zero lets the system choose. Further servers take the next ones.
        snapshot_seconds: Time between two snapshots of a server, from which it comes back; zero makes none by time.
        snapshot_updates: Pushes between two snapshots; zero makes none by count.
        max_refused_updates: Pushes that are not finite after which the fit is given up.

    Raises:
        ConfigurationError: A value is out of its range.
    """

    algorithm: str = "downpour"
    elasticity: float | None = None
    max_staleness: int | None = None
    background_exchange: bool = False
    parameter_servers: int = 1
    server_placement: str = "driver"
    port: int = 0
    snapshot_seconds: float = 30.0
    snapshot_updates: int = 0
    max_refused_updates: int = 100

    def __post_init__(self) -> None:
        _expect(self.algorithm in ALGORITHMS, "algorithm", f"one of {', '.join(ALGORITHMS)}", self.algorithm)
        rate = self.elasticity
        _expect(rate is None or 0 < rate < 1, "elasticity", "a number in (0, 1)", rate)
        if rate is not None and not self.is_elastic:
            raise ConfigurationError(
                f"elasticity: expected algorithm='aeasgd' or 'eamsgd', whose workers are drawn to the servers' "
                f"weights. Received: elasticity={rate!r} with algorithm={self.algorithm!r}. Leave elasticity out, or "
                "change the algorithm."
            )
        bound = self.max_staleness
        _expect(bound is None or bound >= 0, "max_staleness", "an integer of at least 0", bound)
        _expect(self.parameter_servers >= 1, "parameter_servers", "an integer of at least 1", self.parameter_servers)
        placement = self.server_placement
        _expect(placement in PLACEMENTS, "server_placement", f"one of {', '.join(PLACEMENTS)}", placement)
        last_port = 65536 - self.parameter_servers
        _expect(0 <= self.port <= last_port, "port", f"0, or a port of at most {last_port}", self.port)
        _expect(self.snapshot_seconds >= 0, "snapshot_seconds", "zero or more seconds", self.snapshot_seconds)
        _expect(self.snapshot_updates >= 0, "snapshot_updates", "zero or more", self.snapshot_updates)
        _expect(self.max_refused_updates >= 0, "max_refused_updates", "zero or more", self.max_refused_updates)

    @property
    def is_elastic(self) -> bool:
        """Whether workers keep weights of their own that are drawn towards the servers' (elastic averaging)."""
        return self.algorithm in ("aeasgd", "eamsgd")


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """What one fit was asked to do.

    Args:
        mode: ``"synchronous"``, ``"asynchronous"`` or ``"hogwild"``.
        num_workers: Ranks, each one Spark task.
        epochs: Passes over the training rows.
        batch_size: Rows per worker and step.
        validation_fraction: Share of all rows kept for validation, in [0, 1).
        shuffle: Whether each rank draws its rows in a new order every epoch.
        seed: Source of the row order, the validation split and the ranks' random state.
        learning_rate: Replaces the optimizer's own when given.
        scale_learning_rate: Whether to multiply the learning rate by the number of workers.
        frequency: ``"batch"`` exchanges gradients at every step; an integer k, or ``"epoch"``, lets
            each rank train alone and exchanges weights every k steps, or once an epoch.
        compression: How what crosses hosts is encoded; None sends it as it is.
        bucket_bytes: Gradients of so many bytes travel together; None chooses, zero puts all in one bucket.
        sync_batch_norm: Whether batch normalisation uses the statistics of all ranks' rows.
        allow_batch_coupled_loss: Whether a loss may couple the rows of a batch: each rank computes it on its
            own.
        cache: Where a rank keeps its rows: ``"disk"``, memory-mapped, or ``"memory"``.
        steps_per_epoch: Steps of an epoch, which goes on in the rows where the last one ended; None means all rows.
        bucket_by_length: Whether batches are made of sequences of like length.
        use_gpu: Whether workers compute on GPUs: True demands them, False hides them, ``"auto"`` takes those there are.
        gpus_per_worker: GPUs of each worker, each of which is one rank; the worker's rows and batches are divided.
        gpu_resource: What Spark calls GPUs, as in ``spark.executor.resource.NAME.amount``.
        mixed_precision: Whether workers compute in float16 or bfloat16 where the model's layers leave that open.
        checkpoint_path: A folder, on any file system that Spark or fsspec reaches, for a checkpoint of the fit;
            None makes none.
        checkpoint_epochs: Epochs between two checkpoints.
        resume: Whether to go on from the last checkpoint there, where there is one.
        max_restarts: How often a fit that lost a worker is started again, from its last checkpoint.
        verbose: 0 silent, 1 plan, progress and a table of epochs, 2 without the progress.
        warm_workers: Processes that have imported Keras and wait on each executor for the next fit: at most so many;
            zero for none. ``"auto"`` is what ``spark.elephant.warmWorkers`` says, or else 2.
        timeouts: How long waits may last.
        asynchronous: The options of modes with a parameter server.

    Raises:
        ConfigurationError: A value is out of its range, or two of them exclude each other.
    """

    mode: str = "synchronous"
    num_workers: int = 1
    epochs: int = 1
    batch_size: int = 32
    validation_fraction: float = 0.0
    shuffle: bool = True
    seed: int = 0
    learning_rate: float | None = None
    scale_learning_rate: bool = False
    frequency: str | int = "batch"
    compression: str | None = None
    bucket_bytes: int | None = None
    sync_batch_norm: bool = False
    allow_batch_coupled_loss: bool = False
    cache: str = "disk"
    steps_per_epoch: int | None = None
    bucket_by_length: bool = False
    use_gpu: bool | str = "auto"
    gpus_per_worker: int = 1
    gpu_resource: str = "gpu"
    mixed_precision: bool = False
    checkpoint_path: str | None = None
    checkpoint_epochs: int = 1
    resume: bool = False
    max_restarts: int = 0
    verbose: int = 1
    warm_workers: int | str = "auto"
    timeouts: Timeouts = field(default_factory=Timeouts)
    asynchronous: AsynchronousOptions = field(default_factory=AsynchronousOptions)

    def __post_init__(self) -> None:
        check_mode(self.mode)
        for name in ("num_workers", "epochs", "batch_size"):
            _expect(getattr(self, name) >= 1, name, "an integer of at least 1", getattr(self, name))
        _expect(0 <= self.validation_fraction < 1, "validation_fraction", "in [0, 1)", self.validation_fraction)
        _expect(0 <= self.seed < 2**63, "seed", "an integer in [0, 2**63)", self.seed)
        _expect(self.verbose in (0, 1, 2), "verbose", "0, 1 or 2", self.verbose)
        rate = self.learning_rate
        _expect(rate is None or (rate > 0 and math.isfinite(rate)), "learning_rate", "a positive number", rate)
        check_frequency(self.frequency)
        _expect(self.cache in CACHES, "cache", f"one of {', '.join(CACHES)}", self.cache)
        steps = self.steps_per_epoch
        _expect(steps is None or steps >= 1, "steps_per_epoch", "an integer of at least 1", steps)
        _expect(self.use_gpu in (True, False, "auto"), "use_gpu", "True, False or 'auto'", self.use_gpu)
        _expect(self.gpus_per_worker >= 1, "gpus_per_worker", "an integer of at least 1", self.gpus_per_worker)
        _expect(self.checkpoint_epochs >= 1, "checkpoint_epochs", "an integer of at least 1", self.checkpoint_epochs)
        _expect(self.max_restarts >= 0, "max_restarts", "an integer of at least 0", self.max_restarts)
        if self.resume and self.checkpoint_path is None:
            raise ConfigurationError(
                "resume: expected checkpoint_path, where the fit that is to go on has left its checkpoints. "
                "Received: None. Pass the path, or leave resume out."
            )
        if self.batch_size % self.gpus_per_worker:
            raise ConfigurationError(
                f"batch_size: expected a multiple of gpus_per_worker={self.gpus_per_worker}, because the rows of a "
                f"worker's step are divided among its GPUs. Received: {self.batch_size}."
            )
        check_warm_workers(self.warm_workers)
        length = self.bucket_bytes
        _expect(length is None or length >= 0, "bucket_bytes", "bytes, or None to choose them", length)
        if self.sync_batch_norm and not self.averages_gradients:
            raise ConfigurationError(
                f"sync_batch_norm: expected frequency='batch'. Received: frequency={self.frequency!r}, with which "
                "ranks train alone between two averages. Leave one of the two out."
            )
        if self.is_synchronous:
            self._refuse_options_of_servers()
        else:
            self._refuse_options_of_ranks()

    def _refuse_options_of_servers(self) -> None:
        for option in fields(AsynchronousOptions):
            value = getattr(self.asynchronous, option.name)
            if value != option.default:
                raise ConfigurationError(
                    f"{option.name}: expected mode='asynchronous' or 'hogwild', which have a parameter server. "
                    f"Received: {option.name}={value!r} with mode='synchronous'. Change the mode, or leave "
                    f"{option.name} out."
                )

    def _refuse_options_of_ranks(self) -> None:
        given = {
            "sync_batch_norm": (self.sync_batch_norm, "no step in which all workers' rows meet"),
            "allow_batch_coupled_loss": (self.allow_batch_coupled_loss, "no loss of several workers' rows"),
            "bucket_bytes": (self.bucket_bytes is not None, "no allreduce whose gradients could be bundled"),
            "scale_learning_rate": (self.scale_learning_rate, "no global batch: every push is one worker's own"),
        }
        for name, (is_given, reason) in given.items():
            if is_given:
                raise ConfigurationError(
                    f"{name}: expected mode='synchronous'. Received: mode={self.mode!r}, in which there is {reason}. "
                    f"Leave {name} out."
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
        """Whether ranks exchange with each other, and not with a parameter server."""
        return self.mode == "synchronous"

    @property
    def averages_gradients(self) -> bool:
        """Whether ranks exchange gradients at every step, and not weights now and then."""
        return self.frequency == "batch"

    @property
    def pushes_gradients(self) -> bool:
        """Whether a parameter server's optimizer applies every step's gradient; otherwise workers push differences."""
        return self.frequency == "batch" and self.asynchronous.algorithm in ("downpour", "adag", "dynsgd")


def check_mode(mode: str) -> None:
    """Raises ConfigurationError for an unknown mode."""
    _expect(mode in MODES, "mode", f"one of {', '.join(MODES)}", mode)


def check_warm_workers(number: int | str) -> None:
    """Raises ConfigurationError unless it is ``"auto"`` or an integer of at least 0."""
    is_count = isinstance(number, int) and not isinstance(number, bool) and number >= 0
    _expect(is_count or number == "auto", "warm_workers", "'auto' or an integer of at least 0", number)


def check_frequency(frequency: str | int) -> None:
    """Raises ConfigurationError unless it is ``"batch"``, ``"epoch"`` or an integer of at least 1."""
    is_count = isinstance(frequency, int) and not isinstance(frequency, bool) and frequency >= 1
    _expect(
        is_count or frequency in ("batch", "epoch"),
        "frequency",
        "'batch', 'epoch' or an integer of at least 1",
        frequency,
    )


def _expect(holds: bool, name: str, expected: str, received: object) -> None:
    if not holds:
        raise ConfigurationError(f"{name}: expected {expected}. Received: {received!r}.")
