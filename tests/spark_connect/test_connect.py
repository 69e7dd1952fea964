"""Spark Connect: a server with executors of its own, and clients in processes of their own."""

import json
import re
import signal
import time

import psutil
import pytest
from process_tree import predicts, processes_of

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
STARTS_S = 240.0
# Spark kills the Python worker of a cancelled task after two seconds.
ENDS_S = 20.0


more = pytest.mark.slow("a client of its own")
HOSTED = "rank 0 coordinates this run"


def epochs_in(shown):
    """Returns the first words of the lines about epochs."""
    return [line.split()[0] for line in shown.splitlines() if re.search(r"\d/\d ", line) and "step" not in line]


def test_fit_when_the_session_is_remote_then_equals_one_process(client):
    shown = client("fit_synchronously")
    assert HOSTED not in shown
    assert epochs_in(shown) == ["1/2", "2/2"]


@more
def test_fits_when_rank_0_hosts_then_equal_one_process_and_errors_are_whole_and_one_goes_on_from_its_checkpoint(
    client, tmp_path
):
    shown = client("hosted", tmp_path)
    assert HOSTED in shown
    # The plan and the epochs are shown, be it at the end.
    assert epochs_in(shown)[-2:] == ["2/3", "3/3"]


@more
def test_model_when_the_session_is_remote_then_transforms_evaluates_saves_and_loads(client, tmp_path):
    client("use", tmp_path)


@more
def test_prepared_rows_tables_and_a_search_when_the_session_is_remote_then_work_as_in_a_classic_one(client, tmp_path):
    client("tune", tmp_path)


@more
def test_doors_that_need_a_jvm_when_the_session_is_remote_then_say_so(client):
    client("refuse")


@more
def test_token_when_the_session_is_remote_then_is_nowhere_that_others_can_read(server, client, canary, tmp_path):
    said = json.loads(client("keep_tokens", canary.hex(), tmp_path, server.folder, *server.pages()).splitlines()[-1])
    outcomes = {name: about["outcome"] for name, about in said["calls"].items()}
    assert outcomes == {"synchronous": "ended", "rank 0 hosts": "ended", "failing": "WorkerFailure"}
    assert all(about["tokens"] and about["looked"] for about in said["calls"].values()), said
    kinds = {kind for name, kind, _ in said["found"] if name == "canary"}
    assert kinds == {"arguments", "environment", "files", "pages", "event log", "exceptions"}
    assert [one for one in said["found"] if one[0] != "canary"] == []


@more
def test_run_when_the_client_is_interrupted_then_nothing_is_left_of_it(server, client, tmp_path):
    mark = tmp_path / "running"
    client.begin("wait", mark)
    try:
        await_true(mark.exists, STARTS_S)
        # Two ranks and the process that coordinates them.
        assert len(rank_processes()) == 3
    finally:
        for process in psutil.Process(client.clients.pid).children():
            process.send_signal(signal.SIGINT)
        _, said = client.ended()
    assert "KeyboardInterrupt" in said
    await_true(lambda: not rank_processes(), ENDS_S)
    assert list(server.local_folder.glob("**/elephant-*")) == []


def rank_processes():
    """The ranks' processes, and the coordinator's; not those that Python workers keep for the next prediction."""
    modules = ("elephant.rank", "elephant.driver.coordinator_process")
    return [process for module in modules for process in processes_of(module) if not predicts(process)]


def await_true(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
