import math
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import every_case

from elephant.errors import ProtocolError
from elephant.parameter_server.protocol import (
    HEADER_BYTES,
    HELLO_BYTES,
    TEXT_BYTES,
    WELCOME_BYTES,
    ClientHello,
    Flags,
    Lengths,
    RequestHeader,
    RequestKind,
    Role,
    Status,
    Welcome,
    check_reply,
    check_request,
    decode_header,
    decode_statistics,
    decode_text,
    encode_statistics,
    encode_text,
)

LENGTHS = Lengths(push=100, pull=200, whole=300, state=16, num_partitions=2)
PUSH = RequestHeader(
    kind=RequestKind.PUSH, partition=3, call=1, attempt=9, step=258, version=2**40 + 5, rate=0.5, payload_bytes=100
)
PUSH_BYTES = (
    b"ELPS\x03\x03\x00\x00"
    b"\x03\x00\x00\x00\x01\x00\x00\x00"
    b"\x09\x00\x00\x00\x00\x00\x00\x00"
    b"\x02\x01\x00\x00\x00\x00\x00\x00"
    b"\x05\x00\x00\x00\x00\x01\x00\x00"
    b"\x00\x00\x00\x00\x00\x00\xe0\x3f"
    b"\x64\x00\x00\x00\x00\x00\x00\x00"
    b"\xe4\xd1\x01\x1f"
)


def sealed(leading):
    return leading + struct.pack("<I", zlib.crc32(leading))


def test_header_is_these_bytes():
    assert PUSH.to_bytes().hex() == PUSH_BYTES.hex()
    assert decode_header(PUSH_BYTES) == PUSH and PUSH.place == (258, 1)


def test_hello_is_these_bytes():
    hello = ClientHello(
        role=Role.WORKER, digest="0123456789abcdef", codec="int8", first_value=16, num_values=32, epoch_steps=7
    )
    data = hello.to_bytes()
    assert data == (
        b"\x01" + bytes(7) + b"0123456789abcdef" + b"int8".ljust(16, b"\0") + struct.pack("<QQQ", 16, 32, 7)
    )
    assert len(data) == HELLO_BYTES and ClientHello.from_bytes(data) == hello


def test_welcome_is_these_bytes():
    welcome = Welcome(
        step=7, call=1, highest_call=2, num_slots=3, num_state_values=4, first_value=5, num_values=6,
        num_partitions=8, incarnation=9,
    )  # fmt: skip
    data = welcome.to_bytes()
    assert data == struct.pack("<QIIIQQQII", 7, 1, 2, 3, 4, 5, 6, 8, 9) and len(data) == WELCOME_BYTES
    assert Welcome.from_bytes(data) == welcome and welcome.whole_step == 6


@every_case(
    ("data", "said"),
    [
        (b"", "header of 60 bytes. Received: 0 bytes"),
        (b"HTTP" + PUSH_BYTES[4:], "Received: b'HTTP'"),
        (sealed(b"ELPS\x01" + PUSH_BYTES[5:56]), "version 3 of the protocol. Received: version 1"),
        (PUSH_BYTES[:20] + b"\x01" + PUSH_BYTES[21:], "checksum"),
        (sealed(PUSH_BYTES[:5] + b"\x63" + PUSH_BYTES[6:56]), r"kind among HELLO \(1\).*Received: 99"),
        (sealed(PUSH_BYTES[:6] + b"\x63" + PUSH_BYTES[7:56]), r"status among REQUEST \(0\).*Received: 99"),
        (sealed(PUSH_BYTES[:7] + b"\x80" + PUSH_BYTES[8:56]), "flags among 0x0f. Received: 0x80"),
    ],
)
def test_header_that_is_none_then_raises(data, said):
    with pytest.raises(ProtocolError, match=said):
        decode_header(data)


@given(
    kind=st.sampled_from(RequestKind), status=st.sampled_from(Status), flags=st.integers(0, 15),
    partition=st.integers(0, 2**32 - 1), call=st.integers(0, 2**32 - 1), attempt=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**64 - 1), version=st.integers(0, 2**64 - 1),
    rate=st.floats(allow_nan=False), payload_bytes=st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_header_when_encoded_and_decoded_then_is_the_same(flags, **fields):
    header = RequestHeader(flags=Flags(flags), **fields)
    data = header.to_bytes()
    assert len(data) == HEADER_BYTES and decode_header(data) == header


