"""One Spark Connect server for all tests of this folder, and clients of it in processes of their own.

A remote session and a classic one do not live in one Python process. So each test runs a
function of `connect_clients` in a process of its own, forked from one that has imported all that clients need; it
checks for itself and prints what it has seen.
"""

import json
import select
import subprocess

import pytest
from connect_server import ConnectServer, client_command, missing_for_connect
from spark_daemons import end_with_children

CLIENT_S = 540.0
CANARY = bytes(range(64, 96))


@pytest.fixture(scope="session")
def canary():
    """A secret that the server's executors have in their environment, and whoever sees that."""
    return CANARY


@pytest.fixture(scope="session")
def server():
    missing = missing_for_connect()
    if missing:
        pytest.skip(f"Spark Connect: {missing}")
    # Where the search for tokens finds it.
    with ConnectServer(2, conf={"spark.executorEnv.CANARY": CANARY.hex()}) as running:
        yield running


@pytest.fixture(scope="session")
def clients(server):
    """The process that clients are forked from."""
    command, environment = client_command(server)
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


class Client:
    """Runs functions of `connect_clients`, one after the other, each in a process that is forked for it."""

    def __init__(self, clients, folder):
        self.clients = clients
        self._folder, self._output = folder, folder / "client.txt"

    def __call__(self, name, *arguments):
        """Runs one function to its end, and returns what it has printed."""
        self.begin(name, *arguments)
        status, said = self.ended()
        assert status == "0\n", said[-10000:]
        return said

    def begin(self, name, *arguments):
        command = [name, *map(str, arguments)]
        told = {"command": command, "folder": str(self._folder), "output": str(self._output)}
        self.clients.stdin.write(f"{json.dumps(told)}\n")
        self.clients.stdin.flush()

    def ended(self):
        """Waits for the end of the function, and returns its exit status and what it has printed."""
        answered, _, _ = select.select([self.clients.stdout], [], [], CLIENT_S)
        said = self._output.read_text() if self._output.exists() else ""
        if not answered:
            end_with_children([self.clients])
        assert answered, said[-10000:]
        return self.clients.stdout.readline(), self._output.read_text()


@pytest.fixture
def client(clients, tmp_path):
    """What runs functions of `connect_clients`."""
    return Client(clients, tmp_path)
