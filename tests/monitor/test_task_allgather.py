"""Tasks meet on the driver's channel: each hears what all told, and none waits for one that is gone."""

import contextlib
import threading
import time

import pytest
from leaks import nothing_left_behind  # noqa: F401

from elephant.config import Timeouts
from elephant.errors import PeerLostError
from elephant.monitor.channel import Channel, ChannelClient
from elephant.monitor.events import Arrived, RankGone, TaskSilent, TaskStarted, to_message
from elephant.net.deadline import Deadline
from elephant.net.frames import Limits
from elephant.net.stream import connect

TOKEN = b"0123456789abcdef"
TIMEOUTS = Timeouts(connect_s=5.0, heartbeat_s=1.0)


@pytest.fixture
def channel():
    with Channel(bind_host="127.0.0.1", token=TOKEN, run_id="run", timeouts=TIMEOUTS) as opened:
        yield opened


def client_of(channel, rank, timeouts=TIMEOUTS):
    """Returns the connection of a task that has begun."""
    client = ChannelClient(("127.0.0.1", channel.port), token=TOKEN, run_id="run", rank=rank, timeouts=timeouts)
    client.send(TaskStarted(rank=rank, host="h", executor="e", attempt=10 + rank))
    return client


class Task(threading.Thread):
    """A task that waits for the others."""

    def __init__(self, channel, rank):
        super().__init__(daemon=True)
        self.channel, self.rank, self.texts, self.error = channel, rank, None, None
        self.start()

    def run(self):
        client = client_of(self.channel, self.rank)
        try:
            self.texts = client.meet(f"told by {self.rank}", num_tasks=3)
        except PeerLostError as error:
            self.error = error
        client.hang_up()


def ended(tasks):
    for task in tasks:
        task.join(timeout=30)
    return not any(task.is_alive() for task in tasks)


def arrived(channel, *tasks):
    """Waits until the driver has heard of these."""
    deadline = time.monotonic() + 30
    while len(channel._meeting._arrived_streams) < len(tasks) and time.monotonic() < deadline:
        time.sleep(0.01)
    return tasks


def test_tasks_when_all_have_come_then_hear_each_other_by_rank_and_leave_no_event(channel):
    # Ranks of tasks with two GPUs each. The last one comes after more silence than is allowed.
    tasks = arrived(channel, Task(channel, 4), Task(channel, 0))
    assert channel.next_event(2.5 * TIMEOUTS.heartbeat_s) is None
    tasks += (Task(channel, 2),)
    assert ended(tasks)
    assert [task.texts for task in tasks] == [["told by 0", "told by 2", "told by 4"]] * 3
    assert channel.next_event(0.5) is None


def test_tasks_when_the_run_ends_then_do_not_wait_for_the_others(channel):
    tasks = arrived(channel, Task(channel, 0), Task(channel, 1))
    channel.dismiss()
    assert ended(tasks)
    assert all("The driver has ended the run" in str(task.error) for task in tasks)


def test_task_when_the_driver_is_gone_then_does_not_wait(channel):
    tasks = arrived(channel, Task(channel, 0))
    channel.close()
    assert ended(tasks)
    assert isinstance(tasks[0].error, PeerLostError)


def test_driver_when_a_task_that_waits_is_lost_then_hears_of_it(channel):
    (task,) = arrived(channel, Task(channel, 1))
    next(iter(channel._streams)).abort()
    assert ended([task])
    assert channel.next_event(30) == RankGone(rank=1)


def test_driver_when_a_task_has_not_come_yet_then_hears_that_it_is_frozen_and_not_that_it_has_ended(channel):
    beating, ended = client_of(channel, 1), client_of(channel, 2)
    ended.hang_up()
    frozen = client_of(channel, 3, Timeouts(connect_s=5.0, heartbeat_s=1000.0))
    silent = TaskSilent(rank=3, host="h", executor="e", attempt=13, silent_s=TIMEOUTS.heartbeat_s)
    assert channel.next_event(30) == silent
    assert channel.next_event(2 * TIMEOUTS.heartbeat_s) is None
    beating.hang_up()
    frozen.hang_up()


def test_driver_when_tasks_have_met_and_one_freezes_then_hears_of_it(channel):
    tasks = [Task(channel, rank) for rank in (0, 2)]
    frozen = client_of(channel, 1, Timeouts(connect_s=5.0, heartbeat_s=1000.0))
    assert frozen.meet("", num_tasks=3) == ["told by 0", "", "told by 2"]
    assert ended(tasks)
    assert channel.next_event(30).attempt == 11
    frozen.hang_up()


def test_tasks_when_some_of_many_read_nothing_then_the_others_are_told_at_once_and_all_text_once(channel):
    num_tasks, num_frozen, text = 64, 32, "x" * 20_000
    deadline = Deadline(30, "the tasks' meeting")
    address = ("127.0.0.1", channel.port)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(connect(address, TOKEN, "run", deadline)) for _ in range(num_tasks)]
        for rank, stream in enumerate(streams):
            stream.send(to_message(Arrived(rank=rank, text=f"{rank} {text}", num_tasks=num_tasks)), deadline)
        # Each of the first would take its patience, where one was told after the other.
        limits = Limits(max_manifest_bytes=1 << 24)
        for stream in streams[num_frozen:]:
            texts = stream.receive(Deadline(15, "what all told"), limits).fields["texts"]
            assert texts == [f"{rank} {text}" for rank in range(num_tasks)]
