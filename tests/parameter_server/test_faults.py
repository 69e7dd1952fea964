"""What goes wrong on the way: clients that die, stop, lie or stall, and servers that die under load."""

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from leaks import nothing_left_behind as nothing_left_behind
from servers import LAYOUT, TIMEOUTS, TOKEN, receive, until, whole_numbers
from tiers import in_tiers

from elephant.errors import PositionLost
from elephant.net import stream, tls
from elephant.net.tls import new_token
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.protocol import (
    HEADER_BYTES,
    TEXT_BYTES,
    RequestHeader,
    RequestKind,
    Status,
    decode_header,
    decode_text,
)

ADD = {"name": "add"}
TOKENS = {"plain": TOKEN, "encrypted": new_token(encryption=True)}
PLAIN_AND_ENCRYPTED = pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)

HALF_PUSH = """
import sys, time
sys.path[:0] = {path!r}
from servers import Serving, LAYOUT
serving = object.__new__(Serving)
serving.layout, serving._opened, serving.processes = LAYOUT, [], []
Serving.addresses = {addresses!r}
sock = serving.registered(attempt=5)
update = LAYOUT.zeros() + 1
data = serving.push_bytes(update, 1)
sock.sendall(data[: len(data) * 3 // 4])
print("half", flush=True)
time.sleep(300)
"""


def half_pusher(serving):
    """Starts a process that sends three quarters of a push."""
    source = HALF_PUSH.format(path=[path for path in sys.path if path], addresses=serving.addresses)
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    if process.stdout.readline().strip() != "half":
        process.kill()
        raise AssertionError("the process did not get as far as half a push")
    return process


def test_client_killed_in_mid_push_then_nothing_of_it_is_applied_and_its_retry_is_exact(serve):
    serving, out = serve(rule=ADD), LAYOUT.zeros()
    with half_pusher(serving) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    until(lambda: serving.control().statistics()["live"] == [], "the end of the connection")
    retry = serving.worker(attempt=6)
    assert retry.position == 0
    retry.pull(out)
    assert not out.any()
    retry.push_pull(whole_numbers(LAYOUT, 1), out, step=1)
    assert np.array_equal(out, whole_numbers(LAYOUT, 1))


def test_clients_stopped_in_mid_push_then_others_get_their_buffers(serve):
    serving = serve(rule=ADD, num_partitions=3)
    stopped = [half_pusher(serving), half_pusher(serving)]
    try:
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        worker = serving.worker(partition=2)
        began = time.monotonic()
        for step in (1, 2, 3):
            worker.push(whole_numbers(LAYOUT, step), step=step)
        assert time.monotonic() - began < 30
        expected = np.sum([whole_numbers(LAYOUT, step) for step in (1, 2, 3)], axis=0)
        assert np.array_equal(serving.control().fetch().values, expected)
    finally:
        for process in stopped:
            process.kill()
            process.communicate(timeout=30)


