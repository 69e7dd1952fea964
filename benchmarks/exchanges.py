"""What moves arrays between the ranks of one machine: elephant's collectives, those of others, and plain sockets.

Each class is one contender of `allreduce.py`. A contender prepares an array of some
size, fills it, and runs its operation on it; every rank of it is a process of its
own, pinned to a core.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from team import Member

HOST = "127.0.0.1"
TIMEOUT_S = 300.0
# With these the duplex stream is the fastest that was seen: what it receives stays in the cache.
_SOCKET_BYTES = 4 << 20
_PIECE_BYTES = 1 << 18


class Exchange(ABC):
    """An operation on a flat float32 array of each rank.

    Args:
        member: The rank's place in its team; the constructor may exchange addresses.
        stack: What ends with the process.
    """

    @abstractmethod
    def __init__(self, member: Member, stack: contextlib.ExitStack) -> None: ...

    @abstractmethod
    def prepare(self, size: int) -> None:
        """Takes an array of ``size`` bytes, in place of the one before."""

    @abstractmethod
    def fill(self, value: float) -> None:
        """Sets all elements."""

    @abstractmethod
    def run(self) -> None:
        """The operation that is timed."""

    def result(self) -> np.ndarray | None:
        """Returns the array, or None when the operation does not sum."""
        return None


class _InPlace(Exchange):
    """An exchange on a numpy array."""

    def prepare(self, size: int) -> None:
        self.array = np.zeros(size // 4, np.float32)

    def fill(self, value: float) -> None:
        self.array.fill(value)

    def result(self) -> np.ndarray | None:
        return self.array


class Elephant(_InPlace):
    """`elephant.collective`, with the transport that it chooses for ranks of one host."""

    transport = "auto"
    # Of arrays up to so many bytes, None for the threshold of the package.
    rounds_bytes: int | None = None

    def __init__(self, member: Member, stack: contextlib.ExitStack) -> None:
        from elephant.collective import form_collective
        from elephant.collective.operation import AlgorithmThresholds
        from elephant.net import Listener

        sizes = None if self.rounds_bytes is None else AlgorithmThresholds(rounds_bytes=self.rounds_bytes)
        with Listener.bind(HOST) as listener:
            addresses, tokens = zip(*member.exchange((listener.address, secrets.token_bytes(32))), strict=True)
            collective = form_collective(
                member.rank,
                addresses,
                listener,
                tokens[0],
                "benchmark",
                TIMEOUT_S,
                transport=self.transport,
                thresholds=sizes,
            )
        self._collective = stack.enter_context(collective)

    def run(self) -> None:
        self._collective.allreduce_(self.array)


class ElephantTcp(Elephant):
    """`elephant.collective` over TCP, as between hosts."""

    transport = "tcp"


class ElephantRing(ElephantTcp):
    """The same, round the ring."""

    rounds_bytes = 0


class ElephantRounds(ElephantTcp):
    """The same, in rounds, however long the array is."""

    rounds_bytes = 1 << 40


class Gloo(_InPlace):
    """`torch.distributed` with its Gloo backend."""

    def __init__(self, member: Member, stack: contextlib.ExitStack) -> None:
        import torch
        import torch.distributed as dist

        store = dist.TCPStore(HOST, 0, member.size, True, wait_for_workers=False) if member.rank == 0 else None
        port = member.exchange(store and store.port)[0]
        store = store or dist.TCPStore(HOST, port, member.size, False)
        dist.init_process_group("gloo", store=store, rank=member.rank, world_size=member.size)
        stack.callback(dist.destroy_process_group)
        self._torch, self._dist = torch, dist

    def prepare(self, size: int) -> None:
        super().prepare(size)
        self._tensor = self._torch.from_numpy(self.array)

    def run(self) -> None:
        self._dist.all_reduce(self._tensor)


class TensorFlow(Exchange):
    """TensorFlow's collective operations with the ring of its own, as its distribution strategies run them."""

    def __init__(self, member: Member, stack: contextlib.ExitStack) -> None:
        import tensorflow as tf

        with socket.create_server((HOST, 0)) as free:
            # TensorFlow's server cannot be given a socket: it takes the port a moment later.
            port = free.getsockname()[1]
        workers = [f"{HOST}:{port}" for port in member.exchange(port)]
        cluster = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": workers}), task_type="worker", task_id=member.rank
        )
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster, options)
        self._tf, self._size = tf, member.size
        self._device = f"/job:worker/task:{member.rank}/device:CPU:0"
        self._reduce: Any = None

    def prepare(self, size: int) -> None:
        tf = self._tf
        self._elements = size // 4
        key = tf.constant(self._elements % 2**31)

        @tf.function(input_signature=[tf.TensorSpec([self._elements], tf.float32)])
        def reduce(values: Any) -> Any:
            with tf.device(self._device):
                return tf.raw_ops.CollectiveReduceV2(
                    input=values,
                    group_size=self._size,
                    group_key=7,
                    instance_key=key,
                    ordering_token=[],
                    merge_op="Add",
                    final_op="Id",
                    communication_hint="ring",
                )

        self._reduce = reduce

    def fill(self, value: float) -> None:
        self._values = self._tf.fill([self._elements], np.float32(value))

    def run(self) -> None:
        self._values = self._reduce(self._values)

    def result(self) -> np.ndarray | None:
        return self._values.numpy()


