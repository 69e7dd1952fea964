"""Strangers: connections to a listener from somebody who does not know the token, of eight kinds.

As a program, ``python strangers.py COUNT SECONDS HOST:PORT ...`` makes so many to each address, over so many seconds,
unless its standard input ends before; then it prints how many they were.
"""

import contextlib
import os
import random
import socket
import struct
import sys
import threading
import time
import zlib
from collections import Counter, deque

import psutil

from elephant.net.handshake import HELLO_BYTES, PREAMBLE, PROOF_BYTES, client_handshake

KINDS = ("silent", "garbage", "slow", "half a handshake", "replayed", "wrong token", "huge length", "reset")
# Connections of each thread that stay open: more at a time than a listener lets be in a handshake.
_HELD = 48
_WAIT_S = 2.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def listening_addresses(process_ids):
    """Returns the addresses on which processes of this machine listen, Unix sockets and all."""
    found = set()
    for process_id in process_ids:
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(process_id).net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(tuple(connection.laddr))
    return sorted(found)


def huge_frame():
    """Returns the header of a frame that announces all that its fields can say."""
    leading = struct.pack("<4sBBHIQ", b"ELPH", 1, 7, 0, 2**32 - 1, 2**64 - 1)
    return leading + struct.pack("<I", zlib.crc32(leading))


class Strangers:
    """Threads that connect to addresses again and again, a kind after the other, for a ``with`` block.

    Args:
        addresses: Of listeners, in turn.
        count: Connections to each address; the block may end before.
        seconds: Over which they are spread; zero is as fast as they go.

    Attributes:
        made: How many connections of each kind there were.
    """

    def __init__(self, addresses, count, *, seconds=0.0, threads=4, recorded=b""):
        self.made = Counter()
        self._recorded = recorded
        self._turns = [(address, KINDS[turn % len(KINDS)]) for turn in range(count) for address in addresses]
        self._pause_s = seconds * threads / max(len(self._turns), 1)
        self._ended = threading.Event()
        self._changing = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, args=(self._turns[place::threads],), name=f"stranger-{place}")
            for place in range(threads)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self.wait()

    def wait(self, timeout_s=120.0):
        """Waits until all connections were made, or the block is to end."""
        for thread in self._threads:
            thread.join(timeout_s)

    @property
    def total(self):
        """How many connections there were."""
        return sum(self.made.values())

    def _work(self, turns):
        held, begun = deque(), time.monotonic()
        try:
            for number, (address, kind) in enumerate(turns):
                if self._ended.wait(max(begun + number * self._pause_s - time.monotonic(), 0.0)):
                    return
                with contextlib.suppress(OSError):
                    sock = socket.create_connection(address, timeout=_WAIT_S)
                    with self._changing:
                        self.made[kind] += 1
                    if self._behave(sock, kind, held):
                        held.append(sock)
                    else:
                        sock.close()
                if len(held) > _HELD:
                    held.popleft().close()
        finally:
            for sock in held:
                sock.close()

    def _behave(self, sock, kind, held):
        """Does what is of a kind; returns whether the connection stays open."""
        if kind == "garbage":
            sock.sendall(random.randbytes(random.randint(1, 300)))
        elif kind == "huge length":
            sock.sendall(huge_frame() * 4)
        elif kind == "half a handshake":
            sock.sendall(PREAMBLE + bytes(random.randint(0, 31)))
            return True
        elif kind == "wrong token":
            self._shake_hands(sock, client_handshake(os.urandom(32), "run"))
        elif kind == "replayed":
            # A recorded proof, or that of the other side itself.
            sock.sendall(PREAMBLE + bytes(32))
            answer = _received(sock, HELLO_BYTES + PROOF_BYTES)
            sock.sendall(self._recorded[-PROOF_BYTES:] or answer[-PROOF_BYTES:])
        elif kind == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        elif kind == "slow":
            # A byte now, and one whenever another connection is made.
            for place, other in enumerate(list(held)[-4:]):
                with contextlib.suppress(OSError):
                    other.send(PREAMBLE[place : place + 1])
            sock.send(PREAMBLE[:1])
        return kind in ("silent", "slow")

    def _shake_hands(self, sock, handshake):
        step = next(handshake)
        with contextlib.suppress(Exception):
            while True:
                sock.sendall(step.send)
                step = handshake.send(_received(sock, step.receive))


def _received(sock, count):
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("it has hung up")
        data += piece
    return data


def main():
    """Runs the program."""
    count, seconds, *addresses = sys.argv[1:]
    targets = [(host, int(port)) for host, _, port in (address.rpartition(":") for address in addresses)]
    with Strangers(targets, int(count), seconds=float(seconds)) as strangers:
        sys.stdin.read()
    sys.stdout.write(f"{strangers.total}\n")


if __name__ == "__main__":
    main()
