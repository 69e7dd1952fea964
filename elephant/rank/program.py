"""Programs: what a training process runs, one for each kind of run.

Keras imports scikit-learn and Matplotlib for wrappers and pictures, which a training
process does not need: a quarter of the processor time of the whole import. A sixth of
the rest goes to Python's collector, which walks all that has been imported so far, again and again, and finds nothing.

All are started, watched and ended in the same way; a program is the part in which
they differ, and says what it needs: other ranks, or parameter servers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle  # noqa: S403  (the job comes from the parent process, through an inherited pipe)
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elephant.backends import current
from elephant.collective import api
from elephant.collective.bootstrap import form_collective
from elephant.collective.communicator import Communicator
from elephant.errors import ConfigurationError, NetworkError, PeerLostError
from elephant.monitor.channel import ChannelClient
from elephant.monitor.events import FilesLeft, Started
from elephant.monitor.trace import PROCESS
from elephant.net.addresses import address_towards
from elephant.net.stream import Listener
from elephant.rank.executor import executor_id, quick_imports, unseen_note
from elephant.rank.process_pipe import USER_FOLDER, inherited, is_forked
from elephant.rank.rank_info import RankInfo
from elephant.storage.filesystem import WORK_FOLDER
from elephant.storage.user_files import MOST_BYTES, taken_files

if TYPE_CHECKING:
    from elephant.data.epoch_plan import EpochPlan
    from elephant.data.shard import Shard
    from elephant.rank.job import TrainingJob
    from elephant.rank.traced_step import TracedStep


_DISMISSED_S = 5.0
# So many rows tell whether a partition has other classes than the others.
_MOST_LABELS = 20_000
_OF_FITS = "The model, its custom objects or a callback"


class Program(ABC):
    """One kind of work for the ranks of a run.

    Attributes:
        subject: What of the user's the job holds, for the error that says that code is missing.
    """

    subject: str

    @abstractmethod
    def prepare(self) -> None:
        """Imports what takes long, while the Spark task still prepares the rest."""

    def load(self, block: bytes) -> Any:
        """Returns the job, of the block that holds it; raises ConfigurationError as `load_job`."""
        return load_job(self.subject, block)

    @abstractmethod
    def start(self, job: Any, block: bytes, on_dismissed: Callable[[], None]) -> bytes:
        """Connects this process to those that it needs, and does the work.

        Returns:
            What the rank's Spark task hands to the driver.
        """


def load_job(subject: str, block: bytes) -> Any:
    """Returns a job.

    Raises:
        ConfigurationError: It needs code that is not here.
    """
    try:
        return pickle.loads(block)  # noqa: S301  (see the import)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{subject} needs code that the executors do not have: {error}. Ship the module with --py-files or "
            "SparkContext.addPyFile, with addArtifacts(..., pyfile=True) on Spark Connect, or define it in the "
            "main script or notebook.",
            topic="code-that-the-executors-do-not-have",
        ) from error


class SynchronousProgram(Program):
    """Work that all ranks do together: they are connected by a collective."""

    def start(self, job: Any, block: bytes, on_dismissed: Callable[[], None]) -> bytes:
        """Forms the collective of all ranks, and does the work."""
        rank_info = RankInfo.from_bytes(block)
        timeouts, PROCESS.of_task = rank_info.timeouts, rank_info.phases
        with _reporter(rank_info, on_dismissed) as channel:
            with Listener(socket.socket(fileno=inherited(rank_info.listener_fd))) as listener:
                communicator = form_collective(
                    rank_info.rank,
                    rank_info.addresses,
                    listener,
                    token=bytes.fromhex(rank_info.token),
                    # One that comes late, of the ranks before, is to find nobody.
                    run_id=f"{rank_info.run_id} {rank_info.generation or 0}",
                    timeout_s=timeouts.connect_s,
                    operation_timeout_s=timeouts.collective_s,
                )
            PROCESS.end("connecting to ranks")
            with communicator, api.using(communicator):
                return self.run(job, rank_info, communicator, channel)

    @abstractmethod
    def run(self, job: Any, rank_info: RankInfo, communicator: Communicator, channel: ChannelClient) -> bytes:
        """Does the work.

        Returns:
            What the rank's Spark task hands to the driver.
        """


def _load_fit(block: bytes) -> tuple[TrainingJob, TracedStep | None]:
    from elephant.rank.traced_step import traced_step

    job = load_job(_OF_FITS, block)
    return job, traced_step(job)


class SynchronousFitProgram(SynchronousProgram):
    """Trains a model on this rank's rows; what it makes goes to the driver through the reporter."""

    subject = _OF_FITS

    def prepare(self) -> None:
        with quick_imports():
            import elephant.rank.synchronous  # noqa: F401  (imports Keras)

    def load(self, block: bytes) -> tuple[TrainingJob, TracedStep | None]:
        """Returns the job, and what can be made of it before the ranks have met."""
        fit, traced_step = _load_fit(block)
        if fit.config.pipeline_stages is not None:
            from elephant.rank.staged import with_weights_on_disk

            fit = with_weights_on_disk(fit)
        return fit, traced_step

    def run(
        self,
        job: tuple[TrainingJob, TracedStep | None],
        rank_info: RankInfo,
        communicator: Communicator,
        channel: ChannelClient,
    ) -> bytes:
        from elephant.rank.callbacks.divided_tables import TableEndpoint
        from elephant.rank.checkpoints import received_state
        from elephant.rank.divided import train_divided
        from elephant.rank.input.piece_reader import plan_of_ranks
        from elephant.rank.synchronous import train_rank

        fit, traced_step = job
        # The framework has computed nothing until now, where that would be too early.
        current().join_devices(communicator, fit.config, rank_info.addresses[rank_info.rank][0])
        if rank_info.generation:
            # What the job has is from where the first ones have begun.
            fit = replace(fit, state=received_state(channel, communicator) if rank_info.goes_on else None)
        shard = _opened_shard(rank_info, fit)
        plan = plan_of_ranks(fit, rank_info, shard, communicator)
        channel.send(_started(rank_info, plan, first_step=plan.number(*fit.first) + 1))
        if fit.config.pipeline_stages is not None:
            from elephant.rank.staged import train_staged

            train_staged(fit, shard, plan, communicator, channel)
            return b""
        distribution = current().distribution(fit.config)
        if distribution is None:
            endpoint = TableEndpoint(
                host=rank_info.addresses[rank_info.rank][0],
                token=bytes.fromhex(rank_info.token),
                run_id=f"{rank_info.run_id} {rank_info.generation or 0}",
                wait_s=rank_info.timeouts.collective_s,
                ports=rank_info.ports,
            )
            train_rank(fit, shard, plan, communicator, channel, traced_step, endpoint=endpoint)
        else:
            train = functools.partial(train_divided, fit, shard, plan, communicator, channel, distribution)
            with contextlib.closing(distribution):
                distribution.run(train)
        return b""


