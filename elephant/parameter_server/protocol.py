"""Parameter-server protocol: operations, headers, the first messages of a connection, and how values are encoded.

Every message is a fixed header and a payload::

    offset  bytes  field (integers are little-endian)
         0      4  magic, b"ELPS"
         4      1  version of the protocol
         5      1  kind
         6      1  status: 0 in a request, what became of it in a reply
         7      1  flags
         8      4  partition
        12      4  call: numbers several updates of one step, from zero
        16      8  attempt
        24      8  step
        32      8  version of the weights: that the sender has, or that it sends
        40      8  rate: a learning rate, the weight of a state, or the rows of a push in rounds (float64)
        48      8  length of the payload
        56      4  CRC-32 of bytes 0 to 55
        60         payload

Layout and encoding are agreed on in HELLO. From then on a kind has one legal length
of payload (`Lengths`), so a receiver refuses any other before it reads a byte of it. Rows of tables
(`elephant.parameter_server.tables`) come on top, and have a most.

A stripe is what is locked, encoded, decoded and checked at a time: it is large enough that
the fixed cost of its numpy calls does not count, and small enough to stay in a core's cache.
"""

from __future__ import annotations

import enum
import json
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from elephant.compression import CODECS, Codec, check_compression
from elephant.compression.codec import blocks
from elephant.errors import ProtocolError, UnsupportedError

MAGIC = b"ELPS"
VERSION = 3
# What the connections of one fit are for, in their mutual proof.
CONTEXT = "parameter-server/{run_id}"
HEADER_BYTES = 60
TEXT_BYTES = 1024
# Lengths of the payload of HELLO and of its reply; see `elephant.parameter_server.protocol`.
HELLO_BYTES = 64
WELCOME_BYTES = 52
# One MiB of float32.
STRIPE_VALUES = 1 << 18
# Of a request for what servers have of tables.
MOST_WANTED_BYTES = 1 << 20
_FLOAT32_BYTES = 4
_MOST_RATE = float(np.finfo(np.float32).max)
Member = TypeVar("Member", bound=enum.IntEnum)
_LEADING = struct.Struct("<4sBBBBIIQQQdQ")
_CHECKSUM = struct.Struct("<I")
_STATISTICS_BYTES = 1 << 14
_STATISTICS_BYTES_PER_PARTITION = 64
_LEDGER_BYTES = 64
_LEDGER_BYTES_PER_PARTITION = 96

_HELLO = struct.Struct("<B7x16s16sQQQ")
_WELCOME = struct.Struct("<QIIIQQQII")
# More than any rule keeps: a client takes memory for each.
_MOST_SLOTS = 8


class RequestKind(enum.IntEnum):
    """Kinds of requests; a reply has the same kind."""

    HELLO = 1
    PULL = 2
    PUSH = 3
    PUSH_PULL = 4
    STATE = 5
    BYE = 6
    LOOKUP = 7
    FETCH = 16
    STATISTICS = 17
    SET_RATE = 18
    STOP = 19
    KEEP = 20
    OPEN = 21


class Status(enum.IntEnum):
    """Outcome of a request. WAIT says that the reply is still to come: the worker waits for a slower one.

    UNWRITTEN says that a table could not be written to its folder.
    """

    REQUEST = 0
    OK = 1
    DUPLICATE = 2
    SUPERSEDED = 3
    REFUSED = 4
    FAILED = 5
    MISMATCH = 6
    ERROR = 7
    WAIT = 8
    UNWRITTEN = 9


class Flags(enum.IntFlag):
    """Flags of a message.

    Attributes:
        STOP: The fit is to end (replies).
        MODIFIED: The reply carries the weights.
        FINISHED: The worker has done all of its steps (BYE).
        CONDEMNED: Another part of this push is not finite: the server is to refuse this part as well (PUSH).
    """

    NONE = 0
    STOP = 1
    MODIFIED = 2
    FINISHED = 4
    CONDEMNED = 8


class Role(enum.IntEnum):
    """Roles of clients."""

    WORKER = 1
    CONTROL = 2


_KINDS = {
    Role.WORKER: frozenset(
        {
            RequestKind.PULL,
            RequestKind.PUSH,
            RequestKind.PUSH_PULL,
            RequestKind.STATE,
            RequestKind.BYE,
            RequestKind.LOOKUP,
        }
    ),
    Role.CONTROL: frozenset(
        {
            RequestKind.PULL,
            RequestKind.FETCH,
            RequestKind.KEEP,
            RequestKind.STATISTICS,
            RequestKind.SET_RATE,
            RequestKind.STOP,
            RequestKind.OPEN,
            RequestKind.BYE,
        }
    ),
}


