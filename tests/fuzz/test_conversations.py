"""Servers of a fit: whatever a peer that has the token says, in any order, they answer or hang up, and stay whole."""

import contextlib
import socket
import threading
import types

import numpy as np
import pytest
from event_samples import EVENTS
from hypothesis import given
from hypothesis import strategies as st
from mutated import EDGES, frame_of, mutated, mutated_message, with_right_checksum
from tiers import in_tiers

from elephant.config import Timeouts
from elephant.errors import NetworkError
from elephant.gossip.node import GossipNode
from elephant.gossip.peers import CHOICES
from elephant.gossip.weights import WEIGHTS
from elephant.monitor import events
from elephant.monitor.channel import Channel
from elephant.net import renewal
from elephant.net.deadline import Deadline
from elephant.net.frames import Message
from elephant.net.stream import Listener, Stream, connect
from elephant.parameter_server.layout import Layout, ServerSpec
from elephant.parameter_server.protocol import HEADER_BYTES, ClientHello, RequestHeader, RequestKind, Role, Status
from elephant.parameter_server.request_handler import BufferPool, RequestService
from elephant.parameter_server.server import ParameterServer
from elephant.parameter_server.store import SnapshotImage
from elephant.parameter_server.tables import WRITTEN, TablesWanted, contribution_bytes, lookup_bytes
from elephant.tables.part_server import BYE, HELLO, PUSH, READ, STEP, PartServer, tables_context
from elephant.tables.stack import StackPart, TableContribution, stacks_of
from elephant.tables.table import ROWS, TableSpec

TOKEN = b"0123456789abcdef-right"
LAYOUT = Layout([("kernel", (4, 3)), ("bias", (3,))])
ENDED_S = 20.0
# Of a server that waits for a peer within a message, or for others.
STALL_S = 0.2


# What clients say of connections that they make again: here nobody has made one, or nobody takes it.
MOVES = [Message(renewal.GOES_ON, {"number": "1"}), Message(renewal.HAS_MOVED, {"number": "1"})]


