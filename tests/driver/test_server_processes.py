"""The servers of a fit on the driver's host: real processes, without Spark."""

import os
import signal
import socket
import time

import numpy as np
import pytest
from process_tree import processes_of

from elephant.config import AsynchronousOptions, FitConfig
from elephant.driver.server_processes import DriverServers, ServerPart, parts_of, require_ports
from elephant.errors import ClusterError, ServerFailedError
from elephant.parameter_server.control_client import ControlClient
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.process import listening_sockets
from elephant.timeouts import Timeouts

TOKEN = bytes(range(32))


class Model:
    """What servers need to know of the driver's model: 40 weights, one slot, two statistics."""

    layout = Layout([("kernel", (4, 8)), ("bias", (8,))])
    rule = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "nesterov": False}

    def weights(self):
        return self.layout.pack([np.arange(32.0).reshape(4, 8), np.arange(8.0)])

    def slots(self):
        return [self.layout.pack([np.full((4, 8), 2.0), np.full(8, 3.0)])], 7

    def state(self):
        return np.array([0.25, 0.5])

    def tables(self):
        return []

    def ledgers(self, num_servers):
        return [{} for _ in range(num_servers)]


def parts(mode="asynchronous", **options):
    config = FitConfig(mode=mode, num_workers=3, asynchronous=AsynchronousOptions(**options))
    return parts_of(Model(), config, "run")


def served(*, port=0, **options):
    kept = parts(**options)
    return DriverServers(kept, listening_sockets("127.0.0.1", port, len(kept)), token=TOKEN)


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@pytest.mark.parametrize("count", [1, 2, 3])
def test_servers_when_started_then_keep_the_model_together(count):
    model = Model()
    with served(parameter_servers=count) as servers:
        assert len(set(servers.addresses)) == count
        control = ControlClient(servers.control_addresses, token=TOKEN, run_id="run", layout=model.layout)
        kept = control.fetch()
        control.close()
        assert servers.check() == [] and servers.restarts == 0
    np.testing.assert_array_equal(kept.values, model.weights())
    np.testing.assert_array_equal(kept.slots[0], model.slots()[0][0])
    np.testing.assert_array_equal(kept.state, model.state())
    assert kept.iterations == 7
    assert processes_of("elephant.parameter_server") == []


def test_parts_when_the_model_is_small_then_are_not_more_than_it_has_blocks():
    assert [part.spec.num_values for part in parts(parameter_servers=100)] == [16, 16, 16]
    assert [len(part.state) for part in parts(parameter_servers=2)] == [2, 0]


def test_parts_when_options_are_given_then_say_them():
    (spec,) = (part.spec for part in parts("hogwild", algorithm="dynsgd", max_staleness=4))
    assert (spec.locked, spec.divide_by_staleness, spec.max_staleness, spec.max_refused) == (False, True, 4, 100)
    assert (spec.num_partitions, spec.rule["name"], spec.snapshot_seconds) == (3, "sgd", 30.0)


def test_servers_when_a_port_is_taken_then_say_which_and_leave_nothing(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for start in (lambda: served(port=port), lambda: require_ports("127.0.0.1", port, 1)):
            with pytest.raises(ClusterError, match=f"127.0.0.1:{port}"):
                start()
    assert processes_of("elephant.parameter_server") == []
    require_ports("127.0.0.1", port, 1)
    require_ports("127.0.0.1", 0, 1)


def test_servers_when_closed_then_their_port_can_be_had_again_at_once():
    (port,) = free_ports(1)
    for _ in range(2):
        with served(port=port) as servers:
            assert servers.addresses == (("127.0.0.1", port),)
            socket.create_connection(("127.0.0.1", port)).close()


def until(holds):
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_servers_when_one_is_killed_then_say_so_once_and_have_it_back():
    with served(parameter_servers=2) as servers:
        os.kill(processes_of("elephant.parameter_server")[1].pid, signal.SIGKILL)
        notes = []
        until(lambda: notes.extend(servers.check()) or notes)
        assert len(notes) == 1 and notes[0].startswith("parameter server ") and "started again" in notes[0]
        control = ControlClient(servers.control_addresses, token=TOKEN, run_id="run", layout=Model.layout)
        np.testing.assert_array_equal(control.fetch().values, Model().weights())
        control.close()
        assert servers.restarts == 1 and servers.check() == []


def test_servers_when_one_is_lost_for_good_then_say_why(monkeypatch):
    monkeypatch.setattr("elephant.parameter_server.process.MAX_RESTARTS", 0)
    with served() as servers:
        os.kill(processes_of("elephant.parameter_server")[0].pid, signal.SIGKILL)
        with pytest.raises(ServerFailedError, match="parameter server 0 failed: .*signal 9"):
            until(lambda: servers.check() and False)


def test_control_when_a_server_is_lost_for_good_then_does_not_wait_to_reach_it(monkeypatch):
    monkeypatch.setattr("elephant.parameter_server.process.MAX_RESTARTS", 0)
    with served() as servers:
        control = ControlClient(
            servers.control_addresses,
            token=TOKEN,
            run_id="run",
            layout=Model.layout,
            timeouts=Timeouts(connect_s=600.0),
            require_alive=servers.require_alive,
        )
        os.kill(processes_of("elephant.parameter_server")[0].pid, signal.SIGKILL)
        with pytest.raises(ServerFailedError, match="parameter server 0 failed: .*signal 9"):
            control.remind()
        control.close()


def test_part_when_it_travels_then_is_the_same():
    import pickle

    (part,) = parts()
    copied = pickle.loads(pickle.dumps(part))
    assert isinstance(copied, ServerPart)
    assert copied.spec.to_json() == part.spec.to_json()
    np.testing.assert_array_equal(copied.values, part.values)
