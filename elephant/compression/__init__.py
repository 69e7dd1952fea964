"""Fewer bytes for what crosses hosts: casts, quantization, sparsification, low rank, and error feedback."""

from __future__ import annotations

from elephant.compression.casts import BFloat16, Float16, Int8
from elephant.compression.codec import (
    CODECS,
    Codec,
    Compression,
    Encoded,
    ErrorFeedback,
    GradientReducer,
    Uncompressed,
    check_compression,
    compression_of,
    reduction_for,
    register_codec,
    register_reducer,
)
from elephant.compression.power_sgd import PowerSGD
from elephant.compression.top_k import TopK

__all__ = [
    "CODECS",
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
    "register_reducer",
]