@given(st.binary(max_size=120))
def test_any_bytes_then_are_refused_in_words(data):
    with pytest.raises(ProtocolError, match="Expected"):
        decode_header(data)


@given(position=st.integers(0, HEADER_BYTES - 1), bit=st.integers(0, 7))
def test_any_bit_that_is_turned_then_is_noticed(position, bit):
    data = bytearray(PUSH_BYTES)
    data[position] ^= 1 << bit
    with pytest.raises(ProtocolError):
        decode_header(bytes(data))


@given(st.binary(min_size=56, max_size=56))
def test_any_header_with_a_good_checksum_then_is_a_header_or_refused(leading):
    try:
        header = decode_header(sealed(b"ELPS\x03" + leading[5:]))
    except ProtocolError:
        return
    for role in Role:
        try:
            check_request(header, role, LENGTHS)
        except ProtocolError:
            continue
        assert header.payload_bytes == LENGTHS.of_request(header.kind)


@given(st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES))
def test_any_hello_then_is_one_or_refused(data):
    try:
        assert ClientHello.from_bytes(data).role in Role
    except ProtocolError:
        pass


@every_case(
    ("kind", "role", "length"),
    [
        (RequestKind.PULL, Role.WORKER, 0), (RequestKind.PUSH, Role.WORKER, 100),
        (RequestKind.PUSH_PULL, Role.WORKER, 100),
        (RequestKind.STATE, Role.WORKER, 16), (RequestKind.BYE, Role.WORKER, 0), (RequestKind.PULL, Role.CONTROL, 0),
        (RequestKind.FETCH, Role.CONTROL, 0), (RequestKind.STATISTICS, Role.CONTROL, 0),
        (RequestKind.SET_RATE, Role.CONTROL, 0),
        (RequestKind.STOP, Role.CONTROL, 0), (RequestKind.OPEN, Role.CONTROL, 0), (RequestKind.BYE, Role.CONTROL, 0),
    ],
)  # fmt: skip
def test_request_then_has_one_legal_length_and_legal_senders(kind, role, length):
    check_request(RequestHeader(kind=kind, step=1, payload_bytes=length), role, LENGTHS)
    for wrong in (length + 1, 2**64 - 1, *([length - 1] if length else [])):
        with pytest.raises(ProtocolError, match=f"Expected {kind.name} with {length} bytes"):
            check_request(RequestHeader(kind=kind, payload_bytes=wrong), role, LENGTHS)
    if kind not in (RequestKind.PULL, RequestKind.BYE):
        other = Role.CONTROL if role is Role.WORKER else Role.WORKER
        with pytest.raises(ProtocolError, match=f"a {other.name.lower()} that said HELLO. Received: {kind.name}"):
            check_request(RequestHeader(kind=kind, payload_bytes=length), other, LENGTHS)


@pytest.mark.parametrize(
    ("role", "header", "said"),
    [
        (Role.WORKER, RequestHeader(kind=RequestKind.PUSH, payload_bytes=100), "a step from 1 on"),
        (
            Role.WORKER,
            RequestHeader(kind=RequestKind.STATE, rate=math.nan, payload_bytes=16),
            "a finite rate. Received: nan",
        ),
        (Role.CONTROL, RequestHeader(kind=RequestKind.SET_RATE, rate=math.inf), "a finite rate. Received: inf"),
        (Role.CONTROL, RequestHeader(kind=RequestKind.SET_RATE, rate=-1e39), "a finite rate. Received: -1e\\+39"),
    ],
)
def test_request_when_a_field_is_out_of_its_range_then_raises(role, header, said):
    with pytest.raises(ProtocolError, match=f"Expected {header.kind.name} with {said}"):
        check_request(header, role, LENGTHS)


