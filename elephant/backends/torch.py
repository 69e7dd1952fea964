"""Keras on PyTorch: steps are eager, so that what lies between gradients and weights is a plain call."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elephant.backends.base import (
    Backend,
    Spec,
    StageFunctions,
    StageLoss,
    in_places,
    stage_objective,
    sums_of_gradients,
)
from elephant.backends.keras_private import TORCH_OPTIMIZERS, optimized_variables
from elephant.errors import UnsupportedError

if TYPE_CHECKING:
    import keras

    from elephant.backends.gradient_averager import GradientAverager
    from elephant.backends.optimizer_part import OptimizerPart
    from elephant.config import FitConfig


class TorchBackend(Backend):
    """Keras on PyTorch."""

    name = "torch"
    title = "PyTorch"
    compiles_divided_updates = False
    gpu_package = "torch"
    packages = ("torch",)
    oldest = "2.4"
    count_gpus = "import torch; print('gpus', torch.cuda.device_count())"
    optimizers = TORCH_OPTIMIZERS
    program_layers = ("TorchModuleWrapper",)
    # Its convolutions on a processor have no gradients for one row: "grad_weight must be contiguous" (2.13).
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

    def is_variable(self, thing: object) -> bool:
        return "torch" in sys.modules and isinstance(thing, sys.modules["torch"].Tensor)

    def assign(self, variable: Any, value: np.ndarray) -> None:
        import torch

        variable.data.copy_(torch.as_tensor(value))

    def call_on_host(
        self, function: Callable[..., Sequence[np.ndarray]], tensors: Sequence[Any], specs: Sequence[Spec]
    ) -> list[Any]:
        import torch

        @torch.compiler.disable
        def call(*given: Any) -> list[Any]:
            return from_host(function(*to_host(given)), given)

        return call(*tensors)

    def host_op(
        self,
        forward: Callable[..., Sequence[np.ndarray]],
        backward: Callable[..., Sequence[np.ndarray]],
        tensors: Sequence[Any],
        specs: Sequence[Spec],
    ) -> list[Any]:
        import torch

        self._gathers += 1

        class HostOp(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, *values: Any) -> Any:
                context.save_for_backward(*values)
                return tuple(from_host(forward(*to_host(values)), values))

            @staticmethod
            def backward(context: Any, *gradients: Any) -> Any:
                values = context.saved_tensors
                found = backward(*to_host([*values, *gradients]))
                like = [value for value in values if value.is_floating_point()]
                return tuple(in_places(from_host(found, like), [value.is_floating_point() for value in values]))

        return list(HostOp.apply(*tensors))

    def average_gradients(
        self, averager: GradientAverager, optimizer: keras.optimizers.Optimizer, model: keras.Model | None
    ) -> None:
        import torch

        from elephant.backends.torch_devices import TorchReducer

        apply = optimizer.apply
        # What a hook finds in a step that is compiled was not tried.
        is_eager = model is not None and not model.jit_compile
        early = None if model is None or not is_eager else _EarlyBuckets(averager, lambda: self._gathers, model)

        @torch.compiler.disable
        def average(gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
            if averager.uses_kernel and isinstance(averager.kernel, TorchReducer):
                gradients = _as_means(averager, id(optimizer), gradients, variables)
                averages: list[Any] = averager.noting_failure(averager.kernel.average)(gradients, variables)
                return averages
            arrays = iter(to_host([gradient for gradient in gradients if gradient is not None]))
            given = [None if gradient is None else next(arrays) for gradient in gradients]
            averages = averager.noting_failure(averager.average)(id(optimizer), given, variables)
            if early is not None:
                early.end_step(id(optimizer), variables)
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
            variables = optimized_variables(optimizer) if trainable_variables is None else list(trainable_variables)
            if averager.note is not None:
                return averager.note(id(optimizer), list(grads), variables)
            with torch.no_grad():
                averaged = average(list(grads), variables)
            applied = apply(averaged, trainable_variables)
            if averager.optimizer_part is not None:
                exchange(averager.optimizer_part)
            return applied

        @torch.compiler.disable
        def exchange(optimizer_part: OptimizerPart) -> None:
            values = [variable.value for variable in optimizer_part.variables]
            sent = to_host([values[place] for place in optimizer_part.sent])
            received = averager.noting_failure(optimizer_part.exchange)(*sent)
            for place, array in zip(optimizer_part.received, received, strict=True):
                values[place].data.copy_(_as_tensor(array))

        optimizer.apply = apply_averaged

    def reduce_on_devices(self, averager: GradientAverager, config: FitConfig) -> None:
        from elephant.backends.torch_devices import reduce_on_devices

        reduce_on_devices(averager, config)

    def stage_functions(self, stage: keras.layers.Layer, loss: StageLoss | None, is_first: bool) -> StageFunctions:
        import torch

        weights = [variable.value for variable in stage.trainable_variables]
        like = [variable.value for variable in stage.variables][:1]

        def forward(inputs: Sequence[np.ndarray], targets: Any, share: float) -> tuple[list[np.ndarray], float, Any]:
            tensors = from_host(inputs, like)
            wanted = () if is_first else tensors
            floats = [tensor.requires_grad_() for tensor in wanted if tensor.is_floating_point()]
            with torch.enable_grad():
                outputs = stage(tensors, training=True)
                objective = stage_objective(loss, outputs, targets, stage.losses, share)
            ends = [*(output for output in outputs if output.is_floating_point()), objective]
            return to_host(outputs), float(objective.detach()), (floats, ends)

        def backward(
            passed: Any, gradients: Sequence[np.ndarray], scale: float, totals: list[Any] | None
        ) -> tuple[list[np.ndarray], list[Any]]:
            floats, ends = passed
            seeds = [*from_host(gradients, ends[:-1]), torch.full_like(ends[-1], scale)]
            pairs = [(end, seed) for end, seed in zip(ends, seeds, strict=True) if end.requires_grad]
            found: Sequence[Any] = [None] * (len(floats) + len(weights))
            if pairs and found:
                reached, given = zip(*pairs, strict=True)
                found = torch.autograd.grad(reached, [*floats, *weights], given, allow_unused=True)
            back = [
                torch.zeros_like(tensor) if one is None else one for one, tensor in zip(found, floats, strict=False)
            ]
            return to_host(back), sums_of_gradients(totals, found[len(floats) :])

        def infer(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
            with torch.no_grad():
                return to_host(stage(from_host(inputs, like), training=False))

        return StageFunctions(forward, backward, infer)

    def update_function(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> Callable[..., None]:
        import torch

        return torch.no_grad()(super().update_function(optimizer, variables))


def _as_means(averager: GradientAverager, owner: int, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns gradients of which those that are sums over this rank's rows are divided by its part of all rows."""
    if not averager.sums:
        return list(gradients)
    share = averager.share()
    are_sums = [share > 0 and (owner, id(variable)) in averager.sums for variable in variables]
    return [
        gradient / share if is_sum and gradient is not None else gradient
        for gradient, is_sum in zip(gradients, are_sums, strict=True)
    ]


