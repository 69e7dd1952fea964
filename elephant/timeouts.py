"""The limits of each wait of a fit, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from elephant.errors import ConfigurationError
from elephant.kinds import plain

_SLOTS_S, _EXECUTORS_S = 30.0, 60.0
# Clouds take minutes for a machine.
_MACHINES_S = 600.0


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
        slots_s: Waiting for executors that a cluster has promised and not started yet, also after a loss. None takes
            600 s where YARN or Kubernetes is to bring them, which may need machines for that, else 30 s.
        executors_s: Having no executor at all in the middle of a fit, where the cluster could start others. None takes
            600 s where YARN or Kubernetes is to, else 60 s.
        warm_s: How long processes that have imported Keras wait on an executor for the next fit, or others for
            functions.

    Raises:
        ConfigurationError: One of them is no number of seconds.
    """

    connect_s: float = 120.0
    collective_s: float = 600.0
    heartbeat_s: float = 60.0
    slots_s: float | None = None
    executors_s: float | None = None
    warm_s: float = 300.0

    def __post_init__(self) -> None:
        for part in fields(self):
            value = plain(getattr(self, part.name))
            if value is None and part.default is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and value >= 0):
                raise ConfigurationError(f"timeouts: {part.name}: expected zero or more seconds. Received: {value!r}.")
            object.__setattr__(self, part.name, value)

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
    def slot_patience_s(self) -> float:
        """Seconds that `slots_s` stands for."""
        return _SLOTS_S if self.slots_s is None else self.slots_s

    @property
    def executor_patience_s(self) -> float:
        """Seconds that `executors_s` stands for."""
        return _EXECUTORS_S if self.executors_s is None else self.executors_s

    def with_new_machines(self) -> Timeouts:
        """Returns these where what is lost comes back on machines that may have to be started first."""
        patience = {name: _MACHINES_S for name in ("slots_s", "executors_s") if getattr(self, name) is None}
        return replace(self, **patience)

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between two signs of life of a rank: several times in the silence that is allowed."""
        return min(2.0, self.heartbeat_s / 5)
