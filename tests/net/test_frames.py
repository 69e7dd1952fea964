import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tables import every_case

from elephant.errors import ConfigurationError, NetworkError, ProtocolError
from elephant.net.frames import (
    HEADER_BYTES,
    FrameHeader,
    Limits,
    Message,
    decode,
    decode_header,
    decode_manifest,
    encode,
)

DTYPES = ["<f2", "<f4", "<f8", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "|b1"]
SMALL = Limits(max_manifest_bytes=1000, max_payload_bytes=1000)


def frame(
    manifest, payload=b"", *, kind=7, magic=b"ELPH", version=1, reserved=0, manifest_bytes=None, payload_bytes=None
):
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    leading = struct.pack(
        "<4sBBHIQ",
        magic,
        version,
        kind,
        reserved,
        len(text) if manifest_bytes is None else manifest_bytes,
        len(payload) if payload_bytes is None else payload_bytes,
    )
    return leading + struct.pack("<I", zlib.crc32(leading)) + text + payload


def test_encode_of_a_small_message_gives_these_bytes():
    message = Message(7, {"step": 3}, (np.array([[1.0, 2.0]], "<f4"),))
    assert b"".join(bytes(part) for part in encode(message)) == (
        b"ELPH\x01\x07\x00\x00\x2e\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x01\x9c\x92\x84"
        b'{"fields":{"step":3},"arrays":[["<f4",[1,2]]]}'
        b"\x00\x00\x80\x3f\x00\x00\x00\x40"
    )


def test_encode_of_contiguous_arrays_does_not_copy():
    array = np.zeros(1000, np.float32)
    _, payload = encode(Message(1, {}, (array,)))
    assert np.shares_memory(np.frombuffer(payload, np.uint8), array)


@given(
    kind=st.one_of(st.integers(1, 255), st.text(max_size=20)),
    fields=st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.text(max_size=5))),
    arrays=st.lists(
        st.sampled_from(DTYPES).flatmap(
            lambda code: npst.arrays(np.dtype(code), npst.array_shapes(min_dims=0, min_side=0))
        ),
        max_size=3,
    ),
)
def test_decode_of_encode_gives_the_message_back(kind, fields, arrays):
    message = decode(b"".join(encode(Message(kind, fields, tuple(arrays)))))
    assert message.kind == kind
    assert message.fields == fields
    for received, sent in zip(message.arrays, arrays, strict=True):
        assert received.dtype == sent.dtype and received.shape == sent.shape and received.tobytes() == sent.tobytes()
        assert received.flags.writeable


@pytest.mark.parametrize("array", [np.arange(6, dtype=">i4").reshape(2, 3), np.arange(12.0).reshape(3, 4).T[::2]])
def test_encode_of_foreign_byte_order_or_strides_keeps_the_values(array):
    (received,) = decode(b"".join(encode(Message(1, {}, (array,))))).arrays
    np.testing.assert_array_equal(received, array)
    assert received.dtype.isnative


def test_decode_of_encode_when_a_text_is_no_unicode_gives_it_back():
    fields = {"message": "no such file: caf\udce9 \\udce9"}
    assert decode(b"".join(bytes(part) for part in encode(Message(1, fields)))).fields == fields


def test_fields_may_hold_floats_that_are_no_numbers():
    fields = decode(b"".join(encode(Message(1, {"loss": float("nan"), "top": float("inf")})))).fields
    assert np.isnan(fields["loss"]) and np.isinf(fields["top"])


@every_case(
    "message, text",
    [
        (Message(0), "from 1 to 255. Received: 0"),
        (Message(256), "from 1 to 255. Received: 256"),
        (Message(1, {"x": object()}), "expected JSON values"),
        (Message(1, {}, (np.array([object()]),)), "Received: object"),
        (Message(1, {}, (np.array(["text"]),)), "Received: <U4"),
        (Message(1, {}, (np.zeros(1, [("a", "f4")]),)), "expected a dtype among float16, float32"),
        (Message(1, {}, (np.zeros(1, "c8"),)), "Received: complex64"),
    ],
)
def test_encode_of_what_cannot_travel_raises(message, text):
    with pytest.raises(ConfigurationError, match=text):
        encode(message)


OK = {"fields": {}, "arrays": []}


