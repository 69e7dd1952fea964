"""Options are refused where they are made, with what was expected and what came."""

import pytest

from elephant.config import FitConfig
from elephant.errors import ConfigurationError, UnsupportedError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs: expected an integer of at least 1. Received: 0"),
        ({"batch_size": -1}, "batch_size: .* Received: -1"),
        ({"num_workers": 0}, "num_workers: .* Received: 0"),
        ({"validation_fraction": 1.0}, r"validation_fraction: expected in \[0, 1\). Received: 1.0"),
        ({"seed": -1}, "seed: .* Received: -1"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a positive number. Received: nan"),
        ({"verbose": 3}, "verbose: expected 0, 1 or 2. Received: 3"),
        ({"mode": "sync"}, "mode: expected one of synchronous, asynchronous, hogwild. Received: 'sync'"),
    ],
)
def test_config_when_a_value_is_out_of_range_then_says_so(options, message):
    with pytest.raises(ConfigurationError, match=message):
        FitConfig(**options)


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_config_when_a_later_mode_is_asked_for_then_is_refused_by_name(mode):
    with pytest.raises(UnsupportedError, match=f"mode='{mode}' is not available"):
        FitConfig(mode=mode)
