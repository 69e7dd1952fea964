"""Ranks of `elephant.testing.fit_local` that a server forks which has imported Keras, as one does on an executor."""

import contextlib
import functools
import os
from dataclasses import replace
from unittest import mock

from process_tree import forked_in

# One for the environment of most tests, and one for that of a test that changes it.
SERVERS = 2
IDLE_S = 60


@contextlib.contextmanager
def forked_ranks(folder):
    """Has ranks of this process forked meanwhile; the first fit waits for the server.

    Args:
        folder: Where the server's files are, and the ranks' work folders.
    """
    from elephant.driver import local_ranks
    from elephant.task import warm_processes

    warm = warm_processes.WarmWorkers(limit=SERVERS, idle_s=IDLE_S)
    spec, of_function = functools.partial(local_ranks.TaskSpec, warm=warm), local_ranks.function_spec
    with (
        mock.patch.dict(os.environ, SPARK_LOCAL_DIRS=str(folder)),
        # A server forks for what its executor has started, such as this process.
        mock.patch.object(warm_processes, "executor_above", lambda process: (os.getppid(), "0")),
        # Pytest puts the name of the test into the environment, and each environment has a server of its own.
        mock.patch.object(warm_processes, "_OF_TASK", (*warm_processes._OF_TASK, "PYTEST_")),
        mock.patch.object(local_ranks, "TaskSpec", spec),
        mock.patch.object(local_ranks, "function_spec", lambda *given: replace(of_function(*given), warm=warm)),
    ):
        yield


def end_servers(folder):
    """Ends the servers that have forked ranks."""
    for process in forked_in(folder):
        process.kill()
