"""Sums, gathers and broadcasts of numpy arrays between the ranks of one fit."""

from __future__ import annotations

from elephant.collective.base import Collective
from elephant.collective.connect import form_collective
from elephant.collective.fusion import FusedBuffer
from elephant.collective.solo import Solo

__all__ = ["Collective", "FusedBuffer", "Solo", "form_collective"]