class AsynchronousProgram(Program):
    """Trains a model on this partition's rows at its own pace; what it learns goes to the parameter servers."""

    subject = _OF_FITS

    def prepare(self) -> None:
        """Imports Keras."""
        with quick_imports():
            import elephant.rank.asynchronous.worker_fit  # noqa: F401  (imports Keras)

    def load(self, block: bytes) -> tuple[TrainingJob, TracedStep | None]:
        """Returns the job, and what can be made of it before there are servers."""
        return _load_fit(block)

    def start(
        self, job: tuple[TrainingJob, TracedStep | None], block: bytes, on_dismissed: Callable[[], None]
    ) -> bytes:
        """Connects to the driver and the parameter servers, and trains."""
        from elephant.parameter_server.client import ParameterServerClient
        from elephant.rank.asynchronous.worker_fit import train_worker
        from elephant.rank.job import epoch_plan

        fit, traced_step = job
        rank_info = RankInfo.from_bytes(block)
        PROCESS.of_task = rank_info.phases
        shard = _opened_shard(rank_info, fit)
        plan = epoch_plan(fit, rank_info.num_rows, rank_info.num_marked)
        with _reporter(rank_info, on_dismissed) as channel:
            channel.send(_started(rank_info, plan))
            with ParameterServerClient(
                rank_info.servers,
                token=bytes.fromhex(rank_info.token),
                run_id=rank_info.run_id,
                layout=rank_info.weights_layout,
                partition=rank_info.rank,
                attempt=rank_info.attempt,
                epoch_steps=plan.steps if plan.training_rows[rank_info.rank] else 0,
                compression=fit.config.compression,
                timeouts=rank_info.timeouts,
            ) as servers:
                train_worker(fit, shard, rank_info, servers, channel, traced_step)
        return b""


