"""Of the checkpoints of a folder those stay that a fit may go on from, or a user come back for."""

import math

import pytest
from tables import every_case

from elephant.checkpoint.retention import Objective, retained
from elephant.checkpoint.state import CheckpointManifest, StoredFile, file_name
from elephant.errors import ConfigurationError


def manifest(number, epochs, step=0, value=1.0, *, finite=True, of=None):
    """Returns a manifest; with `of`, it shares the state of the one of that number."""
    stored = StoredFile(name=file_name(epochs, step, f"{of or number:016x}", "state.npz"), num_bytes=1, crc=1)
    history = {"loss": [9.0, 9.0], "val_loss": [0.0, value]}
    return CheckpointManifest(epochs=epochs, step=step, number=number, state=stored, history=history, finite=finite)


NAN = (math.nan, {"finite": False})
# A title, what to keep the best of, checkpoints in the order in which they came, the last one just now, and which stay.
CASES = [
    ("the last two", None, [(1,), (2,), (3,)], [2, 3]),
    ("the last end behind many within an epoch", None, [(1,), (2,), (2, 9), (2, 10), (2, 11)], [2, 4, 5]),
    ("those of no end at all", None, [(0, 9), (0, 10), (0, 11)], [2, 3]),
    (
        "of one epoch those that came last, of a fit that went back",
        None,
        [(2,), (2, 240), (2, 99), (2, 130)],
        [1, 3, 4],
    ),
    ("the least", "val_loss", [(1, 0, 3.0), (2, 0, 1.0), (3, 0, 2.0), (4, 0, 2.0)], [2, 3, 4]),
    ("the most", "val_loss:max", [(1, 0, 3.0), (2, 0, 1.0), (3, 0, 2.0), (4, 0, 2.0)], [1, 3, 4]),
    ("the first of equals", "val_loss", [(1, 0, 1.0), (2, 0, 1.0), (3, 0, 1.0), (4, 0, 1.0)], [1, 3, 4]),
    (
        "the best end, and none within the next epoch, whose history is the same",
        "val_loss",
        [(1, 0, 1.0), (1, 5, 1.0), (2, 0, 2.0), (2, 5, 2.0), (2, 6, 2.0)],
        [1, 3, 4, 5],
    ),
    (
        "none of NaN or infinity, or of a value per class",
        "val_loss",
        [(1, 0, math.nan), (2, 0, -math.inf), (3, 0, [0.0]), (4, 0, None), (5, 0, 7.0), (6, 0, 8.0), (7, 0, 8.0)],
        [5, 6, 7],
    ),
    (
        "the best one of finite models",
        "val_loss",
        [(1, 0, 2.0), (2, 0, 1.0, {"finite": False}), (3, 0, 3.0), (4, 0, 3.0)],
        [1, 3, 4],
    ),
    (
        "the last one to go on from, though the best one is finite too",
        "val_loss",
        [(1, 0, 1.0), (2, 0, 2.0), (3, 0, 2.0), (4, 0, *NAN), (5, 0, *NAN)],
        [1, 3, 4, 5],
    ),
    (
        "the last finite end beside the last finite one",
        None,
        [(1,), (2,), (2, 5), (3, 0, *NAN), (3, 5, *NAN), (3, 6, *NAN)],
        [2, 3, 4, 5, 6],
    ),
    ("the one that has come, of a fit that went back", None, [(4,), (5,), (6,), (2,)], [2, 3, 4]),
    ("the later of two that share their state", "val_loss", [(1,), (2,), (3, 0, 0.5), (3, 0, 0.5, {"of": 3})], [2, 4]),
]


@every_case(("title", "metric", "given", "stay"), CASES, ids=[case[0] for case in CASES])
def test_checkpoints_when_one_more_has_come_then_those_stay(title, metric, given, stay):
    made = [manifest(number, *one[:3], **(one[3] if len(one) > 3 else {})) for number, one in enumerate(given, start=1)]
    names = {str(one.number): one for one in made}
    objective = None if metric is None else Objective.of(metric)
    assert retained(names, str(len(given)), objective) == set(map(str, stay))


def test_objective_when_a_history_lacks_it_then_names_what_there_is():
    history = {"loss": [1.0], "val_loss": [2.0], "f1_score": [[0.5, 0.25]]}
    Objective.of("val_loss").require_in(history)
    # Before the first epoch nobody knows.
    Objective.of("val_los:min").require_in({})
    with pytest.raises(ConfigurationError, match="keepBest: .* loss, val_loss, f1_score. Received: 'val_los'"):
        Objective.of("val_los:min").require_in(history)
    with pytest.raises(ConfigurationError, match="--best: expected a metric with one number .*'f1_score', .* each cl"):
        Objective.of("f1_score").require_in(history, "--best")
