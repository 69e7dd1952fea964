"""Session of one connection: who is at the other end, and how its values travel.

A stripe is what is locked, encoded, decoded and checked at a time: it is large enough that
the fixed cost of its numpy calls does not count, and small enough to stay in a core's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from elephant.compression import CODECS, Codec, check_compression
from elephant.compression.codec import blocks
from elephant.errors import NetworkError, UnsupportedError
from elephant.parameter_server.layout import ServerSpec
from elephant.parameter_server.protocol import ClientHello, Lengths, Role, Welcome
from elephant.parameter_server.push_log import Entry

# One MiB of float32.
STRIPE_VALUES = 1 << 18
_FLOAT32_BYTES = 4


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
    if compression is not None and compression not in CODECS:
        raise UnsupportedError(
            f"compression={compression!r} needs all ranks in the same step, and workers of a parameter server take "
            f"none together. Expected one of {', '.join(CODECS)}, or None."
        )


def push_codec(compression: str | None, count: int = 0) -> Codec | None:
    """Returns what encodes (or, with ``count`` zero, only decodes) pushes of so many values; None for none."""
    check_encoding(compression)
    return None if compression is None else CODECS[compression].make(count)


def pull_codec(compression: str | None) -> Codec | None:
    """Returns what encodes and decodes pulls; None for none."""
    check_encoding(compression)
    return None if compression is None else CODECS[compression].pull()


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
    limit = CODECS[compression].finite_limit if compression in CODECS else None
    if limit is None:
        return is_finite(values)
    return bool(-limit <= values.min(initial=0.0) and values.max(initial=0.0) <= limit)


def is_finite(values: np.ndarray) -> bool:
    """Returns whether no value is infinite or not a number; one pass for what is as usual."""
    # The sum of squares is finite only if every value is, and seldom is not if they are.
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.dot(values, values))) or bool(np.isfinite(values).all())


class MismatchError(NetworkError):
    """What a client expects of this server is not what it keeps."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Who is at the other end, and how its values travel.

    Args:
        role: A worker, or the driver.
        partition: Whose updates a worker pushes.
        attempt: Which attempt at that partition it is.
        lengths: The legal lengths of payloads.
        push_codec: Decodes pushes; None takes them as they are.
        pull_codec: Encodes pulls; None sends them as they are.
    """

    role: Role
    partition: int
    attempt: int
    lengths: Lengths
    push_codec: Codec | None
    pull_codec: Codec | None

    @property
    def is_worker(self) -> bool:
        """Whether it pushes, and is waited for."""
        return self.role is Role.WORKER


def open_session(hello: ClientHello, *, partition: int, attempt: int, spec: ServerSpec, num_slots: int) -> Session:
    """Returns the session of a client that said HELLO.

    Raises:
        MismatchError: It means another part, or another model, than this server keeps.
    """
    _check(hello, partition, spec)
    pushed, pulled = push_codec(hello.codec or None), pull_codec(hello.codec or None)
    return Session(
        role=hello.role,
        partition=partition,
        attempt=attempt,
        lengths=lengths_of(hello, num_slots, spec.num_state_values, spec.num_partitions),
        push_codec=pushed,
        pull_codec=pulled,
    )


def lengths_of(hello: ClientHello, num_slots: int, num_state_values: int, num_partitions: int) -> Lengths:
    """Returns the legal lengths of payloads; both sides work them out from HELLO and its reply."""
    codec = hello.codec or None
    return Lengths(
        push=encoded_length(push_codec(codec), hello.num_values),
        pull=encoded_length(pull_codec(codec), hello.num_values),
        whole=4 * hello.num_values * (1 + num_slots) + 8 * num_state_values,
        state=8 * num_state_values,
        num_partitions=num_partitions,
    )


def welcome(entry: Entry, spec: ServerSpec, *, num_slots: int, incarnation: int) -> Welcome:
    """Returns the answer to HELLO."""
    return Welcome(
        step=entry.step,
        call=entry.call,
        highest_call=entry.highest_call,
        num_slots=num_slots,
        num_state_values=spec.num_state_values,
        first_value=spec.first_value,
        num_values=spec.num_values,
        num_partitions=spec.num_partitions,
        incarnation=incarnation,
    )


def _check(hello: ClientHello, partition: int, spec: ServerSpec) -> None:
    if hello.digest != spec.layout.digest:
        raise MismatchError(
            f"Expected a model of the driver's shapes (digest {spec.layout.digest}). Received: a worker whose "
            f"model has other shapes (digest {hello.digest}). Build the same model on the driver and on executors."
        )
    if (hello.first_value, hello.num_values) != (spec.first_value, spec.num_values):
        raise MismatchError(
            f"Expected a client of {spec.num_values} values from {spec.first_value} on. Received: one of "
            f"{hello.num_values} from {hello.first_value} on. Name the servers in the order of their parts."
        )
    try:
        check_encoding(hello.codec or None)
    except ValueError as error:
        raise MismatchError(str(error)) from error
    if hello.role is Role.WORKER and partition >= spec.num_partitions:
        raise MismatchError(f"Expected a partition below {spec.num_partitions}. Received: {partition}.")
