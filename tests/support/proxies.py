"""Proxy between two processes that keeps all it passes on."""

import contextlib
import select
import socket
import threading


class RecordingProxy:
    """Passes connections on to an address.

    Attributes:
        address: Where it listens.
        seen: All bytes that passed, of all connections, in both directions.
    """

    def __init__(self, target):
        self.seen = b""
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self._pieces = []
        self._others = {}
        self._stop_in, self._stop_out = socket.socketpair()
        self._thread = threading.Thread(target=self._pass_on, name="test-proxy")
        self._thread.start()

    def close(self):
        self._stop_out.send(b"!")
        self._thread.join(20)
        self.seen = b"".join(self._pieces)
        for sock in (self._server, self._stop_in, self._stop_out, *self._others):
            sock.close()

    def _pass_on(self):
        while True:
            ready = select.select([self._stop_in, self._server, *self._others], [], [], 20)[0]
            if self._stop_in in ready or not ready:
                return
            for sock in ready:
                if sock is self._server:
                    here, there = self._server.accept()[0], socket.create_connection(self._target, timeout=20)
                    self._others |= {here: there, there: here}
                elif sock in self._others:
                    self._forward(sock, self._others[sock])

    def _forward(self, sock, other):
        with contextlib.suppress(OSError):
            if data := sock.recv(1 << 16):
                self._pieces.append(data)
                other.sendall(data)
                return
        for end in (sock, other):
            self._others.pop(end)
            end.close()


@contextlib.contextmanager
def recording_proxy(target):
    """Opens a proxy for the block; what it has seen can be read afterwards."""
    proxy = RecordingProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