_WITH_TEXT = (Status.FAILED, Status.MISMATCH, Status.ERROR, Status.UNWRITTEN)


_ALL_FLAGS = int(Flags.STOP | Flags.MODIFIED | Flags.FINISHED | Flags.CONDEMNED)


@dataclass(frozen=True, kw_only=True)
class RequestHeader:
    """The fixed start of a message; see the module for its fields."""

    kind: RequestKind
    status: Status = Status.REQUEST
    flags: Flags = Flags.NONE
    partition: int = 0
    call: int = 0
    attempt: int = 0
    step: int = 0
    version: int = 0
    rate: float = 0.0
    payload_bytes: int = 0

    def to_bytes(self) -> bytes:
        """Returns the 60 bytes that it travels as."""
        leading = _LEADING.pack(
            MAGIC, VERSION, self.kind, self.status, self.flags, self.partition, self.call,
            self.attempt, self.step, self.version, self.rate, self.payload_bytes,
        )  # fmt: skip
        return leading + _CHECKSUM.pack(zlib.crc32(leading))

    @property
    def place(self) -> tuple[int, int]:
        """Step and call: the number of a push within its partition."""
        return self.step, self.call


def decode_header(data: bytes | bytearray) -> RequestHeader:
    """Returns the header in 60 bytes.

    Raises:
        ProtocolError: They are no header of this version of the protocol.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"Expected a header of {HEADER_BYTES} bytes. Received: {len(data)} bytes.")
    magic, version, kind, status, flags, *numbers = _LEADING.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"Expected a message that starts with {MAGIC!r}. Received: {magic!r}.")
    if version != VERSION:
        raise ProtocolError(
            f"Expected version {VERSION} of the protocol. Received: version {version}. "
            "Install the same version of elephant on the driver and on every executor."
        )
    expected = zlib.crc32(data[: _LEADING.size])
    (checksum,) = _CHECKSUM.unpack_from(data, _LEADING.size)
    if checksum != expected:
        raise ProtocolError(f"Expected a header with checksum {expected:#010x}. Received: {checksum:#010x}.")
    if flags & ~_ALL_FLAGS:
        raise ProtocolError(f"Expected flags among {_ALL_FLAGS:#04x}. Received: {flags:#04x}.")
    partition, call, attempt, step, model_version, rate, payload_bytes = numbers
    return RequestHeader(
        kind=enum_member(RequestKind, "kind", kind), status=enum_member(Status, "status", status), flags=Flags(flags),
        partition=partition, call=call, attempt=attempt, step=step,
        version=model_version, rate=rate, payload_bytes=payload_bytes,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The one legal length of each payload, in bytes, once both sides know the layout and the encoding.

    Args:
        push: The encoded values of a push.
        pull: The encoded values of a pull.
        whole: What FETCH returns: values, slots and state as they are kept. KEEP returns the ledger after them.
        state: The averaged state, float64.
        num_partitions: Workers of the fit.
        most_rows: What requests may have of tables, at most, beside their one length; clients leave it zero.
    """

    push: int
    pull: int
    whole: int
    state: int
    num_partitions: int
    most_rows: int = 0

    def most_beside(self, kind: RequestKind) -> int:
        """Returns how many bytes about tables a request may have beside the length of its kind."""
        if kind in (RequestKind.PUSH, RequestKind.PUSH_PULL, RequestKind.LOOKUP):
            return self.most_rows
        return MOST_WANTED_BYTES if kind in (RequestKind.FETCH, RequestKind.KEEP) and self.most_rows else 0

    def of_request(self, kind: RequestKind) -> int:
        """Returns the length of the payload of a request."""
        return {RequestKind.PUSH: self.push, RequestKind.PUSH_PULL: self.push, RequestKind.STATE: self.state}.get(
            kind, 0
        )

    def of_reply(self, header: RequestHeader) -> int:
        """Returns the length of the payload of a reply, which its kind, status and flags determine."""
        if header.status in _WITH_TEXT:
            return TEXT_BYTES
        if header.flags & Flags.MODIFIED:
            return self.pull
        if header.status is not Status.OK:
            return 0
        lengths = {
            RequestKind.FETCH: self.whole,
            RequestKind.KEEP: self.whole + self.push_log,
            RequestKind.STATE: self.state,
            RequestKind.STATISTICS: self.statistics,
        }
        return lengths.get(header.kind, 0)

    @property
    def push_log(self) -> int:
        """Length of the ledger, a JSON text padded with blanks."""
        return _LEDGER_BYTES + _LEDGER_BYTES_PER_PARTITION * self.num_partitions

    @property
    def statistics(self) -> int:
        """Length of the statistics, a JSON text padded with blanks."""
        return _STATISTICS_BYTES + _STATISTICS_BYTES_PER_PARTITION * self.num_partitions


