"""Fits across hosts with own addresses, and what becomes of them when a link is cut, for a moment or for good."""

import contextlib
import re
import select
import time
from ipaddress import ip_address

import psutil
import pytest
from driver_process import BATCH, ROWS, Training, assert_counted, assert_equals_one_process
from process_tree import processes_of

# The cluster's start has deadlines of its own, and would count against whichever test comes first.
pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(400, func_only=True),
    pytest.mark.slow("a cluster over three hosts; test_links cuts a link without Spark"),
]

ENCRYPTION = pytest.mark.parametrize("encryption", [False, True], ids=["plain", "tls"])
# A fit that is not to end by itself.
ENDLESS = 100_000
PATIENT = {"heartbeat_s": 60.0, "collective_s": 60.0, "slots_s": 90.0}
# Long enough for a process that has to share its core while it imports Keras.
SILENCE_S = 10.0


@pytest.fixture
def begin(hosts, tmp_path):
    """Begins a fit, and mends all links afterwards."""
    cut = []

    def fit(**options):
        made = {"data": "regression", "rows": ROWS, "batchSize": BATCH, "shuffle": False, "timeouts": PATIENT}
        hosts.driver.begin(marker=str(tmp_path), **{**made, **options})
        return HostsTraining(hosts, tmp_path, cut)

    yield fit
    for links in cut:
        hosts.network.heal(*links)
    hosts.driver.interrupt()


@contextlib.contextmanager
def held(hosts, folder, host, *, steps):
    """Has no more steps made on a host, so that whatever a test does happens before the fit's end, however slow it is.

    Args:
        folder: Where steps leave marks.
    """
    hold = folder / f"hold-{hosts.addresses[host]}"
    hold.write_text(str(steps))
    yield
    hold.unlink()


class HostsTraining(Training):
    """A fit that goes on."""

    def __init__(self, hosts, folder, cut):
        super().__init__(hosts.driver, folder)
        self._hosts, self._cut = hosts, cut

    def steps(self, host):
        """Steps that were made on a host."""
        return self.steps_at(self._hosts.addresses[host])

    def await_steps(self, host, count):
        """Waits until so many steps were made on a host."""
        self.await_(lambda: self.steps(host) >= count)

    def await_steps_somewhere(self, count):
        """Waits until so many steps were made on one of the hosts with workers; returns its number."""
        self.await_(lambda: max(self.steps(1), self.steps(2)) >= count)
        return 1 if self.steps(1) >= count else 2

    def cut(self, *links):
        for link in links:
            self._hosts.network.cut(*link)
            self._cut.append(link)

    def heal(self, *links):
        for link in links:
            self._cut.remove(link)
            self._hosts.network.heal(*link)


def assert_nothing_trains():
    deadline = time.monotonic() + 30
    while (left := processes_of("elephant.rank")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def assert_proxy_unused(hosts):
    """Nobody has called the proxy that the environment of every process names."""
    assert select.select([hosts.proxy], [], [], 0)[0] == []


@ENCRYPTION
def test_synchronous_fit_when_a_link_is_cut_and_mended_in_time_then_equals_one_process_without_a_proxy(
    hosts, begin, encryption
):
    assert all(":" in address for address in hosts.addresses)
    training = begin(epochs=6, pause_s=0.2, encryption=encryption)
    training.await_steps(2, 4)
    assert {process.environ()["ALL_PROXY"] for process in processes_of("elephant.rank")} == {hosts.proxy_url}
    training.cut((0, 2), (1, 2))
    time.sleep(1.0)
    training.heal((0, 2), (1, 2))
    assert_equals_one_process(training.outcome(), epochs=6)
    assert_proxy_unused(hosts)


@ENCRYPTION
def test_asynchronous_fit_when_a_link_is_cut_and_mended_in_time_then_every_update_counts_once(hosts, begin, encryption):
    training = begin(data="counting", mode="asynchronous", epochs=8, pause_s=0.2, encryption=encryption)
    training.await_steps(2, 4)
    training.cut((0, 2))
    time.sleep(1.0)
    training.heal((0, 2))
    assert_counted(training.outcome(), epochs=8)
    assert training.steps(1) == training.steps(2) == 16
    assert_proxy_unused(hosts)


def test_synchronous_fit_when_a_host_is_cut_off_and_comes_back_then_it_is_named_and_restarts_and_equals_one_process(
    hosts, begin, tmp_path
):
    with held(hosts, tmp_path, 2, steps=7):
        training = begin(
            epochs=8,
            pause_s=0.1,
            timeouts={**PATIENT, "heartbeat_s": SILENCE_S},
            checkpointPath=str(tmp_path / "checkpoints"),
            maxRestarts=3,
        )
        training.await_steps(2, 7)
        cut_off = list(filter(hosts.network.hosts[2].holds, processes_of("elephant.rank")))
        assert cut_off
        training.cut((0, 2), (1, 2))
    training.await_line("the fit failed and starts again (1 of 3): rank")
    [told] = [line for line in hosts.driver.said if "starts again (1 of 3)" in line]
    named = re.search(rf": rank \d on (\S+) .* nothing was heard from (it|its Spark task) for {SILENCE_S:.0f} s", told)
    # Java writes all of its parts.
    assert named and ip_address(named[1]) == ip_address(hosts.addresses[2]), told
    # Those that were cut off end, too, although nobody can tell them to; on the other host the spare one goes on.
    assert psutil.wait_procs(cut_off, timeout=30)[1] == []
    training.heal((0, 2), (1, 2))
    training.await_line("going on after epoch")
    assert_equals_one_process(training.outcome(), epochs=8)
    assert 16 <= training.steps(2) < 2 * 16


def test_asynchronous_fit_when_a_host_is_cut_off_then_the_others_go_on_and_do_its_work(hosts, begin, tmp_path):
    with held(hosts, tmp_path, 2, steps=3):
        training = begin(
            data="counting", mode="asynchronous", epochs=10, pause_s=0.1, timeouts={**PATIENT, "heartbeat_s": SILENCE_S}
        )
        training.await_steps(2, 3)
        training.cut((0, 2), (1, 2))
    # Those of its own, and those that the other one has not made.
    assert_counted(training.outcome(), epochs=10)
    assert training.steps(1) > 20
    assert any("nothing was heard from rank" in line for line in hosts.driver.said)
    assert_nothing_trains()


def test_asynchronous_fit_when_the_host_of_a_server_is_cut_off_then_the_fit_fails_and_names_the_server(hosts, begin):
    training = begin(
        data="counting",
        mode="asynchronous",
        serverPlacement="executors",
        numWorkers=1,
        epochs=ENDLESS,
        pause_s=0.1,
        timeouts={**PATIENT, "heartbeat_s": SILENCE_S},
    )
    # The worker has the other of the two slots.
    worker = training.await_steps_somewhere(2)
    training.cut((0, 3 - worker))
    assert "parameter server 0 failed: its task, or the executor, is lost" in training.outcome()["error"]
    training.heal((0, 3 - worker))
    assert_nothing_trains()
