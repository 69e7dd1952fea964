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


@pytest.fixture(scope="session")
def server():
    missing = missing_for_connect()
    if missing:
        pytest.skip(f"Spark Connect: {missing}")
    with ConnectServer(2) as running:
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


@pytest.fixture
def client(clients, tmp_path):
    """Runs one function of `connect_clients` to its end, and returns what it has printed."""
    output = tmp_path / "client.txt"

    def run(name, *arguments):
        told = {"command": [name, *map(str, arguments)], "folder": str(tmp_path), "output": str(output)}
        clients.stdin.write(f"{json.dumps(told)}\n")
        clients.stdin.flush()
        answered, _, _ = select.select([clients.stdout], [], [], CLIENT_S)
        said = output.read_text() if output.exists() else ""
        if not answered:
            end_with_children([clients])
        assert answered and clients.stdout.readline() == "0\n", said[-10000:]
        return output.read_text()

    return run
