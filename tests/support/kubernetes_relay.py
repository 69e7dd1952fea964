"""What the mock server of Kubernetes' API lacks of a real one: server-side apply, and that a new pod is pending.

Spark makes a driver's service and files by the first, and relies on the second. A relay stands before the server. It
makes a creation or a replacement of each apply, and hands on everything else as it is, watches (websockets) among it.
"""

import json
import re
import socket
import socketserver
import threading

_TIMEOUT_S = 60.0
_HEAD_BYTES = 1 << 16
_APPLY = "\r\ncontent-type: application/apply-patch+yaml"
_PENDING = {"status": {"phase": "Pending"}}


class KubernetesRelay(socketserver.ThreadingTCPServer):
    """The relay, from ``with`` to the end of the block.

    Args:
        host: A `network_namespaces.Host`: where it listens, on the host's address.
        upstream: Address and port of the server, on the same host.
        exists: Whether the server has an object, by the path of its address.

    Attributes:
        url: ``http://address:port``.
    """

    daemon_threads = True
    # Watches go on until the server ends.
    block_on_close = False

    def __init__(self, host, upstream, exists):
        self.host, self.upstream, self.exists = host, upstream, exists
        with host.entered():
            super().__init__((host.address, 0), _Relayed)
        self.url = f"http://{host.address}:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, name="test-kubernetes-relay", args=(0.1,))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self._thread.join(_TIMEOUT_S)
        self.server_close()


class _Relayed(socketserver.BaseRequestHandler):
    """One request, or one watch."""

    def handle(self):
        head, body = _read(self.request)
        if not head:
            return
        method, path, _ = head.split(" ", 2)
        if _APPLY in head.lower():
            path = path.partition("?")[0]
            method, path = ("PUT", path) if self.server.exists(path) else ("POST", path.rpartition("/")[0])
            head = _head(method, path)
        if method == "POST" and path.endswith("/pods"):
            body = json.dumps({**_PENDING, **json.loads(body)}).encode()
            head = _head(method, path)
        if "\r\nupgrade:" not in head.lower():
            # One request for each connection: the next one may have to be changed, too.
            head = re.sub(r"\r\n(connection|content-length):[^\r]*", "", head, flags=re.IGNORECASE)
            head += f"\r\nConnection: close\r\nContent-Length: {len(body)}"
        with self.server.host.entered():
            upstream = socket.create_connection(self.server.upstream, timeout=_TIMEOUT_S)
        with upstream:
            upstream.sendall(head.encode() + b"\r\n\r\n" + body)
            upstream.settimeout(None)
            sending = threading.Thread(target=_copy, args=(self.request, upstream), daemon=True)
            sending.start()
            _copy(upstream, self.request)


def _head(method, path):
    return f"{method} {path} HTTP/1.1\r\nHost: kubernetes\r\nContent-Type: application/json"


def _read(connection):
    """Returns the head of a request without the empty line that ends it, and the body; nothing where none comes."""
    got = b""
    while b"\r\n\r\n" not in got:
        more = connection.recv(_HEAD_BYTES)
        if not more:
            return "", b""
        got += more
    head, body = got.split(b"\r\n\r\n", 1)
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    while length and len(body) < int(length[1]):
        body += connection.recv(_HEAD_BYTES)
    return head.decode(), body


def _copy(source, sink):
    """Hands on what comes until one of both ends is closed, and closes the other one."""
    try:
        while more := source.recv(_HEAD_BYTES):
            sink.sendall(more)
    except OSError:
        pass
    finally:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
