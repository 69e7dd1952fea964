"""Optimizers of parameter servers: (init, update) pairs on flat float32 vectors."""

from __future__ import annotations

from elephant.parameter_server.optimizers.base import Rule
from elephant.parameter_server.optimizers.rules import OPTIMIZERS, KnownOptimizer, register_rule, rule_of
from elephant.parameter_server.optimizers.schedules import SCHEDULES, schedule_of
from elephant.parameter_server.optimizers.wrappers import NormClipping, clipping_of, without_clipping

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "KnownOptimizer",
    "NormClipping",
    "Rule",
    "clipping_of",
    "register_rule",
    "rule_of",
    "schedule_of",
    "without_clipping",
]
