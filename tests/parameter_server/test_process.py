"""The life of a server's process: its start, its ends, and its returns."""

import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
import psutil
import pytest
from leaks import nothing_left_behind as nothing_left_behind
from servers import LAYOUT, RUN, TIMEOUTS, TOKEN, until, whole_numbers

from elephant.config import Timeouts
from elephant.errors import ClusterError, ConfigurationError, NetworkError, PositionLost, ServerFailedError
from elephant.net.addresses import listening_socket
from elephant.parameter_server.client import ParameterServerClient
from elephant.parameter_server.layout import ServerSpec
from elephant.parameter_server.process import MAX_RESTARTS, ServerProcess, listening_sockets

ADD = {"name": "add"}
LOWEST_PORT = pathlib.Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")


def gone(process_id):
    return not psutil.pid_exists(process_id) or psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE


def test_server_when_started_then_loads_no_framework_and_hides_the_token(serve):
    process = psutil.Process(serve().process.process_id)
    libraries = " ".join(mapping.path for mapping in process.memory_maps())
    assert not any(name in libraries for name in ("tensorflow", "pyarrow", "torch"))
    assert TOKEN.hex() not in " ".join(process.cmdline()) + str(process.environ())
    assert os.getsid(process.pid) == process.pid


def test_server_when_interrupted_then_goes_on(serve):
    serving = serve(rule=ADD)
    os.kill(serving.process.process_id, signal.SIGINT)
    time.sleep(0.3)
    serving.worker().push(LAYOUT.zeros(), step=1)
    assert serving.process.restarts == 0


def test_server_when_closed_then_leaves_nothing(serve):
    serving = serve()
    process_id, address = serving.process.process_id, serving.process.address
    serving.process.close()
    serving.process.close()
    assert gone(process_id)
    listening_socket(*address).close()


@pytest.mark.parametrize("signal_number", [signal.SIGSTOP, signal.SIGKILL])
def test_close_when_the_process_is_stopped_or_dying_then_ends_it(serve, signal_number):
    serving = serve()
    process_id = serving.process.process_id
    os.kill(process_id, signal_number)
    serving.process.close()
    assert gone(process_id)


def test_two_servers_when_on_one_machine_then_do_not_meet(serve):
    one, other = serve(rule=ADD), serve(rule=ADD)
    one.worker().push(LAYOUT.zeros() + 1, step=1)
    assert not other.control().fetch().values.any()


def test_fixed_port_when_used_twice_in_a_row_then_works_and_when_taken_says_what_to_do():
    [first] = listening_sockets("127.0.0.1", 0, 1)
    port = first.getsockname()[1]
    with pytest.raises(ClusterError, match=rf"listen on 127\.0\.0\.1:{port}.*in use.*port=0"):
        listening_sockets("127.0.0.1", port, 1)
    first.close()
    spec = ServerSpec(run_id=RUN, layout=LAYOUT, first_value=0, num_values=LAYOUT.num_values)
    for _ in range(2):
        [sock] = listening_sockets("127.0.0.1", port, 1)
        with ServerProcess(spec, sock, TOKEN, LAYOUT.zeros()) as server:
            assert server.address == ("127.0.0.1", port)
            worker = ParameterServerClient(
                [server.address], token=TOKEN, run_id=RUN, layout=LAYOUT, partition=0, attempt=1, timeouts=TIMEOUTS
            )
            worker.pull(LAYOUT.zeros())
        worker.close(finished=False)


def test_second_of_two_ports_when_taken_then_the_first_is_free_again():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] - 1
        with pytest.raises(ClusterError, match=rf"127\.0\.0\.1:{port + 1}"):
            listening_sockets("127.0.0.1", port, 2)
    listening_socket("127.0.0.1", port).close()


def test_address_when_it_is_not_of_this_machine_then_says_which_settings_name_it():
    with pytest.raises(ClusterError, match=r"listen on 240\.0\.0\.1:0.*spark\.driver\.bindAddress"):
        listening_sockets("240.0.0.1", 0, 1)


@pytest.mark.skipif(
    not LOWEST_PORT.exists() or LOWEST_PORT.read_text().strip() == "0", reason="everybody may use all ports here"
)
def test_port_when_it_is_not_for_everybody_then_says_to_choose_another():
    # What Python imports to resolve a name may not be for everybody to read.
    socket.getaddrinfo("127.0.0.1", 0)
    before = os.geteuid()
    if not before:
        os.seteuid(65534)
    try:
        with pytest.raises(ClusterError, match=r"listen on 127\.0\.0\.1:1\..*below 1024.*port=0"):
            listening_sockets("127.0.0.1", 1, 1)
    finally:
        os.seteuid(before)


