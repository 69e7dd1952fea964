"""How a server applies what is pushed to it: optimizers as (init, update) pairs on flat float32 vectors."""

from __future__ import annotations

from elephant.parameter_server.optimizers.base import Rule
from elephant.parameter_server.optimizers.registry import KNOWN, rule_of

__all__ = ["KNOWN", "Rule", "rule_of"]
