"""Walks through the code, pinned: how many functions and modules lie between two ends that a reader looks for.

Each step names its file, its function or class, and the name by which that hands on to the next step. A step that does
not mention that name any more makes the test fail: the walk is another one, and is to be followed again by hand.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "elephant"


class Step(NamedTuple):
    """One function or class of a walk."""

    file: str
    name: str
    hands_on_by: str


TO_SPARK = [
    Step("spark/estimator.py", "KerasEstimator._fit", "train"),
    Step("spark/fit.py", "train", "train_synchronously"),
    Step("spark/fit.py", "train_synchronously", "run_ranks"),
    Step("driver/run_ranks.py", "run_ranks", "start"),
    Step("driver/launcher.py", "SparkLauncher.start", "SparkJob"),
    # Its action is the `run` of the rows, which `SparkLauncher.start` has bound.
    Step("cluster/spark_job.py", "SparkJob", "_action"),
    Step("cluster/row_source.py", "ArrowRows.run", "mapInArrow"),
]
# The driver's part of a fit without checkpoints, as the DataFrame goes: its columns, its cluster, its ranks.
OF_THE_DRIVER = [
    Step("spark/estimator.py", "KerasEstimator._fit", "rows_of_dataset"),
    Step("spark/prepared.py", "rows_of_dataset", "rows_of_frame"),
    Step("spark/training_data.py", "rows_of_frame", "_training_data"),
    Step("spark/training_data.py", "_training_data", "training_schema"),
    Step("spark/columns/column_types.py", "training_schema", "schema_with_targets"),
    *TO_SPARK[:2],
    Step("spark/fit.py", "train_synchronously", "preflight_checked"),
    Step("cluster/checks/preflight.py", "preflight_checked", "run_checks"),
    Step("spark/fit.py", "train_synchronously", "attempts_at_ranks"),
    Step("driver/coordinator_location.py", "attempts_at_ranks", "attempt_here"),
    Step("driver/run_ranks.py", "attempt_here", "Coordinator"),
    *TO_SPARK[2:],
]


def names_in(step):
    """Returns the names and attributes that a function or class mentions; raises KeyError if there is none."""
    node = ast.parse((PACKAGE / step.file).read_text())
    for name in step.name.split("."):
        node = {part.name: part for part in node.body if isinstance(part, ast.ClassDef | ast.FunctionDef)}[name]
    parts = list(ast.walk(node))
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return names | {part.attr for part in parts if isinstance(part, ast.Attribute)}


@pytest.mark.parametrize("walk", [TO_SPARK, OF_THE_DRIVER], ids=["to Spark", "of the driver"])
def test_walk_when_it_is_followed_then_each_step_hands_on_to_the_next(walk):
    lost = [step for step in walk if step.hands_on_by not in names_in(step)]
    assert not lost


def test_fit_when_its_way_to_spark_is_followed_then_is_seven_functions_at_most():
    for step, following in zip(TO_SPARK, TO_SPARK[1:], strict=False):
        assert step.hands_on_by in ("_action", *following.name.split("."))
    assert {"_rows", "run"} <= names_in(TO_SPARK[4])
    assert len(TO_SPARK) <= 7


def test_fit_when_its_driver_s_part_is_followed_then_is_eleven_modules_at_most():
    assert len({step.file for step in OF_THE_DRIVER}) <= 11


def test_checkpoints_when_a_fit_has_them_then_it_opens_their_folder_in_one_place():
    opening = Step("spark/fit.py", "train", "open_checkpoints")
    going_on = Step("driver/recovery/restarts.py", "Recovery", "latest")
    assert opening.hands_on_by in names_in(opening)
    assert not {"open_checkpoints", "checkpoint_folder"} & names_in(going_on)
