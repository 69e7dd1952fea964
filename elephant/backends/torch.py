"""Keras on PyTorch: steps are eager, so that what lies between gradients and weights is a plain call."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elephant.backends.base import Backend, Spec, gathered_blocks, gathered_gradient
from elephant.backends.gradient_averager import spec_of
from elephant.backends.torch_devices import DeviceReducer, reduce_on_devices
from elephant.errors import UnsupportedError

if TYPE_CHECKING:
    import keras

    from elephant.backends.gradient_averager import GradientAverager
    from elephant.collective.communicator import Communicator
    from elephant.config import FitConfig


class TorchBackend(Backend):
    """Keras on PyTorch."""

    name = "torch"
    gpu_package = "torch"
    packages = ("torch",)
    oldest = "2.4"
    count_gpus = "import torch; print('gpus', torch.cuda.device_count())"
    # Of one row, its convolutions on a processor cannot have gradients: "grad_weight must be contiguous" (2.13).
    stand_in_rows = 2
    has_nccl = True

    def __init__(self) -> None:
        self._gathers = 0

    def prepare_process(self, *, overlaps: bool = False) -> None:
        import os

        import torch

        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit():
            torch.set_num_threads(int(threads))

    def sees_gpu(self) -> bool:
        import torch

        return bool(torch.cuda.is_available())

    @contextlib.contextmanager
    def random_state(self) -> Iterator[None]:
        import torch

        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices):
            yield

    # Keras' Dropout without a seed draws from it.

    def generator_state(self) -> np.ndarray:
        import torch

        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
        return np.concatenate([np.asarray(state.numpy()) for state in states])

    def restore_generator(self, state: np.ndarray) -> None:
        import torch

        size = len(torch.get_rng_state())
        torch.set_rng_state(torch.from_numpy(np.array(state[:size], np.uint8)))
        if len(state) > size and torch.cuda.is_initialized():
            devices = torch.cuda.device_count()
            parts = np.split(np.array(state[size:], np.uint8), devices)
            torch.cuda.set_rng_state_all([torch.from_numpy(np.array(part)) for part in parts])

    def seed_generator(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    def call_on_host(
        self, function: Callable[..., Sequence[np.ndarray]], tensors: Sequence[Any], specs: Sequence[Spec]
    ) -> list[Any]:
        import torch

        @torch.compiler.disable
        def call(*given: Any) -> list[Any]:
            return from_host(function(*to_host(given)), given)

        return call(*tensors)

    def average_gradients(
        self, averager: GradientAverager, optimizer: keras.optimizers.Optimizer, model: keras.Model | None
    ) -> None:
        import torch

        apply = optimizer.apply
        # What a hook finds in a step that is compiled was not tried.
        is_eager = model is not None and not model.jit_compile
        next_step = None if model is None or not is_eager else early_buckets(averager, lambda: self._gathers, model)

        @torch.compiler.disable
        def average(gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
            if averager.uses_kernel and isinstance(averager.kernel, DeviceReducer):
                averages: list[Any] = averager.noting_failure(averager.kernel.average)(gradients, variables)
                return averages
            arrays = iter(to_host([gradient for gradient in gradients if gradient is not None]))
            given = [None if gradient is None else next(arrays) for gradient in gradients]
            averages = averager.noting_failure(averager.average)(id(optimizer), given, variables)
            if next_step is not None:
                next_step(id(optimizer), variables)
            # A gradient of other ranks alone has its variable's device.
            like = [
                variable.value if gradient is None else gradient
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
            return [
                None if average is None else from_host([average], [place])[0]
                for average, place in zip(averages, like, strict=True)
            ]

        def apply_averaged(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
            variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
            with torch.no_grad():
                averaged = average(list(grads), variables)
            return apply(averaged, trainable_variables)

        optimizer.apply = apply_averaged

    def reduce_on_devices(self, averager: GradientAverager, config: FitConfig) -> None:
        reduce_on_devices(averager, config)

    def all_gather(self, block: Any, collective: Communicator, share: Callable[[], float]) -> Any:
        import torch

        self._gathers += 1

        class Gather(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, values: Any) -> Any:
                (own,) = to_host([values])
                return from_host([gathered_blocks(own, collective, share())], [values])[0]

            @staticmethod
            def backward(context: Any, gradient: Any) -> Any:
                (given,) = to_host([gradient])
                return from_host([gathered_gradient(given, collective, share())], [gradient])[0]

        return Gather.apply(block)


def early_buckets(
    averager: GradientAverager, gathers: Callable[[], int], model: keras.Model
) -> Callable[[Hashable, Sequence[Any]], None]:
    """Has buckets of gradients leave while the backward pass goes on.

    The last one stays: it tells which gradients there are, and that a rank knows at the end of the pass. All of them
    stay where the pass itself asks the other ranks: ranks ask for the same things in the same order. They also stay
    where the first step has added to a gradient twice, in two passes for example. A pass outside of the model's step,
    such as one of a callback, sends nothing.

    Args:
        gathers: How often a pass has asked them.
        model: Its ``train_step`` is replaced.

    Returns:
        A function that is called at the end of a step, with whose gradients they are and the variables. The first
        call is what sets the next steps up.
    """
    arrived: dict[int, Any] = {}
    sent, is_open, is_set_up = 0, False, False
    before, step = gathers(), model.train_step
    additions: Counter[int] = Counter()
    counting: list[Any] = []

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent, is_open
        if not is_set_up and not counting:
            for variable in model.trainable_variables:
                count = functools.partial(lambda key, _: additions.update([key]), id(variable))
                counting.append(variable.value.register_post_accumulate_grad_hook(count))
        arrived.clear()
        sent, is_open = 0, True
        try:
            return step(*args, **kwargs)
        finally:
            is_open = False

    def set_up(owner: Hashable, variables: Sequence[Any]) -> None:
        values = [variable.value for variable in variables]
        group = averager.flagged_group(owner, [spec_of(None, variable) for variable in variables])
        buckets = [bucket.positions for bucket in group.buckets[:-1]]
        submit = averager.noting_failure(lambda *arrays: group.submit(sent, arrays))

        def take(position: int, value: Any) -> None:
            nonlocal sent
            if not is_open:
                return
            if any(position in positions for positions in buckets[:sent]):
                raise UnsupportedError(
                    "bucketBytes: expected a step that adds to each gradient once. Received: one that adds to a "
                    "gradient that has left for the other ranks. Set bucketBytes=0."
                )
            arrived[position] = value.grad
            while sent < len(buckets) and arrived.keys() >= set(buckets[sent]):
                submit(*to_host([arrived[position] for position in buckets[sent]]))
                sent += 1

        for place, value in enumerate(values) if buckets else ():
            # The flags are the first of a group.
            value.register_post_accumulate_grad_hook(functools.partial(take, place + 1))

    def next_step(owner: Hashable, variables: Sequence[Any]) -> None:
        nonlocal is_open, is_set_up
        is_open = False
        if not is_set_up:
            is_set_up = True
            for hook in counting:
                hook.remove()
            if gathers() == before and max(additions.values(), default=0) <= 1:
                set_up(owner, variables)

    model.train_step = train_step
    return next_step


def to_host(tensors: Sequence[Any]) -> list[np.ndarray]:
    """Returns tensors as arrays: those of the processor without a copy; those of a GPU are copied side by side."""
    import torch

    copies = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.current_stream().synchronize()
    return [_as_array(copy) for copy in copies]


def _as_array(tensor: Any) -> np.ndarray:
    import torch

    if tensor.dtype != torch.bfloat16:
        return np.asarray(tensor.numpy())
    import ml_dtypes

    # numpy has no such type of its own.
    return np.asarray(tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16))


def from_host(arrays: Sequence[np.ndarray], like: Sequence[Any]) -> list[Any]:
    """Returns arrays as tensors on the device of others: on the processor without a copy.

    Args:
        like: As many tensors, or the first tells for all; none means the processor.
    """
    devices = [tensor.device for tensor in like] or ["cpu"]
    if len(devices) != len(arrays):
        devices = [devices[0]] * len(arrays)
    return [_as_tensor(array).to(device) for array, device in zip(arrays, devices, strict=True)]


def _as_tensor(array: np.ndarray) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(array))
