"""What a server's process is told through its standard input, and how it answers.

::

    8 bytes    length of the manifest (little-endian)
    manifest   JSON: spec, token, descriptor of the listening socket, folder, incarnation, iterations, slots, state
    arrays     values, each slot, state: raw, little-endian; none of them where the server is to restore a snapshot

The token goes no other way: arguments and environment can be read by other processes.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from elephant.errors import DataError
from elephant.net.frames import raw_view
from elephant.parameter_server import snapshot
from elephant.parameter_server.encoding import aligned_vector
from elephant.parameter_server.snapshot import Image
from elephant.parameter_server.spec import ServerSpec

READY = "elephant parameter server is ready"
BEAT = "elephant parameter server lives"
logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class Startup:
    """How a server begins.

    Args:
        spec: What to keep.
        token: The job's random token.
        listener_fd: The listening socket that the process inherits.
        folder: Where its snapshots are.
        incarnation: How often it was started before. A server that was goes on from its last snapshot.
        iterations: Updates that the optimizer has made before.
        num_slots: Slots that follow; none leaves them to the rule.
        ledger: By partition, in text: the last step that was settled in an earlier fit, its last call, and the highest
            call of any step.
    """

    spec: ServerSpec
    token: bytes = field(repr=False)
    listener_fd: int
    folder: str
    incarnation: int = 0
    iterations: int = 0
    num_slots: int = 0
    ledger: dict[str, Sequence[int]] = field(default_factory=dict)

    @property
    def restores(self) -> bool:
        """Whether it goes on from a snapshot, and no arrays follow."""
        return self.incarnation > 0


def write(pipe: BinaryIO, startup: Startup, arrays: Sequence[np.ndarray] = ()) -> None:
    """Tells a process how to begin.

    Raises:
        BrokenPipeError: It has ended.
    """
    values = {**{name: getattr(startup, name) for name in startup.__dataclass_fields__}}
    values.update(spec=startup.spec.to_json(), token=startup.token.hex())
    text = json.dumps(values).encode()
    pipe.write(_LENGTH.pack(len(text)) + text)
    for array in arrays:
        pipe.write(raw_view(array))
    pipe.flush()


def read(pipe: Any) -> tuple[Startup, Image]:
    """Returns how to begin and what with.

    Args:
        pipe: An unbuffered binary file.

    Raises:
        ValueError: The pipe was closed before all was told.
        DataError: There is no snapshot to restore.
    """
    head = bytearray(_LENGTH.size)
    snapshot.fill(pipe, memoryview(head))
    text = bytearray(_LENGTH.unpack(head)[0])
    snapshot.fill(pipe, memoryview(text))
    values = json.loads(text)
    values.update(spec=ServerSpec.from_json(values["spec"]), token=bytes.fromhex(values["token"]))
    startup = Startup(**values)
    if startup.restores:
        return startup, restore(startup)
    vectors = [aligned_vector(startup.spec.num_values) for _ in range(1 + startup.num_slots)]
    state = np.empty(startup.spec.num_state_values)
    for array in (*vectors, state):
        snapshot.fill(pipe, raw_view(array))
    entries = {
        int(partition): {"step": step, "call": call, "highest_call": highest}
        for partition, (step, call, highest) in startup.ledger.items()
    }
    image = Image(
        values=vectors[0], slots=tuple(vectors[1:]), state=state, iterations=startup.iterations, entries=entries
    )
    return startup, image


def restore(startup: Startup) -> Image:
    """Returns the last snapshot that is whole; the one of the beginning where there is no later one.

    Raises:
        DataError: There is none at all.
    """
    folder = Path(startup.folder)
    snapshot.tidy(folder)
    try:
        return snapshot.read_image(folder, snapshot.LATEST, startup.spec)
    except DataError as error:
        if snapshot.exists(folder, snapshot.LATEST):
            logger.warning(
                "The last snapshot cannot be used: %s The server goes back to its beginning. Workers repeat what they "
                "have pushed, except those that have finished: run the fit again.",
                error,
            )
        return snapshot.read_image(folder, snapshot.INITIAL, startup.spec)
