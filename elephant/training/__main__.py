"""The training process of one rank: ``python -m elephant.training WORK_FOLDER``.

It is started by the rank's Spark task with the environment (devices, threads)
already set, gets two blocks through its standard input (the job, then the gang)
and ends when training has ended, or when the task that started it is gone: its
standard input then closes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle  # noqa: S403  (the job comes from the parent process, through an inherited pipe)
import shutil
import socket
import sys
import threading
import traceback
from concurrent.futures import Future
from pathlib import Path

from elephant.errors import ConfigurationError, kind_of
from elephant.training.gang import Gang
from elephant.training.wire import ABANDONED_EXIT_CODE, FAILURE_FILE, read_block


class Parent:
    """Reads what the Spark task sends, and ends this process when the task is gone.

    Args:
        work_folder: What to remove then: nobody else would.
    """

    def __init__(self, work_folder: Path) -> None:
        self._work_folder = work_folder
        self.job: Future[bytes] = Future()
        self.gang: Future[bytes] = Future()
        threading.Thread(target=self._read, name="elephant-parent", daemon=True).start()

    def _read(self) -> None:
        pipe = sys.stdin.buffer
        for future in (self.job, self.gang):
            block = read_block(pipe)
            if block is None:
                self.abandon()
            else:
                future.set_result(block)
        pipe.read()
        self.abandon()

    def abandon(self) -> None:
        """Ends this process at once, and leaves nothing behind."""
        shutil.rmtree(self._work_folder, ignore_errors=True)
        os._exit(ABANDONED_EXIT_CODE)


def train(parent: Parent) -> None:
    """Trains this rank from the first block to the last event."""
    # Importing Keras takes seconds; meanwhile the task writes the shard.
    from elephant.collective.connect import form_collective
    from elephant.data.shard import Shard
    from elephant.monitor.channel import ChannelClient
    from elephant.monitor.events import Started
    from elephant.net.stream import Listener
    from elephant.training.job import epoch_plan
    from elephant.training.synchronous import train_rank

    job = _load_job(parent.job.result())
    gang = Gang.from_bytes(parent.gang.result())
    timeouts, token = job.config.timeouts, bytes.fromhex(gang.token)
    shard = Shard(None if gang.shard is None else Path(gang.shard), job.schema, gang.widths)
    if gang.shard is not None:
        # The mapping keeps the rows; without a name nothing can be left behind, however this process ends.
        os.unlink(gang.shard)
    plan = epoch_plan(job.config, job.schema, gang.num_rows, gang.num_marked)
    listener = Listener(socket.socket(fileno=gang.listener_fd))
    with ChannelClient(
        gang.driver,
        token=token,
        run_id=gang.run_id,
        rank=gang.rank,
        timeouts=timeouts,
        on_dismissed=parent.abandon,
    ) as reporter:
        collective = form_collective(
            gang.rank,
            gang.addresses,
            listener,
            token=token,
            run_id=gang.run_id,
            timeout_s=timeouts.connect_s,
            operation_timeout_s=timeouts.collective_s,
        )
        with collective:
            reporter.tell(
                Started(
                    rank=gang.rank,
                    host=gang.host,
                    device=gang.device,
                    threads=gang.threads,
                    training_rows=plan.training_rows[gang.rank],
                    validation_rows=plan.validation_rows[gang.rank],
                )
            )
            train_rank(job, shard, plan, collective, reporter)


def _load_job(block: bytes):  # type: ignore[no-untyped-def]  # naming TrainingJob here would import Keras too early
    try:
        return pickle.loads(block)  # noqa: S301  (see the import)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"The model, its custom objects or a callback needs code that the executors do not have: {error}. "
            "Ship the module with --py-files or SparkContext.addPyFile, or define it in the main script or notebook."
        ) from error


def describe(error: BaseException) -> dict[str, str]:
    """Returns a failure as the Spark task reads it."""
    return {
        "kind": kind_of(error),
        "message": str(error).strip() or "(no message)",
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }


def main() -> int:
    """Runs the process and returns its exit code."""
    faulthandler.enable()
    work_folder = Path(sys.argv[1])
    parent = Parent(work_folder)
    try:
        train(parent)
    except BaseException as error:
        # Anything at all that ends training is told to the task, which tells the driver.
        (work_folder / FAILURE_FILE).write_text(json.dumps(describe(error)))
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of TensorFlow or of a callback must not keep a finished rank, and its GPU, alive.
    os._exit(code)
