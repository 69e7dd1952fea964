"""Lines of a rank's process reach the driver in order, not too many of them, and trouble with them is nobody's."""

import os
import secrets
import subprocess
import sys
import threading
import time

import pytest

from elephant.config import Timeouts
from elephant.monitor import log_stream
from elephant.monitor.channel import Channel
from elephant.monitor.events import Printed
from elephant.monitor.log_stream import BURST_LINES, OutputStream, TokenBucket
from elephant.net import stream, tls
from elephant.net.tls import new_token

TOKEN = secrets.token_bytes(32)


@pytest.fixture
def channel():
    with Channel(bind_host="127.0.0.1", token=TOKEN, run_id="run", timeouts=Timeouts(heartbeat_s=0.5)) as opened:
        yield opened
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("elephant")]


def stream_to(port, **options):
    address = ("127.0.0.1", port)
    return OutputStream(address, token=TOKEN, run_id="run", rank=1, host="h", timeouts=Timeouts(), **options)


def heard(channel):
    events = []
    while (event := channel.next_event(0.0)) is not None:
        events.append(event)
    return events


def test_lines_when_the_stream_closes_then_all_have_arrived_in_order(channel):
    stream = stream_to(channel.port)
    lines = [f"line {number} \ufffd" for number in range(BURST_LINES)]
    for line in [*lines[:50], "", "I0000 00:00:1.2  1 port.cc:153] noise", *lines[50:]]:
        stream.add(line)
    stream.close()
    events = heard(channel)
    assert {(type(event), event.rank, event.host) for event in events} == {(Printed, 1, "h")}
    assert [line for event in events for line in event.lines] == lines


def test_lines_when_keys_are_worn_then_all_arrive_once_over_new_connections(monkeypatch):
    """With a limit of one byte, before each message."""
    token, dialled, dial = new_token(encryption=True), [], stream.dial
    monkeypatch.setattr(tls, "RENEW_BYTES", 1)
    monkeypatch.setattr(stream, "dial", lambda *args, **options: dialled.append(args) or dial(*args, **options))
    with Channel(bind_host="127.0.0.1", token=token, run_id="run", timeouts=Timeouts(heartbeat_s=0.5)) as channel:
        output = OutputStream(
            ("127.0.0.1", channel.port), token=token, run_id="run", rank=1, host="h", timeouts=Timeouts()
        )
        events = []
        for number in range(4):
            output.add(f"line {number}")
            events.append(channel.next_event(10.0))
        output.close()
        events += heard(channel)
    assert [event.lines for event in events] == [[f"line {number}"] for number in range(4)]
    assert len(dialled) >= 4


def test_lines_when_they_are_too_many_then_are_counted(channel):
    stream = stream_to(channel.port, bucket=TokenBucket(per_second=0, burst=3))
    for number in range(10):
        stream.add(str(number))
    stream.close()
    events = heard(channel)
    assert [line for event in events for line in event.lines] == ["0", "1", "2"]
    assert sum(event.left_out for event in events) == 7


def test_stream_when_it_says_nothing_for_long_then_its_rank_is_neither_silent_nor_gone(channel):
    stream = stream_to(channel.port)
    stream.add("first")
    deadline = time.monotonic() + 10
    while not isinstance(channel.next_event(0.1), Printed) and time.monotonic() < deadline:
        pass
    # Longer than a rank may be silent.
    assert channel.next_event(1.2) is None
    began = time.monotonic()
    channel.dismiss(timeout_s=60.0)
    # Nobody waits for its end: a busy machine takes long, and not so long.
    assert time.monotonic() - began < 30
    stream.add("second")
    stream.close()
    assert [event.lines for event in heard(channel)] == [["second"]]


def test_stream_when_the_driver_is_gone_then_lines_are_lost_and_nothing_else(channel, monkeypatch):
    monkeypatch.setattr(log_stream, "_SEND_S", 1.0)
    stream = stream_to(channel.port)
    stream.add("first")
    assert channel.next_event(10.0) is not None
    channel.close()
    for number in range(1000):
        stream.add(str(number))
    stream.close()
    nowhere = stream_to(channel.port)
    nowhere.add("nobody listens")
    nowhere.close()


@pytest.mark.parametrize("level", [None, "0", "2"])
def test_import_when_tensorflow_prints_then_only_what_matters_is_shown_unless_the_user_wants_all(level):
    code = (
        "import os, subprocess\n"
        "from elephant.monitor.log_stream import quiet_imports\n"
        "with quiet_imports():\n"
        "    os.write(2, b'I0000 00:00:1.5 1 port.cc:153] oneDNN\\nW0000 00:00:1.5 1 x.cc:1] no such kernel\\n')\n"
        "    os.write(2, os.environ['TF_CPP_MIN_LOG_LEVEL'].encode() + b'\\n')\n"
        "os.write(2, b'I0000 00:00:1.5 1 later\\n' + os.environ.get('TF_CPP_MIN_LOG_LEVEL', 'none').encode())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environment.update({} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level})
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    matters = "W0000 00:00:1.5 1 x.cc:1] no such kernel\n"
    if level is None:
        assert done.stderr == f"{matters}3\nI0000 00:00:1.5 1 later\nnone"
    elif level == "2":
        assert done.stderr == f"{matters}2\nI0000 00:00:1.5 1 later\n2"
    else:
        assert done.stderr == f"I0000 00:00:1.5 1 port.cc:153] oneDNN\n{matters}0\nI0000 00:00:1.5 1 later\n0"


def test_import_when_the_process_dies_in_it_then_its_last_words_are_shown():
    code = (
        "import os\n"
        "from elephant.monitor.log_stream import quiet_imports\n"
        "with quiet_imports():\n"
        "    os.write(2, b'F0000 00:00:1.5 1 cpu.cc:1] no AVX\\n')\n"
        "    os.abort()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode < 0 and "no AVX" in done.stderr
