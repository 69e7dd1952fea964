"""Tasks meet on the driver's channel: each hears what all told, none waits for one that is gone, and all meet again."""

import contextlib
import threading
import time

import pytest
from leaks import nothing_left_behind  # noqa: F401

from elephant.config import Timeouts
from elephant.errors import PeerLostError
from elephant.monitor.channel import Channel, ChannelClient
from elephant.monitor.events import Arrived, RankGone, Started, TaskSilent, TaskStarted, to_message
from elephant.monitor.meetings import AGAIN, RELEASED
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
            self.texts = client.meet(f"told by {self.rank}", num_tasks=3).texts
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
    while (
        sum(seat.text is not None for seat in channel.meetings._seats.values()) < len(tasks)
        and time.monotonic() < deadline
    ):
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
    assert frozen.meet("", num_tasks=3).texts == ["told by 0", "", "told by 2"]
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


class Staying:
    """A task that stays connected, as `elephant.task.task_link.StayingLink` does it."""

    def __init__(self, channel, rank, attempt=0, is_retry=False):
        self.called, self.ended = [], threading.Event()
        self.client = ChannelClient(
            ("127.0.0.1", channel.port),
            token=TOKEN,
            run_id="run",
            rank=rank,
            timeouts=TIMEOUTS,
            on_dismissed=self.ended.set,
            on_message={AGAIN: lambda message: self.called.append(message.fields["generation"])},
        )
        self.client.send(TaskStarted(rank=rank, host="h", executor="e", attempt=attempt, stays=True, is_retry=is_retry))
        self.rank, self.met = rank, None

    def come(self):
        self.thread = threading.Thread(target=self._come, daemon=True)
        self.thread.start()
        return self

    def _come(self):
        with contextlib.suppress(PeerLostError):
            self.met = self.client.meet(f"told by {self.rank}", num_tasks=2)

    def has_met(self):
        self.thread.join(timeout=30)
        return None if self.met is None else (self.met.generation, self.met.goes_on, len(self.met.texts))


def awaited(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def staying_channel():
    with Channel(bind_host="127.0.0.1", token=TOKEN, run_id="run", timeouts=TIMEOUTS, begins_again=True) as opened:
        yield opened


def started(rank):
    return Started(rank=rank, host="h", device="CPU", threads=1, training_rows=1, validation_rows=0)


def test_tasks_when_one_is_lost_then_meet_again_with_the_next_attempt_and_what_the_lost_ranks_tell_is_dropped(
    staying_channel,
):
    channel = staying_channel
    first, second = Staying(channel, 0).come(), Staying(channel, 1).come()
    assert first.has_met() == second.has_met() == (0, False, 2)
    rank = ChannelClient(
        ("127.0.0.1", channel.port), token=TOKEN, run_id="run", rank=0, timeouts=TIMEOUTS, generation=0
    )
    rank.send(started(0))
    assert channel.next_event(30) == started(0)
    second.client.hang_up()
    assert channel.next_event(30) == RankGone(rank=1, with_task=True)
    # Spark may be quicker than the driver's decision.
    again = Staying(channel, 1, attempt=5).come()
    assert awaited(lambda: 1 in channel.meetings._seats)
    channel.meetings.begin_again(goes_on=True)
    assert awaited(lambda: first.called == [1])
    rank.send(started(0))
    assert channel.next_event(0.5) is None
    first.come()
    assert first.has_met() == again.has_met() == (1, True, 2) and not again.called
    of_now = ChannelClient(
        ("127.0.0.1", channel.port), token=TOKEN, run_id="run", rank=0, timeouts=TIMEOUTS, generation=1
    )
    of_now.send(started(0))
    assert channel.next_event(30) == started(0)
    for client in (rank, of_now, first.client, again.client):
        client.hang_up()


def test_tasks_when_one_is_lost_before_all_have_come_then_nobody_begins_again_and_the_next_attempt_is_waited_for(
    staying_channel,
):
    channel = staying_channel
    lost = Staying(channel, 0).come()
    assert awaited(lambda: 0 in channel.meetings._seats and channel.meetings._seats[0].text is not None)
    lost.client.hang_up()
    assert awaited(lambda: channel.meetings.absent([0, 1])[0] == [0, 1])
    tasks = [Staying(channel, rank).come() for rank in (0, 1)]
    assert [task.has_met() for task in tasks] == [(0, False, 2)] * 2
    assert channel.next_event(0.2) is None and channel.meetings.absent([0, 1])[0] == []
    for task in tasks:
        task.client.hang_up()


def test_task_when_another_attempt_at_it_is_alive_then_is_released_and_else_takes_its_place(staying_channel):
    channel = staying_channel
    tasks = [Staying(channel, rank).come() for rank in (0, 1)]
    assert [task.has_met() for task in tasks] == [(0, False, 2)] * 2
    needless = Staying(channel, 1, attempt=7).come()
    assert needless.ended.wait(30) and needless.client.last_word == RELEASED and needless.has_met() is None
    assert channel.next_event(0.2) is None
    # Spark would end the first attempt if one that it has started because that is slow ended well.
    copy = Staying(channel, 0, attempt=8, is_retry=True).come()
    time.sleep(0.3)
    assert not copy.ended.is_set()
    # One that says nothing, and whose connection ends only later, as that of a host without power.
    silent = channel.meetings._seats[1].stream
    tasks[1].client._say_alive = lambda: None
    tasks[1].client._on_message["Ping"] = lambda message: None
    next_one = Staying(channel, 1, attempt=9).come()
    time.sleep(0.3)
    assert not next_one.ended.is_set()
    silent.abort()
    assert channel.next_event(30) == RankGone(rank=1, with_task=True)
    channel.meetings.begin_again(goes_on=False)
    tasks[0].come()
    assert tasks[0].has_met() == next_one.has_met() == (1, False, 2)
    channel.meetings.release()
    assert next_one.ended.wait(30) and tasks[0].ended.wait(30) and next_one.client.last_word == RELEASED
    assert copy.ended.wait(30) and copy.client.last_word == RELEASED
    # Tasks end then, and that is no loss.
    for task in (*tasks, needless, next_one, copy):
        task.client.hang_up()
    assert channel.next_event(0.5) is None
