"""Network namespaces of this machine as hosts: own addresses, a link between every two, which can be cut and slowed.

Needs root, and the programs ``ip`` and ``tc`` (iproute2); Linux alone has them. The namespaces
go when the ``with`` block ends; those of a process that was killed go when the next one makes some.
"""

import contextlib
import ctypes
import itertools
import os
import subprocess

_CLONE_NEWNET = 0x40000000
_PREFIX = "elephant-net-"
# Of the shared address space (RFC 6598) and of those for documentation, which the machine's own networks do not use.
_ADDRESSES = {4: "100.64.77.{}/32", 6: "2001:db8:77::{}/128"}
_TIMEOUT_S = 30.0
# Longer than the largest packet that the kernel hands over at once.
_BURST_BYTES = 1 << 18


class NetworkUnavailableError(Exception):
    """This process cannot make network namespaces; the text says why."""


class Host:
    """One namespace.

    Args:
        name: Of the namespace.
        address: Its own, by which all others reach it.
    """

    def __init__(self, name, address):
        self.name = name
        self.address = address

    @property
    def prefix(self):
        """What stands before a command that is to run there."""
        return ("ip", "netns", "exec", self.name)

    def holds(self, process):
        """Returns whether a process is in the namespace."""
        return os.path.samefile(f"/proc/{process.pid}/ns/net", f"/var/run/netns/{self.name}")

    @contextlib.contextmanager
    def entered(self):
        """Puts the calling thread into the namespace, and with it the processes that it starts."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            inside = os.open(f"/var/run/netns/{self.name}", os.O_RDONLY)
            try:
                _enter(inside)
            finally:
                os.close(inside)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)


class Network:
    """Some hosts, from ``with`` to the end of the block.

    Args:
        count: How many.
        ip_version: 4 or 6: of their addresses.

    Attributes:
        hosts: A `Host` each.

    Raises:
        NetworkUnavailableError: This process cannot make them.
    """

    def __init__(self, count=2, *, ip_version=4):
        stem = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        template = _ADDRESSES[ip_version].split("/")[0]
        self.hosts = [Host(f"{stem}-{index}", template.format(index + 1)) for index in range(count)]
        self._width = _ADDRESSES[ip_version].split("/")[1]
        self._closing = contextlib.ExitStack()

    def __enter__(self):
        try:
            _remove_abandoned()
            self._open()
            # A kernel without this kind of queue is told of here, and not in the middle of a test.
            self.cut(0, 1)
            self.heal(0, 1)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            said = getattr(error, "stderr", None) or str(error)
            raise NetworkUnavailableError(f"no network namespaces here: {said.strip()}") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Removes the namespaces, and all links with them."""
        self._closing.close()

    def cut(self, one, other, *, both=True):
        """Has everything that two hosts send each other vanish on the way: neither is told.

        Args:
            one: The number of a host.
            other: That of another one.
            both: Whether in both directions; else what the first sends vanishes, and it hears the other one still.
        """
        for inside, device in self._ends(one, other)[: 2 if both else 1]:
            _run("tc", "-n", inside.name, "qdisc", "replace", "dev", device, "root", "blackhole")

    def heal(self, one, other, *, both=True):
        """Mends the link between two hosts, which was cut in as many directions."""
        for inside, device in self._ends(one, other)[: 2 if both else 1]:
            _run("tc", "-n", inside.name, "qdisc", "del", "dev", device, "root")

    def isolate(self, number):
        """Cuts all links of one host."""
        for other in range(len(self.hosts)):
            if other != number:
                self.cut(number, other)

    def reconnect(self, number):
        """Mends all links of one host."""
        for other in range(len(self.hosts)):
            if other != number:
                self.heal(number, other)

    def limit(self, bits_per_s):
        """Limits the rate of every link.

        Args:
            bits_per_s: Of each direction, headers included.
        """
        rate = ("tbf", "rate", f"{bits_per_s:.0f}bit", "burst", str(_BURST_BYTES), "latency", "50ms")
        for one, other in itertools.combinations(range(len(self.hosts)), 2):
            for inside, device in self._ends(one, other):
                _run("tc", "-n", inside.name, "qdisc", "replace", "dev", device, "root", *rate)

    def _open(self):
        for host in self.hosts:
            _run("ip", "netns", "add", host.name)
            self._closing.callback(_remove, host.name)
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
        for one, other in itertools.combinations(range(len(self.hosts)), 2):
            first, second = (("name", device, "netns", end.name) for end, device in self._ends(one, other))
            _run("ip", "link", "add", *first, "type", "veth", "peer", *second)
            for (end, device), peer in zip(self._ends(one, other), (other, one), strict=True):
                self._set_up(end, device, self.hosts[peer].address)

    def _set_up(self, host, device, peer):
        inside = ("ip", "-n", host.name)
        # An address of version 6 is else looked for on the link first, which takes a second.
        at_once = ("nodad",) if ":" in host.address else ()
        _run(*inside, "address", "add", f"{host.address}/{self._width}", "dev", device, *at_once)
        _run(*inside, "link", "set", device, "up")
        _run(*inside, "route", "add", f"{peer}/{self._width}", "dev", device, "src", host.address)

    def _ends(self, one, other):
        """Returns both hosts of a link, each with the name of its device."""
        return [(self.hosts[here], f"to{there}") for here, there in ((one, other), (other, one))]


_numbers = itertools.count()


def _enter(namespace):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}; it needs root")


def _remove_abandoned():
    """Removes the namespaces of processes that were killed and so could not do it themselves."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split(" ")[0]
        if name.startswith(_PREFIX) and not os.path.exists(f"/proc/{name.split('-')[2]}"):
            _remove(name)


def _remove(name):
    subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, timeout=_TIMEOUT_S)


def _run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S).stdout
