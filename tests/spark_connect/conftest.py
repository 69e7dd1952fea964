"""One Spark Connect server for all tests of this folder, and clients of it in processes of their own.

A remote session and a classic one do not live in one Python process. So each test runs a
function of `connect_clients` in a new process, which checks for itself and prints what it has seen.
"""

import subprocess

import pytest
from connect_server import ConnectServer, client_command, missing_for_connect

CLIENT_S = 540.0


@pytest.fixture(scope="session")
def server():
    missing = missing_for_connect()
    if missing:
        pytest.skip(f"Spark Connect: {missing}")
    with ConnectServer(2) as running:
        yield running


@pytest.fixture
def client(server, tmp_path):
    """Runs one function of `connect_clients` to its end, and returns what it has printed."""

    def run(name, *arguments):
        command, environment = client_command(server, name, *arguments)
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CLIENT_S, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    return run
