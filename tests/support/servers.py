"""Real server processes for tests, and those who talk to them."""

import time

import numpy as np

from elephant.config import Timeouts
from elephant.net.deadline import Deadline
from elephant.net.stream import connect
from elephant.parameter_server.client import ParameterServerClient
from elephant.parameter_server.control_client import ControlClient
from elephant.parameter_server.layout import Layout, ServerSpec
from elephant.parameter_server.process import ServerProcess, listening_sockets, shard_specs
from elephant.parameter_server.protocol import CONTEXT, WELCOME_BYTES, ClientHello, RequestHeader, RequestKind, Role

TOKEN = b"0123456789abcdef-right"
RUN = "run"
# A little more than two stripes, and one variable that does not fill its last 16 values.
LAYOUT = Layout([("kernel", (1024, 600)), ("bias", (37,))])
TIMEOUTS = Timeouts(connect_s=30.0, collective_s=60.0)


class Serving:
    """Servers of one fit, and whoever talks to them."""

    token = TOKEN

    def __init__(
        self, layout=LAYOUT, *, count=1, values=None, state=None, iterations=0, slots=(), token=TOKEN, **options
    ):
        self.layout, self.token = layout, token
        self.notes = []
        self._opened = []
        spec = ServerSpec(run_id=RUN, layout=layout, first_value=0, num_values=layout.num_values, **options)
        values = layout.zeros() if values is None else values
        self.processes = []
        try:
            specs, sockets = shard_specs(spec, count), listening_sockets("127.0.0.1", 0, count)
            for part, sock in zip(specs, sockets, strict=True):
                cut = slice(part.first_value, part.first_value + part.num_values)
                own = [slot[cut] for slot in slots]
                first = state if part.num_state_values else None
                process = ServerProcess(
                    part, sock, token, values[cut], own, iterations, first, note=self.notes.append
                )  # fmt: skip
                self.processes.append(process)
        except BaseException:
            self.close()
            raise

    @property
    def process(self):
        return self.processes[0]

    @property
    def addresses(self):
        return [process.address for process in self.processes]

    def worker(self, partition=0, attempt=1, **options):
        options = {"timeouts": TIMEOUTS, "layout": self.layout, "token": self.token, **options}
        worker = ParameterServerClient(self.addresses, run_id=RUN, partition=partition, attempt=attempt, **options)
        self._opened.append(lambda: worker.close(finished=False))
        return worker

    def control(self):
        control = ControlClient(self.addresses, token=self.token, run_id=RUN, layout=self.layout, timeouts=TIMEOUTS)
        self._opened.append(control.close)
        return control

    def raw(self):
        """Returns an authenticated socket that has not said HELLO."""
        context = CONTEXT.format(run_id=RUN)
        sock = connect(self.addresses[0], TOKEN, context, Deadline(30, "Connecting in a test")).detach()
        sock.settimeout(30)
        self._opened.append(sock.close)
        return sock

    def registered(self, partition=0, attempt=1):
        """Returns an authenticated socket that has said HELLO for a worker."""
        sock = self.raw()
        hello = ClientHello(
            role=Role.WORKER, digest=self.layout.digest, codec="", first_value=0, num_values=self.layout.num_values
        ).to_bytes()
        header = RequestHeader(kind=RequestKind.HELLO, partition=partition, attempt=attempt, payload_bytes=len(hello))
        sock.sendall(header.to_bytes() + hello)
        receive(sock, 60 + WELCOME_BYTES)
        return sock

    def push_bytes(self, update, step, **fields):
        """Returns a whole push as it travels."""
        payload = update.tobytes()
        header = RequestHeader(kind=RequestKind.PUSH, step=step, payload_bytes=len(payload), **fields)
        return header.to_bytes() + payload

    def close(self):
        for close in reversed(self._opened):
            close()
        for process in self.processes:
            process.close()


def receive(sock, count):
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError(f"ended after {len(data)} of {count} bytes")
        data += piece
    return data


def until(condition, what, seconds=30):
    """Waits for something that another process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.02)


def whole_numbers(layout, seed):
    """Updates whose sums float32 holds exactly, in any order."""
    flat = layout.zeros()
    for view in layout.views(flat):
        view[...] = np.random.default_rng(seed).integers(-8, 9, view.shape)
    return flat
