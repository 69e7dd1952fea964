"""Reduction of gradients on GPUs that JAX has joined: elephant's collective tells where its service is."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from elephant.backends.device_reducer import (
    GRACE_S,
    LOOK_S,
    REASON_S,
    DeviceReducer,
    all_have_devices,
    has_stand_in,
    wrong_sum,
)
from elephant.backends.gradient_averager import GradientAverager
from elephant.collective.communicator import Communicator
from elephant.collective.process_group import ProcessGroup
from elephant.config import FitConfig
from elephant.errors import ConfigurationError, NetworkError
from elephant.net.addresses import Ports, listening_socket, name_of

logger = logging.getLogger(__name__)

# How long processes that have met may take to reach JAX' service.
_JOIN_S = 60
# For errors: the option that joins devices, its value, and the way out.
_OF_NCCL = ("gpuTransport", "'nccl'", "pass 'host'")
_OF_DISTRIBUTION = ("distribution", "a divided model", "leave it out")


def join_devices(communicator: Communicator, config: FitConfig, address: str) -> JaxReducer | None:
    """Joins the devices of all ranks, before JAX has looked for any; all ranks call it.

    JAX has no other way than a service in one of the processes, to which anyone may connect who reaches it, and without
    which all others end. So the option alone switches it on.

    Args:
        address: Under which the other ranks reach this one, if it is the first.

    Returns:
        What reduces gradients on them, or divides a model among them; None where gradients go through the host.

    Raises:
        ConfigurationError: JAX is too old, a rank has no GPU of its own, or a trial fails; on all ranks alike.
        NetworkError: Another rank is gone.
    """
    is_divided = config.distribution is not None
    if not isinstance(communicator, ProcessGroup) or not (is_divided or config.gpu_transport == "nccl"):
        return None
    option, value, way_out = _OF_DISTRIBUTION if is_divided else _OF_NCCL
    import jax

    if not hasattr(jax.config, "jax_enable_recoverability"):
        raise ConfigurationError(
            f"{option}: expected JAX 0.7.1 or later, as {value} needs. Received: {jax.__version__}. "
            f"{way_out.capitalize()}, or install a newer one."
        )
    on_processors = has_stand_in()
    if is_divided:
        on_processors = on_processors or not _have_gpus(communicator)
    else:
        all_have_devices(communicator, _device(), required=True)
    looked = [bool(one[0]) for one in communicator.allgather(np.array([_has_looked_for_devices()], np.int8))]
    if any(looked):
        raise ConfigurationError(
            f"{option}: expected no array of JAX, nor a Keras variable, in callbacks, losses and modules of a fit, "
            f"as {value} needs on JAX, which joins the ranks' devices before it makes the first. Received: some on "
            f"rank {', '.join(str(rank) for rank, one in enumerate(looked) if one)}. Make them in on_train_begin, or "
            f"{way_out}."
        )
    operation = "step of a divided model" if is_divided else "exchange of gradients"
    reducer = JaxReducer(communicator, operation, on_processors=on_processors)
    try:
        if not reducer.form(address, config.ports):
            raise _not_joined() if is_divided else wrong_sum()
    except Exception:
        reducer.close()
        raise
    return reducer


def _has_looked_for_devices() -> bool:
    from jax._src import xla_bridge

    # This function is in no public module. Where it is gone, the join itself fails.
    return bool(getattr(xla_bridge, "backends_are_initialized", bool)())


def _device() -> str:
    # JAX is not asked: once it has looked for devices, it takes no other ranks' any more.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if has_stand_in():
        return f"{socket.gethostname()} {os.getpid()}"
    return "" if visible in ("", "-1") or "," in visible else f"{socket.gethostname()} {visible}"


def _have_gpus(communicator: ProcessGroup) -> bool:
    """Returns whether the ranks have GPUs; raises ConfigurationError where they have no one each, and some have."""
    names = [part.tobytes() for part in communicator.allgather(np.frombuffer(_device().encode(), np.uint8))]
    if not any(names):
        return False
    without = [rank for rank, name in enumerate(names) if not name or names.count(name) > 1]
    if without:
        raise ConfigurationError(
            "distribution: expected a GPU for each rank, its own, or none for all. Received: none on rank "
            f"{', '.join(map(str, without))} of {len(names)}. Give each rank a GPU, or pass useGpu=False."
        )
    return True


def _not_joined() -> ConfigurationError:
    return ConfigurationError(
        "distribution: expected JAX to join the ranks' devices. Received: an error, or a wrong sum of a number of each "
        "rank, which the rank's log has. Leave distribution out."
    )


class JaxReducer(DeviceReducer):
    """Averages gradients by a sum over one device of each process, which JAX has joined.

    JAX cannot abort what is under way: a thread of its own waits for it, which is left behind with its process.
    A fit whose every step waits for other ranks, such as that of a divided model, is in that thread as a whole.

    Args:
        operation: What the ranks wait in, for errors.
        on_processors: Whether these are the devices, and Gloo adds up.

    Attributes:
        averager: Whose weights and stop signal it takes; set before the first average.
    """

    averager: GradientAverager

    def __init__(
        self,
        communicator: ProcessGroup,
        operation: str = "exchange of gradients",
        *,
        on_processors: bool = False,
    ) -> None:
        self._on_processors = on_processors
        self._orders: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._is_joined = False
        super().__init__(communicator, operation)
        threading.Thread(target=self._work, name=f"elephant-sums-{communicator.rank}", daemon=True).start()

    def form(self, address: str, ports: Ports) -> bool:
        """Joins the devices; all ranks call it. Returns whether they add up right, on all of them.

        Raises:
            NetworkError: Another rank is gone.
        """
        size = self._communicator.world_size
        with listening_socket(address, ports=ports) as free:
            own = name_of((address, free.getsockname()[1]))
        first, *_ = self._communicator.allgather(np.frombuffer(own.encode(), np.uint8))
        is_right = False
        try:
            self._in_time(self._join, first.tobytes().decode())
            is_right = self._in_time(self._sum_of_ranks) == size * (size + 1) / 2
        except (RuntimeError, ValueError, AttributeError) as error:
            self._raise_failure()
            logger.warning("JAX does not join the devices of the ranks here: %s", error)
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

        rank, size = self._communicator.rank, self._communicator.world_size
        # Without it gRPC asks a proxy of the environment for the other ranks, and JAX ends the process in vain.
        unproxied = [os.environ.get("no_grpc_proxy", ""), address.rpartition(":")[0].strip("[]")]
        os.environ["no_grpc_proxy"] = ",".join(filter(None, unproxied))
        if self._on_processors:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # Without it the end of one process in good order waits for all others.
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
            heartbeat_timeout_seconds=int(2 * self._communicator.timeout_s + GRACE_S),
        )
        self._is_joined = True
        if jax.local_devices()[0].platform != "gpu" and not self._on_processors:
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
        return float(self._summed(self._pack(1.0, float(self._communicator.rank + 1), []))[0][0])

    def _averaged(self, weight: float, wish: float, gradients: Sequence[Any]) -> tuple[list[Any], bool]:
        sums = self._summed(self._pack(weight, wish, gradients))
        averages, wish = self._unpack(sums, gradients)
        # Whoever reads a number waits for the device, and hears of its errors.
        return averages, bool(wish)

    def _summed(self, flats: Sequence[Any]) -> list[Any]:
        import jax

        size = self._communicator.world_size
        parts = [jax.make_array_from_single_device_arrays((size, flat.shape[1]), self._split, [flat]) for flat in flats]
        return [self._sum(part).addressable_data(0) for part in parts]

    def _in_time(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns the result of a function that may wait for other ranks; raises NetworkError where one is gone."""
        self._under_way = (time.monotonic(), None)
        result = self.run(function, *args)
        self._under_way = (time.monotonic(), [])
        return result

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Has other ranks looked after, for the time of a ``with`` block in a function that `run` was given."""
        self._under_way = (time.monotonic(), None)
        yield
        # Not after an error: why it came is still to be found out.
        self._under_way = (time.monotonic(), [])

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns the result of a function that waits for other ranks where it says so; all ranks call it.

        It is computed in the thread that may be left behind.

        Raises:
            NetworkError: Another rank is gone.
        """
        self._orders.put((function, args))
        while True:
            try:
                result, error = self._answers.get(timeout=LOOK_S)
            except queue.Empty:
                self._raise_failure()
                continue
            if error is None:
                return result
            is_waiting = self._under_way[1] is None and not isinstance(error, NetworkError)
            reason = self._reason() if is_waiting else self._error
            raise error if reason is None else reason from error

    def _work(self) -> None:
        for function, args in iter(self._orders.get, None):
            try:
                self._answers.put((function(*args), None))
            except BaseException as error:
                self._answers.put((None, error))

    def _abort(self) -> None:
        """Does nothing: its thread ends by itself."""

    def close(self) -> None:
        """Ends the threads, and, where the fit has ended well, leaves JAX' service in good order."""
        self._end_watch()
        self._orders.put(None)
        if not self._is_joined:
            return
        if self._error is not None or sys.exc_info()[0] is not None:
            # With the first rank, JAX ends all others: they have this long to say what has happened.
            time.sleep(REASON_S if self._communicator.rank == 0 else 0)
        else:
            import jax

            with contextlib.suppress(NetworkError, RuntimeError):
                # The service ends last.
                if self._communicator.rank == 0:
                    self._communicator.barrier()
                jax.distributed.shutdown()
                if self._communicator.rank > 0:
                    self._communicator.barrier()


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
