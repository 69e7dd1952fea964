"""Learning rates that change with the number of updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from elephant.errors import ConfigurationError
from elephant.parameter_server.optimizers.base import Schedule


def schedule_of(spec: float | Mapping[str, Any] | None) -> Schedule:
    """Returns the learning rate that a JSON value describes, as a function of the updates applied before.

    Args:
        spec: A number, which is the rate of all updates.

    Raises:
        ConfigurationError: It describes none.

    >>> schedule_of(0.5)(100)
    0.5
    """
    if isinstance(spec, bool) or not isinstance(spec, (int, float)):
        raise ConfigurationError(f"learning_rate: expected a number. Received: {spec!r}.")
    value = float(np.float32(spec))
    return lambda iteration: value
