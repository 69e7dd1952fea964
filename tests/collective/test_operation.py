import pytest
from hypothesis import given
from hypothesis import strategies as st

from elephant.collective.operation import REQUEST_BYTES, Operation
from elephant.errors import ProtocolError
from elephant.net import Deadline


def operation(sequence, name):
    return Operation(sequence, name, Deadline(10, "A test"))


def test_request_is_these_bytes():
    request = operation(5, "barrier").request
    assert request == b"EREQ" + bytes(4) + b"\x05\0\0\0\0\0\0\0barrier" + bytes(57)
    assert len(request) == REQUEST_BYTES


def test_check_of_the_same_request_passes():
    operation(5, "barrier").check(memoryview(operation(5, "barrier").request), 2, 1)


@pytest.mark.parametrize(
    "request_bytes, text",
    [
        (operation(5, "broadcast").request, "rank 1 asked for 'broadcast' as operation 5, rank 2 for 'barrier' as"),
        (operation(6, "barrier").request, "rank 1 asked for 'barrier' as operation 6"),
        (bytes(REQUEST_BYTES), "a request of rank 1"),
    ],
)
def test_check_of_another_request_says_who_asked_for_what(request_bytes, text):
    with pytest.raises(ProtocolError, match=text):
        operation(5, "barrier").check(memoryview(request_bytes), 2, 1)


@given(st.text(max_size=200), st.text(max_size=200))
def test_requests_with_different_names_are_never_equal(first, second):
    same = operation(1, "x" * 60 + first).request == operation(1, "x" * 60 + second).request
    assert same == (first.rstrip("\0") == second.rstrip("\0"))
