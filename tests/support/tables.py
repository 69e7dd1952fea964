"""Tables of cases of a pure function, as one test: `pytest.mark.parametrize` counts and reports each as a test."""

import functools
import inspect
import traceback

import pytest


def every_case(names, cases, ids=None):
    """Has a test run with every case; it fails with the tracebacks of all that fail.

    It takes what `pytest.mark.parametrize` takes. All cases have the same fixtures: use it where they leave no trace.

    Args:
        names: Of the arguments that a case is for, with commas between them.
        cases: Values of the arguments, or tuples of them.
        ids: What to call the cases; None shows their values.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = list(cases)
    # Those of pytest.param have marks.
    cases = [case.values if hasattr(case, "marks") else (tuple(case) if len(names) > 1 else (case,)) for case in cases]

    def decorate(test):
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**fixtures):
            failures = []
            for place, case in enumerate(cases):
                try:
                    test(**fixtures, **dict(zip(names, case, strict=True)))
                except (Exception, pytest.fail.Exception):
                    title = list(ids)[place] if ids else repr(case)[:200]
                    failures.append(f"case {place}, {title}:\n{traceback.format_exc()}")
            if failures:
                pytest.fail(f"{len(failures)} of {len(cases)} cases failed.\n" + "\n".join(failures), pytrace=False)

        left = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=left)
        return run

    return decorate
