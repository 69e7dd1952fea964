import socket
import threading

import pytest

from elephant.errors import AuthenticationError, ConfigurationError, DeadlineExceededError, PeerLostError, ProtocolError
from elephant.net.deadline import Deadline
from elephant.net.handshake import PREAMBLE, REFUSAL, check_token, client_handshake, perform, proof, server_handshake

TOKEN, OTHER = b"a" * 16, b"b" * 16
NONCE_C, NONCE_S = b"c" * 32, b"s" * 32


def converse(client, server):
    """Runs two handshakes against each other; returns what each ended with, None for success."""
    outcome = {client: "unfinished", server: "unfinished"}
    server_step = next(server)
    client_step = next(client)
    to_server, to_client = client_step.send, server_step.send
    for _ in range(6):
        for side in (server, client):
            if outcome[side] != "unfinished":
                continue
            step = server_step if side is server else client_step
            inbox = to_server if side is server else to_client
            if len(inbox) < step.receive:
                continue
            try:
                coordinator = side.send(inbox[: step.receive])
            except StopIteration:
                outcome[side] = None
                continue
            except Exception as error:
                outcome[side] = error
                continue
            if side is server:
                server_step, to_server, to_client = coordinator, inbox[step.receive :], to_client + coordinator.send
            else:
                client_step, to_client, to_server = coordinator, inbox[step.receive :], to_server + coordinator.send
    return outcome[client], outcome[server]


def test_handshake_with_the_same_token_succeeds_on_both_sides():
    assert converse(client_handshake(TOKEN, "run"), server_handshake(TOKEN, "run")) == (None, None)


@pytest.mark.parametrize(
    "client, server",
    [
        (client_handshake(OTHER, "run"), server_handshake(TOKEN, "run")),
        (client_handshake(TOKEN, "run 1"), server_handshake(TOKEN, "run 2")),
        (client_handshake(TOKEN, "ring/0->1"), server_handshake(TOKEN, "ring/1->0")),
    ],
)
def test_handshake_with_another_token_or_context_fails_on_both_sides(client, server):
    outcomes = converse(client, server)
    assert [type(outcome) for outcome in outcomes] == [AuthenticationError] * 2
    assert "Expected a server that knows this job's token" in str(outcomes[0])
    assert "Expected a client that knows this job's token" in str(outcomes[1])


def test_messages_are_these_bytes():
    client = client_handshake(TOKEN, "run", NONCE_C)
    assert next(client).send == b"elephant/auth/1\n" + NONCE_C
    server = server_handshake(TOKEN, "run", NONCE_S)
    next(server)
    answer = server.send(PREAMBLE + NONCE_C).send
    assert answer[:48] == b"elephant/auth/1\n" + NONCE_S
    assert answer[48:].hex() == "b2baa617073050965ebffdd6db69a4bfe6d7e419284be2e0cf073df4cd57c0f2"
    assert client.send(answer).send == proof(TOKEN, "client", NONCE_C, NONCE_S, "run")


def test_recorded_client_against_a_new_nonce_is_refused():
    recorded = proof(TOKEN, "client", NONCE_C, NONCE_S, "run")
    server = server_handshake(TOKEN, "run")
    next(server)
    server.send(PREAMBLE + NONCE_C)
    with pytest.raises(AuthenticationError):
        server.send(recorded)


def test_servers_own_proof_sent_back_is_refused():
    server = server_handshake(TOKEN, "run")
    next(server)
    answer = server.send(PREAMBLE + NONCE_C).send
    with pytest.raises(AuthenticationError):
        server.send(answer[48:])


def test_recorded_server_against_a_new_nonce_is_refused():
    recorded = PREAMBLE + NONCE_S + proof(TOKEN, "server", NONCE_C, NONCE_S, "run")
    client = client_handshake(TOKEN, "run")
    next(client)
    assert client.send(recorded).send == REFUSAL
    with pytest.raises(AuthenticationError):
        client.send(b"")


def test_another_protocol_is_named_in_the_error():
    client = client_handshake(TOKEN, "run")
    next(client)
    with pytest.raises(ProtocolError, match=r"greets with b'elephant/auth/1\\n'. Received: b'HTTP/1.1 400 Bad'"):
        client.send(b"HTTP/1.1 400 Bad Request\r\n".ljust(80))


@pytest.mark.parametrize("token", [b"", b"short", "a string of sixteen and more", None])
def test_check_token_with_too_little_raises(token):
    with pytest.raises(ConfigurationError, match="at least 16 random bytes"):
        check_token(token)


@pytest.fixture
def sockets():
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
    yield pair
    for sock in pair:
        sock.close()


def test_perform_with_a_wrong_token_raises_on_both_sides(sockets):
    errors = []

    def serve():
        try:
            perform(server_handshake(TOKEN, "run"), sockets[1], Deadline(20, "Test"), "client")
        except AuthenticationError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(AuthenticationError):
        perform(client_handshake(OTHER, "run"), sockets[0], Deadline(20, "Test"), "server")
    thread.join(20)
    assert len(errors) == 1


def test_perform_against_silence_ends_at_the_deadline(sockets):
    with pytest.raises(DeadlineExceededError, match="Greeting did not end within 0.05 s"):
        perform(client_handshake(TOKEN, "run"), sockets[0], Deadline(0.05, "Greeting"), "server")


def test_perform_against_a_closed_connection_raises(sockets):
    sockets[1].close()
    with pytest.raises(PeerLostError):
        perform(server_handshake(TOKEN, "run"), sockets[0], Deadline(20, "Test"), "client")
