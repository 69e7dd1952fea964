"""Arrow chunks between a Python worker of Spark and a process of its own that computes on them.

Columns go through memory that both processes map, so that they are copied once; all else goes through
a socket between the two. The worker answers when the other side asks for more: one of them works at a time.
"""

from __future__ import annotations

import mmap
import os
import pickle  # noqa: S403  (both ends are processes of one task, connected by an inherited socket)
import socket
import struct
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from elephant.errors import ElephantError, TrainingError

# From the columns of each chunk to the results, of which there may be one for each chunk, or more, or fewer.
ChunkFunction = Callable[[Iterator[list[pa.Array]]], Iterable[Any]]

_LENGTH = struct.Struct("!Q")
_GROWTH = 1 << 20
_BEGIN, _CHUNK, _END, _MORE, _ITEM, _DONE, _ERROR = range(7)


class HungUpError(Exception):
    """The process at the other end has ended. Functions and chunks raise errors of their own, none like this one."""


class OtherProcessTraceback(Exception):  # noqa: N818  (where an error was raised, and none itself)
    """Traceback of the process at the other end, as text: the cause of an error that was raised there."""


class ChunkChannel:
    """One end of the connection."""

    def __init__(self, connection: socket.socket, sending: int, receiving: int) -> None:
        self._connection = connection
        self._descriptors: tuple[int, ...] = (sending, receiving)
        self._sending: mmap.mmap | None = None
        self._received: tuple[int, pa.Buffer] = (0, pa.py_buffer(b""))

    @classmethod
    def pair(cls) -> tuple[ChunkChannel, list[int]]:
        """Returns this end, and the descriptors of the other one in the order of the arguments."""
        ours, theirs = socket.socketpair()
        there, back = (os.memfd_create(name) for name in ("elephant-chunks", "elephant-results"))
        return cls(ours, there, back), [theirs.detach(), os.dup(back), os.dup(there)]

    def close(self) -> None:
        """Ends the connection; the memory goes with its last user."""
        self._connection.close()
        descriptors, self._descriptors = self._descriptors, ()
        # Each mapping has a descriptor of its own.
        self._sending, self._received = None, (0, pa.py_buffer(b""))
        for descriptor in descriptors:
            os.close(descriptor)

    def results(self, function: ChunkFunction, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[Any]:
        """Yields the results of the other end's function on the chunks.

        Raises:
            HungUpError: The other process has ended.
            Exception: What the function raises.
        """
        remaining = iter(chunks)
        self._send(_BEGIN, function)
        while True:
            kind, content = self._receive()
            if kind == _MORE:
                columns = next(remaining, None)
                self._send(_END) if columns is None else self._send_arrays(_CHUNK, columns)
            elif kind == _ITEM:
                yield content
            elif kind == _ERROR:
                error, trace = content
                raise error from (OtherProcessTraceback(f"\n{trace}") if trace else None)
            else:
                return

    def serve(self) -> None:
        """Runs one function after the other, until the other end hangs up."""
        while True:
            try:
                _, function = self._receive()
                for item in function(self._chunks()):
                    self._send_item(item)
            except HungUpError:
                return
            except Exception as error:
                self._send_error(error)
            else:
                self._send(_DONE)

    def _chunks(self) -> Iterator[list[pa.Array]]:
        while True:
            self._send(_MORE)
            kind, content = self._receive()
            if kind == _END:
                return
            yield content

    def _send_item(self, item: Any) -> None:
        if isinstance(item, list) and item and all(isinstance(part, pa.Array) for part in item):
            self._send_arrays(_ITEM, item)
        else:
            self._send(_ITEM, item)

    def _send_error(self, error: Exception) -> None:
        # Those of elephant are about what was passed, and say all in their text.
        trace = "" if isinstance(error, ElephantError) else "".join(traceback.format_exception(error))
        try:
            # Some can be pickled, and made again from what came of it by nobody.
            pickle.loads(pickle.dumps(error))  # noqa: S301  (see the import)
        except Exception:
            error = TrainingError(f"{type(error).__name__}: {error}")
        self._send(_ERROR, (error, trace))

    def _send(self, kind: int, content: Any = None) -> None:
        block = pickle.dumps((kind, content), protocol=pickle.HIGHEST_PROTOCOL)
        try:
            self._connection.sendall(_LENGTH.pack(len(block)))
            self._connection.sendall(block)
        except OSError as error:
            raise HungUpError("the other process has ended") from error

    def _receive(self) -> tuple[int, Any]:
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        kind, content = pickle.loads(self._exactly(size))  # noqa: S301  (see the import)
        if kind in (_CHUNK, _ITEM) and isinstance(content, _InMemory):
            content = self._arrays(content)
        return kind, content

    def _exactly(self, size: int) -> bytearray:
        block = bytearray(size)
        view = memoryview(block)
        while view:
            try:
                received = self._connection.recv_into(view)
            except OSError as error:
                raise HungUpError("the other process has ended") from error
            if received == 0:
                raise HungUpError("the other process has ended")
            view = view[received:]
        return block

    def _send_arrays(self, kind: int, arrays: Sequence[pa.Array]) -> None:
        batch = pa.RecordBatch.from_arrays(list(arrays), [str(place) for place in range(len(arrays))])
        counting = pa.MockOutputStream()
        _write(batch, counting)
        size = counting.size()
        memory = self._room(size)
        _write(batch, pa.FixedSizeBufferWriter(pa.py_buffer(memory)))
        self._send(kind, _InMemory(size, kind == _ITEM))

    def _room(self, size: int) -> mmap.mmap:
        if self._sending is None or len(self._sending) < size:
            length = -(-size // _GROWTH) * _GROWTH
            os.ftruncate(self._descriptors[0], length)
            self._sending = mmap.mmap(self._descriptors[0], length)
        return self._sending

    def _arrays(self, in_memory: _InMemory) -> list[pa.Array]:
        mapped, memory = self._received
        if mapped < in_memory.size:
            mapped = os.fstat(self._descriptors[1]).st_size
            memory = pa.py_buffer(mmap.mmap(self._descriptors[1], mapped, access=mmap.ACCESS_READ))
            self._received = (mapped, memory)
        part = memory.slice(0, in_memory.size)
        if in_memory.outlives:
            # The next ones take the same place.
            part = pa.py_buffer(part.to_pybytes())
        return list(pa.ipc.open_stream(part).read_next_batch().columns)


class _InMemory:
    """Columns that stand in the shared memory.

    Args:
        outlives: Whether the receiver keeps them longer than until it asks for more.
    """

    def __init__(self, size: int, outlives: bool) -> None:
        self.size = size
        self.outlives = outlives


def _write(batch: pa.RecordBatch, sink: Any) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
