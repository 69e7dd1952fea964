"""The policy of an elastic fit as a table: the scenarios of Horovod's elastic tests, by name, and a few more.

A scenario is what happens, one after the other, and what the policy is to make of it.
"""

import pytest

from elephant.driver.elastic.policy import FRUITLESS_LOSSES, Action, ElasticPolicy

SLOTS_S = 30.0


def starts(slots, workers, waited=0.0):
    """An attempt with so many slots begins with so many workers."""
    return ("starts", slots, waited, workers)


def waits(slots, waited=0.0):
    return ("waits", slots, waited)


def gives_up(slots, waited=SLOTS_S):
    return ("gives up", slots, waited)


def loss(goes_on=True, further=True):
    """A worker, or all of them, are lost."""
    return ("loss", goes_on, further)


def epoch(slots, grows=False):
    """An epoch ends with so many slots."""
    return ("epoch", slots, grows)


SCENARIOS = {
    "hosts added": ((1, 4), [starts(2, 2), epoch(2), epoch(3, grows=True), starts(3, 3), epoch(4, grows=True),
                             starts(4, 4), epoch(4)]),
    "hosts removed": ((1, 4), [starts(4, 4), loss(), waits(3), waits(3, 29.0), starts(3, 3, SLOTS_S), loss(),
                               waits(1), starts(1, 1, SLOTS_S)]),
    "hosts added and removed": ((1, 4), [starts(2, 2), epoch(4, grows=True), starts(4, 4), loss(), waits(3),
                                         starts(3, 3, SLOTS_S), epoch(4, grows=True), starts(4, 4)]),
    "one added as another is removed": ((1, 4), [starts(3, 3), loss(), starts(3, 3), epoch(3)]),
    "one rank fails, and its slot stays": ((2, 4), [starts(2, 2), loss(), starts(2, 2)]),
    "one rank fails, and its slot comes back in time": ((2, 4), [starts(3, 3), loss(), waits(2), waits(2, 12.0),
                                                                 starts(3, 3, 13.0)]),
    "all ranks fail at once: one loss": ((2, 4), [starts(4, 4), loss(), starts(4, 4)]),
    "one rank fails again and again without coming further": (
        (1, 2),
        [starts(2, 2), *[step for _ in range(FRUITLESS_LOSSES - 1) for step in (loss(further=False), starts(2, 2))],
         loss(goes_on=False, further=False)],
    ),
    "losses are free as long as the fit comes further": (
        (1, 2), [starts(2, 2), *[step for _ in range(20) for step in (loss(), starts(2, 2))]],
    ),
    "losses without headway count anew after one with": (
        (1, 2), [starts(2, 2), loss(further=False), starts(2, 2), loss(further=False), starts(2, 2), loss(),
                 starts(2, 2), loss(further=False), starts(2, 2)],
    ),
    "all hosts lost": ((2, 4), [starts(4, 4), loss(), waits(0), waits(0, 29.0), gives_up(0)]),
    "all hosts lost, and some come back": ((2, 4), [starts(4, 4), loss(), waits(0), waits(2, 10.0),
                                                    starts(2, 2, SLOTS_S)]),
    "min workers: fewer at the begin": ((3, 4), [waits(2), waits(2, 29.9), gives_up(2)]),
    "min workers: enough after a while": ((3, 4), [waits(2), waits(2, 10.0), starts(3, 3, 11.0)]),
    "min workers: fewer after a loss": ((2, 4), [starts(2, 2), loss(), waits(1), gives_up(1)]),
    "max workers: more slots than that": ((1, 3), [starts(9, 3), epoch(9), loss(), starts(9, 3)]),
    "as many as there are after a loss, and more if there are": ((1, 4), [starts(2, 2), loss(), starts(4, 4)]),
    "no spurious reset: an executor comes in mid-epoch, and goes": ((1, 4), [starts(2, 2), epoch(2), epoch(2)]),
    "no spurious reset: another's executor goes": ((1, 4), [starts(3, 3), epoch(2), epoch(3)]),
    "no spurious reset: equal slots": ((2, 2), [starts(2, 2), epoch(2), epoch(5)]),
    "what was free is taken again before it is used": ((1, 4), [starts(2, 2), epoch(3, grows=True), starts(2, 2)]),
}  # fmt: skip


def play(policy, events):
    for number, (kind, *values) in enumerate(events):
        if kind == "loss":
            goes_on, further = values
            assert policy.goes_on_after_loss(came_further=further) is goes_on, number
        elif kind == "epoch":
            slots, grows = values
            assert policy.grows_after_epoch(slots) is grows, number
        else:
            slots, waited, *workers = values
            decision = policy.before_attempt(slots, waited_s=waited)
            expected = {"starts": Action.START, "waits": Action.WAIT, "gives up": Action.GIVE_UP}[kind]
            assert (decision.action, *([decision.workers] if workers else [])) == (expected, *workers), number


@pytest.mark.parametrize("name", SCENARIOS)
def test_policy_when_hosts_come_and_go_then_decides_as_the_table_says(name):
    (least, most), events = SCENARIOS[name]
    play(ElasticPolicy(least, most, slots_s=SLOTS_S), events)


def test_policy_when_machines_have_to_be_started_then_waits_longer_for_the_fewest_and_not_for_more():
    policy = ElasticPolicy(2, 4, slots_s=SLOTS_S, least_s=600.0)
    events = [starts(4, 4), loss(), waits(3, 29.0), starts(3, 3, SLOTS_S), loss(), waits(1, 599.0), gives_up(1, 600.0)]
    play(policy, events)


def test_policy_when_restarts_are_limited_then_counts_losses_and_not_growth():
    policy = ElasticPolicy(1, 4, slots_s=SLOTS_S, max_restarts=2)
    play(policy, [starts(2, 2), loss(), starts(2, 2), epoch(4, grows=True), starts(4, 4), loss(further=False),
                  starts(4, 4), loss(goes_on=False)])  # fmt: skip
    assert policy.restarts == 2


def test_policy_when_executors_are_being_started_then_waits_for_the_most_of_them():
    policy = ElasticPolicy(1, 4, slots_s=SLOTS_S)
    for slots, waited in ((1, 0.0), (3, 4.0)):
        assert policy.before_attempt(slots, waited_s=waited, are_coming=True).action is Action.WAIT
    assert policy.before_attempt(3, waited_s=9.0).workers == 3
    assert policy.before_attempt(4, waited_s=0.0, are_coming=True).workers == 4
