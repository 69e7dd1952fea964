"""The first message of a client, and the answer: who it is, what it expects, and where its partition stands."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from elephant.errors import ProtocolError
from elephant.parameter_server.protocol import Role, member_of

_HELLO = struct.Struct("<B7x16s16sQQ")
_WELCOME = struct.Struct("<QIIIQQQII")
# More than any rule keeps: a client takes memory for each.
_MOST_SLOTS = 8


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The payload of a client's first message.

    Args:
        role: Who it is.
        digest: The digest of its layout.
        codec: The name of the encoding, empty for none.
        first_value: Where the part of the vector begins that it expects here.
        num_values: The length of that part.
    """

    role: Role
    digest: str
    codec: str
    first_value: int
    num_values: int

    def to_bytes(self) -> bytes:
        """Returns the bytes that it travels as."""
        return _HELLO.pack(self.role, self.digest.encode(), self.codec.encode(), self.first_value, self.num_values)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> Hello:
        """Returns what ``to_bytes`` was made of; raises ProtocolError for anything else."""
        role, digest, codec, first_value, num_values = _HELLO.unpack(data)
        return cls(
            role=member_of(Role, "role", role), digest=_text(digest), codec=_text(codec),
            first_value=first_value, num_values=num_values,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The payload of the server's first reply.

    Args:
        step: Last step of the client's partition that was applied, zero for none.
        call: ... and the last call of that step.
        highest_call: The highest call of any of its steps.
        num_slots: Slot vectors that the server keeps for its optimizer.
        num_state_values: Length of the averaged state.
        first_value: Where the server's part of the vector begins.
        num_values: The length of that part.
        num_partitions: Workers of the fit.
        incarnation: How often the server has been started again.
    """

    step: int
    call: int
    highest_call: int
    num_slots: int
    num_state_values: int
    first_value: int
    num_values: int
    num_partitions: int
    incarnation: int

    def to_bytes(self) -> bytes:
        """Returns the bytes that it travels as."""
        return _WELCOME.pack(*(getattr(self, name) for name in self.__dataclass_fields__))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> Welcome:
        """Returns what ``to_bytes`` was made of; raises ProtocolError where no server says that."""
        welcome = cls(**dict(zip(cls.__dataclass_fields__, _WELCOME.unpack(data), strict=True)))
        if welcome.num_slots > _MOST_SLOTS or not welcome.num_partitions:
            raise ProtocolError(
                f"Expected at most {_MOST_SLOTS} slots, of one partition or more. Received: {welcome.num_slots} slots, "
                f"of {welcome.num_partitions} partitions."
            )
        return welcome

    @property
    def place(self) -> tuple[int, int]:
        """Step and call of the last push that was applied."""
        return self.step, self.call

    @property
    def whole_step(self) -> int:
        """The last step of which no call is missing, as far as one can tell from the steps before it."""
        return self.step if self.call >= self.highest_call else self.step - 1


def _text(data: bytes) -> str:
    try:
        return data.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        raise ProtocolError(f"Expected a name in ASCII. Received: {data!r}.") from None
