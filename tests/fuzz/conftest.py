"""What every test here must not do: leave a thread or a descriptor, or have the package log an error."""

import logging

import pytest
from leaks import nothing_left_behind  # noqa: F401  (a fixture that every test here uses)


class Errors(logging.Handler):
    """Keeps the records of errors, such as those of a connection's thread that has failed of what was sent to it."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture(autouse=True)
def logged_errors():
    """Errors that the package has logged so far; a test after which there are some fails."""
    errors, logger = Errors(), logging.getLogger("elephant")
    logger.addHandler(errors)
    yield errors.records
    logger.removeHandler(errors)
    assert [(record.getMessage(), record.exc_info and record.exc_info[1]) for record in errors.records] == []