def enum_member(kind: type[Member], name: str, value: int) -> Member:
    """Returns the member of an enumeration with that value; raises ProtocolError, which lists them, for others."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(f"{member.name} ({member.value})" for member in kind)
        raise ProtocolError(f"Expected a {name} among {known}. Received: {value}.") from None


def check_request(header: RequestHeader, role: Role | None, lengths: Lengths | None) -> None:
    """Raises ProtocolError unless the header is a request that this client may make, of its only legal length.

    Args:
        role: Who sent it; None before HELLO, when nothing else is legal.
        lengths: What HELLO agreed on; None before it.
    """
    if header.status is not Status.REQUEST:
        raise ProtocolError(f"Expected a request. Received: a reply ({header.status.name}).")
    if role is None or lengths is None:
        legal, expected, most = header.kind is RequestKind.HELLO, HELLO_BYTES, 0
    else:
        legal, expected = header.kind in _KINDS[role], lengths.of_request(header.kind)
        most = lengths.most_beside(header.kind)
    if not legal:
        who = "a new client, which says HELLO first" if role is None else f"a {role.name.lower()} that said HELLO"
        raise ProtocolError(f"Expected a request of {who}. Received: {header.kind.name}.")
    if not expected <= header.payload_bytes <= expected + most:
        _check_length(header, expected)
    if header.kind in (RequestKind.PUSH, RequestKind.PUSH_PULL) and not header.step:
        raise ProtocolError(f"Expected {header.kind.name} with a step from 1 on. Received: 0.")
    # A rate that is not a number goes back to that of the optimizer. A finite one is to be so in float32, too.
    if abs(header.rate) > _MOST_RATE or (header.kind is RequestKind.STATE and math.isnan(header.rate)):
        raise ProtocolError(f"Expected {header.kind.name} with a finite rate. Received: {header.rate}.")


def check_reply(header: RequestHeader, kind: RequestKind, lengths: Lengths | None, of_tables: int = 0) -> None:
    """Raises ProtocolError unless the header is a reply to a request of that kind, of its only legal length.

    Args:
        lengths: What HELLO agreed on; None while its own reply is awaited.
        of_tables: Bytes that were asked for beside the length of the kind.
    """
    if header.status in (Status.ERROR, Status.MISMATCH):
        # The server's last words, whatever it was that it did not understand.
        return _check_length(header, TEXT_BYTES)
    if header.kind is not kind or header.status is Status.REQUEST:
        raise ProtocolError(f"Expected a reply to {kind.name}. Received: {header.kind.name} ({header.status.name}).")
    if lengths is not None:
        _check_length(header, lengths.of_reply(header) + (of_tables if header.status is Status.OK else 0))
    else:
        expected = {Status.OK: WELCOME_BYTES, Status.SUPERSEDED: 0}.get(header.status, TEXT_BYTES)
        _check_length(header, expected)


def encode_text(text: str) -> bytes:
    """Returns an error's text as the payload of a reply: cut, and padded with zeros, to its fixed length."""
    return text.encode("utf-8", "replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")


def decode_text(data: bytes | bytearray) -> str:
    """Decodes the form of `encode_text`.

    >>> decode_text(encode_text("no"))
    'no'
    """
    return bytes(data).rstrip(b"\0").decode("utf-8", "replace")


def encode_statistics(values: dict[str, Any], length: int) -> bytes:
    """Returns statistics as JSON, padded with blanks."""
    return json.dumps(values, separators=(",", ":")).encode().ljust(length)


