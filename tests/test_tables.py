"""Tables of cases report what fails: a table that passes whatever it holds would hide 600 cases."""

import pytest
from tables import every_case


def test_table_when_cases_fail_then_names_each_and_runs_the_others():
    ran = []

    @every_case("number, limit", [(1, 2), pytest.param(5, 2, id="five"), (7, 2), (0, 1)])
    def holds(number, limit):
        ran.append(number)
        assert number < limit

    with pytest.raises(pytest.fail.Exception, match=r"(?s)2 of 4 cases failed.*case 1, \(5, 2\).*case 2, \(7, 2\)"):
        holds()
    assert ran == [1, 5, 7, 0]
