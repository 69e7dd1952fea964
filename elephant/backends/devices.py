"""Reduction of gradients on the GPUs that the ranks have: NCCL moves the data, elephant forms the group.

elephant's collective has authenticated the ranks. On PyTorch it carries the keys by which NCCL's communicator is
formed; on JAX, the address of the service in which the ranks' processes find each other. It stays beside NCCL, which
waits forever for a rank that is gone, and tells of that at once.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from elephant.backends.gradient_averager import GradientAverager
from elephant.collective.communicator import Communicator
from elephant.collective.process_group import ProcessGroup
from elephant.config import FitConfig
from elephant.errors import ConfigurationError, NetworkError, ProtocolError

logger = logging.getLogger(__name__)

# Of tests: "gloo" has the processor, and Gloo, stand in for GPUs and NCCL.
STAND_IN_VARIABLE = "ELEPHANT_GPU_TRANSPORT"

# How often the other ranks are looked after while an operation is under way.
_LOOK_S = 0.1
# How long a rank whose operation has failed waits to hear why.
_REASON_S = 2.0
# How long an abort may take, before the process ends instead.
_ABORT_S = 30.0
# How long processes that have met may take to reach JAX' service.
_JOIN_S = 60
# NCCL's and Gloo's own deadlines come after the collective's, which knows the ranks.
_GRACE_S = 5.0


def reduce_on_devices(averager: GradientAverager, config: FitConfig) -> None:
    """Has gradients reduced on GPUs, where the options and all ranks' devices allow it; all ranks call it.

    Raises:
        ConfigurationError: The option asks for it, and a rank has no GPU of its own, or a trial fails; on all ranks
            alike.
        NetworkError: Another rank is gone.
    """
    collective, transport = averager.collective, config.gpu_transport
    fits = config.use_gpu is not False and config.compression is None and not collective.crosses_hosts
    if not isinstance(collective, ProcessGroup) or transport == "host" or (transport == "auto" and not fits):
        return
    if _all_have_devices(collective, _device_of_torch(), required=transport != "auto"):
        reducer = TorchReducer(averager, collective)
        # The averager closes it, also where the ranks do not come together.
        averager.kernel = reducer
        averager.uses_kernel = reducer.form()
        if not averager.uses_kernel:
            averager.kernel = None
            reducer.close()
            if transport != "auto":
                raise _wrong_sum()


def _all_have_devices(collective: Communicator, name: str, *, required: bool) -> bool:
    """Returns whether each rank has a device of its own; all ranks call it.

    Args:
        name: Of this rank's device, which no other device has; empty where it has none for NCCL.

    Raises:
        ConfigurationError: It is required, and one has none.
    """
    names = [part.tobytes() for part in collective.allgather(np.frombuffer(name.encode(), np.uint8))]
    without = [rank for rank, name in enumerate(names) if not name or names.count(name) > 1]
    if without and required:
        raise ConfigurationError(
            "gpuTransport: expected a GPU for each rank, its own, that Keras' backend sees and can use with NCCL, as "
            f"'nccl' needs. Received: none on rank {', '.join(map(str, without))} of {len(names)}. Give each rank a "
            "GPU, or pass 'host'."
        )
    return not without


def _wrong_sum() -> ConfigurationError:
    return ConfigurationError(
        "gpuTransport: expected NCCL to add up a number of each rank, as 'nccl' needs. Received: another sum, or an "
        "error, which the rank's log has. Pass 'host'."
    )


def _device_of_torch() -> str:
    import torch

    if _has_stand_in():
        return f"{socket.gethostname()} {os.getpid()}"
    if not torch.cuda.is_available() or not torch.distributed.is_available():
        return ""
    if not hasattr(getattr(torch.distributed, "ProcessGroupNCCL", None), "abort"):
        return ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{socket.gethostname()} {getattr(properties, 'uuid', os.environ.get('CUDA_VISIBLE_DEVICES', ''))}"


def _device_of_jax() -> str:
    # JAX is not asked: once it has looked for devices, it takes no other ranks' any more.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if _has_stand_in():
        return f"{socket.gethostname()} {os.getpid()}"
    return "" if visible in ("", "-1") or "," in visible else f"{socket.gethostname()} {visible}"


def _has_stand_in() -> bool:
    return os.environ.get(STAND_IN_VARIABLE) == "gloo"


class DeviceReducer(ABC):
    """Averages the gradients of all ranks on their devices: the kernel of a `GradientAverager`.

    A thread looks after the other ranks while an operation is under way.

    Tests have Gloo in the place of NCCL, on processors: they set the environment variable ``ELEPHANT_GPU_TRANSPORT`` to
    "gloo" in every rank. It is for nothing else: gradients on the processor go the collective's own way.
    """

    def __init__(self, collective: ProcessGroup) -> None:
        self._collective = collective
        self._is_formed = False
        # Since when an operation is under way, and its parts, once they have begun.
        self._under_way: tuple[float, Sequence[Any] | None] = (time.monotonic(), None)
        self._error: NetworkError | None = None
        self._is_broken, self._is_closed = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=f"elephant-devices-{collective.rank}", daemon=True)
        self._watcher.start()

    @abstractmethod
    def average(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the averages of gradients, on their devices; raises NetworkError where another rank is gone."""

    @abstractmethod
    def close(self) -> None:
        """Ends the thread that looks after the other ranks, and the communicator."""

    @abstractmethod
    def _abort(self) -> None:
        """Has an operation under way return or raise, where that is possible."""

    def _agreed(self, is_right: bool) -> bool:
        """Returns whether a trial has gone right on all ranks."""
        found = np.array([is_right], np.int32)
        self._is_formed = True
        self._collective.allreduce_(found, "min")
        if found[0] and self._collective.rank == 0:
            logger.info("%d ranks reduce gradients on their devices", self._collective.world_size)
        return bool(found[0])

    def _reason(self) -> NetworkError | None:
        """Waits a moment for why an operation has failed."""
        self._is_broken.wait(_REASON_S)
        return self._error

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _watch(self) -> None:
        while not self._is_closed.wait(_LOOK_S):
            since, works = self._under_way
            try:
                if works is not None and all(work.is_completed() for work in works):
                    continue
                self._collective.look("exchange of gradients", time.monotonic() - since)
            except NetworkError as error:
                self._break(error)
                return
            except Exception as error:
                # An operation that fails of itself, say: without this thread, nobody would look after the others.
                self._break(NetworkError(f"Expected to look after the exchange of gradients. Received: {error!r}."))
                return

    def _break(self, error: NetworkError) -> None:
        """Aborts what is under way, which then returns or raises; ends the process where it does neither."""
        self._error = error
        self._is_broken.set()
        faulthandler.dump_traceback_later(_ABORT_S, exit=True, file=sys.__stderr__ or 2)
        self._abort()
        if self._is_formed:
            faulthandler.cancel_dump_traceback_later()

    def _end_watch(self) -> None:
        self._is_closed.set()
        self._watcher.join()
        if self._error is not None:
            faulthandler.cancel_dump_traceback_later()


