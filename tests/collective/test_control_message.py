import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import every_case

from elephant.collective.watch.control_message import ControlKind, ControlMessage, take_notice
from elephant.errors import AuthenticationError, DeadlineExceededError, NetworkError, PeerLostError, ProtocolError


def test_notice_is_these_bytes():
    assert (
        ControlMessage(ControlKind.PRESENT, 7, "1.5").to_bytes()
        == b"ENOT\x02\0\x03\0\xff\xff\xff\xff\x07\0\0\0\0\0\0\x001.5"
    )


@given(
    st.lists(
        st.builds(
            ControlMessage,
            st.sampled_from(ControlKind),
            st.integers(0, 2**64 - 1),
            st.text(max_size=50),
            st.integers(-1, 2**31 - 1),
        )
    )
)
def test_notices_come_out_of_the_stream_as_they_went_in_however_it_is_cut(notices):
    received, taken = bytearray(), []
    for byte in b"".join(notice.to_bytes() for notice in notices):
        received.append(byte)
        if (notice := take_notice(received)) is not None:
            taken.append(notice)
    assert taken == notices and not received


@every_case("kind", [PeerLostError, ProtocolError, DeadlineExceededError, AuthenticationError, NetworkError])
def test_notice_of_an_error_arrives_as_that_error(kind):
    notice = take_notice(bytearray(ControlMessage.of(kind("rank 3 is gone: Größe"), 7).to_bytes()))
    assert type(notice.error) is kind and str(notice.error) == "rank 3 is gone: Größe" and notice.sequence == 7


@pytest.mark.parametrize("kind", [ControlKind.CLOSED, ControlKind.WAITING, ControlKind.PRESENT])
def test_other_notices_carry_no_error(kind):
    assert ControlMessage(kind, 9).error is None


def test_notice_with_a_long_text_is_cut():
    assert len(take_notice(bytearray(ControlMessage(ControlKind.PROTOCOL, 0, "ü" * 5000).to_bytes())).text) == 2000


@given(st.binary(min_size=20, max_size=100).filter(lambda data: not data.startswith(b"ENOT")))
def test_garbage_in_the_place_of_a_notice_raises(data):
    with pytest.raises(ProtocolError, match="Expected a notice"):
        take_notice(bytearray(data))


@pytest.mark.parametrize("head", [b"ENOT\x0a\0\0\0" + bytes(12), b"ENOT\x03\0\xff\xff" + bytes(12)])
def test_an_unknown_kind_and_an_absurd_length_raise_before_anything_is_awaited(head):
    with pytest.raises(ProtocolError, match="Expected a notice"):
        take_notice(bytearray(head))
