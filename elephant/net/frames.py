"""Frames: the wire format of messages, its limits, and checks of the fields of a message.

::

    offset  bytes  field (integers are little-endian)
         0      4  magic, b"ELPH"
         4      1  version
         5      1  kind: 1 to 255, or 0 when the manifest carries it as a name
         6      2  reserved, zero
         8      4  length of the manifest
        12      8  length of the payload
        20      4  CRC-32 of bytes 0 to 19
        24         manifest, UTF-8: {"fields": {...}, "arrays": [["<f4", [2, 3]], ...]} and "kind" where that is a name
                   payload: the little-endian, C-contiguous buffers of the arrays, one after the other

A receiver checks every length against its ``Limits`` before it takes memory, and
nothing in a frame can name code. The CRC finds a peer that lost its place in the
stream; it is no protection against a forger: that is what authentication is for.
"""

from __future__ import annotations

import json
import math
import struct
import types
import typing
import zlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elephant.errors import ConfigurationError, ProtocolError

MAGIC = b"ELPH"
VERSION = 1
HEADER_BYTES = 24
_LEADING = struct.Struct("<4sBBHIQ")
_CHECKSUM = struct.Struct("<I")
_MAX_DIMENSIONS = 32
_DTYPES = {
    np.dtype(code).str: np.dtype(code)
    for code in ("<f2", "<f4", "<f8", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "|b1")
}
Spec = tuple[np.dtype[Any], tuple[int, ...]]

_MOST = 2**63
_SHOWN = 120


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a receiver.

    Args:
        max_manifest_bytes: Length of the JSON manifest, in bytes.
        max_payload_bytes: Length of all arrays of one frame together, in bytes.
    """

    max_manifest_bytes: int = 1 << 20
    max_payload_bytes: int = 1 << 32


@dataclass(frozen=True, eq=False)
class Message:
    """Contents of one frame.

    Args:
        kind: A name, or an integer from 1 to 255, that says what the message is.
        fields: JSON values by name; floats may be infinite or not a number.
        arrays: Of dtype float16, 32, 64, int8 to 64, uint8 to 64 or bool, any shape.
            Raw bytes travel as uint8. Received arrays are the receiver's own and writable.
    """

    kind: str | int
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class FrameHeader:
    """The fixed start of a frame: its kind (0 for a named one) and two lengths in bytes."""

    kind: int
    manifest_bytes: int
    payload_bytes: int


@dataclass(frozen=True)
class Manifest:
    """A frame's manifest: the kind, the fields, and dtype and shape of each array."""

    kind: str | int
    fields: dict[str, Any]
    specs: tuple[Spec, ...]

    def empty_arrays(self) -> tuple[np.ndarray, ...]:
        """Returns uninitialized arrays for the payload to be read into."""
        return tuple(np.empty(shape, dtype) for dtype, shape in self.specs)


def encode(message: Message) -> list[bytes | memoryview]:
    """Returns the buffers that make up a frame, in order; contiguous arrays are not copied.

    Raises:
        ConfigurationError: The kind, a field or the dtype of an array cannot travel in a frame.
    """
    arrays = [_portable(array) for array in message.arrays]
    manifest: dict[str, Any] = {
        "fields": dict(message.fields),
        "arrays": [[array.dtype.str, list(array.shape)] for array in arrays],
    }
    kind = message.kind
    if isinstance(kind, str):
        manifest["kind"] = kind
        kind = 0
    elif not 1 <= kind <= 255:
        raise ConfigurationError(f"kind: expected a name or an integer from 1 to 255. Received: {kind!r}.")
    text = _to_json(manifest)
    leading = _LEADING.pack(MAGIC, VERSION, kind, 0, len(text), sum(array.nbytes for array in arrays))
    return [leading + _CHECKSUM.pack(zlib.crc32(leading)) + text, *(raw_view(array) for array in arrays if array.size)]


