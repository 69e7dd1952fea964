"""Fewer bytes for what crosses hosts: casts, quantisation, sparsification, and error feedback."""

from __future__ import annotations

from elephant.compression.base import Codec

__all__ = ["Codec"]
