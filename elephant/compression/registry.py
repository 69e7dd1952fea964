"""The ways to compress the gradients of a fit, by name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

from elephant.compression.codec import CODECS, Codec, Encoded, GradientReducer, Slices, Uncompressed, num_values
from elephant.compression.power_sgd import DEFAULT_RANK, PowerSGD
from elephant.compression.top_k import BYTES_PER_VALUE, DEFAULT_RATIO, TopK
from elephant.errors import ConfigurationError

# An option stands behind a colon.
KNOWN = (*(name for name in CODECS if ":" not in name), "topk", "powersgd")
_FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Compression:
    """One way to compress.

    Attributes:
        name: As it was asked for.
        ratio: How many times fewer bytes a rank's gradient takes; None where that depends on the
            shapes of its arrays.
        is_codec: Whether the pieces of an allreduce travel encoded. Otherwise the ranks exchange something else.
        reduction: Makes one rank's reduction for the arrays at these places.
    """

    name: str
    ratio: float | None
    is_codec: bool
    reduction: Callable[[Slices], GradientReducer]


def compression_of(name: str | None) -> Compression | None:
    """Returns the compression of that name, and None for None.

    Args:
        name: One of ``KNOWN``. Three take an option behind a colon: ``"topk:0.001"`` sends that share
            of the values in each step (0.01 without it), ``"powersgd:2"`` has factors of that
            rank (4 without it), ``"int8:feedback"`` adds what a step's rounding lost to the next step.

    Raises:
        ConfigurationError: There is no such name, or no such option.

    >>> compression_of("bfloat16").ratio, compression_of("topk").ratio, compression_of(None)
    (2.0, 66.66666666666667, None)
    """
    if name is None:
        return None
    if name in CODECS:
        codec = CODECS[name]
        return Compression(
            name=name, ratio=codec.ratio, is_codec=True, reduction=functools.partial(_encoded, codec.make)
        )
    base, colon, option = str(name).partition(":")
    with contextlib.suppress(ValueError):
        if base == "topk":
            return _topk(str(name), float(option) if colon else DEFAULT_RATIO)
        if base == "powersgd":
            return _powersgd(str(name), int(option) if colon else DEFAULT_RANK)
    raise ConfigurationError(
        f"compression: expected None or one of {', '.join(KNOWN)}. topk takes a share of the values in (0, 1], as in "
        "topk:0.001, powersgd a rank of at least 1, as in powersgd:2, and int8 a word, as in int8:feedback. "
        f"Received: {name!r}."
    )


def check_compression(name: str | None) -> None:
    """Raises ConfigurationError, which lists the names, unless there is a compression of that name or it is None."""
    compression_of(name)


def reduction_for(name: str | None, slices: Slices) -> GradientReducer:
    """Returns what sums one flat array of gradients over the ranks of a fit.

    Args:
        name: As for ``compression_of``; without one nothing is compressed.
        slices: Start and shape of each array in the flat one, in the order in which they lie; the
            same on all ranks.

    Raises:
        ConfigurationError: There is no such name, or the arrays overlap.
    """
    compression = compression_of(name)
    return Uncompressed(slices) if compression is None else compression.reduction(slices)


def _encoded(codec: Callable[[int], Codec], slices: Slices) -> GradientReducer:
    return Encoded(slices, codec(num_values(slices)))


def _topk(name: str, share: float) -> Compression:
    if not 0 < share <= 1:
        raise ValueError(share)
    ratio = _FLOAT32_BYTES / (BYTES_PER_VALUE * share)
    return Compression(name=name, ratio=ratio, is_codec=False, reduction=functools.partial(TopK, ratio=share))


def _powersgd(name: str, rank: int) -> Compression:
    if rank < 1:
        raise ValueError(rank)
    return Compression(name=name, ratio=None, is_codec=False, reduction=functools.partial(PowerSGD, rank=rank))
