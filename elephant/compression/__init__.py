"""Fewer bytes for what crosses hosts: casts, quantisation, sparsification, low rank, and error feedback."""

from __future__ import annotations

from elephant.compression.base import Codec
from elephant.compression.casts import BFloat16, Float16
from elephant.compression.feedback import ErrorFeedback
from elephant.compression.low_rank import PowerSGD
from elephant.compression.quantisation import Int8
from elephant.compression.reduction import Encoded, Reduction, Uncompressed
from elephant.compression.registry import KNOWN, Compression, check_compression, compression_of, reduction_for
from elephant.compression.sparsification import TopK

__all__ = [
    "KNOWN",
    "BFloat16",
    "Codec",
    "Compression",
    "Encoded",
    "ErrorFeedback",
    "Float16",
    "Int8",
    "PowerSGD",
    "Reduction",
    "TopK",
    "Uncompressed",
    "check_compression",
    "compression_of",
    "reduction_for",
]
