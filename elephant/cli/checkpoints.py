"""``elephant checkpoints``: what a folder of them has, whether its files are whole, and one of them as a model."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elephant.errors import CheckpointError, ConfigurationError, ElephantError, shown_text

if TYPE_CHECKING:
    from elephant.checkpoint.manager import CheckpointManager, SurveyedCheckpoint

NAME = "elephant checkpoints"
_SUFFIX = ".keras"
_WIDTH = 120


def checkpoints(given: argparse.Namespace) -> int:
    """Lists the checkpoints of a folder, the furthest last, or saves one as a model; returns the exit code."""
    from elephant.checkpoint.manager import CheckpointManager
    from elephant.storage.folder import folder_at

    try:
        _require_both(given)
        manager = CheckpointManager(folder_at(given.path), option="PATH", again="ask again")
        found = manager.survey()
        if given.export is not None:
            return _export(manager, found, given)
    except ConfigurationError as error:
        return _failed(error, 2)
    except (ElephantError, OSError) as error:
        return _failed(error, 1)
    sys.stdout.write((_as_json(found) if given.json else _as_table(found)) + "\n")
    return 0 if found and all(one.error is None for one in found) else 1


def _require_both(given: argparse.Namespace) -> None:
    if (given.export is None) != (given.model is None):
        received = "--model alone" if given.export is None else "--export alone"
        raise ConfigurationError(
            f"expected --export FILE{_SUFFIX} and --model together: a checkpoint has numbers, and no layers. "
            f"Received: {received}."
        )
    for name, value in (("--epochs", given.epochs), ("--best", given.best)):
        if value is not None and given.export is None:
            raise ConfigurationError(
                f"{name}: expected --export with it. Received: {name} alone, which says nothing about a list."
            )
    if given.epochs is not None and given.best is not None:
        raise ConfigurationError(
            "--best: expected no --epochs with it. Received: both, and each says which checkpoint to save."
        )
    if given.export is not None and not given.export.endswith(_SUFFIX):
        raise ConfigurationError(f"--export: expected a name that ends in {_SUFFIX}. Received: {given.export!r}.")


def _failed(error: Exception, code: int) -> int:
    sys.stderr.write(f"{NAME}: {shown_text(error)}\n")
    return code


def _export(manager: CheckpointManager, found: Sequence[SurveyedCheckpoint], given: argparse.Namespace) -> int:
    wanted = [one for one in found if given.epochs is None or (one.epochs, one.step) == (given.epochs, 0)]
    if not wanted:
        known = ", ".join(map(_place, found)) or "none"
        asked = "any checkpoint" if given.epochs is None else f"one after {given.epochs} epochs"
        raise CheckpointError(f"PATH: expected {asked}. Received: a folder with {known}.")
    whole = [one for one in wanted if one.error is None]
    if not whole:
        raise CheckpointError(f"PATH: expected a checkpoint that is whole. Received: {wanted[-1].error}.")
    chosen = _newest(whole) if given.best is None else _best(whole, given.best)
    from elephant.jobs.checkpoint_export import export

    name = export(manager.read(chosen), given.model, given.export)
    steps = f" and {chosen.step} steps" if chosen.step else ""
    sys.stdout.write(f"{given.export}: {name!r} after {chosen.epochs} epochs{steps}\n")
    return 0


def _newest(checkpoints: Sequence[SurveyedCheckpoint]) -> SurveyedCheckpoint:
    return max(checkpoints, key=lambda one: (one.epochs, 0) if one.manifest is None else one.manifest.age)


def _best(checkpoints: Sequence[SurveyedCheckpoint], metric: str) -> SurveyedCheckpoint:
    """Returns the checkpoint of the best epoch, with the model as it was then, whatever the fit returned in the end."""
    from elephant.checkpoint.retention import Objective

    objective = Objective.of(metric)
    best = objective.best_of(one.manifest for one in checkpoints if one.manifest is not None)
    if best is None:
        objective.require_in({name: one.history[name] for one in checkpoints for name in one.history}, "--best")
        raise CheckpointError(
            f"PATH: expected a checkpoint at an epoch's end whose model and {objective.metric} are finite. Received: "
            f"{', '.join(map(_place, checkpoints))}, which are not so."
        )
    return next(replace(one, finished=False) for one in checkpoints if one.manifest is best)


def _place(checkpoint: SurveyedCheckpoint) -> str:
    epochs, step = checkpoint.epochs, checkpoint.step
    return f"{epochs} + {step} step{'s' * (step != 1)}" if step else str(epochs)


def _row(one: SurveyedCheckpoint) -> dict[str, Any]:
    last = {name: values[-1] for name, values in one.history.items() if values}
    return {
        "epochs": one.epochs,
        "step": one.step,
        "ended": one.finished,
        "finite": one.finite,
        "bytes": one.num_bytes,
        "workers": one.num_workers,
        "whole": one.error is None,
        "error": one.error,
        "metrics": last,
        "file": one.name,
    }


def _as_json(found: Sequence[SurveyedCheckpoint]) -> str:
    return "\n".join(json.dumps(_row(one)) for one in found)


def _as_table(found: Sequence[SurveyedCheckpoint]) -> str:
    """Returns one line for each checkpoint, and below it what is wrong with its files."""
    from rich.console import Console
    from rich.table import Table

    if not found:
        return "no checkpoints"
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("epochs", "files", "bytes", "workers", "model", "last metrics"):
        table.add_column(title, justify="right" if title in ("epochs", "bytes", "workers") else "left")
    for one in found:
        row = _row(one)
        metrics = " ".join(f"{name}={value:.4g}" for name, value in row["metrics"].items() if isinstance(value, float))
        state = ("ended, " if one.finished else "") + ("finite" if one.finite else "NaN or infinite")
        workers = "" if one.num_workers is None else str(one.num_workers)
        table.add_row(
            _place(one), "whole" if one.error is None else "DAMAGED", f"{one.num_bytes:,}", workers, state, metrics
        )
    output = io.StringIO()
    Console(file=output, width=_WIDTH, force_terminal=False, force_jupyter=False).print(table)
    errors = [f"{one.name}: {one.error}" for one in found if one.error is not None]
    return "\n".join([*(line.rstrip() for line in output.getvalue().splitlines()), *errors])