class GossipProgram(AsynchronousProgram):
    """Trains a model on this partition's rows at its own pace; what it learns goes to other workers, in pairs."""

    def start(
        self, job: tuple[TrainingJob, TracedStep | None], block: bytes, on_dismissed: Callable[[], None]
    ) -> bytes:
        """Connects to the driver, listens for other workers, and trains."""
        from elephant.rank.asynchronous.gossip_exchange import GossipMember, label_counts
        from elephant.rank.asynchronous.worker_fit import train_worker
        from elephant.rank.job import epoch_plan

        fit, traced_step = job
        rank_info = RankInfo.from_bytes(block)
        PROCESS.of_task = rank_info.phases
        shard = _opened_shard(rank_info, fit)
        plan = epoch_plan(fit, rank_info.num_rows, rank_info.num_marked)
        labels = {} if fit.preprocessing.target_schema else label_counts(_some_labels(shard, fit))
        with _reporter(rank_info, on_dismissed) as channel:
            channel.send(_started(rank_info, plan))
            # Where it reaches the driver from, other workers reach it.
            listener = Listener.bind(address_towards(rank_info.driver), ports=rank_info.ports)
            with GossipMember(rank_info, fit.config, listener, channel, labels) as gossip_member:
                train_worker(fit, shard, rank_info, gossip_member, channel, traced_step)
        return b""


