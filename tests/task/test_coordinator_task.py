"""Links of tasks to their coordinator, on the driver or beside rank 0, without Spark."""

import os
import signal
import threading

import pytest

from elephant.config import Timeouts
from elephant.driver.replay import LoggedEvents, replay_coordinator
from elephant.errors import PeerLostError, TrainingError, WorkerFailure
from elephant.monitor.channel import Channel, ChannelClient
from elephant.monitor.events import RankFailure, TaskStarted
from elephant.task import task_link
from elephant.task.coordinator_task import EVENTS, EarlyOutput, RankZeroLink
from elephant.task.process import DISMISSED
from elephant.task.rendezvous import RankReport
from elephant.task.specs import CoordinatorInfo, CoordinatorSpec, RunContext, TaskSpec
from elephant.task.task import PIECE_BYTES, result_rows, results_by_rank


def test_results_by_rank_when_results_are_large_then_joins_their_pieces():
    results = {0: bytes(range(256)) * 10_000, 1: b"", -1: b"x" * PIECE_BYTES}
    rows = [row for rank, result in results.items() for row in result_rows(rank, result)]
    assert max(len(piece) for _, piece in rows) <= PIECE_BYTES
    assert len(rows) == 5
    assert results_by_rank({"rank": rank, "result": piece} for rank, piece in rows) == results


def test_host_place_when_it_crosses_the_pipe_then_is_the_same():
    place = CoordinatorInfo(
        run_id="r",
        token="00ff",
        num_ranks=3,
        channel_fd=7,
        server_fds=[8, 9],
        timeouts=Timeouts(connect_s=3.0),
        extras=b'\n{"not": "json"}\n\x80\x04',
    )
    assert CoordinatorInfo.from_bytes(place.to_bytes()) == place
    assert "00ff" not in repr(place)


class Lines:
    def __init__(self):
        self.lines, self.closed = [], False

    def add(self, line):
        self.lines.append(line)

    def close(self):
        self.closed = True


def test_early_lines_when_they_come_before_the_ranks_have_met_then_are_sent_afterwards():
    early, lines = EarlyOutput(), Lines()
    for number in range(300):
        early.add(str(number))
    early.begin(lines)
    early.add("late")
    early.close()
    assert lines.lines == [*map(str, range(200)), "late"] and lines.closed
    # Of ranks that never meet nobody wants the lines.
    EarlyOutput().close()


def test_early_lines_when_nobody_asks_for_them_before_the_end_then_keep_the_first_and_count_the_rest():
    early = EarlyOutput()
    for number in range(203):
        early.add(str(number))
    early.add(" ")
    early.close()
    assert early.taken() == ([str(number) for number in range(200)], 3)


def test_task_when_its_rank_has_failed_then_fails_once_the_run_is_over_and_its_job_cancelled(monkeypatch):
    monkeypatch.setattr(task_link, "_CANCELLED_WITHIN_S", 60.0)
    spec = TaskSpec(program="fit", driver_versions={}, job=b"", backend=None, schema=None, timeouts=Timeouts())
    token, over, failed = bytes(range(32)), threading.Event(), []

    def fail():
        with pytest.raises(TrainingError, match="rank 0 on h: ValueError: no"):
            list(link.fail(RankFailure(rank=0, host="h", kind="ValueError", message="no")))
        failed.append(over.is_set())

    with Channel(bind_host="127.0.0.1", token=token, run_id="run", timeouts=spec.timeouts) as channel:
        run = RunContext(run_id="run", token=token, driver=("127.0.0.1", channel.port))
        link = task_link.ChannelLink(spec, run, TaskStarted(rank=0, host="h", executor="1", attempt=0))
        task = threading.Thread(target=fail)
        task.start()
        assert channel.next_event(60).message == "no"
        channel.dismiss()
        over.set()
    task.join(60)
    link.close()
    assert failed == [True]


def test_task_when_the_driver_has_ended_the_run_while_it_reads_rows_then_reads_no_more():
    spec = TaskSpec(program="fit", driver_versions={}, job=b"", backend=None, schema=None, timeouts=Timeouts())
    token = bytes(range(32))
    with Channel(bind_host="127.0.0.1", token=token, run_id="run", timeouts=spec.timeouts) as channel:
        run = RunContext(run_id="run", token=token, driver=("127.0.0.1", channel.port))
        link = task_link.ChannelLink(spec, run, TaskStarted(rank=0, host="h", executor="1", attempt=0))
        link.open()
        link.check()
    assert link._channel.await_end(60)
    with pytest.raises(PeerLostError, match="It has ended the run"):
        link.check()
    link.close()


class FakeContext:
    """Stands for the barrier of a stage of one task."""

    def allGather(self, text):
        return [text]


class FakeProgress:
    def show(self, event):
        pass

    def note(self, text):
        pass

    def awaits(self, text):
        pass


class EndedJob:
    """Stands for a job that has ended well, and has left these rows."""

    running, error = False, None

    def __init__(self, rows):
        self.rows = [{"rank": rank, "result": piece} for rank, piece in rows]


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
def test_run_when_its_coordinator_beside_rank_0_freezes_or_is_killed_then_ranks_hear_it_and_it_is_no_rank_s_failure(
    end,
):
    timeouts = Timeouts(heartbeat_s=8.0, connect_s=60.0)
    spec = TaskSpec(program="fit", driver_versions={}, job=b"", backend=None, schema=None, timeouts=timeouts)
    run = RunContext(run_id="run", token=bytes(range(32)), driver=("127.0.0.1", 0))
    place = TaskStarted(rank=0, host="h", executor="4", attempt=0)
    link = RankZeroLink(CoordinatorSpec(program="synchronous"), spec, run, place, FakeContext(), "127.0.0.1")
    told = threading.Event()
    try:
        link.open()
        report = RankReport(rank=0, run_id="run", name="h", host="127.0.0.1", port=0, versions={}, executor="4")
        link.exchange([report])
        rank = ChannelClient(
            link.run.driver, token=run.token, run_id="run", rank=0, timeouts=timeouts, on_dismissed=told.set
        )
        folder, pid = link._handle._process.work_folder, link._handle._process._process.pid
        os.kill(pid, end)
        assert told.wait(60)
        rank.hang_up()
        job = EndedJob(link.fail(RankFailure(rank=0, host="h", kind=DISMISSED, message="the driver ended the run")))
    finally:
        link.close()
    assert not folder.exists() and list(results_by_rank(job.rows)) == [EVENTS]
    events = LoggedEvents()
    events.follow(job)
    coordinator = replay_coordinator(events, FakeProgress())
    coordinator.until_ended(job)
    with pytest.raises(TrainingError, match="executor 4 on h: the coordinator of the run, a process") as failed:
        coordinator.raise_failure(None)
    assert failed.value.retryable and not isinstance(failed.value, WorkerFailure)
    assert ("frozen" in str(failed.value)) == (end == signal.SIGSTOP) and "what a worker holds" not in str(failed.value)
