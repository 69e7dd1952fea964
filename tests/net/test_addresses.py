import pytest

from elephant.errors import ConfigurationError, NetworkError
from elephant.net.addresses import is_own_address, listening_socket, name_of, numeric_addresses


@pytest.mark.parametrize(
    "address, name", [(("10.0.0.1", 80), "10.0.0.1:80"), (("::1", 80), "[::1]:80"), (("h", 0), "h:0")]
)
def test_name_of(address, name):
    assert name_of(address) == name


def test_listening_socket_without_a_host_raises():
    with pytest.raises(ConfigurationError, match="expected the address to listen on"):
        listening_socket("", 0)


def test_listening_socket_on_a_port_in_use_raises():
    with listening_socket("127.0.0.1", 0) as first:
        with pytest.raises(NetworkError, match=r"Cannot listen on 127.0.0.1:\d+: .*in use"):
            listening_socket("127.0.0.1", first.getsockname()[1])


def test_listening_socket_on_a_foreign_address_raises():
    with pytest.raises(NetworkError, match="Cannot listen on 192.0.2.1:0"):
        listening_socket("192.0.2.1", 0)


def test_numeric_addresses_of_this_machine_are_loopback_and_unknown_names_raise():
    assert set(numeric_addresses("localhost")) <= {"127.0.0.1", "::1"}
    with pytest.raises(NetworkError, match="Cannot resolve no-such-host.invalid"):
        numeric_addresses("no-such-host.invalid")
    with pytest.raises(NetworkError, match="Cannot resolve an empty"):
        numeric_addresses("")


@pytest.mark.parametrize(
    ("address", "own"), [("127.0.0.1", True), ("192.0.2.77", False), ("2001:db8::7", False), ("no address", False)]
)
def test_is_own_address(address, own):
    assert is_own_address(address) is own