def _some_labels(shard: Shard, job: TrainingJob) -> np.ndarray:
    """Returns the labels of some of a shard's rows; none where there are several columns of them."""
    if len(job.schema.labels) != 1 or not job.schema.labels[0].is_fixed or not shard.num_rows:
        return np.empty(0)
    rows = np.unique(np.linspace(0, shard.num_rows - 1, min(shard.num_rows, _MOST_LABELS)).astype(np.int64))
    return np.asarray(shard.column(job.schema.labels[0], rows))


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """A function of the user's and its arguments: the job of a `FunctionProgram`.

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        pickled: Turns its result into bytes: what pickled the call itself, so that classes
            of the driver's main script travel back as they came.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    pickled: Callable[[Any], bytes]


class FunctionProgram(SynchronousProgram):
    """Calls a function and returns its pickled result. Imports nothing that the function does not."""

    subject = "The function or one of its arguments"

    def prepare(self) -> None:
        """Does nothing: a function imports what it needs."""

    def run(self, job: FunctionCall, rank_info: RankInfo, communicator: Communicator, channel: ChannelClient) -> bytes:
        channel.send(_started(rank_info))
        communicator.dumps = job.pickled
        try:
            result = job.fn(*job.args, **job.kwargs)
        except BaseException as error:
            lost = _lost_peer(error)
            if lost is None or lost is error:
                raise
            # Whatever came of it: this rank failed because another one did, and that one is to be blamed.
            raise PeerLostError(str(lost)) from error
        return _pickled_result(job, result, rank_info.rank)


class ChunksProgram(Program):
    """Computes on chunks of columns that a Python worker of Spark has: the process in which it predicts."""

    subject = "The model or a function"

    def prepare(self) -> None:
        """Does nothing: the functions import what they need."""

    def start(self, job: None, block: bytes, on_dismissed: Callable[[], None]) -> bytes:
        """Serves the worker until it hangs up, by ending this process or because it has ended itself."""
        from elephant.rank.chunks import ChunkChannel

        connection, sending, receiving = (inherited(descriptor) for descriptor in json.loads(block))
        ChunkChannel(socket.socket(fileno=connection), sending, receiving).serve()
        # Nobody asks for a result, and the work folder is nobody else's to remove.
        on_dismissed()
        return b""


PROGRAMS: dict[str, Program] = {
    "fit": SynchronousFitProgram(),
    "asynchronous": AsynchronousProgram(),
    "gossip": GossipProgram(),
    "function": FunctionProgram(),
    "chunks": ChunksProgram(),
}


@contextlib.contextmanager
def _reporter(rank_info: RankInfo, on_dismissed: Callable[[], None]) -> Iterator[ChannelClient]:
    """Connects to the driver, which in the end gets the files that the user's code has left, however that comes."""

    def send_files(timeout_s: float = 60.0) -> None:
        most_bytes = MOST_BYTES if rank_info.rank == 0 else MOST_BYTES // (rank_info.world_size - 1)
        files, left_out = taken_files(Path(os.environ.get(WORK_FOLDER, os.devnull)) / USER_FOLDER, most_bytes)
        if files or left_out:
            channel.send(FilesLeft.of(files, left_out, rank=rank_info.rank), timeout_s=timeout_s)

    def dismissed() -> None:
        # The driver listens for a moment; where it is gone, nobody does.
        with contextlib.suppress(NetworkError):
            send_files(_DISMISSED_S)
        on_dismissed()

    with ChannelClient(
        rank_info.driver,
        token=bytes.fromhex(rank_info.token),
        run_id=rank_info.run_id,
        rank=rank_info.rank,
        timeouts=rank_info.timeouts,
        on_dismissed=dismissed,
        generation=rank_info.generation,
    ) as channel:
        try:
            yield channel
        except BaseException:
            # A driver that is gone, or has given up, must not hide why.
            with contextlib.suppress(NetworkError):
                send_files()
            raise
        send_files()


def _opened_shard(rank_info: RankInfo, job: TrainingJob) -> Shard:
    from elephant.data.shard import Shard

    folder = None if rank_info.shard is None else Path(rank_info.shard)
    shard = Shard(folder, job.schema, rank_info.row_shapes, in_memory=job.config.cache == "memory")
    if rank_info.generation is None:
        shard.unlink()
    return shard


def _started(rank_info: RankInfo, plan: EpochPlan | None = None, *, first_step: int | None = None) -> Started:
    unseen = unseen_note(rank_info.devices, rank_info.host)
    return Started(
        rank=rank_info.rank,
        host=rank_info.host,
        device=f"{rank_info.device} (not seen)" if unseen else rank_info.device,
        threads=rank_info.threads,
        training_rows=plan.training_rows[rank_info.rank] if plan else 0,
        validation_rows=plan.validation_rows[rank_info.rank] if plan else 0,
        executor=executor_id(),
        devices=rank_info.devices,
        note=unseen or rank_info.note,
        first_step=first_step,
        warm=is_forked(),
    )


def _lost_peer(error: BaseException) -> BaseException | None:
    """Returns the loss of another rank that an error comes from, or None when it comes from this rank."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, PeerLostError):
            return cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    # TensorFlow replaces what is raised in a step that it runs by an error of its own.
    return next((known for known in api.failures() if isinstance(known, PeerLostError)), None)


def _pickled_result(call: FunctionCall, result: Any, rank: int) -> bytes:
    try:
        return call.pickled(result)
    except Exception as error:
        raise ConfigurationError(
            f"result of rank {rank}: expected something that can be pickled. Received: {type(result).__name__}: "
            f"{type(error).__name__}: {error}. Return numbers, numpy arrays, or containers of them.",
            topic="code-that-cannot-be-sent",
        ) from error
