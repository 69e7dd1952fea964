"""What one connection between two hosts makes of a link that is cut, or mended in time."""

import os
import threading
import time

import pytest

from elephant.config import Timeouts
from elephant.monitor.channel import Channel, ChannelClient
from elephant.monitor.events import EpochEnded, Finished, RankGone, RankSilent
from elephant.net.addresses import address_towards

TOKEN = b"0123456789abcdef-right"
HEARTBEAT_S = 2.0
WAIT_S = 30.0


@pytest.fixture
def conversation(network):
    """The driver's channel on one host, a rank's end on the other, and the event of the latter's end."""
    driver, executor = network.hosts
    timeouts, ended = Timeouts(heartbeat_s=HEARTBEAT_S, connect_s=10.0), threading.Event()
    with driver.entered():
        channel = Channel(bind_host=driver.address, token=TOKEN, run_id="run", timeouts=timeouts)
    with channel:
        with executor.entered():
            client = ChannelClient(
                (driver.address, channel.port),
                token=TOKEN,
                run_id="run",
                rank=3,
                timeouts=timeouts,
                on_dismissed=ended.set,
            )
        client.epoch(0, {"loss": 1.0})
        assert isinstance(channel.next_event(WAIT_S), EpochEnded)
        yield network, channel, client, ended
        client.hang_up()


def test_channel_when_the_link_is_cut_then_both_ends_give_the_other_up_in_their_own_time(conversation):
    network, channel, _, ended = conversation
    network.cut(0, 1)
    assert channel.next_event(WAIT_S) == RankSilent(rank=3, silent_s=HEARTBEAT_S)
    # The system alone would take a quarter of an hour over it.
    assert ended.wait(WAIT_S)


def test_channel_when_the_link_is_mended_before_the_deadline_then_nothing_is_lost(conversation):
    network, channel, client, ended = conversation
    network.cut(0, 1)
    client.epoch(1, {"loss": 0.5})
    assert channel.next_event(HEARTBEAT_S / 4) is None
    network.heal(0, 1)
    event = channel.next_event(WAIT_S)
    assert (event.epoch, event.logs) == (1, {"loss": 0.5})
    assert not ended.is_set()
    client.close()
    assert channel.next_event(WAIT_S) == Finished(rank=3)
    assert channel.next_event(0.1) is None


def test_channel_when_the_driver_gave_a_rank_up_and_the_link_is_mended_then_the_rank_learns_it(conversation):
    network, channel, _, ended = conversation
    network.cut(0, 1)
    assert isinstance(channel.next_event(WAIT_S), RankSilent)
    network.heal(0, 1)
    assert ended.wait(WAIT_S)
    assert not isinstance(channel.next_event(0.5), RankGone)


def test_address_towards_another_host_is_the_own_one_there(network):
    here, there = network.hosts
    with here.entered():
        assert address_towards((there.address, 9)) == here.address


def test_hosts_when_their_block_has_ended_then_nothing_of_them_is_left(network):
    names = {host.name for host in network.hosts}
    network.close()
    deadline = time.monotonic() + WAIT_S
    while names & namespaces() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not names & namespaces()


def namespaces():
    return set(os.listdir("/var/run/netns")) if os.path.isdir("/var/run/netns") else set()