@PLAIN_AND_ENCRYPTED
def test_client_dropped_for_its_silence_when_it_goes_on_then_its_push_counts_once(serve, token):
    serving = serve(token=token, rule=ADD, num_partitions=3)
    source = PUSHER.format(
        path=[path for path in sys.path if path], addresses=serving.addresses, partition=0, steps=40, token=token
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        others = [serving.worker(partition) for partition in (1, 2)]
        for step in range(1, 6):
            process.send_signal(signal.SIGSTOP)
            # Both together need both buffers: a client that holds one is dropped.
            threads = [
                threading.Thread(target=other.push, args=(LAYOUT.zeros(),), kwargs={"step": step}) for other in others
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
        assert process.communicate(timeout=60)[0].strip() == "done"
    expected = np.sum([whole_numbers(LAYOUT, step) for step in range(1, 41)], axis=0)
    assert np.array_equal(serving.control().fetch().values, expected)


PUSHER = """
import sys
sys.path[:0] = {path!r}
from servers import LAYOUT, RUN, TIMEOUTS, whole_numbers
from elephant.errors import PositionLost
from elephant.parameter_server.client import ParameterServerClient
worker = ParameterServerClient(
    {addresses!r}, token={token!r}, run_id=RUN, layout=LAYOUT, partition={partition}, attempt=1, timeouts=TIMEOUTS
)
print("ready", flush=True)
out = LAYOUT.zeros()
step = worker.position
while True:
    try:
        while step < {steps}:
            step += 1
            worker.push_pull(whole_numbers(LAYOUT, 1000 * {partition} + step), out, step=step)
        worker.close(finished=True)
        break
    except PositionLost as lost:
        step = lost.step
print("done", flush=True)
"""


def test_encrypted_connection_when_its_keys_are_worn_then_is_made_again_and_every_push_counts_once(serve, monkeypatch):
    serving, out = serve(token=new_token(encryption=True), rule=ADD), LAYOUT.zeros()
    worker, dialled, connect = serving.worker(), [], stream.connect
    # In this process; a push is half of it.
    monkeypatch.setattr(tls, "_MOST_BYTES", 5_000_000)
    monkeypatch.setattr(stream, "connect", lambda *args, **options: dialled.append(args) or connect(*args, **options))
    for step in range(1, 13):
        worker.push_pull(whole_numbers(LAYOUT, step), out, step=step)
    assert len(dialled) >= 4
    assert np.array_equal(out, np.sum([whole_numbers(LAYOUT, step) for step in range(1, 13)], axis=0))


@pytest.mark.parametrize(
    "token",
    in_tiers(TOKENS, fast=["plain"], slow="the same pushes; clients that are dropped have encrypted connections, too"),
)
def test_server_killed_again_and_again_while_workers_push_then_every_push_counts_exactly_once(serve, token):
    steps, partitions, count = 60, (0, 1), 2
    serving = serve(token=token, rule=ADD, num_partitions=2, snapshot_updates=7, count=count)
    path = [path for path in sys.path if path]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PUSHER.format(
                path=path, addresses=serving.addresses, partition=partition, steps=steps, token=token
            )],
            stdout=subprocess.PIPE, text=True,
        )
        for partition in partitions
    ]  # fmt: skip
    try:
        for worker in workers:
            worker.stdout.readline()
        for number in range(4):
            time.sleep(0.4)
            process = serving.processes[number % count]
            restarts = process.restarts
            os.kill(process.process_id, signal.SIGKILL)
            until(lambda process=process, before=restarts: process.restarts > before, "a restart")
        for worker in workers:
            assert worker.communicate(timeout=120)[0].strip() == "done"
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate(timeout=30)
    updates = [whole_numbers(LAYOUT, 1000 * each + step) for each in partitions for step in range(1, steps + 1)]
    assert np.array_equal(serving.control().fetch().values, np.sum(updates, axis=0))
    assert sum(process.restarts for process in serving.processes) == 4