class TorchReducer(DeviceReducer):
    """Averages gradients by a process group of PyTorch's.

    Args:
        averager: Whose ranks, weights and stop signal it takes.
    """

    def __init__(self, averager: GradientAverager, collective: ProcessGroup) -> None:
        import torch

        self._averager = averager
        self._device = torch.device("cpu") if _has_stand_in() else torch.device("cuda", torch.cuda.current_device())
        self._group: Any = None
        self._checked_layouts: set[int] = set()
        # The flags of the last step, as `_on_way_to_host` returns them.
        self._last_flags: tuple[Any, Any] | None = None
        super().__init__(collective)

    def form(self) -> bool:
        """Forms the communicator; all ranks call it. Returns whether it adds up right, on all of them.

        Raises:
            NetworkError: Another rank is gone.
        """
        import torch

        rank, size = self._collective.rank, self._collective.world_size
        self._store = _store_over(self._collective, self._averager.noting_failure)
        is_right = False
        try:
            self._group = _process_group(self._store, self._collective, self._device)
            # NCCL's ranks meet in the first operation.
            (total,) = self._sum([torch.full((1,), rank + 1.0, device=self._device)])
            is_right = float(total) == size * (size + 1) / 2
        except RuntimeError as error:
            self._raise_failure()
            logger.warning("GPUs do not reduce gradients: NCCL does not form its group here: %s", error)
        self._store.is_forming = False
        return self._agreed(is_right)

    def average(self, gradients: Sequence[Any | None], variables: Sequence[Any]) -> list[Any | None]:
        """Returns the averages of gradients, on their devices: None where no rank with rows has one.

        Args:
            gradients: One tensor for each variable, or None.
            variables: Keras variables, of which a gradient that is absent has shape, dtype and device.

        Raises:
            NetworkError: Another rank is gone, too late, or has other variables.
        """
        weight, values = self._averager.begin(), [variable.value for variable in variables]
        self._raise_failure()
        self._check_layout(values)
        # A share of those that have it, and the wish to stop, which a rank without rows may have too.
        flags = [weight * (gradient is not None) for gradient in gradients]
        flats = self._packed(gradients, values, weight, [*flags, float(self._averager.stop.requested)])
        sums = self._sum([flat for flat, _ in flats])
        averages: list[Any | None] = [None] * len(values)
        for total, (_, places) in zip(sums, flats, strict=True):
            sizes = [values[place].numel() for place in places]
            for place, view in zip(places, total[: sum(sizes)].split(sizes), strict=True):
                gradient = gradients[place]
                like = values[place] if gradient is None else gradient
                averages[place] = view.reshape(values[place].shape).to(like.device, like.dtype)
        return self._found(averages, sums[0][-len(flags) - 1 :], knows=weight > 0 and all(flags))

    def _packed(
        self, gradients: Sequence[Any | None], values: Sequence[Any], weight: float, flags: list[float]
    ) -> list[tuple[Any, list[int]]]:
        """Returns a buffer for each dtype, and whose gradients it holds; flags end the first one, which is of float32.

        Gradients of 16 bits are summed in 32. A rank without rows writes zeros: zero times NaN is NaN.
        """
        import torch

        on_gpu, buffers = self._device.type == "cuda", []
        given = gradients if weight else [None] * len(gradients)
        for dtype in (torch.float32, torch.float64):
            places = [p for p, value in enumerate(values) if (value.dtype == torch.float64) == (dtype == torch.float64)]
            if not places and dtype == torch.float64:
                continue
            pieces = [self._piece(given[place], values[place], dtype) for place in places]
            count = sum(map(len, pieces))
            if dtype == torch.float32:
                # From pinned memory, a copy waits for nothing.
                on_host = torch.tensor(flags, dtype=dtype, device="cpu", pin_memory=on_gpu)
                pieces.append(on_host.to(self._device, non_blocking=True))
            flat = torch.cat(pieces)
            flat[:count].mul_(weight)
            buffers.append((flat, places))
        return buffers

    def _piece(self, gradient: Any | None, value: Any, dtype: Any) -> Any:
        import torch

        if gradient is None:
            return torch.zeros(value.numel(), dtype=dtype, device=self._device)
        return gradient.detach().reshape(-1).to(self._device, dtype)

    def _found(self, averages: list[Any | None], flags: Any, *, knows: bool) -> list[Any | None]:
        """Returns the averages without those that no rank has, and takes note of the last step's wish to stop.

        The wish is read one step later, on all ranks alike, so that none waits for its device. At the end of an epoch
        the ranks agree through the collective, in which a wish that nobody has read is said again. Which gradients are
        there, a rank knows that has them all, and rows: others wait for their devices to read it.

        Args:
            knows: Whether this rank has rows, and all gradients.
        """
        last, self._last_flags = self._last_flags, self._on_way_to_host(flags)
        if last is not None and self._read(last)[-1] > 0:
            self._averager.stop.agreed = True
        if knows:
            return averages
        *shares, _ = self._read(self._last_flags)
        # A step to which no rank brings rows leaves all as they are.
        has_rows = any(shares)
        return [average if share > 0 or not has_rows else None for average, share in zip(averages, shares, strict=True)]

    def _on_way_to_host(self, flags: Any) -> tuple[Any, Any]:
        """Begins to copy; returns the copy, and the event that tells when it is there, or None."""
        import torch

        copy = flags.to("cpu", non_blocking=True)
        if not flags.is_cuda:
            return copy, None
        event = torch.cuda.Event()
        event.record()
        return copy, event

    def _read(self, flags: tuple[Any, Any]) -> list[float]:
        copy, event = flags
        if event is not None:
            event.synchronize()
        # What an aborted operation leaves is no sum.
        self._raise_failure()
        return [float(flag) for flag in copy.tolist()]

    def _sum(self, flats: list[Any]) -> list[Any]:
        """Returns buffers, summed in place over all ranks; on GPUs, once the device gets there."""
        began = time.monotonic()
        self._under_way = (began, None)
        try:
            works = [self._group.allreduce([flat]) for flat in flats]
            self._under_way = (began, works)
            for work in works:
                # Gloo's operations cannot be aborted.
                while self._device.type == "cpu" and not work.is_completed():
                    self._raise_failure()
                    time.sleep(0.0002)
                work.wait()
        except RuntimeError as error:
            self._under_way = (began, None)
            raise self._reason() or error from error
        self._raise_failure()
        return flats

    def _check_layout(self, values: Sequence[Any]) -> None:
        """Raises ProtocolError where ranks come with different variables, when they first do: NCCL does not look."""
        layout = zlib.crc32(repr([(tuple(value.shape), str(value.dtype)) for value in values]).encode())
        if layout in self._checked_layouts:
            return
        layouts = [int(one[0]) for one in self._collective.allgather(np.array([layout], np.int64))]
        if len(set(layouts)) > 1:
            raise ProtocolError(
                "Expected gradients of the same variables from all ranks, by the checksum of their shapes. Received: "
                f"{', '.join(f'{one:08x}' for one in layouts)}. Let all ranks apply the same optimizers in one order."
            )
        self._checked_layouts.add(layout)

    def _abort(self) -> None:
        self._averager.error = self._error
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Ends the thread that looks after the other ranks, and the communicator."""
        self._end_watch()
        if self._group is not None:
            # An orderly end would wait for the others, and there may be none.
            self._group.abort()
            # Whoever lets Gloo go waits for operations that cannot be aborted.
            last, self._group, self._under_way = [self._group], None, (time.monotonic(), [])
            threading.Thread(target=last.clear, name="elephant-group-end", daemon=True).start()


def _process_group(store: Any, collective: ProcessGroup, device: Any) -> Any:
    """Returns a process group of PyTorch's that is no part of its default group, which is left to the user."""
    from torch import distributed

    rank, size = collective.rank, collective.world_size
    if device.type == "cpu":
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = datetime.timedelta(seconds=collective.timeout_s + _GRACE_S)
        return distributed.ProcessGroupGloo(store, rank, size, options)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=2 * collective.timeout_s + _GRACE_S)
    # Else its own watchdog would end the process where a rank is lost.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _store_over(collective: Communicator, noting_failure: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Returns a store of keys and values of PyTorch's, in which ranks that form a group find each other's."""
    import torch

    class CollectiveStore(torch.distributed.Store):
        """Keys and values of all ranks.

        Whoever sets a key, or asks for one that is not there yet, exchanges all of them with all ranks. So it serves
        where each rank does the one or the other, once: NCCL's rank 0 sets an id for which the others ask, and Gloo's
        ranks all set their addresses. Once they have met, a store is each rank's own.
        """

        def __init__(self) -> None:
            super().__init__()
            self.values: dict[str, bytes] = {}
            self.is_forming = True

        def set(self, key: str, value: bytes) -> None:
            self.values[key] = bytes(value)
            exchange(self)

        def get(self, key: str) -> bytes:
            self.wait([key])
            return self.values[key]

        def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
            if not self.check(keys):
                exchange(self)

        def check(self, keys: Sequence[str]) -> bool:
            return all(key in self.values for key in keys)

    @noting_failure
    def exchange(store: CollectiveStore) -> None:
        if store.is_forming:
            own = json.dumps({key: value.hex() for key, value in store.values.items()}).encode()
            for part in collective.allgather(np.frombuffer(own, np.uint8)):
                store.values |= {key: bytes.fromhex(value) for key, value in json.loads(part.tobytes()).items()}

    return CollectiveStore()


