"""One error of all that is missing."""

import pytest

from elephant.cluster.checks.result import check_result, refuse_failures
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