def test_server_when_it_is_lost_and_has_no_snapshot_then_says_so_without_a_traceback(tmp_path):
    spec = ServerSpec(
        run_id=RUN, layout=LAYOUT, first_value=0, num_values=LAYOUT.num_values, snapshot_folder=str(tmp_path)
    )
    [sock] = listening_sockets("127.0.0.1", 0, 1)
    with ServerProcess(spec, sock, TOKEN, LAYOUT.zeros(), note=lambda text: None) as server:
        for path in tmp_path.glob("*/*"):
            path.unlink()
        os.kill(server.process_id, signal.SIGKILL)
        until(lambda: server.failure is not None, "the server is given up")
        assert "Expected a whole snapshot in" in server.failure and "Traceback" not in server.failure


def test_rule_that_does_not_exist_when_started_then_the_error_has_its_last_lines(serve):
    with pytest.raises(ClusterError, match=r"exited with 1\. Its last lines: [\s\S]*expected one of add, "):
        serve(rule={"name": "nonsense"})


def test_slots_that_the_rule_does_not_have_when_given_then_the_error_says_so(serve):
    with pytest.raises(ClusterError, match="slots: expected 0 for the rule"):
        serve(rule=ADD, slots=[LAYOUT.zeros()])


def test_snapshots_by_time_then_come_without_being_asked_for_and_only_when_something_changed(serve):
    serving = serve(rule=ADD, snapshot_seconds=0.2)
    worker, control, out = serving.worker(), serving.control(), LAYOUT.zeros()
    time.sleep(0.6)
    assert control.statistics()["snapshots"] == 1
    worker.push(whole_numbers(LAYOUT, 1), step=1)
    until(lambda: control.statistics()["snapshots"] == 2, "a snapshot")
    os.kill(serving.process.process_id, signal.SIGKILL)
    worker.pull(out)
    assert np.array_equal(out, whole_numbers(LAYOUT, 1))


def test_values_of_another_length_when_given_then_raise():
    spec = ServerSpec(run_id=RUN, layout=LAYOUT, first_value=0, num_values=LAYOUT.num_values)
    [sock] = listening_sockets("127.0.0.1", 0, 1)
    with sock, pytest.raises(ConfigurationError, match="expected the shapes"):
        ServerProcess(spec, sock, TOKEN, np.zeros(5, np.float32))


PARENT = """
import sys, time
sys.path[:0] = {path!r}
from servers import Serving
serving = Serving()
print(serving.process.process_id, flush=True)
time.sleep(300)
"""


stopped_too = pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell of a parent's end")


@pytest.mark.parametrize(
    ("signal_number", "stopped"),
    [(signal.SIGKILL, False), (signal.SIGTERM, False), pytest.param(signal.SIGKILL, True, marks=stopped_too)],
)
def test_parent_when_it_dies_then_the_server_ends_and_removes_its_snapshots(signal_number, stopped):
    source = PARENT.format(path=[path for path in sys.path if path])
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as parent:
        server = int(parent.stdout.readline())
        if stopped:
            os.kill(server, signal.SIGSTOP)
            until(lambda: psutil.Process(server).status() == psutil.STATUS_STOPPED, "a stopped server")
        parent.send_signal(signal_number)
        parent.wait(30)
    until(lambda: gone(server), "the end of the server")
    prefix = f"elephant-server-{parent.pid}-"
    until(lambda: not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(prefix)], "its tidying")


def test_server_when_killed_then_returns_on_its_port_from_the_beginning_without_a_snapshot(serve):
    values, update, out = whole_numbers(LAYOUT, 1), whole_numbers(LAYOUT, 2), LAYOUT.zeros()
    serving = serve(rule=ADD, values=values)
    worker = serving.worker()
    before = worker.push_pull(update, out, step=1)
    os.kill(serving.process.process_id, signal.SIGKILL)
    with pytest.raises(PositionLost, match="repeat from step 1 on") as caught:
        worker.push(update, step=2)
    assert caught.value.step == 0
    reply = worker.pull(out)
    assert reply.modified and reply.version > before.version and np.array_equal(out, values)
    assert serving.process.restarts == 1 and serving.process.failure is None
    assert "was killed (signal 9)" in serving.notes[0]