class _EarlyBuckets:
    """Buckets of gradients that leave while the backward pass goes on.

    The last one stays: it tells which gradients there are, and that a rank knows at the end of the pass. All of them
    stay where the pass itself asks the other ranks: ranks ask for the same things in the same order. They also stay
    where the first step has added to a gradient twice, in two passes for example. A pass outside of the model's step,
    such as one of a callback, sends nothing.

    Args:
        averager: Averages the gradients.
        gathers: How often a pass has asked the other ranks.
        model: Its ``train_step`` is replaced.
    """

    def __init__(self, averager: GradientAverager, gathers: Callable[[], int], model: keras.Model) -> None:
        self._averager, self._gathers, self._before = averager, gathers, gathers()
        self._model, self._step = model, model.train_step
        # Until the end of the first step: how often each gradient was added to, and the hooks that count it.
        self._additions: Counter[int] = Counter()
        self._counting: list[Any] = []
        self._is_set_up = False
        # In a step: the gradients that have arrived, and how many buckets have left.
        self._arrived: dict[int, Any] = {}
        self._sent = 0
        self._is_open = False
        model.train_step = self._train_step

    def end_step(self, owner: int, variables: Sequence[Any]) -> None:
        """Ends a step; the end of the first one is what sets the next ones up.

        Args:
            owner: Whose gradients they are.
            variables: Their variables.
        """
        self._is_open = False
        if self._is_set_up:
            return
        self._is_set_up = True
        for hook in self._counting:
            hook.remove()
        if self._gathers() == self._before and max(self._additions.values(), default=0) <= 1:
            self._set_up(owner, variables)

    def _train_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_set_up and not self._counting:
            for variable in self._model.trainable_variables:
                count = functools.partial(lambda key, _: self._additions.update([key]), id(variable))
                self._counting.append(variable.value.register_post_accumulate_grad_hook(count))
        self._arrived.clear()
        self._sent, self._is_open = 0, True
        try:
            return self._step(*args, **kwargs)
        finally:
            self._is_open = False

    def _set_up(self, owner: int, variables: Sequence[Any]) -> None:
        from elephant.backends.gradient_averager import spec_of

        names = [(owner, id(variable)) for variable in variables]
        group = self._averager.flagged_group(owner, [spec_of(None, variable) for variable in variables], names)
        buckets = [bucket.positions for bucket in group.buckets[:-1]]
        submit = self._averager.noting_failure(group.submit)
        for place, variable in enumerate(variables) if buckets else ():
            # The flags are the first of a group.
            take = functools.partial(self._take, buckets, submit, place + 1)
            variable.value.register_post_accumulate_grad_hook(take)

    def _take(self, buckets: list[Sequence[int]], submit: Callable[..., Any], position: int, value: Any) -> None:
        if not self._is_open:
            return
        if any(position in positions for positions in buckets[: self._sent]):
            raise UnsupportedError(
                "ELEPHANT_BUCKET_BYTES: expected a step that adds to each gradient once. Received: one that adds to a "
                "gradient that has left for the other ranks. Set it to 0 in the driver's environment."
            )
        self._arrived[position] = value.grad
        while self._sent < len(buckets) and self._arrived.keys() >= set(buckets[self._sent]):
            submit(self._sent, to_host([self._arrived[position] for position in buckets[self._sent]]))
            self._sent += 1


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