@every_case(
    "data, text",
    [
        (frame(OK, magic=b"HTTP"), r"starts with b'ELPH'. Received: b'HTTP'"),
        (frame(OK, version=2), "version 1. Received: version 2. Install the same version"),
        (frame(OK, reserved=1), "reserved bytes of a header. Received: 0x0001"),
        (frame(OK)[:20] + b"\0\0\0\0" + frame(OK)[24:], "header with checksum 0x.*Received: 0x00000000"),
        (frame(OK, manifest_bytes=1001), "manifest of at most 1000 bytes. Received: 1001"),
        (frame(OK, payload_bytes=2**63), "payload of at most 1000 bytes. Received: 9223372036854775808"),
        (frame(OK)[:10], "header of 24 bytes. Received: 10"),
        (frame(OK) + b"x", "Expected a frame of .* bytes"),
        (frame(b"{"), "manifest in JSON"),
        (frame(b"\xff\xfe{}"), "manifest in JSON"),
        (frame(b"[" * 900), "manifest in JSON"),
        (frame([]), 'with "fields" and "arrays"'),
        (frame({"fields": {}}), 'with "fields" and "arrays"'),
        (frame({**OK, "code": 1}), 'with "fields" and "arrays"'),
        (frame({"fields": [], "arrays": []}), "fields in an object"),
        (frame({"fields": {}, "arrays": {}}), "arrays in a list"),
        (frame(OK, kind=0), "a name as the kind of a frame. Received: None"),
        (frame({**OK, "kind": 3}, kind=0), "a name as the kind of a frame. Received: 3"),
        (frame(OK, b"1234"), "arrays of 4 bytes together. Received: 0"),
        (frame({"fields": {}, "arrays": ["<f4"]}), r"an array as \[dtype, shape\]"),
        (frame({"fields": {}, "arrays": [["|O", [1]]]}, b"12345678"), "a dtype among .* Received: '|O'"),
        (frame({"fields": {}, "arrays": [[">f4", [1]]]}, b"1234"), "a dtype among"),
        (frame({"fields": {}, "arrays": [[["<f4"], [1]]]}, b"1234"), "a dtype among"),
        (frame({"fields": {}, "arrays": [["<f4", [-1]]]}), "sizes of zero or more"),
        (frame({"fields": {}, "arrays": [["<f4", [-1, -1]]]}, b"1234"), "sizes of zero or more"),
        (frame({"fields": {}, "arrays": [["<f4", [True]]]}, b"1234"), "sizes of zero or more"),
        (frame({"fields": {}, "arrays": [["<f4", [1.0]]]}, b"1234"), "sizes of zero or more"),
        (frame({"fields": {}, "arrays": [["<f4", [1] * 33]]}, b"1234"), "at most 32 sizes"),
        (frame({"fields": {}, "arrays": [["<f4", [0, 2**62]]]}), "an array within 1000 bytes"),
        (frame({"fields": {}, "arrays": [["<f4", [2**62, 4]]]}), "an array within 1000 bytes"),
        (frame({"fields": {}, "arrays": [["<f4", [1]], ["<f4", [1]]]}, b"1234"), "4 bytes together. Received: 8"),
        (frame({"fields": {}, "arrays": [["|b1", [2]]]}, b"\x01\x02"), "bools of 0 or 1. Received: 2"),
    ],
)
def test_decode_of_a_bad_frame_says_what_is_wrong(data, text):
    with pytest.raises(ProtocolError, match=text):
        decode(data, SMALL)


@given(st.binary(max_size=200))
def test_decode_of_any_bytes_raises_network_errors_only(data):
    with pytest.raises(NetworkError):
        decode(data, SMALL)


@given(st.data())
def test_decode_of_a_damaged_frame_raises_network_errors_only(data):
    good = b"".join(encode(Message("kind", {"a": [1, 2]}, (np.arange(5, dtype="f4"), np.ones(3, bool)))))
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(damaged), SMALL)
    except NetworkError:
        pass


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from([*DTYPES, "|O", "fields"])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(["fields", "arrays"]), inner)),
    max_leaves=12,
)


@given(
    manifest=st.one_of(JSON, st.builds(lambda arrays: {"fields": {}, "arrays": arrays}, JSON)),
    payload=st.integers(0, 999),
)
def test_any_manifest_takes_no_more_memory_than_its_payload(manifest, payload):
    text = json.dumps(manifest).encode()[:1000]
    try:
        arrays = decode_manifest(text, FrameHeader(1, len(text), payload), SMALL).empty_arrays()
    except NetworkError:
        return
    assert sum(array.nbytes for array in arrays) == payload


def test_huge_announced_lengths_take_no_memory():
    header = frame(OK, manifest_bytes=2**32 - 1, payload_bytes=2**64 - 1)[:HEADER_BYTES]
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode_header(header, Limits())
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
