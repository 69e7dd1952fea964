"""Fewer bytes for what crosses hosts: casts, quantization, sparsification, low rank, and error feedback."""

from __future__ import annotations

from elephant.compression.casts import BFloat16, Float16, Int8
from elephant.compression.codec import (
    CODECS,
    Codec,
    Encoded,
    ErrorFeedback,
    GradientReducer,
    Uncompressed,
    register_codec,
)
from elephant.compression.power_sgd import PowerSGD
from elephant.compression.registry import KNOWN, Compression, check_compression, compression_of, reduction_for
from elephant.compression.top_k import TopK

__all__ = [
    "CODECS",
    "KNOWN",
    "BFloat16",
    "Codec",
    "Compression",
    "Encoded",
    "ErrorFeedback",
    "Float16",
    "Int8",
    "PowerSGD",
    "GradientReducer",
    "TopK",
    "Uncompressed",
    "check_compression",
    "compression_of",
    "reduction_for",
    "register_codec",
]
