"""The addresses that driver and ranks give each other, as tables: settings and names in, numbers or an error out."""

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import every_case

from elephant.cluster import addresses
from elephant.cluster.addresses import (
    choose_driver_addresses,
    driver_addresses,
    master_addresses,
    own_address,
    resource_managers,
)
from elephant.errors import ClusterError, NetworkError

NAMES = {
    "driver": ["10.0.0.5"],
    "debian": ["127.0.1.1"],
    "localhost": ["::1", "127.0.0.1"],
    "both": ["fe80::5%eth0", "fd00::5", "10.0.0.5"],
    "half": ["127.0.1.1", "10.0.0.5"],
    "six": ["fd00::5"],
}


def resolved(host):
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if host not in NAMES:
            raise NetworkError(f"Cannot resolve {host}: no such name.") from None
        return NAMES[host]
    return [host]


def towards(target):
    """Answers for one master, which this machine reaches from 10.0.0.5."""
    if target != ("master", 7077):
        raise NetworkError(f"Cannot reach {target[0]}:{target[1]}: no route.")
    return "10.0.0.5"


def chosen(host, bind, master):
    return choose_driver_addresses(host, bind, master=master, resolve=resolved, towards=towards)


REMOTE = "spark://master:7077"


@every_case(
    ("host", "bind", "master", "expected"),
    [
        ("10.0.0.7", None, "yarn", ("10.0.0.7", "10.0.0.7")),
        ("10.0.0.7", "", "yarn", ("10.0.0.7", "10.0.0.7")),
        ("10.0.0.7", "0.0.0.0", "yarn", ("10.0.0.7", "0.0.0.0")),
        ("driver", None, "yarn", ("10.0.0.5", "10.0.0.5")),
        ("driver", "0.0.0.0", "k8s://https://api:6443", ("10.0.0.5", "0.0.0.0")),
        ("driver", "driver", REMOTE, ("10.0.0.5", "10.0.0.5")),
        # A service in front of the driver: it listens on another address than that which it is reached at.
        ("10.96.0.1", "10.0.0.5", "k8s://https://api:6443", ("10.96.0.1", "10.0.0.5")),
        ("[fd00::7]", None, REMOTE, ("fd00::7", "fd00::7")),
        ("fd00::7", "[::]", REMOTE, ("fd00::7", "::")),
        ("10.0.0.7", "::", REMOTE, ("10.0.0.7", "::")),
        ("both", None, REMOTE, ("10.0.0.5", "10.0.0.5")),
        ("both", "::", REMOTE, ("fd00::5", "::")),
        ("both", "fd00::5", REMOTE, ("fd00::5", "fd00::5")),
        ("six", None, "yarn", ("fd00::5", "fd00::5")),
        ("half", None, "yarn", ("10.0.0.5", "10.0.0.5")),
        ("half", "127.0.1.1", "local[2]", ("127.0.1.1", "127.0.1.1")),
        ("localhost", None, "local[4]", ("127.0.0.1", "127.0.0.1")),
        ("localhost", None, "local-cluster[2,1,1024]", ("127.0.0.1", "127.0.0.1")),
        ("127.0.0.1", "127.0.0.1", "local", ("127.0.0.1", "127.0.0.1")),
        # The user's own word, for a tunnel or a port that is mapped.
        ("127.0.0.1", None, REMOTE, ("127.0.0.1", "127.0.0.1")),
        ("debian", None, REMOTE, ("10.0.0.5", "10.0.0.5")),
        ("debian", "0.0.0.0", REMOTE, ("10.0.0.5", "0.0.0.0")),
        ("debian", "10.0.0.5", REMOTE, ("10.0.0.5", "10.0.0.5")),
        ("debian", None, "spark://gone:7077,master:7077", ("10.0.0.5", "10.0.0.5")),
    ],
)
def test_driver_addresses_when_settings_can_work_then_are_numbers_that_executors_reach(host, bind, master, expected):
    assert chosen(host, bind, master) == expected