def test_snapshot_when_damaged_then_the_server_returns_to_the_beginning_and_the_replay_is_exact(serve):
    serving, out = serve(rule=ADD, snapshot_updates=1), LAYOUT.zeros()
    worker, control = serving.worker(), serving.control()
    worker.push(whole_numbers(LAYOUT, 1), step=1)
    until(lambda: control.statistics()["snapshots"] == 2, "a snapshot")
    [arrays] = [name for name in os.listdir(serving.process._folder) if name.startswith("latest") and "arrays" in name]
    with open(os.path.join(serving.process._folder, arrays), "r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    os.kill(serving.process.process_id, signal.SIGKILL)
    with pytest.raises(PositionLost) as caught:
        worker.push(whole_numbers(LAYOUT, 2), step=2)
    assert caught.value.step == 0
    for step in (1, 2, 3):
        worker.push_pull(whole_numbers(LAYOUT, step), out, step=step)
    assert np.array_equal(out, np.sum([whole_numbers(LAYOUT, step) for step in (1, 2, 3)], axis=0))


def test_push_replayed_by_another_connection_then_is_a_duplicate(serve):
    serving, update = serve(rule=ADD), whole_numbers(LAYOUT, 1)
    recorded = serving.push_bytes(update, 1)
    for expected in (Status.OK, Status.DUPLICATE, Status.DUPLICATE):
        sock = serving.registered()
        sock.sendall(recorded)
        assert decode_header(receive(sock, HEADER_BYTES)).status is expected
    assert np.array_equal(serving.control().fetch().values, update)


def _refusal(sock):
    header = decode_header(receive(sock, HEADER_BYTES))
    assert header.status is Status.ERROR
    text = decode_text(receive(sock, TEXT_BYTES))
    assert sock.recv(1) == b""
    return text


ILLEGAL = [
    (b"GET / HTTP/1.1\r\n".ljust(HEADER_BYTES), r"starts with b'ELPS'. Received: b'GET '"),
    (
        RequestHeader(kind=RequestKind.PUSH, step=1, payload_bytes=1 << 62).to_bytes(),
        "PUSH with .* Received: 4611686018427387904",
    ),
    (RequestHeader(kind=RequestKind.PUSH, step=1, payload_bytes=7).to_bytes(), "PUSH with .* Received: 7 bytes"),
    (RequestHeader(kind=RequestKind.PULL, payload_bytes=1).to_bytes(), "PULL with 0 bytes of payload"),
    (
        RequestHeader(kind=RequestKind.HELLO, payload_bytes=56).to_bytes(),
        "a worker that said HELLO. Received: HELLO",
    ),
    (RequestHeader(kind=RequestKind.STOP).to_bytes(), "a worker that said HELLO. Received: STOP"),
    (RequestHeader(kind=RequestKind.FETCH).to_bytes(), "a worker that said HELLO. Received: FETCH"),
]


def test_message_that_is_not_legal_then_is_refused_before_its_payload_and_others_go_on(serve):
    serving = serve(rule=ADD)
    worker = serving.worker()
    for step, (data, said) in enumerate(ILLEGAL, 1):
        sock = serving.registered()
        sock.sendall(data)
        text = _refusal(sock)
        assert re.search(said, text), text
        worker.push(LAYOUT.zeros(), step=step)


def test_request_before_hello_then_is_refused(serve):
    sock = serve().raw()
    sock.sendall(RequestHeader(kind=RequestKind.PULL).to_bytes())
    assert "a new client, which says HELLO first" in _refusal(sock)


def test_garbage_and_strangers_on_the_port_then_workers_go_on(serve):
    serving = serve(rule=ADD, num_partitions=2)
    address = serving.addresses[0]
    strangers = [socket.create_connection(address, 30) for _ in range(64)]
    idle = [serving.raw() for _ in range(64)]
    registered = [serving.registered() for _ in range(8)]
    half = serving.registered()
    half.sendall(RequestHeader(kind=RequestKind.PULL).to_bytes()[:31])
    with socket.create_connection(address, 30) as garbage:
        garbage.sendall(os.urandom(5000))
        worker, out = serving.worker(partition=1), LAYOUT.zeros()
        for step in (1, 2):
            worker.push_pull(LAYOUT.zeros() + 1, out, step=step)
    assert (out == 2).all() and serving.process.restarts == 0
    for sock in (*strangers, *idle, *registered):
        sock.close()


def test_client_that_is_slow_to_read_a_pull_then_others_push(serve):
    layout = Layout([("large", (8_000_000,))])
    serving = serve(layout, rule=ADD, num_partitions=2)
    reader, worker = serving.registered(), serving.worker(partition=1)
    reader.sendall(RequestHeader(kind=RequestKind.PULL).to_bytes())
    header = decode_header(receive(reader, HEADER_BYTES))
    update = layout.zeros() + 1
    for step in (1, 2, 3):
        worker.push(update, step=step)
    data = np.frombuffer(receive(reader, header.payload_bytes), np.float32)
    # Every stripe is of one version: none was locked while the reader slept, none is torn.
    assert all(len(np.unique(data[start : start + (1 << 18)])) == 1 for start in range(0, len(data), 1 << 18))
    assert np.array_equal(serving.control().fetch().values, 3 * update)


def test_connection_that_stalls_in_mid_message_then_is_closed(serve):
    serving = serve(stall_s=0.5)
    for data in (RequestHeader(kind=RequestKind.PULL).to_bytes()[:9], serving.push_bytes(LAYOUT.zeros(), 1)[:500_000]):
        sock = serving.registered()
        sock.sendall(data)
        with pytest.raises((ConnectionError, struct.error)):
            while True:
                receive(sock, 1)


def test_memory_when_many_push_and_pull_then_is_bounded(serve):
    layout = Layout([("large", (5_000_000,))])
    size = 4 * layout.num_values
    idle = psutil.Process(serve(Layout([("a", (1,))])).process.process_id).memory_info().rss
    serving = serve(layout, rule={"name": "sgd", "learning_rate": 0.1}, num_partitions=8)
    server = psutil.Process(serving.process.process_id)
    workers = [serving.worker(partition) for partition in range(8)]
    update, highest = layout.zeros(), []

    def run(worker):
        out = layout.zeros()
        for step in range(1, 5):
            worker.push_pull(update, out, step=step)

    run(workers[0])
    alone = server.memory_info().rss - idle
    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers[1:]]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        highest.append(server.memory_info().rss - idle)
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert alone <= 2.5 * size
    assert max(highest) <= 5 * size


def test_worker_that_closes_while_its_server_is_away_then_is_prompt(serve):
    serving = serve()
    worker = serving.worker(timeouts=TIMEOUTS)
    serving.process.close()
    began = time.monotonic()
    worker.close(finished=False)
    assert time.monotonic() - began < 10
