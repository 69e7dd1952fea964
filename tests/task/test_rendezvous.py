"""What ranks must agree on before they train."""

import dataclasses

import pytest
from tables import every_case

from elephant.errors import ENDED, ClusterError, ConfigurationError, DataError, PeerLostError
from elephant.monitor.events import RankFailure
from elephant.task.rendezvous import RankReport, agree, agreed_row_shapes, installed_versions

VERSIONS = {"python": "3.11", "elephant": "0.1.0", "keras": "3.15.1"}


def cards(*rows):
    return [
        RankReport(
            rank=rank,
            run_id="run",
            name=f"h{rank}",
            host=f"10.0.0.{rank}",
            port=1,
            num_rows=count,
            row_shapes={"features": (4,)},
            versions=VERSIONS,
        )
        for rank, count in enumerate(rows)
    ]


def replaced(at, change, *rows):
    made = cards(*rows)
    made[at] = dataclasses.replace(made[at], **change)
    return made


def test_cards_when_written_and_read_then_are_equal():
    card = cards(3)[0]
    assert RankReport.from_text(card.to_text()) == card


def test_row_shapes_when_all_is_well_then_are_given_even_to_empty_ranks():
    assert agreed_row_shapes(replaced(1, {"row_shapes": {}}, 3, 0)) == {"features": (4,)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (cards(0, 0), "Received: a DataFrame without rows"),
        (replaced(0, {"num_marked": 3}, 3, 0), "all marked for validation"),
        (replaced(1, {"row_shapes": {"features": (5,)}}, 3, 3), "features: expected rows of one shape.* 4 .* 5 "),
    ],
)
def test_row_shapes_when_there_is_nothing_to_train_on_then_every_rank_gets_the_same_error(given, message):
    with pytest.raises(DataError, match=message):
        agreed_row_shapes(given)


def test_agree_when_the_driver_demands_fewer_versions_then_others_may_differ():
    given = replaced(1, {"versions": {**VERSIONS, "keras": "3.9.0"}}, 0, 0)
    agree(given, driver_versions={"python": "3.11"})
    with pytest.raises(ClusterError, match=r"Received: \{'jax': 'missing'\} on h0 \(rank 0\)"):
        agree(given, driver_versions={"jax": "0.4"})


@every_case(
    ("given", "error", "message"),
    [
        (
            replaced(1, {"failure": RankFailure(kind="elephant.DataError", message="column 'x'")}, 3, 3),
            DataError,
            r"column 'x' \(rank 1\)",
        ),
        (
            replaced(1, {"failure": RankFailure(kind="OSError", message="OSError: full")}, 3, 3),
            ClusterError,
            "OSError: full",
        ),
        (
            replaced(1, {"failure": RankFailure(kind=ENDED, message="its process was killed")}, 3, 3),
            PeerLostError,
            r"another rank's process ended before the ranks had met: its process was killed \(rank 1\)",
        ),
        (replaced(1, {"host": "127.0.1.1"}, 3, 3), ClusterError, r"h1 to resolve.*Received: 127.0.1.1 \(rank 1\)"),
        (
            replaced(
                1, {"failure": RankFailure(kind="elephant.ConfigurationError", message="none", traceback="File")}, 3, 3
            ),
            ConfigurationError,
            r"^none \(rank 1\)$",
        ),
        (
            replaced(1, {"versions": {**VERSIONS, "keras": "3.9.0"}}, 3, 3),
            ClusterError,
            r"'keras': '3.9.0'.* on h1 \(rank 1\)",
        ),
    ],
)
def test_agree_when_something_differs_then_every_rank_gets_the_same_error(given, error, message):
    with pytest.raises(error, match=message):
        agree(given, driver_versions=VERSIONS)


def test_installed_versions_when_asked_then_do_not_import_keras():
    assert set(installed_versions()) == {"python", "elephant", "keras"}