@pytest.fixture(scope="module", autouse=True)
def quick_moves():
    """Has servers wait for connections that go on for others no longer than these tests can."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(renewal, "_THERE_WITHIN_S", STALL_S)
        patched.setattr(renewal, "MOVED_WITHIN_S", STALL_S)
        yield


def speak(address, context, messages):
    """Says messages over one proven connection, and reads what is answered until the other side hangs up."""
    sock = connect(address, TOKEN, context, Deadline(ENDED_S, "a test")).detach()
    with sock:
        sock.settimeout(ENDED_S)
        try:
            sock.sendall(b"".join(map(frame_of, messages)))
            # Not closed, which would take back what is unread.
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        except TimeoutError:
            pytest.fail("It has neither hung up nor answered.")
        except OSError:
            # It has hung up before it had read all.
            pass


# Parameter server


# Of the learning rates that are set: updates of 1e30, a dozen of them, stay finite with it.
_MOST_RATE = 1e6


def parameter_server(**options):
    spec = ServerSpec(
        run_id="run", layout=LAYOUT, first_value=0, num_values=LAYOUT.num_values, num_state_values=2,
        rule={"name": "sgd", "learning_rate": 0.5}, num_partitions=2, stall_s=STALL_S, **options,
    )  # fmt: skip
    return ParameterServer(spec, SnapshotImage(values=LAYOUT.zeros(), state=np.zeros(2)))


def service_of(server):
    snapshotter = types.SimpleNamespace(request=lambda wait_s: None)
    listener = types.SimpleNamespace(turned_away={})
    return RequestService(server, BufferPool(LAYOUT.num_values, stall_s=STALL_S), snapshotter, listener)


HELLO_OF = {
    role: ClientHello(role=role, digest=LAYOUT.digest, codec="", first_value=0, num_values=LAYOUT.num_values).to_bytes()
    for role in Role
}


USUAL = {
    Role.WORKER: [RequestKind.PUSH, RequestKind.PUSH_PULL, RequestKind.PULL, RequestKind.STATE],
    Role.CONTROL: [RequestKind.SET_RATE, RequestKind.PULL, RequestKind.FETCH, RequestKind.KEEP, RequestKind.OPEN],
}


@st.composite
def requests(draw, role):
    """Returns bytes of one request, whose fields are often those of a valid one."""
    kind = draw(st.sampled_from(USUAL[role]) | st.sampled_from([*RequestKind]))
    legal = {RequestKind.HELLO: 64, RequestKind.STATE: 16}
    pushes = (RequestKind.PUSH, RequestKind.PUSH_PULL)
    length = draw(st.just(4 * LAYOUT.num_values if kind in pushes else legal.get(kind, 0)) | st.sampled_from([0, 7]))
    if kind is RequestKind.HELLO:
        payload = draw(st.sampled_from([*HELLO_OF.values()]).flatmap(lambda one: st.just(one) | mutated(one)))
        payload = payload.ljust(length, b"\0")[:length]
    else:
        payload = np.full(length // 4 + 1, draw(st.sampled_from([1.0, np.nan, np.inf, 1e30])), np.float32).tobytes()
        payload = payload[:length]
    numbers = st.integers(0, 3) | st.sampled_from([edge for edge in EDGES if 0 <= edge < 2**32])
    header = RequestHeader(
        kind=kind, partition=draw(numbers), call=draw(numbers), attempt=draw(numbers), step=draw(numbers),
        version=draw(numbers), rate=draw(st.sampled_from([0.0, 1.0, -1.0, np.nan, np.inf, 1e300])),
        status=draw(st.sampled_from([Status.REQUEST] * 9 + [Status.OK])), payload_bytes=len(payload),
    ).to_bytes()  # fmt: skip
    return header + payload


@st.composite
def conversations(draw):
    """Returns the bytes of a few requests, most often after a right HELLO, and now and then damaged."""
    role = draw(st.sampled_from([*Role]))
    said = draw(st.lists(requests(role), max_size=5))
    if draw(st.integers(0, 3)):
        hello = HELLO_OF[role]
        partition, attempt = draw(st.integers(0, 1) | st.integers(0, 9)), draw(st.integers(0, 2))
        header = RequestHeader(kind=RequestKind.HELLO, partition=partition, attempt=attempt, payload_bytes=64)
        said.insert(0, header.to_bytes() + hello)
    content = b"".join(said)
    return content if draw(st.integers(0, 2)) else with_right_checksum(draw(mutated(content)), HEADER_BYTES)


def converse(service, content):
    """Has a service serve a connection over which so many bytes come before it ends, until the service is done."""
    ours, theirs = socket.socketpair()
    stream = Stream(ours, "a peer")
    failed = []

    def serve():
        try:
            service.serve(stream)
        except NetworkError:
            pass
        except Exception as error:
            failed.append(error)

    serving = threading.Thread(target=serve, name="test-serve")
    serving.start()
    with theirs:
        theirs.settimeout(ENDED_S)
        with contextlib.suppress(OSError):
            theirs.sendall(content)
            theirs.shutdown(socket.SHUT_WR)
            while theirs.recv(1 << 16):
                pass
    serving.join(ENDED_S)
    assert not serving.is_alive(), "it serves a connection that has ended"
    if failed:
        raise failed[0]


@pytest.mark.parametrize("options", [{}, {"rounds_from": 0}, {"max_staleness": 1}], ids=["free", "rounds", "bounded"])
@given(said=st.lists(conversations(), min_size=1, max_size=3))
def test_parameter_server_when_peers_say_anything_then_it_hangs_up_and_keeps_finite_weights(options, said):
    server, rates = parameter_server(**options), [0.0]
    service, set_rate = service_of(server), server.set_rate
    server.set_rate = lambda rate: (rates.append(rate), set_rate(rate))
    for content in said:
        converse(service, content)
    # Whoever may set a learning rate may have the weights diverge.
    diverges = max(abs(rate) for rate in rates if not np.isnan(rate)) > _MOST_RATE
    assert np.isfinite(server.store.values).all() or diverges
    assert np.isfinite(server.averages.average()).all()
    assert server.failure is None and not server.clock.live()


# Tables

SPECS = [
    TableSpec(num_rows=9, width=2, rule="lazy_adam", seed=1),
    TableSpec(num_rows=5, width=2, rule="lazy_adam", seed=2),
    TableSpec(num_rows=7, width=3, rule="sgd", seed=3),
]
STACKS = stacks_of(SPECS, 2)
NUMBERS = [np.array([0, 2], np.uint32) for _ in STACKS]
GRADIENTS = [np.ones((2, stack.specs[0].width), np.float32) for stack in STACKS]
TABLE_MESSAGES = [
    Message(HELLO, {"rank": 0}),
    Message(HELLO, {"rank": 1}),
    Message(STEP, {"round": 0, "tables": []}, tuple(NUMBERS)),
    Message(STEP, {"round": 1, "tables": [0, 1, 2]}, (*NUMBERS, *GRADIENTS, *NUMBERS)),
    Message(PUSH, {"round": 1, "tables": [0, 1, 2]}, (*NUMBERS, *GRADIENTS)),
    Message(PUSH, {"round": 2, "tables": [0, 2]}, (*NUMBERS, *GRADIENTS)),
    Message(READ, {"table": 0, "round": 0, "name": ROWS, "first": 1, "count": 3}),
    Message(READ, {"table": 2, "round": 1, "name": ROWS, "first": 0, "count": 2**62}),
    Message(BYE),
    *MOVES,
]


TABLED = Layout([("kernel", (4, 3))], SPECS)
OF_PUSH = contribution_bytes(STACKS, len(SPECS), TableContribution((0, 1, 2), NUMBERS, GRADIENTS)).tobytes()
TABLE_REQUESTS = {
    RequestKind.PUSH_PULL: (4 * TABLED.num_values, OF_PUSH),
    RequestKind.PUSH: (4 * TABLED.num_values, OF_PUSH),
    RequestKind.LOOKUP: (0, lookup_bytes(STACKS, NUMBERS).tobytes()),
    RequestKind.FETCH: (0, TablesWanted(places=[None] * len(SPECS)).to_bytes()),
    RequestKind.KEEP: (0, TablesWanted(places=[None] * len(SPECS), action=WRITTEN).to_bytes()),
}


@st.composite
def table_conversations(draw):
    """Returns the bytes of a right HELLO and a few requests about tables, of which some are damaged or too long."""
    role = draw(st.sampled_from([*Role]))
    hello = ClientHello(
        role=role, digest=TABLED.digest, codec="", first_value=0, num_values=TABLED.num_values
    ).to_bytes()
    said = [RequestHeader(kind=RequestKind.HELLO, attempt=1, payload_bytes=len(hello)).to_bytes() + hello]
    for step in range(1, draw(st.integers(1, 4)) + 1):
        kind = draw(st.sampled_from([*TABLE_REQUESTS]))
        fixed, of_tables = TABLE_REQUESTS[kind]
        of_tables = draw(st.just(of_tables) | mutated(of_tables))
        length = fixed + len(of_tables) + draw(st.sampled_from([0, 0, 0, 1, 2**20, 2**40]))
        header = RequestHeader(kind=kind, attempt=1, step=step, payload_bytes=length).to_bytes()
        said.append(header + bytes(fixed) + of_tables)
    return b"".join(said)


@given(said=st.lists(table_conversations(), min_size=1, max_size=3))
def test_parameter_server_when_peers_say_anything_about_tables_then_it_hangs_up_and_keeps_finite_rows(said):
    spec = ServerSpec(
        run_id="run", layout=TABLED, first_value=0, num_values=TABLED.num_values, parts=2,
        rule={"name": "sgd", "learning_rate": 0.5}, num_partitions=2, stall_s=STALL_S,
    )  # fmt: skip
    server = ParameterServer(spec, SnapshotImage(values=TABLED.zeros(), state=np.empty(0)))
    service = service_of(server)
    for content in said:
        converse(service, content)
    assert all(np.isfinite(array).all() for array in server.tables.arrays)
    assert server.failure is None and not server.clock.live()


@given(
    said=st.lists(
        st.lists(st.sampled_from(TABLE_MESSAGES).flatmap(mutated_message), max_size=5).map(
            lambda messages: [TABLE_MESSAGES[0], *messages]
        ),
        min_size=1,
        max_size=3,
    )
)
def test_part_server_when_peers_say_anything_then_it_answers_or_hangs_up_and_keeps_its_tables(said):
    stack_parts = [StackPart(stack) for stack in STACKS]
    before = [part.take(numbers) for part, numbers in zip(stack_parts, NUMBERS, strict=True)]
    server = PartServer(stack_parts, 2, Listener.bind("127.0.0.1"), token=TOKEN, run_id="run", wait_s=0.1)
    try:
        for messages in said:
            speak(server.address, tables_context("run"), messages)
    finally:
        server.close()
    for part, rows, numbers in zip(stack_parts, before, NUMBERS, strict=True):
        after = part.take(numbers)
        assert after.shape == rows.shape
        # A round needs both ranks.
        if not any(
            message.kind == HELLO and message.fields.get("rank") == 1 for messages in said for message in messages
        ):
            np.testing.assert_array_equal(after, rows)


# Gossip


def gossip_messages():
    fields = {"partition": 1, "attempt": 0, "share": 1.0}
    arrays = (np.ones(3, np.float32), np.zeros(2, np.int64))
    offers = [Message("Offer", fields, arrays), Message("Confirm"), Message("Read"), Message("Reply", fields, arrays)]
    return [*offers, *MOVES]


@pytest.mark.parametrize("algorithm", in_tiers(sorted(WEIGHTS), fast=["sgp"], slow="the same node, other averages"))
@given(said=st.lists(st.lists(st.sampled_from(gossip_messages()).flatmap(mutated_message), max_size=4), max_size=3))
def test_gossip_node_when_peers_say_anything_then_it_hangs_up_and_keeps_finite_weights(algorithm, said):
    weights = WEIGHTS[algorithm](np.ones(3), np.zeros(2))
    with GossipNode(
        weights, (0, 0), Listener.bind("127.0.0.1"), token=TOKEN, run_id="run", peer_choice=CHOICES[algorithm](0, 0),
        state=np.zeros(1), exchange_s=0.1,
    ) as node:  # fmt: skip
        for messages in said:
            speak(node.address, "gossip/run", messages)
        node.leave()
    held = weights.held()
    assert np.isfinite(held.values).all() and 0 < held.share < np.inf


# The driver's channel


@given(
    said=st.lists(
        st.lists(st.sampled_from([*map(events.to_message, EVENTS), *MOVES]).flatmap(mutated_message), max_size=5),
        max_size=3,
    ),
    begins_again=st.booleans(),
)
def test_channel_when_peers_say_anything_then_tells_events_or_that_it_was_no_event(said, begins_again):
    with Channel(
        bind_host="127.0.0.1", token=TOKEN, run_id="run", timeouts=Timeouts(heartbeat_s=5), begins_again=begins_again
    ) as channel:
        for messages in said:
            speak(("127.0.0.1", channel.port), "run", messages)
        with contextlib.suppress(NetworkError):
            while channel.next_event(0.05) is not None:
                pass