def test_server_when_frozen_then_is_ended_and_returns(serve):
    serving = serve(rule=ADD, heartbeat_s=3.0)
    worker = serving.worker()
    worker.push(LAYOUT.zeros() + 1, step=1)
    process = psutil.Process(serving.process.process_id)
    process.send_signal(signal.SIGSTOP)
    # Until it is, it may well answer.
    until(lambda: process.status() == psutil.STATUS_STOPPED, "a frozen server")
    try:
        worker.push(LAYOUT.zeros() + 2, step=2)
    except PositionLost as lost:
        # Its first snapshot was from before the first push.
        for step in range(lost.step + 1, 3):
            worker.push(LAYOUT.zeros() + step, step=step)
    out = LAYOUT.zeros()
    worker.pull(out)
    assert np.array_equal(out, LAYOUT.zeros() + 3)
    assert serving.process.restarts == 1
    until(lambda: serving.notes, "a note")
    assert "nothing was heard of it for 3 s" in serving.notes[0]


def test_server_when_killed_after_a_snapshot_then_goes_on_from_it_with_all_it_had(serve):
    rule = {"name": "sgd", "learning_rate": 0.5, "momentum": 0.5}
    serving = serve(rule=rule, snapshot_updates=1, num_state_values=1, max_refused=3)
    worker, control, out = serving.worker(attempt=3), serving.control(), LAYOUT.zeros()
    worker.average_state(np.array([5.0]), 2)
    bad = LAYOUT.zeros()
    bad[0] = np.nan
    worker.push(bad, step=1)
    for step in (2, 3):
        worker.push(whole_numbers(LAYOUT, step), step=step)
    control.set_rate(0.25)
    until(lambda: control.statistics()["snapshots"] >= 2, "a snapshot")
    worker.close(finished=True)
    before, had = control.fetch(), control.statistics()
    os.kill(serving.process.process_id, signal.SIGKILL)
    after, said = control.fetch(), control.statistics()
    assert np.array_equal(after.values, before.values) and np.array_equal(after.slots[0], before.slots[0])
    assert (after.iterations, after.state) == (before.iterations, before.state) == (2, [5.0])
    assert (said["refused"], said["positions"], said["server_restarts"]) == (1, {"0": 3}, 1)
    assert said["staleness"] == had["staleness"] == {"0": 1, "1": 1}
    # A push that is not finite is received as well.
    assert said["bytes_in"] >= 3 * 4 * LAYOUT.num_values
    again = serving.worker(attempt=4)
    assert again.position == 3 and again.pull(out).rate == 0.25
    with pytest.raises(ConnectionError, match="after attempt 2"):
        serving.worker(attempt=2)


def test_iterations_when_the_server_returns_then_are_those_before_the_fit_and_its_updates(serve):
    schedule = {"schedule": "piecewise_constant_decay", "boundaries": [6], "values": [1.0, 0.25]}
    serving = serve(rule={"name": "sgd", "learning_rate": schedule}, iterations=5, snapshot_updates=1)
    worker, control = serving.worker(), serving.control()
    for step in (1, 2):
        worker.push(whole_numbers(LAYOUT, step), step=step)
    worker.close(finished=True)
    before = control.fetch()
    os.kill(serving.process.process_id, signal.SIGKILL)
    after, said = control.fetch(), control.statistics()
    assert (said["server_restarts"], said["updates"], said["iterations"], after.iterations) == (1, 2, 7, 7)
    assert np.array_equal(after.values, before.values)
    # The schedule goes on where it was.
    update, out = whole_numbers(LAYOUT, 3), LAYOUT.zeros()
    assert serving.worker(attempt=2).push_pull(update, out, step=3).rate == 0.25
    assert np.array_equal(out, before.values - np.float32(0.25) * update)


def test_rate_and_stop_when_the_server_returns_then_are_told_again(serve):
    serving = serve(rule={"name": "sgd", "learning_rate": 0.5})
    control = serving.control()
    control.set_rate(0.125)
    control.stop()
    os.kill(serving.process.process_id, signal.SIGKILL)
    control.remind()
    reply = serving.worker().pull(LAYOUT.zeros())
    assert reply.rate == 0.125 and reply.stop


