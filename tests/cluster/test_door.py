"""A door of the driver's, at which executors knock."""

import socket

from elephant.cluster.door import Door, knock_function


def test_door_when_knocked_at_then_opens_to_its_token_alone():
    with Door("127.0.0.1", "127.0.0.1") as door:
        assert knock_function(door.address, door.token, 10.0)() == ""
        assert knock_function(door.address, b"\0" * 32, 10.0)() == "another program answers there"
        assert knock_function(door.address, door.token, 10.0)() == ""
    assert knock_function(door.address, door.token, 10.0)().startswith("ConnectionRefusedError")


def test_door_when_whoever_listens_says_nothing_then_the_knock_ends_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = knock_function(silent.getsockname(), b"\0" * 32, 0.2)()
    assert said.startswith("TimeoutError")
