"""Tables of cases of which only some run in ``make test``."""

import re

import pytest


def in_tiers(cases, *, fast, slow):
    """Returns the cases of a table as the values of one parameter; all but a few are marked as slow.

    Args:
        cases: By name, or a sequence whose values are their own names.
        fast: Names of those that run in ``make test``, too.
        slow: Why the others do not.
    """
    named = cases if isinstance(cases, dict) else {name_of(case): case for case in cases}
    unknown = {*fast} - {*named}
    assert not unknown, f"there are no cases {unknown} among {[*named]}"
    return [
        pytest.param(case, id=str(name), marks=() if name in fast else pytest.mark.slow(slow))
        for name, case in named.items()
    ]


def name_of(case):
    """Returns a case's own name, without addresses: the processes of pytest-xdist have to give it the same one."""
    if callable(case):
        return case.__name__
    return case if isinstance(case, int | str) else re.sub(r" at 0x[0-9a-f]+", "", str(case))
