"""Reduction of gradients on the GPUs that the ranks have: NCCL moves the data, elephant forms the group.

elephant's collective has authenticated the ranks, and forms the group of their devices, in a module for each
framework that can. It stays beside NCCL, which waits forever for a rank that is gone, and tells of that at once.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from elephant.collective.communicator import Communicator
from elephant.collective.process_group import ProcessGroup
from elephant.errors import ConfigurationError, NetworkError

logger = logging.getLogger(__name__)

# Variable for tests: "gloo" has the processor, and Gloo, stand in for GPUs and NCCL.
STAND_IN_VARIABLE = "ELEPHANT_GPU_TRANSPORT"

# How often the other ranks are looked after while an operation is under way.
LOOK_S = 0.1
# How long a rank whose operation has failed waits to hear why.
REASON_S = 2.0
# How long an abort may take, before the process ends instead.
_ABORT_S = 30.0
# NCCL's and Gloo's own deadlines come after the collective's, which knows the ranks.
GRACE_S = 5.0


class DeviceReducer(ABC):
    """Averages the gradients of all ranks on their devices: the kernel of a `GradientAverager`.

    A thread looks after the other ranks while an operation is under way.

    Tests have Gloo in the place of NCCL, on processors: they set the environment variable ``ELEPHANT_GPU_TRANSPORT`` to
    "gloo" in every rank. It is for nothing else: gradients on the processor go the collective's own way.

    Args:
        operation: What the ranks wait in, for errors.
    """

    def __init__(self, communicator: ProcessGroup, operation: str = "exchange of gradients") -> None:
        self._communicator = communicator
        self._operation = operation
        self._is_formed = False
        # Since when an operation is under way, and its parts, once they have begun.
        self._under_way: tuple[float, Sequence[Any] | None] = (time.monotonic(), None)
        self._error: NetworkError | None = None
        self._is_broken, self._is_closed = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=f"elephant-devices-{communicator.rank}", daemon=True)
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
        self._communicator.allreduce_(found, "min")
        if found[0] and self._communicator.rank == 0:
            logger.info("%d ranks reduce gradients on their devices", self._communicator.world_size)
        return bool(found[0])

    def _reason(self) -> NetworkError | None:
        """Waits a moment for why an operation has failed."""
        self._is_broken.wait(REASON_S)
        return self._error

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _watch(self) -> None:
        while not self._is_closed.wait(LOOK_S):
            since, works = self._under_way
            try:
                if works is not None and all(work.is_completed() for work in works):
                    continue
                self._communicator.look(self._operation, time.monotonic() - since)
            except NetworkError as error:
                self._break(error)
                return
            except Exception as error:
                # An operation that fails of itself, say: without this thread, nobody would look after the others.
                self._break(NetworkError(f"Expected to look after the {self._operation}. Received: {error!r}."))
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


def all_have_devices(communicator: Communicator, name: str, *, required: bool) -> bool:
    """Returns whether each rank has a device of its own; all ranks call it.

    Args:
        name: Of this rank's device, which no other device has; empty where it has none for NCCL.

    Raises:
        ConfigurationError: It is required, and one has none.
    """
    names = [part.tobytes() for part in communicator.allgather(np.frombuffer(name.encode(), np.uint8))]
    without = [rank for rank, name in enumerate(names) if not name or names.count(name) > 1]
    if without and required:
        raise ConfigurationError(
            "gpuTransport: expected a GPU for each rank, its own, that Keras' backend sees and can use with NCCL, as "
            f"'nccl' needs. Received: none on rank {', '.join(map(str, without))} of {len(names)}. Give each rank a "
            "GPU, or pass 'host'."
        )
    return not without


def wrong_sum() -> ConfigurationError:
    """Returns the error of a trial whose sum was wrong, or could not be computed."""
    return ConfigurationError(
        "gpuTransport: expected NCCL to add up a number of each rank, as 'nccl' needs. Received: another sum, or an "
        "error, which the rank's log has. Pass 'host'."
    )


def has_stand_in() -> bool:
    """Returns whether processors and Gloo stand in for GPUs and NCCL."""
    return os.environ.get(STAND_IN_VARIABLE) == "gloo"