def decode_statistics(data: bytes | bytearray) -> dict[str, Any]:
    """Decodes the form of `encode_statistics`; raises ProtocolError for anything else."""
    try:
        values = json.loads(bytes(data))
    except ValueError as error:
        raise ProtocolError(f"Expected statistics in JSON. Received: {bytes(data[:40])!r} ({error}).") from None
    if not isinstance(values, dict):
        raise ProtocolError(f"Expected statistics as a JSON object. Received: {type(values).__name__}.")
    return values


def _check_length(header: RequestHeader, expected: int) -> None:
    if header.payload_bytes != expected:
        raise ProtocolError(
            f"Expected {header.kind.name} with {expected} bytes of payload. "
            f"Received: {header.payload_bytes} bytes announced."
        )


@dataclass(frozen=True, kw_only=True)
class ClientHello:
    """The payload of a client's first message.

    Args:
        role: Who it is.
        digest: The digest of its layout.
        codec: The name of the encoding, empty for none.
        first_value: Where the part of the vector begins that it expects here.
        num_values: The length of that part.
        epoch_steps: Steps of a worker's epoch, for rounds.
    """

    role: Role
    digest: str
    codec: str
    first_value: int
    num_values: int
    epoch_steps: int = 0

    def to_bytes(self) -> bytes:
        """Returns the bytes that it travels as."""
        names = self.digest.encode(), self.codec.encode()
        return _HELLO.pack(self.role, *names, self.first_value, self.num_values, self.epoch_steps)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> ClientHello:
        """Reads the form of `to_bytes`; raises ProtocolError for anything else."""
        role, digest, codec, first_value, num_values, epoch_steps = _HELLO.unpack(data)
        return cls(
            role=enum_member(Role, "role", role), digest=_text(digest), codec=_text(codec),
            first_value=first_value, num_values=num_values, epoch_steps=epoch_steps,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The payload of the server's first reply.

    Args:
        step: Last step of the client's partition that was applied, zero for none.
        call: ... and the last call of that step.
        highest_call: The highest call of any of its steps.
        num_slots: Slot vectors that the server keeps for its optimizer.
        num_state_values: Length of the averaged state.
        first_value: Where the server's part of the vector begins.
        num_values: The length of that part.
        num_partitions: Workers of the fit.
        incarnation: How often the server has been started again.
    """

    step: int
    call: int
    highest_call: int
    num_slots: int
    num_state_values: int
    first_value: int
    num_values: int
    num_partitions: int
    incarnation: int

    def to_bytes(self) -> bytes:
        """Returns the bytes that it travels as."""
        return _WELCOME.pack(*(getattr(self, name) for name in self.__dataclass_fields__))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> Welcome:
        """Reads the form of `to_bytes`; raises ProtocolError for values that no server sends."""
        welcome = cls(**dict(zip(cls.__dataclass_fields__, _WELCOME.unpack(data), strict=True)))
        if welcome.num_slots > _MOST_SLOTS or not welcome.num_partitions:
            raise ProtocolError(
                f"Expected at most {_MOST_SLOTS} slots, of one partition or more. Received: {welcome.num_slots} slots, "
                f"of {welcome.num_partitions} partitions."
            )
        return welcome

    @property
    def place(self) -> tuple[int, int]:
        """Step and call of the last push that was applied."""
        return self.step, self.call

    @property
    def whole_step(self) -> int:
        """The last step of which no call is missing, as far as one can tell from the steps before it."""
        return self.step if self.call >= self.highest_call else self.step - 1


def _text(data: bytes) -> str:
    try:
        return data.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        raise ProtocolError(f"Expected a name in ASCII. Received: {data!r}.") from None


def lengths_of(
    hello: ClientHello, num_slots: int, num_state_values: int, num_partitions: int, most_rows: int = 0
) -> Lengths:
    """Returns the legal lengths of payloads; both sides work them out from HELLO and its reply.

    Args:
        most_rows: See `Lengths`.
    """
    codec = hello.codec or None
    return Lengths(
        push=encoded_length(push_codec(codec), hello.num_values),
        pull=encoded_length(pull_codec(codec), hello.num_values),
        whole=4 * hello.num_values * (1 + num_slots) + 8 * num_state_values,
        state=8 * num_state_values,
        num_partitions=num_partitions,
        most_rows=most_rows,
    )


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
    """Returns the codec of pushes of so many values (with ``count`` zero, it only decodes); None for none."""
    check_encoding(compression)
    return None if compression is None else CODECS[compression].make(count)


def pull_codec(compression: str | None) -> Codec | None:
    """Returns the codec of pulls; None for none."""
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
