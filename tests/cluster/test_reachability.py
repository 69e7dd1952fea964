"""A probe of the driver, to which executors connect."""

import contextlib
import socket
import threading

from elephant.cluster.reachability import ReachabilityProbe, connect_back_function


def test_probe_when_executors_connect_then_it_knows_its_token_alone():
    with ReachabilityProbe("127.0.0.1", "127.0.0.1") as reachability_probe:
        assert connect_back_function(reachability_probe.address, reachability_probe.token, 10.0)() == ""
        assert connect_back_function(reachability_probe.address, b"\0" * 32, 10.0)() == "another program answers there"
        assert connect_back_function(reachability_probe.address, reachability_probe.token, 10.0)() == ""
    assert connect_back_function(reachability_probe.address, reachability_probe.token, 10.0)().startswith(
        "ConnectionRefusedError"
    )


def test_probe_when_strangers_say_nothing_then_others_do_not_wait_for_them():
    with ReachabilityProbe("127.0.0.1", "127.0.0.1") as reachability_probe, contextlib.ExitStack() as strangers:
        for _ in range(20):
            strangers.enter_context(socket.create_connection(reachability_probe.address))
        assert connect_back_function(reachability_probe.address, reachability_probe.token, 2.0)() == ""


def test_connection_when_somebody_listens_in_then_does_not_show_its_token():
    heard, token = [], b"0123456789abcdef" * 2
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen():
            visitor, _ = listener.accept()
            with visitor:
                heard.append(visitor.recv(1000))
                visitor.sendall(bytes(80))
                heard.append(visitor.recv(1000))

        thread = threading.Thread(target=listen)
        thread.start()
        assert connect_back_function(listener.getsockname(), token, 5.0)() == "another program answers there"
        thread.join(10)
    assert len(heard) == 2 and token not in b"".join(heard)


def test_connection_when_whoever_listens_says_nothing_then_ends_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = connect_back_function(silent.getsockname(), b"\0" * 32, 0.2)()
    assert said.startswith("TimeoutError")