def join_devices(collective: Communicator, config: FitConfig, address: str) -> JaxReducer | None:
    """Joins the devices of all ranks, before JAX has looked for any; all ranks call it.

    JAX has no other way than a service in one of the processes, to which anyone may connect who reaches it, and without
    which all others end. So the option alone switches it on.

    Args:
        address: Under which the other ranks reach this one, if it is the first.

    Returns:
        What reduces gradients on them; None where they go through the host.

    Raises:
        ConfigurationError: JAX is too old, a rank has no GPU of its own, or a trial fails; on all ranks alike.
        NetworkError: Another rank is gone.
    """
    if config.gpu_transport != "nccl" or not isinstance(collective, ProcessGroup):
        return None
    import jax

    if not hasattr(jax.config, "jax_enable_recoverability"):
        raise ConfigurationError(
            f"gpuTransport: expected JAX 0.7.1 or later, as 'nccl' needs. Received: {jax.__version__}. Pass 'host', or "
            "install a newer one."
        )
    _all_have_devices(collective, _device_of_jax(), required=True)
    looked = [bool(one[0]) for one in collective.allgather(np.array([_has_looked_for_devices()], np.int8))]
    if any(looked):
        raise ConfigurationError(
            "gpuTransport: expected no array of JAX, nor a Keras variable, in callbacks, losses and modules of a fit, "
            "as 'nccl' needs on JAX, which joins the ranks' devices before it makes the first. Received: some on rank "
            f"{', '.join(str(rank) for rank, one in enumerate(looked) if one)}. Make them in on_train_begin, or pass "
            "'host'."
        )
    reducer = JaxReducer(collective)
    try:
        if not reducer.form(address):
            raise _wrong_sum()
    except Exception:
        reducer.close()
        raise
    return reducer


