"""Parsers of what comes over connections: any bytes give a value or an error of the network's, in bounded memory."""

import dataclasses
import hmac
import pickle
import socket
import tracemalloc

import numpy as np
import pytest
from event_samples import EVENTS, STATE
from hypothesis import assume, example, given
from hypothesis import strategies as st
from mutated import JSON, frame_of, mutated, mutated_arrays, mutated_fields, mutated_message, with_right_checksum

from elephant.collective.connector import PeerHello
from elephant.collective.objects import opened, sealed
from elephant.collective.operation import Operation
from elephant.collective.watch.control_message import ControlKind, ControlMessage, take_notice
from elephant.errors import AuthenticationError, NetworkError, PeerLostError, ProtocolError
from elephant.monitor import events
from elephant.net.deadline import Deadline
from elephant.net.frames import HEADER_BYTES, Limits, Message, decode
from elephant.net.handshake import client_handshake, server_handshake
from elephant.net.stream import Stream
from elephant.task.rendezvous import RankReport

SMALL = Limits(max_manifest_bytes=4000, max_payload_bytes=4000)
TOKEN = b"0123456789abcdef-right"
MESSAGES = st.sampled_from(EVENTS).map(events.to_message).flatmap(mutated_message)


def sent(content, limits):
    """Returns the message that a stream receives of bytes after which the connection ends."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(content)
        theirs.shutdown(socket.SHUT_WR)
        with Stream(ours, "a stranger") as stream:
            return stream.receive(Deadline(10, "A frame of a test"), limits)


@given(data=st.data())
def test_frame_when_it_is_damaged_behind_a_right_checksum_then_is_a_message_or_refused(data):
    frame = frame_of(events.to_message(data.draw(st.sampled_from(EVENTS))))
    damaged = with_right_checksum(data.draw(mutated(frame)), HEADER_BYTES)
    for read in (lambda: decode(damaged, SMALL), lambda: sent(damaged[: 1 << 16], SMALL)):
        try:
            message = read()
        except NetworkError:
            continue
        assert isinstance(message, Message)
        assert sum(array.nbytes for array in message.arrays) <= SMALL.max_payload_bytes


def test_frame_when_it_announces_all_that_is_allowed_and_ends_then_memory_is_not_touched():
    message = Message("values", {}, (np.zeros(1 << 26, np.uint8),))
    header = frame_of(dataclasses.replace(message, arrays=(np.zeros(0, np.uint8),)))
    whole = frame_of(message)[: len(header) + 8]
    before = resident_bytes()
    with pytest.raises(PeerLostError):
        sent(whole, Limits())
    assert resident_bytes() - before < 1 << 24


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@given(kind=st.text(max_size=5) | st.integers(1, 255), fields=st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_event_when_it_is_any_message_then_is_refused(kind, fields):
    with pytest.raises(ProtocolError):
        events.from_message(Message(kind, fields))


@given(message=MESSAGES, recorded=st.booleans())
def test_event_when_a_part_is_anything_then_is_an_event_or_refused(message, recorded):
    try:
        event = events.from_message(message, recorded=recorded)
    except ProtocolError:
        return
    assert events.from_message(decode(frame_of(events.to_message(event))), recorded=recorded).rank == event.rank
    if isinstance(event, events.FilesLeft):
        assert len(event.files) <= len(event.names)


@given(data=st.data())
def test_state_when_its_parts_are_anything_then_is_whole_or_awaits_more_or_is_refused(data):
    first, *others = STATE.in_parts()
    message = events.to_message(first)
    fields = dict(message.fields)
    fields["shapes"] = data.draw(st.just(fields["shapes"]) | st.lists(st.lists(st.integers(0, 5), max_size=3)))
    pieces = [array for event in others for array in data.draw(mutated_arrays(event.arrays))]
    try:
        arrays = events.from_message(Message(message.kind, fields)).joined(pieces)
    except ProtocolError:
        return
    assert arrays is None or [list(array.shape) for array in arrays] == fields["shapes"]


@given(data=st.data())
def test_record_of_events_when_it_is_damaged_then_is_read_or_refused(data):
    record = events.packed(data.draw(st.lists(st.sampled_from(EVENTS), max_size=3)))
    try:
        found = events.unpacked(data.draw(mutated(record)))
    except ProtocolError:
        return
    assert all(isinstance(event, events.Event) for event in found)


@given(data=st.data())
def test_report_of_a_rank_when_it_is_anything_then_is_read_or_refused(data):
    report = RankReport(rank=1, run_id="run", name="n", host="127.0.0.1", port=1, row_shapes={"x": (2,)})
    text = data.draw(st.text(max_size=20) | mutated(report.to_text().encode()).map(lambda one: one.decode("latin-1")))
    try:
        assert isinstance(RankReport.from_text(text), RankReport)
    except ProtocolError:
        return


@given(message=mutated_message(PeerHello(rank=1, world_size=2, purpose="data", host="h").to_message()))
def test_hello_of_a_peer_when_it_is_anything_then_is_read_or_refused(message):
    try:
        hello = PeerHello.of(message)
    except ProtocolError:
        return
    assert type(hello.rank) is type(hello.world_size) is int


@given(data=st.data())
def test_notice_when_it_is_anything_then_is_read_or_incomplete_or_refused(data):
    notice = ControlMessage(ControlKind.LOST, 7, "rank 3 is gone", 3).to_bytes()
    received = bytearray(data.draw(mutated(notice) | st.binary(max_size=60)))
    before = len(received)
    try:
        found = take_notice(received)
    except ProtocolError:
        return
    assert (found is None) == (len(received) == before)


@given(data=st.data())
def test_operation_when_another_rank_s_request_is_anything_then_is_the_same_or_refused(data):
    operation = Operation(3, "allreduce float32[4]", Deadline(10, "An operation"))
    request = data.draw(st.binary(min_size=len(operation.request), max_size=len(operation.request)))
    assume(request != operation.request)
    with pytest.raises(ProtocolError):
        operation.check(request, 0, 1)


class Called:
    """An object whose unpickling would be noticed."""

    calls = 0

    def __reduce__(self):
        return (noticed, ())


def noticed():
    Called.calls += 1


@given(data=st.data())
def test_object_when_its_proof_is_not_that_of_a_rank_then_is_not_unpickled(data):
    def seal(sender, content):
        return hmac.digest(TOKEN, bytes([sender]) + content, "sha256")

    array = sealed(pickle.dumps(Called()), seal, 1)
    damaged = data.draw(mutated(array.tobytes()))
    assume(damaged != array.tobytes())
    before = Called.calls
    with pytest.raises(AuthenticationError):
        opened(np.frombuffer(damaged, np.uint8), seal, 1)
    with pytest.raises(AuthenticationError):
        opened(array, seal, 2)
    assert Called.calls == before


@given(data=st.data())
def test_handshake_when_the_other_side_says_anything_then_nobody_gets_in(data):
    for make in (client_handshake, server_handshake):
        handshake = make(TOKEN, "run")
        step = next(handshake)
        with pytest.raises((AuthenticationError, ProtocolError)):
            while True:
                valid = b"elephant/auth/1\n".ljust(step.receive, b"\0")[: step.receive]
                said = data.draw(mutated(valid).map(lambda one, step=step: one.ljust(step.receive, b"\0")))
                step = handshake.send(said[: step.receive])


@given(data=st.data())
def test_handshake_when_it_repeats_a_recorded_one_then_nobody_gets_in(data):
    client, server = client_handshake(TOKEN, "run"), server_handshake(TOKEN, "run")
    hello, _ = next(client).send, next(server)
    answer = server.send(hello).send
    proof = client.send(answer).send
    other = server_handshake(TOKEN, "run")
    next(other)
    other.send(hello)
    with pytest.raises(AuthenticationError):
        other.send(data.draw(st.sampled_from([proof, answer[-32:], bytes(32)])))


def test_message_when_a_field_is_nested_deeply_then_is_refused_with_little_memory():
    nested = b"[" * 100_000 + b"]" * 100_000
    text = b'{"fields":{"rank":' + nested + b'},"arrays":[],"kind":"Alive"}'
    frame = with_right_checksum(
        frame_of(Message("Alive", {"rank": 0}))[:8] + len(text).to_bytes(4, "little") + bytes(12), HEADER_BYTES
    )
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="manifest in JSON"):
            decode(frame + text, Limits())
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


@example(fields={"rank": 0, "purpose": "data"})
@given(fields=mutated_fields({"rank": 1, "world_size": 2, "purpose": "data", "host": "h"}))
def test_hello_when_its_fields_are_anything_then_the_error_is_short(fields):
    fields["more"] = "x" * 5000
    with pytest.raises(ProtocolError) as caught:
        PeerHello.of(Message("hello", fields))
    assert len(str(caught.value)) < 2000
