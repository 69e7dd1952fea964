"""Checks by phase, and one error of all that is missing."""

import pytest

from elephant.cluster.checks import registry
from elephant.cluster.checks.registry import Phase, check, check_result, refuse_failures, run_phase
from elephant.errors import ClusterError


def found(name, status):
    return check_result(name, status, expected="one thing", received="another", remedy="Change it.")


def test_findings_when_none_failed_then_nothing_is_raised():
    refuse_failures([found("a", "ok"), found("b", "warning"), found("c", "unknown")])


def test_findings_when_one_failed_then_its_text_is_the_error():
    with pytest.raises(ClusterError) as failure:
        refuse_failures([found("a", "ok"), found("b", "failure")])
    assert str(failure.value) == "b: expected one thing. Received: another. Change it."


def test_findings_when_several_failed_then_one_error_names_all():
    with pytest.raises(ClusterError) as failure:
        refuse_failures([found("a", "failure"), found("b", "warning"), found("c", False)])
    assert str(failure.value).splitlines() == [
        "the Spark application lacks 2 things that this fit needs:",
        "1. a: expected one thing. Received: another. Change it.",
        "2. c: expected one thing. Received: another. Change it.",
    ]


def test_finding_when_its_message_was_made_elsewhere_then_that_is_said():
    assert str(check_result("a", "failure", expected="b", received="c", text="All of it.")) == "All of it."


def test_checks_when_registered_then_take_the_facts_of_their_phase_by_name_where_they_apply(monkeypatch):
    monkeypatch.setattr(registry, "CHECKS", {phase: {} for phase in Phase})

    @check(Phase.SETTINGS)
    def check_size(size):
        return check_result("size", size < 3, expected="a small one", received=size)

    @check(Phase.SETTINGS, when=lambda facts: facts["names"])
    def check_names(names, size):
        return [check_result(name, "warning", expected="none", received=size) for name in names]

    found = run_phase(Phase.SETTINGS, size=3, names=["a", "b"], unused=None)
    assert [(one.name, one.status) for one in found] == [("size", "failure"), ("a", "warning"), ("b", "warning")]
    assert [one.name for one in run_phase(Phase.SETTINGS, size=1, names=[])] == ["size"]
    assert run_phase(Phase.SLOTS) == []