class _Plain(_InPlace):
    """Plain TCP connections round the ranks, each sending to the next one; nothing is added."""

    def __init__(self, member: Member, stack: contextlib.ExitStack) -> None:
        self._rank, self._size = member.rank, member.size
        with socket.create_server((HOST, 0)) as listening:
            addresses = member.exchange(listening.getsockname())
            self._right = stack.enter_context(
                socket.create_connection(addresses[(member.rank + 1) % member.size], TIMEOUT_S)
            )
            listening.settimeout(TIMEOUT_S)
            self._left = stack.enter_context(listening.accept()[0])
        for sock in (self._left, self._right):
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def result(self) -> np.ndarray | None:
        return None

    def _send(self, view: memoryview) -> None:
        self._right.sendall(view)

    def _receive(self, view: memoryview) -> None:
        while len(view):
            view = view[self._receive_some(view) :]

    def _receive_some(self, view: memoryview) -> int:
        count = self._left.recv_into(view[:_PIECE_BYTES], 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError("the other end of the stream is gone")
        return count


class Stream(_Plain):
    """The array from rank 0 to rank 1, one way."""

    def run(self) -> None:
        view = memoryview(self.array).cast("B")
        if self._rank == 0:
            self._send(view)
        elif self._rank == 1:
            self._receive(view)


class Duplex(_Plain):
    """What every rank of a ring must send and receive in an allreduce, both at once: 2 (n - 1) / n of the array."""

    def __init__(self, member: Member, stack: contextlib.ExitStack) -> None:
        super().__init__(member, stack)
        for sock, option in ((self._right, socket.SO_SNDBUF), (self._left, socket.SO_RCVBUF)):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)

    def prepare(self, size: int) -> None:
        super().prepare(2 * (self._size - 1) * size // self._size)
        self._piece = memoryview(bytearray(_PIECE_BYTES))

    def run(self) -> None:
        sender = threading.Thread(target=self._send, args=(memoryview(self.array).cast("B"),), name="duplex-send")
        sender.start()
        missing = self.array.nbytes
        while missing:
            missing -= self._receive_some(self._piece[:missing])
        sender.join()


EXCHANGES: dict[str, type[Exchange]] = {
    "elephant": Elephant,
    "elephant_tcp": ElephantTcp,
    "elephant_ring": ElephantRing,
    "elephant_rounds": ElephantRounds,
    "gloo": Gloo,
    "tensorflow": TensorFlow,
    "stream": Stream,
    "duplex": Duplex,
}


def serve(member: Member, name: str) -> None:
    """The work of a team that is one contender: a turn is (bytes, operations in a row)."""
    with contextlib.ExitStack() as stack:
        exchange = EXCHANGES[name](member, stack)
        prepared = 0
        member.reply("ready")
        for size, burst in member.turns():
            if size != prepared:
                exchange.prepare(size)
                exchange.fill(0)
                prepared = size
                # Touches the memory, lets buffers grow, traces TensorFlow's function.
                exchange.run()
                exchange.run()
            exchange.fill(member.rank + 1)
            interval = member.timed(lambda burst=burst: [exchange.run() for _ in range(burst)])
            _check(exchange.result(), member, burst)
            member.reply(interval)


def _check(array: np.ndarray | None, member: Member, burst: int) -> None:
    expected = member.size * (member.size + 1) / 2 * member.size ** (burst - 1)
    if array is not None and not (array == expected).all():
        raise SystemExit(f"rank {member.rank}: expected the sum {expected} in every element. Received: {array}.")
