"""Ports of a fit, where a firewall leaves some of them open."""

import json
import os
import socket
import threading

import keras
import numpy as np
import psutil
import pytest
from process_tree import processes_of
from spark_frames import partitioned_frame, split_rows

import elephant
from elephant import KerasEstimator, ShardedEmbedding
from elephant.errors import ConfigurationError, NetworkError

DATA = {
    "features": np.random.default_rng(0).integers(0, 30, (31, 2)).astype("float32"),
    "label": np.zeros(31, "float32"),
}
COUNT = 20
PROGRAMS = ("elephant.parameter_server", "elephant.driver.coordinator_process")


@pytest.fixture(scope="module")
def frame(spark):
    return partitioned_frame(spark, split_rows(DATA, (17, 14)), "features array<double>, label double")


@pytest.fixture
def ports():
    """The first and the last of ports that are all free, below those that the system gives."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        lowest = int(file.read().split()[0])
    for first in range(lowest - COUNT, 1024, -COUNT):
        free = [_is_free(port) for port in range(first, first + COUNT)]
        if all(free):
            return first, first + COUNT - 1
    pytest.fail("there are no free ports")


def _is_free(port):
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


def listening(process):
    """Returns the TCP ports that a process listens on."""
    try:
        return {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    except psutil.Error:
        return set()


class Watched:
    """Ports that this process, servers and a coordinator of its fits listen on within a ``with`` block.

    Attributes:
        found: All of them.
        found_by: Those of each program.
    """

    def __enter__(self):
        self.before, self.found_by = listening(psutil.Process()), dict.fromkeys(("here", *PROGRAMS), frozenset())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self):
        own = psutil.Process()
        while not self._ended.wait(0.05):
            processes = {"here": [own], **{name: processes_of(name) for name in PROGRAMS}}
            for name, found in processes.items():
                self.found_by[name] |= set().union(*map(listening, found)) - self.before

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    @property
    def found(self):
        return set().union(*self.found_by.values())


class Ports(keras.callbacks.Callback):
    """Writes down what a rank listens on."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch, logs=None):
        found = {one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"}
        with open(os.path.join(self.folder, f"{os.getpid()}.json"), "w") as file:
            json.dump(sorted(found), file)


def model_of():
    ids = keras.Input((2,))
    rows = ShardedEmbedding(30, 4, name="user")(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile("sgd", "mse")
    return model


def estimator_of(**options):
    return KerasEstimator(model_of(), **{"numWorkers": 2, "epochs": 1, "batchSize": 8, "verbose": 0, **options})


MODES = {
    "synchronous": {},
    "asynchronous": {"mode": "asynchronous", "parameterServers": 2},
    "servers on executors": {"mode": "asynchronous", "serverPlacement": "executors", "numWorkers": 1},
    "rank 0 hosts": {"mode": "asynchronous", "numWorkers": 1},
}
# Programs besides the driver that listen; ranks say themselves on which ports.
LISTENING = {
    "synchronous": {"here"},
    "asynchronous": {"here", "elephant.parameter_server"},
    "servers on executors": {"here", "elephant.parameter_server"},
    "rank 0 hosts": {"elephant.driver.coordinator_process", "elephant.parameter_server"},
}


@pytest.mark.slow("a fit of each mode; the test below has a run")
@pytest.mark.usefixtures("by_value")
@pytest.mark.parametrize("mode", MODES)
def test_fit_when_it_may_listen_on_some_ports_then_all_of_its_processes_take_those(spark, frame, ports, tmp_path, mode):
    estimator = estimator_of(ports=ports, callbacks=[Ports(str(tmp_path))], **MODES[mode])
    spark.conf.set("spark.elephant.coordinator", "executors" if mode == "rank 0 hosts" else "driver")
    try:
        with Watched() as watched:
            estimator.fit(frame)
    finally:
        spark.conf.unset("spark.elephant.coordinator")
    of_ranks = [set(json.loads(path.read_text())) for path in tmp_path.iterdir()]
    assert len(of_ranks) == estimator.getNumWorkers()
    assert {name for name, found in watched.found_by.items() if found} == LISTENING[mode]
    # Ranks serve their parts of the table; of servers each has its own port.
    assert all(of_ranks) if mode == "synchronous" else len(watched.found) >= (3 if mode == "asynchronous" else 2)
    assert set().union(watched.found, *of_ranks) <= set(range(ports[0], ports[1] + 1))


def test_run_when_the_setting_names_ports_then_listens_on_those(spark, ports):
    def listening_here():
        return sorted(one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN")

    spark.conf.set("spark.elephant.ports", f"{ports[0]}-{ports[1]}")
    try:
        with Watched() as watched:
            found = elephant.run(listening_here, num_workers=2, verbose=0)
    finally:
        spark.conf.unset("spark.elephant.ports")
    assert watched.found and set().union(watched.found, *found) <= set(range(ports[0], ports[1] + 1))


def test_fit_when_no_port_is_left_then_it_is_an_error_that_names_them(frame, ports):
    with socket.create_server(("0.0.0.0", ports[0])):
        with pytest.raises(NetworkError, match=rf"expected a free port from {ports[0]} to {ports[0]}"):
            estimator_of(ports=(ports[0], ports[0])).fit(frame)


def test_setting_when_it_has_no_ports_then_is_refused_by_name(spark, frame):
    spark.conf.set("spark.elephant.ports", "many")
    try:
        with pytest.raises(ConfigurationError, match=r"spark\.elephant\.ports: expected the first and the last port"):
            estimator_of().fit(frame)
    finally:
        spark.conf.unset("spark.elephant.ports")
