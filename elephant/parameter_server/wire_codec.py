"""How the values of pushes and pulls travel: as float32, or encoded by stripes with a codec.

A stripe is what is locked, encoded, decoded and checked at a time: it is large enough that
the fixed cost of its numpy calls does not count, and small enough to stay in a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from elephant.compression import BFloat16, Codec, ErrorFeedback, Float16, Int8, check_compression
from elephant.compression.codec import blocks
from elephant.errors import UnsupportedError

# One MiB of float32.
STRIPE_VALUES = 1 << 18
_FLOAT32_BYTES = 4

_PUSHED: dict[str, Callable[[int], Codec]] = {
    "bfloat16": lambda count: BFloat16(),
    "float16": lambda count: Float16(),
    "int8": lambda count: Int8(),
    "int8:feedback": lambda count: ErrorFeedback(Int8(), count),
}
# Weights that are pulled are no differences: 8 bits with a scale would move them more than training does.
_PULLED: dict[str, Callable[[], Codec]] = {
    "bfloat16": BFloat16,
    "float16": Float16,
    "int8": BFloat16,
    "int8:feedback": BFloat16,
}

# What is greater in size may be rounded to infinity.
_LARGEST = {"bfloat16": 3.389e38, "float16": 65504.0}


def check_encoding(compression: str | None) -> None:
    """Raises unless pushes and pulls can travel with the compression of that name.

    Raises:
        ConfigurationError: There is no such compression.
        UnsupportedError: There is, and only ranks that reduce together can use it.

    >>> check_encoding("topk")
    Traceback (most recent call last):
    ...
    elephant.errors.UnsupportedError: compression='topk' needs all ranks in the same step, and workers of a parameter \
server take none together. Expected one of bfloat16, float16, int8, int8:feedback, or None.
    """
    check_compression(compression)
    if compression is not None and compression not in _PUSHED:
        raise UnsupportedError(
            f"compression={compression!r} needs all ranks in the same step, and workers of a parameter server take "
            f"none together. Expected one of {', '.join(_PUSHED)}, or None."
        )


def push_codec(compression: str | None, count: int = 0) -> Codec | None:
    """Returns what encodes (or, with ``count`` zero, only decodes) pushes of so many values; None for none."""
    check_encoding(compression)
    return None if compression is None else _PUSHED[compression](count)


def pull_codec(compression: str | None) -> Codec | None:
    """Returns what encodes and decodes pulls; None for none."""
    check_encoding(compression)
    return None if compression is None else _PULLED[compression]()


def encoded_length(codec: Codec | None, count: int) -> int:
    """Returns how many bytes ``count`` values take, stripe by stripe."""
    return sum(stripe_bytes(codec, stripe) for stripe in stripes(count))


def stripes(count: int) -> Iterator[slice]:
    """Yields the stripes that together cover ``count`` values."""
    return blocks(count, STRIPE_VALUES)


def stripe_bytes(codec: Codec | None, stripe: slice) -> int:
    """Returns how many bytes one stripe takes."""
    count = stripe.stop - stripe.start
    return _FLOAT32_BYTES * count if codec is None else codec.encoded_bytes(count)


def arrives_finite(values: np.ndarray, compression: str | None) -> bool:
    """Returns whether no value is infinite or not a number, once it has been encoded as pushes are.

    >>> values = np.array([1e5, 0], np.float32)
    >>> arrives_finite(values, None), arrives_finite(values, "float16")
    (True, False)
    """
    limit = _LARGEST.get(compression or "")
    if limit is None:
        return is_finite(values)
    return bool(-limit <= values.min(initial=0.0) and values.max(initial=0.0) <= limit)


def is_finite(values: np.ndarray) -> bool:
    """Returns whether no value is infinite or not a number; one pass for what is as usual."""
    # The sum of squares is finite only if every value is, and seldom is not if they are.
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.dot(values, values))) or bool(np.isfinite(values).all())
