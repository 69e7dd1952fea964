"""Sessions with a JVM, without one, and with one that is kept from Python, as on shared clusters; all made up."""

import re
import threading
from types import SimpleNamespace

import pyspark
import pytest
from tables import every_case

from elephant.cluster.addresses import client_addresses, driver_addresses
from elephant.cluster.session import is_remote, jvm_context, require_connect, require_master, require_running
from elephant.driver.coordinator_location import coordinates_on_executors
from elephant.errors import ClusterError, ConfigurationError, NetworkError, UnsupportedError


class Conf(dict):
    def get(self, name, default=None):
        return super().get(name, default)


class RemoteSession:
    """As a session of Spark Connect is: of a class in its package, without a context."""

    def __init__(self, host="127.0.0.1", **settings):
        self.client = SimpleNamespace(host=host)
        self.conf = Conf({name.replace("_", "."): value for name, value in settings.items()})

    @property
    def sparkContext(self):
        raise AttributeError("[JVM_ATTRIBUTE_NOT_SUPPORTED]")

    _sc = _jvm = sparkContext


RemoteSession.__module__ = "pyspark.sql.connect.session"


class ClassicSession:
    def __init__(self, context, **settings):
        self._sc = context
        self.conf = Conf({name.replace("_", "."): value for name, value in settings.items()})


class Locked:
    """What a shared cluster lets Python see of the JVM."""

    def __getattr__(self, name):
        raise RuntimeError(f"Py4JSecurityException: Method {name} is not whitelisted")


def open_context():
    paths = SimpleNamespace(hadoop=SimpleNamespace(fs=SimpleNamespace(Path=str)))
    return SimpleNamespace(
        _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(applicationId=lambda: "app-1")),
        _jvm=SimpleNamespace(org=SimpleNamespace(apache=paths)),
    )


def test_require_connect_when_pyspark_is_too_old_for_it_then_says_so(monkeypatch):
    class OldThread(threading.Thread):
        """As PySpark 3.5 has it."""

        def __init__(self, target, *args, **kwargs):
            super().__init__(target=target)

    require_connect(RemoteSession())
    monkeypatch.setattr(pyspark, "InheritableThread", OldThread)
    with pytest.raises(UnsupportedError, match=r"expected PySpark 4.0 or newer. Received: \d"):
        require_connect(RemoteSession())
    require_connect(ClassicSession(open_context()))


def test_require_running_when_a_session_was_stopped_then_says_so():
    require_running(RemoteSession())
    require_running(ClassicSession(open_context()))
    require_running(ClassicSession(Locked()))
    with pytest.raises(ClusterError, match="one that was stopped. Start another"):
        require_running(ClassicSession(SimpleNamespace(_jsc=None, _jvm=None)))


def test_jvm_context_when_the_session_has_none_then_is_none_and_nothing_is_raised():
    assert jvm_context(RemoteSession()) is None and is_remote(RemoteSession())
    locked = ClassicSession(SimpleNamespace(_jsc=Locked(), _jvm=Locked()))
    assert jvm_context(locked) is None and not is_remote(locked)
    context = open_context()
    assert jvm_context(ClassicSession(context)) is context
    # Some platforms let one see the context and not the file systems.
    half = SimpleNamespace(_jsc=context._jsc, _jvm=Locked())
    assert jvm_context(ClassicSession(half)) is None


def test_driver_addresses_when_the_session_is_remote_then_are_the_clients_own():
    # The server's own settings are no use: spark.driver.host is where the server is.
    remote = RemoteSession("127.0.0.1", spark_driver_host="10.9.8.7")
    assert driver_addresses(remote) == ("127.0.0.1", "127.0.0.1")
    named = RemoteSession("127.0.0.1", spark_elephant_driver_host="192.0.2.7")
    assert client_addresses(named) == ("192.0.2.7", "127.0.0.1")
    assert client_addresses(RemoteSession("[::1]")) == ("::1", "::1")


def test_client_addresses_when_the_server_is_not_known_then_says_what_to_set():
    with pytest.raises(ClusterError, match="tells the host of its server.* spark.elephant.coordinator to executors"):
        client_addresses(RemoteSession(host=""))
    with pytest.raises(NetworkError, match="Cannot reach"):
        client_addresses(RemoteSession(host="no-such-host.invalid"))


def test_executors_host_when_it_is_set_then_nothing_is_tried():
    assert coordinates_on_executors(RemoteSession(spark_elephant_coordinator="executors"))
    assert not coordinates_on_executors(RemoteSession(spark_elephant_coordinator="driver"))
    # The driver of a classic session is reached by its executors in any case.
    assert not coordinates_on_executors(ClassicSession(open_context()))
    assert coordinates_on_executors(ClassicSession(open_context(), spark_elephant_coordinator="executors"))
    with pytest.raises(ConfigurationError, match="expected auto, driver or executors. Received: 'rank0'"):
        coordinates_on_executors(RemoteSession(spark_elephant_coordinator="rank0"))


def test_executors_host_when_a_client_has_no_way_to_its_server_then_rank_0_hosts():
    assert coordinates_on_executors(RemoteSession(host="no-such-host.invalid"))


@every_case(
    "master",
    [
        "",
        "local",
        "local[4]",
        "local[*]",
        "local[*,2]",
        "local-cluster[2,1,1024]",
        "spark://host:7077",
        "spark://one:7077,two:7077",
        "spark://[::1]:7077",
        "yarn",
        "k8s://https://host:6443",
        "k8s://host",
        # Of other cluster managers.
        "mesos://host:5050",
        "nomad",
        "ray://host:10001",
        "armada://host:50051",
        "sparkle://host",
    ],
)
def test_master_when_spark_or_another_cluster_manager_may_take_it_then_passes(master):
    require_master(master)


@every_case(
    ("master", "expected"),
    [
        ("loca[2]", r"local, local\[N\] or local\[\*\]"),
        ("local[two]", r"local, local\[N\]"),
        ("local[2", r"local, local\[N\]"),
        ("local4", r"local, local\[N\]"),
        ("local-cluster[2]", r"local-cluster\[EXECUTORS,CORES,MEGABYTES\]"),
        ("spark:/host:7077", "spark://HOST:PORT"),
        ("spark://host", "spark://HOST:PORT; the port is 7077"),
        ("saprk", "spark://HOST:PORT"),
        ("YARN", "yarn; --deploy-mode"),
        ("yarn-client", "yarn; --deploy-mode"),
        ("kubernetes://host", "k8s://https://HOST:PORT"),
        ("sc://host:15002", "--remote"),
    ],
)
def test_master_when_misspelled_then_is_refused_with_the_form_that_was_meant(master, expected):
    with pytest.raises(
        ConfigurationError, match=f"master: expected .*{expected}.* Received: {re.escape(repr(master))}"
    ):
        require_master(master)