def _has_looked_for_devices() -> bool:
    from jax._src import xla_bridge

    # Of no public module. Where it is gone, the join itself fails.
    return bool(getattr(xla_bridge, "backends_are_initialized", bool)())


class JaxReducer(DeviceReducer):
    """Averages gradients by a sum over one device of each process, which JAX has joined.

    JAX cannot abort what is under way: a thread of its own waits for it, which is left behind with its process.

    Attributes:
        averager: Whose weights and stop signal it takes; set before the first average.
    """

    averager: GradientAverager

    def __init__(self, collective: ProcessGroup) -> None:
        self._orders: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._is_joined = False
        super().__init__(collective)
        threading.Thread(target=self._work, name=f"elephant-sums-{collective.rank}", daemon=True).start()

    def form(self, address: str) -> bool:
        """Joins the devices; all ranks call it. Returns whether they add up right, on all of them.

        Raises:
            NetworkError: Another rank is gone.
        """
        size = self._collective.world_size
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as free:
            free.bind((address, 0))
            own = f"{address if family == socket.AF_INET else f'[{address}]'}:{free.getsockname()[1]}"
        first, *_ = self._collective.allgather(np.frombuffer(own.encode(), np.uint8))
        is_right = False
        try:
            self._in_time(self._join, first.tobytes().decode())
            is_right = self._in_time(self._sum_of_ranks) == size * (size + 1) / 2
        except (RuntimeError, ValueError, AttributeError) as error:
            self._raise_failure()
            logger.warning("GPUs do not reduce gradients: JAX does not join them here: %s", error)
        return self._agreed(is_right)

    def average(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the averages of gradients, on their devices.

        Args:
            gradients: One array for each variable.
            variables: Not looked at: on JAX, no gradient is absent.

        Raises:
            NetworkError: Another rank is gone, or too late.
        """
        self._raise_failure()
        weight, stop = self.averager.begin(), self.averager.stop
        averages, wish = self._in_time(self._averaged, weight, float(stop.requested), gradients)
        stop.agreed = stop.agreed or wish
        return list(averages)

    def _join(self, address: str) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        rank, size = self._collective.rank, self._collective.world_size
        # Else gRPC asks a proxy of the environment for the other ranks, and JAX ends the process in vain.
        unproxied = [os.environ.get("no_grpc_proxy", ""), address.rpartition(":")[0].strip("[]")]
        os.environ["no_grpc_proxy"] = ",".join(filter(None, unproxied))
        if _has_stand_in():
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # Else the end of one process in good order waits for all others.
        jax.config.update("jax_enable_recoverability", True)
        with contextlib.suppress(AttributeError):
            # It would take SIGTERM for a notice, and the process would go on.
            jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            address,
            size,
            rank,
            local_device_ids=[0],
            cluster_detection_method="deactivate",
            coordinator_bind_address=address,
            initialization_timeout=_JOIN_S,
            # Frozen ranks are the collective's to tell.
            heartbeat_timeout_seconds=int(2 * self._collective.timeout_s + _GRACE_S),
        )
        self._is_joined = True
        if jax.local_devices()[0].platform != "gpu" and not _has_stand_in():
            raise RuntimeError(f"JAX sees no GPU, and computes on {jax.local_devices()[0]}")
        mesh = Mesh(np.array(jax.devices()), ("ranks",))
        self._split = NamedSharding(mesh, PartitionSpec("ranks"))
        self._sum = jax.jit(
            jax.shard_map(
                lambda own: jax.lax.psum(own[0], "ranks"),
                mesh=mesh,
                in_specs=PartitionSpec("ranks"),
                out_specs=PartitionSpec(),
            )
        )
        self._pack, self._unpack = jax.jit(_packed_for_sum), jax.jit(_unpacked_sums)

    def _sum_of_ranks(self) -> float:
        # The wish to stop is the number that each rank adds.
        return float(self._summed(self._pack(1.0, float(self._collective.rank + 1), []))[0][0])

    def _averaged(self, weight: float, wish: float, gradients: Sequence[Any]) -> tuple[list[Any], bool]:
        sums = self._summed(self._pack(weight, wish, gradients))
        averages, wish = self._unpack(sums, gradients)
        # Whoever reads a number waits for the device, and hears of its errors.
        return averages, bool(wish)

    def _summed(self, flats: Sequence[Any]) -> list[Any]:
        import jax

        size = self._collective.world_size
        parts = [jax.make_array_from_single_device_arrays((size, flat.shape[1]), self._split, [flat]) for flat in flats]
        return [self._sum(part).addressable_data(0) for part in parts]

    def _in_time(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns the result of a function that may wait for other ranks; raises NetworkError where one is gone."""
        self._under_way = (time.monotonic(), None)
        self._orders.put((function, args))
        while True:
            try:
                result, error = self._answers.get(timeout=_LOOK_S)
            except queue.Empty:
                self._raise_failure()
                continue
            if error is not None:
                raise self._reason() or error from error
            self._under_way = (time.monotonic(), [])
            return result

    def _work(self) -> None:
        for function, args in iter(self._orders.get, None):
            try:
                self._answers.put((function(*args), None))
            except BaseException as error:
                self._answers.put((None, error))

    def _abort(self) -> None:
        """Leaves it to its thread."""

    def close(self) -> None:
        """Ends the threads, and, where the fit has ended well, leaves JAX' service in good order."""
        self._end_watch()
        self._orders.put(None)
        if not self._is_joined:
            return
        if self._error is not None or sys.exc_info()[0] is not None:
            # With the first rank, JAX ends all others: they have this long to say what has happened.
            time.sleep(_REASON_S if self._collective.rank == 0 else 0)
        else:
            import jax

            with contextlib.suppress(NetworkError, RuntimeError):
                # The service ends last.
                if self._collective.rank == 0:
                    self._collective.barrier()
                jax.distributed.shutdown()
                if self._collective.rank > 0:
                    self._collective.barrier()


def _packed_for_sum(weight: Any, wish: Any, gradients: Sequence[Any]) -> list[Any]:
    """Returns an array (1, elements) for each dtype; the first one is of float32, and ends with the wish to stop.

    Gradients of 16 bits are summed in 32. A rank without rows has zeros: zero times NaN is NaN.
    """
    import jax.numpy as jnp

    wide = [gradient for gradient in gradients if gradient.dtype == jnp.float64]
    others = [gradient.astype(jnp.float32) for gradient in gradients if gradient.dtype != jnp.float64]
    weighted = [
        [jnp.where(weight > 0, gradient.ravel() * weight.astype(gradient.dtype), 0) for gradient in group]
        for group in (others, wide)
    ]
    first = jnp.concatenate([*weighted[0], wish.astype(jnp.float32)[None]])[None]
    return [first, jnp.concatenate(weighted[1])[None]] if wide else [first]


def _unpacked_sums(sums: Sequence[Any], like: Sequence[Any]) -> tuple[list[Any], Any]:
    """Returns the averages, in the shapes and dtypes of gradients, and whether any rank wishes to stop."""
    averages, taken = [], [0, 0]
    for gradient in like:
        of_dtype = int(gradient.dtype == "float64")
        start, taken[of_dtype] = taken[of_dtype], taken[of_dtype] + gradient.size
        flat = sums[of_dtype][start : start + gradient.size]
        averages.append(flat.reshape(gradient.shape).astype(gradient.dtype))
    return averages, sums[0][-1] > 0