@every_case(
    ("host", "bind", "master", "message"),
    [
        (
            "debian",
            None,
            "yarn",
            r"'debian', which is 127.0.1.1 .* 'yarn'. Nothing says where .* Set spark.driver.host",
        ),
        ("debian", None, "spark://gone:7077", "Cannot reach gone:7077: no route. Set spark.driver.host"),
        ("debian", "127.0.0.1", REMOTE, "listens on 127.0.0.1 alone, and reaches the master from 10.0.0.5"),
        ("unknown", None, "yarn", "spark.driver.host: expected a name .* Received: 'unknown'. Cannot resolve unknown"),
        ("driver", "unknown", "yarn", "spark.driver.bindAddress: expected a name .* Received: 'unknown'"),
        ("[fd00::7]", "0.0.0.0", REMOTE, "bindAddress: expected an IPv6 address.* Received: 0.0.0.0. Set it to .* ::"),
        (
            "10.0.0.7",
            "fd00::7",
            REMOTE,
            "bindAddress: expected an IPv4 address.* Received: fd00::7. Set it to 10.0.0.7",
        ),
    ],
)
def test_driver_addresses_when_executors_could_not_reach_them_then_the_setting_to_change_is_named(
    host, bind, master, message
):
    with pytest.raises(ClusterError, match=message):
        chosen(host, bind, master)


@given(
    host=st.sampled_from([*NAMES, "10.0.0.7", "[fd00::7]", "::1"]),
    bind=st.sampled_from([None, "", "0.0.0.0", "::", "[::]", "10.0.0.5", "fd00::5", "127.0.0.1", "driver"]),
    master=st.sampled_from(["local[2]", "local-cluster[2,1,1024]", REMOTE, "spark://gone:7077", "yarn", "k8s://api"]),
)
def test_driver_addresses_whatever_is_set_then_are_numeric_and_of_one_family_or_refused(host, bind, master):
    try:
        advertised, listening = chosen(host, bind, master)
    except ClusterError as error:
        assert "Set " in str(error)
        return
    reached, bound = ipaddress.ip_address(advertised), ipaddress.ip_address(listening)
    assert reached.version == bound.version or listening == "::"
    assert not reached.is_unspecified
    # A loopback only on this machine, or where the user gave the number.
    assert not reached.is_loopback or master.startswith("local") or host == "::1"


@every_case(
    ("places", "expected"),
    [
        ([("master", 7077)], ("10.0.0.5", "10.0.0.5")),
        ([("gone", 8032), ("master", 7077)], ("10.0.0.5", "10.0.0.5")),
        ([("gone", 8032)], "Cannot reach gone:8032"),
        ([], "Nothing says where the master is"),
    ],
)
def test_driver_addresses_when_a_name_leads_back_on_yarn_then_its_resource_managers_tell_the_way(places, expected):
    def choose():
        return choose_driver_addresses(
            "debian", None, master="yarn", resource_managers=lambda: places, resolve=resolved, towards=towards
        )

    if isinstance(expected, tuple):
        assert choose() == expected
        return
    with pytest.raises(ClusterError, match=expected):
        choose()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"yarn.resourcemanager.address": "rm:8050"}, [("rm", 8050)]),
        # Hadoop's default, which says nothing.
        ({"yarn.resourcemanager.address": "0.0.0.0:8032"}, []),
        ({}, []),
        (
            {
                "yarn.resourcemanager.ha.rm-ids": "one, two",
                "yarn.resourcemanager.address.one": "a:8032",
                "yarn.resourcemanager.address.two": "b",
                "yarn.resourcemanager.address": "0.0.0.0:8032",
            },
            [("a", 8032), ("b", 8032)],
        ),
        # As clusters mostly have them: names alone, and addresses of a port of their own.
        (
            {
                "yarn.resourcemanager.ha.rm-ids": "one,two",
                "yarn.resourcemanager.hostname.one": "a",
                "yarn.resourcemanager.hostname.two": "b",
                "yarn.resourcemanager.address.two": "b:8050",
            },
            [("a", 8032), ("b", 8050)],
        ),
    ],
)
def test_resource_managers_when_hadoop_s_settings_are_read_then_are_where_applications_go(
    settings, expected, monkeypatch
):
    class JavaContext:
        def hadoopConfiguration(self):
            return settings

    monkeypatch.setattr(addresses, "jvm_context", lambda session: session)
    monkeypatch.setattr(addresses, "java_context", lambda context: JavaContext())
    assert resource_managers("a session") == expected