def decode_header(data: bytes, limits: Limits) -> FrameHeader:
    """Returns the header in the first 24 bytes of a frame.

    Raises:
        ProtocolError: They are no header of this version, or announce more than the limits allow.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"Expected a frame header of {HEADER_BYTES} bytes. Received: {len(data)} bytes.")
    magic, version, kind, reserved, manifest_bytes, payload_bytes = _LEADING.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"Expected a frame that starts with {MAGIC!r}. Received: {magic!r}.")
    if version != VERSION:
        raise ProtocolError(
            f"Expected frames of version {VERSION}. Received: version {version}. "
            "Install the same version of elephant on the driver and on every executor."
        )
    expected = zlib.crc32(data[: _LEADING.size])
    (checksum,) = _CHECKSUM.unpack_from(data, _LEADING.size)
    if checksum != expected:
        raise ProtocolError(f"Expected a header with checksum {expected:#010x}. Received: {checksum:#010x}.")
    if reserved != 0:
        raise ProtocolError(f"Expected zero in the reserved bytes of a header. Received: {reserved:#06x}.")
    _check_limit("manifest", manifest_bytes, limits.max_manifest_bytes)
    _check_limit("payload", payload_bytes, limits.max_payload_bytes)
    return FrameHeader(kind, manifest_bytes, payload_bytes)


def decode_manifest(data: bytes, header: FrameHeader, limits: Limits) -> Manifest:
    """Returns the manifest of a frame, after checking that its arrays fill the announced payload exactly.

    Args:
        data: The manifest's bytes.

    Raises:
        ProtocolError: It is no manifest, names a dtype or shape that is not allowed, or contradicts the header.
    """
    try:
        manifest = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"Expected a manifest in JSON. Received: {shown(data)} ({error}).") from None
    if not isinstance(manifest, dict) or not {"fields", "arrays"} <= manifest.keys() <= {"fields", "arrays", "kind"}:
        raise ProtocolError(f'Expected a manifest with "fields" and "arrays". Received: {shown(manifest)}.')
    fields, arrays = manifest["fields"], manifest["arrays"]
    if not isinstance(fields, dict) or not isinstance(arrays, list):
        raise ProtocolError(f"Expected fields in an object and arrays in a list. Received: {shown(manifest)}.")
    specs = tuple(_decode_spec(entry, limits) for entry in arrays)
    total = sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs)
    if total != header.payload_bytes:
        raise ProtocolError(f"Expected arrays of {header.payload_bytes} bytes together. Received: {total} bytes.")
    return Manifest(_decode_kind(header.kind, manifest), fields, specs)


def check_values(arrays: Sequence[np.ndarray]) -> None:
    """Raises ProtocolError where the bytes read into a bool array are not all 0 or 1."""
    for array in arrays:
        if array.dtype == np.bool_ and array.size and int(array.view(np.uint8).max()) > 1:
            raise ProtocolError(f"Expected bools of 0 or 1. Received: {int(array.view(np.uint8).max())}.")


def decode(data: bytes | bytearray | memoryview, limits: Limits | None = None) -> Message:
    """Returns the message in one whole frame; its arrays are copies.

    Raises:
        ProtocolError: The bytes are not one valid frame within the limits.
    """
    limits = limits or Limits()
    view = memoryview(data).cast("B")
    header = decode_header(bytes(view[:HEADER_BYTES]), limits)
    start = HEADER_BYTES + header.manifest_bytes
    if len(view) != start + header.payload_bytes:
        raise ProtocolError(f"Expected a frame of {start + header.payload_bytes} bytes. Received: {len(view)} bytes.")
    manifest = decode_manifest(bytes(view[HEADER_BYTES:start]), header, limits)
    arrays = manifest.empty_arrays()
    for array in arrays:
        raw_view(array)[:] = view[start : start + array.nbytes]
        start += array.nbytes
    check_values(arrays)
    return Message(manifest.kind, manifest.fields, arrays)


def raw_view(array: np.ndarray) -> memoryview:
    """Returns the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def _portable(array: np.ndarray) -> np.ndarray:
    little = array.dtype.newbyteorder("<")
    if little.str not in _DTYPES or little.hasobject:
        known = ", ".join(dtype.name for dtype in _DTYPES.values())
        raise ConfigurationError(f"An array in a message: expected a dtype among {known}. Received: {array.dtype}.")
    return np.asarray(array, dtype=little, order="C")


