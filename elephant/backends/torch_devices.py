"""Reduction of gradients on GPUs by PyTorch: a process group whose keys elephant's collective carries."""

from __future__ import annotations

import datetime
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from elephant.backends.device_reducer import GRACE_S, DeviceReducer, all_have_devices, has_stand_in, wrong_sum
from elephant.backends.gradient_averager import GradientAverager
from elephant.collective.communicator import Communicator
from elephant.collective.process_group import ProcessGroup
from elephant.config import FitConfig
from elephant.errors import ProtocolError

logger = logging.getLogger(__name__)


def reduce_on_devices(averager: GradientAverager, config: FitConfig) -> None:
    """Has gradients reduced on GPUs, where the options and all ranks' devices allow it; all ranks call it.

    Raises:
        ConfigurationError: The option asks for it, and a rank has no GPU of its own, or a trial fails; on all ranks
            alike.
        NetworkError: Another rank is gone.
    """
    communicator, transport = averager.communicator, config.gpu_transport
    fits = config.use_gpu is not False and config.compression is None and not communicator.crosses_hosts
    # NCCL's own sockets are not encrypted.
    fits = fits and not config.encryption
    if not isinstance(communicator, ProcessGroup) or transport == "host" or (transport == "auto" and not fits):
        return
    if all_have_devices(communicator, _device(), required=transport != "auto"):
        reducer = TorchReducer(averager, communicator)
        # The averager closes it, also where the ranks do not come together.
        averager.kernel = reducer
        averager.uses_kernel = reducer.form()
        if not averager.uses_kernel:
            averager.kernel = None
            reducer.close()
            if transport != "auto":
                raise wrong_sum()


def _device() -> str:
    import torch

    if has_stand_in():
        return f"{socket.gethostname()} {os.getpid()}"
    if not torch.cuda.is_available() or not torch.distributed.is_available():
        return ""
    if not hasattr(getattr(torch.distributed, "ProcessGroupNCCL", None), "abort"):
        return ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{socket.gethostname()} {getattr(properties, 'uuid', os.environ.get('CUDA_VISIBLE_DEVICES', ''))}"


class TorchReducer(DeviceReducer):
    """Averages gradients by a process group of PyTorch's.

    Args:
        averager: Whose ranks, weights and stop signal it takes.
    """

    def __init__(self, averager: GradientAverager, communicator: ProcessGroup) -> None:
        import torch

        self._averager = averager
        self._device = torch.device("cpu") if has_stand_in() else torch.device("cuda", torch.cuda.current_device())
        self._group: Any = None
        self._checked_layouts: set[int] = set()
        # The flags of the last step, as `_on_way_to_host` returns them.
        self._last_flags: tuple[Any, Any] | None = None
        super().__init__(communicator)

    def form(self) -> bool:
        """Forms the communicator; all ranks call it. Returns whether it adds up right, on all of them.

        Raises:
            NetworkError: Another rank is gone.
        """
        import torch

        rank, size = self._communicator.rank, self._communicator.world_size
        self._store = _store_over(self._communicator, self._averager.noting_failure)
        is_right = False
        try:
            self._group = _process_group(self._store, self._communicator, self._device)
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
        layouts = [int(one[0]) for one in self._communicator.allgather(np.array([layout], np.int64))]
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


def _process_group(store: Any, communicator: ProcessGroup, device: Any) -> Any:
    """Returns a process group of PyTorch's that is no part of its default group, which is left to the user."""
    from torch import distributed

    rank, size = communicator.rank, communicator.world_size
    if device.type == "cpu":
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = datetime.timedelta(seconds=communicator.timeout_s + GRACE_S)
        return distributed.ProcessGroupGloo(store, rank, size, options)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=2 * communicator.timeout_s + GRACE_S)
    # Without it NCCL's own watchdog would end the process where a rank is lost.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _store_over(communicator: Communicator, noting_failure: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
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
            for known in communicator.allgather_object(store.values):
                store.values |= known

    return CollectiveStore()
