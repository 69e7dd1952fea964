"""What jobs that train refuse before Spark starts."""

import pytest

from elephant.errors import ConfigurationError
from elephant.jobs.training import check_training

GIVEN = {"data": "/rows", "model": "mine:build", "output": "hdfs:///models/digits"}


@pytest.mark.parametrize("path", ["hdfs:///models/digits", "hdfs:///models/digits/", "hdfs:///models/digits/kept"])
def test_training_when_checkpoints_would_lie_at_the_output_then_is_refused_before_it_begins(path):
    with pytest.raises(ConfigurationError, match="checkpoint-path: expected a folder outside of output"):
        check_training({**GIVEN, "checkpointPath": path})


@pytest.mark.parametrize("path", ["hdfs:///models/digits-kept", "hdfs:///models", "/models/digits"])
def test_training_when_checkpoints_lie_elsewhere_then_is_not_refused(path):
    check_training({**GIVEN, "checkpointPath": path})
    check_training(GIVEN)