def test_welcome_when_it_is_of_more_slots_than_any_rule_has_then_raises():
    with pytest.raises(ProtocolError, match="at most 8 slots.*4294967295"):
        Welcome.from_bytes(struct.pack("<QIIIQQQII", 0, 0, 0, 2**32 - 1, 0, 0, 6, 1, 0))


def test_request_before_hello_then_is_hello_alone():
    check_request(RequestHeader(kind=RequestKind.HELLO, payload_bytes=HELLO_BYTES), None, None)
    for kind in set(RequestKind) - {RequestKind.HELLO}:
        with pytest.raises(ProtocolError, match="a new client, which says HELLO first"):
            check_request(RequestHeader(kind=kind), None, None)
    with pytest.raises(ProtocolError, match="Expected a request. Received: a reply"):
        check_request(RequestHeader(kind=RequestKind.HELLO, status=Status.OK, payload_bytes=HELLO_BYTES), None, None)


@every_case(
    ("header", "length"),
    [
        (RequestHeader(kind=RequestKind.PULL, status=Status.OK), 0),
        (RequestHeader(kind=RequestKind.PULL, status=Status.OK, flags=Flags.MODIFIED), 200),
        (RequestHeader(kind=RequestKind.PUSH_PULL, status=Status.DUPLICATE, flags=Flags.MODIFIED | Flags.STOP), 200),
        (RequestHeader(kind=RequestKind.PUSH, status=Status.REFUSED), 0),
        (RequestHeader(kind=RequestKind.PUSH, status=Status.SUPERSEDED), 0),
        (RequestHeader(kind=RequestKind.PUSH_PULL, status=Status.WAIT), 0),
        (RequestHeader(kind=RequestKind.STATE, status=Status.OK), 16),
        (RequestHeader(kind=RequestKind.STATE, status=Status.SUPERSEDED), 0),
        (RequestHeader(kind=RequestKind.FETCH, status=Status.OK), 300),
        (RequestHeader(kind=RequestKind.FETCH, status=Status.FAILED), TEXT_BYTES),
        (RequestHeader(kind=RequestKind.STATISTICS, status=Status.OK), LENGTHS.statistics),
        (RequestHeader(kind=RequestKind.BYE, status=Status.ERROR), TEXT_BYTES),
    ],
)
def test_reply_then_has_one_legal_length(header, length):
    assert LENGTHS.of_reply(header) == length
    with pytest.raises(ProtocolError, match="bytes of payload"):
        check_reply(header, header.kind, LENGTHS) if length else check_reply(
            RequestHeader(kind=header.kind, status=header.status, payload_bytes=1), header.kind, LENGTHS
        )


def test_reply_to_something_else_then_raises():
    with pytest.raises(ProtocolError, match=r"a reply to PULL. Received: PUSH \(OK\)"):
        check_reply(RequestHeader(kind=RequestKind.PUSH, status=Status.OK), RequestKind.PULL, LENGTHS)
    with pytest.raises(ProtocolError, match=r"a reply to PULL. Received: PULL \(REQUEST\)"):
        check_reply(RequestHeader(kind=RequestKind.PULL), RequestKind.PULL, LENGTHS)
    with pytest.raises(ProtocolError, match="Expected HELLO with 52 bytes"):
        check_reply(
            RequestHeader(kind=RequestKind.HELLO, status=Status.OK, payload_bytes=2**50), RequestKind.HELLO, None
        )


def test_rate_that_is_not_a_number_then_travels():
    assert math.isnan(decode_header(RequestHeader(kind=RequestKind.PULL, rate=math.nan).to_bytes()).rate)


@given(st.text(max_size=2000))
def test_text_then_has_its_fixed_length(text):
    data = encode_text(text)
    assert len(data) == TEXT_BYTES
    if len(text.encode("utf-8", "replace")) < TEXT_BYTES and not text.endswith("\0"):
        assert decode_text(data) == text.encode("utf-8", "replace").decode()


def test_statistics_then_are_padded_json():
    assert decode_statistics(encode_statistics({"updates": 3}, 64)) == {"updates": 3}
    assert len(encode_statistics({}, 64)) == 64
    for data in (b"\xff\xfe", b"[1]", b""):
        with pytest.raises(ProtocolError, match="Expected statistics"):
            decode_statistics(data)
