import pytest

from elephant.errors import ConfigurationError, NetworkError
from elephant.net.addresses import listening_socket, name_of


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
