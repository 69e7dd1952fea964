import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.collective.wire import (
    NOTICE_BYTES,
    REQUEST_BYTES,
    Notice,
    Request,
    decode_notice,
    text_bytes_of,
)
from elephant.errors import DeadlineExceededError, NetworkError, PeerLostError, ProtocolError


def received(notice):
    data = notice.to_bytes()
    head = data[:NOTICE_BYTES]
    assert text_bytes_of(head) == len(data) - NOTICE_BYTES
    return decode_notice(head, data[NOTICE_BYTES:])


def test_request_is_these_bytes():
    data = Request(5, "barrier", 2).to_bytes()
    assert data == b"EREQ\x02\0\0\0\x05\0\0\0\0\0\0\0barrier" + bytes(57)
    assert len(data) == REQUEST_BYTES


def test_check_of_the_same_request_passes():
    Request(5, "barrier", 2).check(memoryview(Request(5, "barrier", 1).to_bytes()), 1)


@pytest.mark.parametrize(
    "other, text",
    [
        (
            Request(5, "broadcast", 1),
            "rank 1 asked for 'broadcast' as operation 5, rank 2 for 'barrier' as operation 5",
        ),
        (Request(6, "barrier", 1), "rank 1 asked for 'barrier' as operation 6"),
        (Request(5, "barrier", 3), "a request of rank 1"),
    ],
)
def test_check_of_another_request_says_who_asked_for_what(other, text):
    with pytest.raises(ProtocolError, match=text):
        Request(5, "barrier", 2).check(memoryview(other.to_bytes()), 1)


@given(st.text(max_size=200), st.text(max_size=200))
def test_requests_with_different_names_never_pass(first, second):
    request, other = Request(1, "x" * 60 + first, 1), Request(1, "x" * 60 + second, 0)
    same = request.to_bytes()[8:] == other.to_bytes()[8:]
    assert same == (first.rstrip("\0") == second.rstrip("\0"))


@pytest.mark.parametrize("kind", [PeerLostError, ProtocolError, DeadlineExceededError, NetworkError])
def test_notice_of_an_error_arrives_as_that_error(kind):
    notice = received(Notice(kind("rank 3 is gone: Größe"), 7))
    assert type(notice.error) is kind and str(notice.error) == "rank 3 is gone: Größe" and notice.finished == 7


def test_notice_of_a_farewell_carries_no_error():
    assert received(Notice(None, 9)) == Notice(None, 9)


def test_notice_with_a_long_text_is_cut():
    assert len(str(received(Notice(ProtocolError("ü" * 5000), 0)).error)) <= 2001


@given(st.binary(min_size=NOTICE_BYTES, max_size=NOTICE_BYTES))
def test_garbage_in_the_place_of_a_notice_raises(data):
    with pytest.raises(ProtocolError, match="Expected a notice"):
        text_bytes_of(data)
