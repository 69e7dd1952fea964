import math

import pytest

from elephant.errors import ConfigurationError, DeadlineExceededError
from elephant.net.deadline import Deadline


def test_remaining_before_the_end_is_positive_and_bounded():
    assert 0 < Deadline(50, "A test").remaining() <= 50
    assert Deadline(math.inf, "A test").remaining() == 3600


def test_remaining_after_the_end_says_what_it_covered():
    deadline = Deadline(0, "Waiting for rank 3")
    assert deadline.expired
    with pytest.raises(DeadlineExceededError, match=r"^Waiting for rank 3 did not end within 0 s\.$"):
        deadline.remaining()


def test_exceeded_with_detail_appends_it():
    assert str(Deadline(2.5, "Connecting").exceeded("Nobody came.")) == (
        "Connecting did not end within 2.5 s. Nobody came."
    )


def test_shortened_never_outlives_the_whole():
    whole = Deadline(1, "All")
    assert whole.shortened(100, "Part").remaining() <= 1
    assert whole.shortened(0.5, "Part").remaining() <= 0.5
    assert Deadline(0, "All").shortened(5, "Part").expired


@pytest.mark.parametrize("seconds", [-1, math.nan])
def test_deadline_with_impossible_seconds_raises(seconds):
    with pytest.raises(ConfigurationError, match="expected a timeout of zero or more seconds"):
        Deadline(seconds, "A test")
