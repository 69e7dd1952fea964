"""What HELLO settles between one client and the server, for all of its requests."""

from __future__ import annotations

from dataclasses import dataclass

from elephant.compression import Codec
from elephant.errors import NetworkError
from elephant.parameter_server.layout import ServerSpec
from elephant.parameter_server.protocol import ClientHello, Lengths, Role, Welcome
from elephant.parameter_server.push_log import Entry
from elephant.parameter_server.wire_codec import check_encoding, encoded_length, pull_codec, push_codec


class MismatchError(NetworkError):
    """What a client expects of this server is not what it keeps."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Who is at the other end, and how its values travel.

    Args:
        role: A worker, or the driver.
        partition: Whose updates a worker pushes.
        attempt: Which attempt at that partition it is.
        lengths: The legal lengths of payloads.
        push_codec: Decodes pushes; None takes them as they are.
        pull_codec: Encodes pulls; None sends them as they are.
    """

    role: Role
    partition: int
    attempt: int
    lengths: Lengths
    push_codec: Codec | None
    pull_codec: Codec | None

    @property
    def is_worker(self) -> bool:
        """Whether it pushes, and is waited for."""
        return self.role is Role.WORKER


def open_session(hello: ClientHello, *, partition: int, attempt: int, spec: ServerSpec, num_slots: int) -> Session:
    """Returns the session of a client that said HELLO.

    Raises:
        MismatchError: It means another part, or another model, than this server keeps.
    """
    _check(hello, partition, spec)
    pushed, pulled = push_codec(hello.codec or None), pull_codec(hello.codec or None)
    return Session(
        role=hello.role,
        partition=partition,
        attempt=attempt,
        lengths=lengths_of(hello, num_slots, spec.num_state_values, spec.num_partitions),
        push_codec=pushed,
        pull_codec=pulled,
    )


def lengths_of(hello: ClientHello, num_slots: int, num_state_values: int, num_partitions: int) -> Lengths:
    """Returns the legal lengths of payloads; both sides work them out from HELLO and its reply."""
    codec = hello.codec or None
    return Lengths(
        push=encoded_length(push_codec(codec), hello.num_values),
        pull=encoded_length(pull_codec(codec), hello.num_values),
        whole=4 * hello.num_values * (1 + num_slots) + 8 * num_state_values,
        state=8 * num_state_values,
        num_partitions=num_partitions,
    )


def welcome(entry: Entry, spec: ServerSpec, *, num_slots: int, incarnation: int) -> Welcome:
    """Returns the answer to HELLO."""
    return Welcome(
        step=entry.step,
        call=entry.call,
        highest_call=entry.highest_call,
        num_slots=num_slots,
        num_state_values=spec.num_state_values,
        first_value=spec.first_value,
        num_values=spec.num_values,
        num_partitions=spec.num_partitions,
        incarnation=incarnation,
    )


def _check(hello: ClientHello, partition: int, spec: ServerSpec) -> None:
    if hello.digest != spec.layout.digest:
        raise MismatchError(
            f"Expected a model of the driver's shapes (digest {spec.layout.digest}). Received: a worker whose "
            f"model has other shapes (digest {hello.digest}). Build the same model on the driver and on executors."
        )
    if (hello.first_value, hello.num_values) != (spec.first_value, spec.num_values):
        raise MismatchError(
            f"Expected a client of {spec.num_values} values from {spec.first_value} on. Received: one of "
            f"{hello.num_values} from {hello.first_value} on. Name the servers in the order of their parts."
        )
    try:
        check_encoding(hello.codec or None)
    except ValueError as error:
        raise MismatchError(str(error)) from error
    if hello.role is Role.WORKER and partition >= spec.num_partitions:
        raise MismatchError(f"Expected a partition below {spec.num_partitions}. Received: {partition}.")