def test_driver_addresses_when_a_session_names_its_host_then_the_driver_resolves_it():
    class Session:
        class conf:  # noqa: N801
            get = {"spark.driver.host": "localhost", "spark.master": "local[2]"}.get

    advertised, listening = driver_addresses(Session)
    assert advertised == listening
    assert advertised in {entry[4][0] for entry in socket.getaddrinfo("localhost", None)}


@every_case(
    ("master", "expected"),
    [
        ("spark://[::1]:7077", [("::1", 7077)]),
        ("spark://a:1,b:2,c", [("a", 1), ("b", 2), ("c", 7077)]),
        ("k8s://https://10.0.0.1:6443", [("10.0.0.1", 6443)]),
        ("k8s://http://api/path", [("api", 80)]),
        ("k8s://[fd00::1]:6443", [("fd00::1", 6443)]),
        ("yarn", []),
        ("local[2]", []),
    ],
)
def test_master_addresses_of_urls(master, expected):
    assert master_addresses(master) == expected


OWN = {"10.0.0.5", "fd00::5", "127.0.0.1", "127.0.1.1", "::1", "fe80::5%eth0"}
DRIVER = ("10.0.0.9", 4000)


@every_case(
    ("host", "hosts", "driver", "reached_from", "expected"),
    [
        ("10.0.0.5", ["10.0.0.5", "10.0.0.6"], DRIVER, "10.0.0.5", "10.0.0.5"),
        ("driver", ["driver", "other"], DRIVER, "10.0.0.5", "10.0.0.5"),
        # /etc/hosts knows the loopback alone: what reaches the driver is what others reach.
        ("debian", ["debian", "other"], DRIVER, "10.0.0.5", "10.0.0.5"),
        ("localhost", ["localhost", "other"], DRIVER, "10.0.0.5", "10.0.0.5"),
        # All ranks are here: the loopback will do, wherever the driver is.
        ("debian", ["debian", "debian"], DRIVER, "10.0.0.5", "127.0.1.1"),
        ("127.0.0.1", ["127.0.0.1"], ("127.0.0.1", 1), "127.0.0.1", "127.0.0.1"),
        # The driver is on this host, and executors are on others: the ranks refuse that together.
        ("debian", ["debian", "other"], ("127.0.0.1", 1), "127.0.0.1", "127.0.0.1"),
        ("debian", ["debian", "other"], DRIVER, None, "127.0.1.1"),
        ("unknown", ["unknown", "other"], DRIVER, "10.0.0.5", "10.0.0.5"),
        ("unknown", ["unknown", "other"], DRIVER, None, "127.0.0.1"),
        # A name for the outside, such as that of a cloud: nobody here can listen on it.
        ("203.0.113.1", ["203.0.113.1", "other"], DRIVER, "10.0.0.5", "10.0.0.5"),
        # Where there is a choice, the family of the driver's address, which is in use already.
        ("both", ["both", "other"], DRIVER, "10.0.0.5", "10.0.0.5"),
        ("both", ["both", "other"], ("fd00::9", 4000), "fd00::5", "fd00::5"),
        ("[fd00::5]", ["fd00::5", "fd00::6"], ("fd00::9", 4000), "fd00::5", "fd00::5"),
        ("localhost", ["localhost"], ("::1", 4000), "::1", "::1"),
    ],
)
def test_own_address_is_one_that_the_other_ranks_reach(host, hosts, driver, reached_from, expected):
    def towards_driver(target):
        if reached_from is None:
            raise NetworkError("no route")
        assert target == driver
        return reached_from

    address = own_address(
        host, hosts=hosts, driver=driver, resolve=resolved, towards=towards_driver, is_own=OWN.__contains__
    )
    assert address == expected