def _to_json(manifest: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False)
        # Half a surrogate pair, as in the name of a file that is no UTF-8, becomes JSON's own escape for it.
        return text.encode("utf-8", "backslashreplace")
    except (TypeError, ValueError, RecursionError) as error:
        received = shown(manifest["fields"])
        raise ConfigurationError(f"fields: expected JSON values. Received: {received} ({error}).") from None


def _check_limit(part: str, received: int, limit: int) -> None:
    if received > limit:
        raise ProtocolError(f"Expected a {part} of at most {limit} bytes. Received: {received} bytes announced.")


def _decode_kind(number: int, manifest: dict[str, Any]) -> str | int:
    if number != 0:
        return number
    name = manifest.get("kind")
    if not isinstance(name, str):
        raise ProtocolError(f"Expected a name as the kind of a frame. Received: {shown(name)}.")
    return name


def _decode_spec(entry: Any, limits: Limits) -> Spec:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], list):
        raise ProtocolError(f"Expected an array as [dtype, shape]. Received: {shown(entry)}.")
    code, shape = entry
    if not isinstance(code, str) or code not in _DTYPES:
        raise ProtocolError(f"Expected a dtype among {', '.join(_DTYPES)}. Received: {shown(code)}.")
    if len(shape) > _MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise ProtocolError(f"Expected at most {_MAX_DIMENSIONS} sizes of zero or more. Received: {shown(shape)}.")
    dtype = _DTYPES[code]
    # A zero counts as one here, so that (0, 2**62) cannot overflow numpy's own arithmetic.
    if dtype.itemsize * math.prod(max(size, 1) for size in shape) > max(limits.max_payload_bytes, dtype.itemsize):
        raise ProtocolError(
            f"Expected an array within {limits.max_payload_bytes} bytes. Received: {shown(shape)} of {dtype.name}."
        )
    return dtype, tuple(shape)


def shown(value: object) -> str:
    """Returns a text for an error of a value that was received: its beginning, where it is long.

    >>> shown("ab"), shown([0] * 1000)[-21:]
    ("'ab'", '... (3000 characters)')
    """
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def require(
    values: Mapping[str, Any], expected: Mapping[str, Any], what: str, *, optional: Set[str] = frozenset()
) -> None:
    """Raises ProtocolError unless there are the expected fields and no others, each of which fits its annotation.

    Args:
        expected: Annotations by name, see `fits`.

    >>> require({"step": -1}, {"step": int}, "StepEnded")
    Traceback (most recent call last):
    elephant.errors.ProtocolError: expected StepEnded with step as int of zero or more. Received: -1.
    """
    if not expected.keys() - optional <= values.keys() <= expected.keys():
        raise ProtocolError(f"expected the fields of {what}. Received: {shown(sorted(values))}.")
    for name, value in values.items():
        if not fits(value, expected[name]):
            annotation = expected[name]
            form = annotation.__name__ if type(annotation) is type else annotation
            limits = " of zero or more" if annotation is int else ""
            raise ProtocolError(f"expected {what} with {name} as {form}{limits}. Received: {shown(value)}.")


def fits(value: Any, annotation: Any) -> bool:
    """Returns whether a JSON value is what an annotation says.

    Whole numbers count something: they are neither negative nor bools, and an int64 holds them.

    >>> fits({"loss": 1}, dict[str, float]), fits({"loss": "1"}, dict[str, float]), fits(True, int)
    (True, False, False)
    >>> fits(None, int | None), fits([1, 2], list[int]), fits([1, -2], list[int]), fits("ab", list[str])
    (True, True, False, False)
    """
    if annotation is Any:
        return True
    if annotation is int:
        return type(value) is int and 0 <= value < _MOST
    if annotation is float:
        return type(value) in (int, float)
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, part) for part in parts)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(isinstance(key, str) and fits(value[key], parts[1]) for key in value)
    if origin in (list, Sequence):
        return isinstance(value, list | tuple) and all(fits(item, parts[0]) for item in value)
    return isinstance(value, annotation)
