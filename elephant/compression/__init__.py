"""Fewer bytes for what crosses hosts: casts, quantisation, sparsification, and error feedback."""

from __future__ import annotations

from elephant.compression.base import Codec
from elephant.compression.casts import BFloat16, Float16
from elephant.compression.feedback import ErrorFeedback
from elephant.compression.quantisation import Int8

__all__ = ["BFloat16", "Codec", "ErrorFeedback", "Float16", "Int8"]
