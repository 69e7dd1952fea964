"""A task whose ranks may begin again: real processes and the driver's channel, without Spark."""

import signal
import subprocess
import sys
import textwrap
import time

from elephant.config import Timeouts
from elephant.monitor.channel import Channel

TOKEN = bytes(range(32))
TASK = """
    import sys
    from pyspark import cloudpickle
    from elephant.cluster.gpu_plan import ResourcePlan
    from elephant.config import Timeouts
    from elephant.errors import TrainingError
    from elephant.task.rank_task import RestartableTask
    from elephant.task.rendezvous import installed_versions
    from elephant.task.specs import RunContext, TaskSpec

    class Context:
        partitionId = attemptNumber = lambda self: 0
        cpus = taskAttemptId = lambda self: 1
        resources = lambda self: {}

    spec = TaskSpec(
        program="function", driver_versions=installed_versions(), job=cloudpickle.dumps((print, (), {})), backend=None,
        schema=None, timeouts=Timeouts(), plan=ResourcePlan(devices="none", slots_needed=2),
    )
    run = RunContext(run_id="run", token=bytes(range(32)), driver=("127.0.0.1", int(sys.argv[1])))
    try:
        list(RestartableTask(spec, run, Context()).rows([]))
    except TrainingError as error:
        sys.exit(str(error))
"""


def until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_task_when_it_is_asked_to_end_while_it_waits_for_others_then_leaves_at_once_and_these_wait_for_the_next():
    with Channel(bind_host="127.0.0.1", token=TOKEN, run_id="run", timeouts=Timeouts(), begins_again=True) as channel:
        command = [sys.executable, "-c", textwrap.dedent(TASK), str(channel.port)]
        task = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert until(lambda: any(seat.text is not None for seat in channel.meetings._seats.values()))
            task.send_signal(signal.SIGTERM)
            _, text = task.communicate(timeout=30)
        finally:
            task.kill()
        assert task.returncode == 1 and "asked to end (SIGTERM)" in text
        assert until(lambda: channel.meetings.absent([0])[0] == [0])
        # Nobody had begun: the driver has no loss to count.
        assert channel.next_event(0.2) is None