def test_server_when_lost_too_often_then_says_why_and_clients_give_up(serve):
    serving = serve()
    worker = serving.worker(timeouts=Timeouts(connect_s=3, collective_s=30))
    for number in range(MAX_RESTARTS):
        process_id = serving.process.process_id
        os.kill(process_id, signal.SIGKILL)
        until(lambda number=number: serving.process.restarts == number + 1, "a restart")
    os.kill(serving.process.process_id, signal.SIGKILL)
    until(lambda: serving.process.failure, "the end of restarts")
    assert re.search(r"5 times in the 10 minutes before: .*was killed \(signal 9\)", serving.process.failure)
    began = time.monotonic()
    with pytest.raises(NetworkError, match="Connecting to the parameter server on 127"):
        worker.push(LAYOUT.zeros(), step=1)
    assert time.monotonic() - began < 30


def test_server_when_its_losses_are_far_apart_then_always_returns(serve, monkeypatch):
    monkeypatch.setattr("elephant.parameter_server.process.MAX_RESTARTS", 1)
    monkeypatch.setattr("elephant.parameter_server.process.RESTARTS_WITHIN_S", 0.0)
    serving = serve()
    for number in (1, 2, 3):
        os.kill(serving.process.process_id, signal.SIGKILL)
        until(lambda number=number: serving.process.restarts == number, "a restart")
    serving.worker().pull(LAYOUT.zeros())


def test_finished_worker_when_the_server_is_killed_later_then_has_lost_nothing(serve):
    serving, update = serve(rule=ADD, num_partitions=2), whole_numbers(LAYOUT, 1)
    worker, control = serving.worker(1), serving.control()
    worker.push(update, step=1)
    worker.close(finished=True)
    os.kill(serving.process.process_id, signal.SIGKILL)
    assert np.array_equal(control.fetch().values, update)


def test_finished_worker_when_no_snapshot_would_ever_be_due_then_is_in_one(serve):
    serving = serve(rule=ADD, snapshot_seconds=float("inf"))
    worker, control = serving.worker(), serving.control()
    worker.push(whole_numbers(LAYOUT, 1), step=1)
    worker.close(finished=True)
    # The first one is of the beginning.
    assert control.statistics()["snapshots"] == 2


def test_finished_worker_when_the_server_was_restored_before_then_has_to_repeat(serve):
    serving, update = serve(rule=ADD), whole_numbers(LAYOUT, 1)
    worker = serving.worker()
    worker.push(update, step=1)
    os.kill(serving.process.process_id, signal.SIGKILL)
    with pytest.raises(PositionLost):
        worker.close(finished=True)
    worker.push(update, step=1)
    worker.close(finished=True)
    assert np.array_equal(serving.control().fetch().values, update)


def test_server_when_it_has_no_descriptor_left_then_ends_the_fit_and_says_which_limit_it_is(serve):
    serving = serve(rule=ADD)
    worker = serving.worker()
    resource.prlimit(serving.process.process_id, resource.RLIMIT_NOFILE, (3, 3))
    with socket.create_connection(serving.process.address):
        until(lambda: "ulimit -n" in (serving_failure(worker) or ""), "the reason")


def serving_failure(worker):
    try:
        worker.pull(LAYOUT.zeros())
    except ServerFailedError as error:
        return str(error)


def test_disk_when_full_then_training_goes_on_and_failures_are_counted(serve, caplog):
    serving = serve(rule=ADD, snapshot_updates=1)
    control, worker = serving.control(), serving.worker()
    until(lambda: control.statistics()["snapshots"] == 1, "the first snapshot")
    resource.prlimit(serving.process.process_id, resource.RLIMIT_FSIZE, (1000, 1000))
    for step in (1, 2, 3):
        worker.push(whole_numbers(LAYOUT, step), step=step)
        until(lambda step=step: control.statistics()["snapshot_failures"] >= step, "a failed snapshot")
    worker.close(finished=True)
    # One for each push, and one for the worker that finished: a failure is not tried again at once.
    assert control.statistics()["snapshot_failures"] == 4
    assert np.array_equal(control.fetch().values, np.sum([whole_numbers(LAYOUT, step) for step in (1, 2, 3)], axis=0))
    until(lambda: "could not be written" in caplog.text, "the warning")
    assert caplog.text.count("could not be written") == 1
    assert serving.process.restarts == 0
