"""``elephant checkpoints``: what it lists, what it finds damaged, and the model that it saves."""

import json
from dataclasses import replace

import keras
import numpy as np
import pytest

from elephant.checkpoint.manager import CheckpointManager
from elephant.checkpoint.state import FitState
from elephant.cli.main import main
from elephant.modeling.variable_paths import StateReader, paths_in_order, read_by_path, state_paths
from elephant.modeling.variables import build_variables, optimizer_names
from elephant.storage.folder import folder_at


def small_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def state_of(model, epochs, step=0, losses=()):
    build_variables(model, None)
    facts = {
        "variables": paths_in_order(model),
        "optimizer_names": optimizer_names(model),
        "optimizers": [],
        "num_workers": 2,
    }
    history = {"loss": list(losses) or [float(epochs - epoch) for epoch in range(epochs)]}
    return FitState(epochs=epochs, step=step, arrays=read_by_path(state_paths(model)), facts=facts, history=history)


@pytest.fixture
def kept(tmp_path):
    """A folder with checkpoints after two and four epochs of a model that has been trained."""
    model, folder = small_model(), tmp_path / "kept"
    x, y = np.ones((8, 3), np.float32), np.zeros((8, 2), np.float32)
    manager = CheckpointManager(folder_at(str(folder)))
    weights = {}
    for epochs in (2, 4):
        model.fit(x, y, epochs=2, verbose=0)
        manager.save(state_of(model, epochs))
        weights[epochs] = [*model.get_weights(), *map(np.asarray, model.optimizer.variables)]
    small_model().save(tmp_path / "layers.keras")
    return folder, weights


def test_checkpoints_when_all_are_whole_then_lists_them_and_exits_with_0(kept, capsys):
    folder, _ = kept
    assert main(["checkpoints", str(folder)]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split()[:3] == ["epochs", "files", "bytes"]
    assert [line.split()[:2] for line in lines] == [["2", "whole"], ["4", "whole"]] and "loss=1" in lines[1]
    assert main(["checkpoints", str(folder), "--json"]) == 0
    newest = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        (newest["epochs"], newest["step"]) == (4, 0)
        and newest["whole"]
        and newest["workers"] == 2
        and newest["metrics"] == {"loss": 1.0}
    )


def test_checkpoints_when_one_is_damaged_then_names_it_and_saves_the_one_before(kept, tmp_path, capsys):
    folder, weights = kept
    [newest] = folder.glob("epoch-00000004.*.npz")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    assert main(["checkpoints", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED" in out and f"{newest.name} is not what was written" in out
    saved = tmp_path / "model.keras"
    layers = str(tmp_path / "layers.keras")
    assert main(["checkpoints", str(folder), "--export", str(saved), "--model", layers]) == 0
    loaded = keras.saving.load_model(saved)
    found = [*loaded.get_weights(), *map(np.asarray, loaded.optimizer.variables)]
    for value, wanted in zip(found, weights[2], strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert main(["checkpoints", str(folder), "--export", str(saved), "--model", layers, "--epochs", "4"]) == 1
    assert "expected a checkpoint that is whole" in capsys.readouterr().err


def test_checkpoints_when_a_base_is_frozen_then_save_a_model_that_predicts_alike_with_the_optimizer_s_state(tmp_path):
    model, folder = small_model(), tmp_path / "adapted"
    model.layers[1].trainable = False
    model.layers[0].enable_lora(1)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.save(tmp_path / "layers.keras")
    x, y = np.random.default_rng(0).normal(size=(8, 3)).astype("float32"), np.zeros((8, 2), np.float32)
    manager, reader = CheckpointManager(folder_at(str(folder))), StateReader()
    for epochs in (1, 2, 3):
        model.fit(x, y, verbose=0)
        arrays, frozen = reader.read(model)
        state = state_of(model, epochs)
        manager.save(replace(state, arrays=arrays, facts={**state.facts, "frozen": frozen}))
    assert [place.name[:14] for place in folder.glob("*.frozen.npz")] == ["epoch-00000001"]
    saved = str(tmp_path / "model.keras")
    assert main(["checkpoints", str(folder), "--export", saved, "--model", str(tmp_path / "layers.keras")]) == 0
    loaded = keras.saving.load_model(saved)
    # Keras writes the kernel with its factors added to it.
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
    for found, expected in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.fixture
def kept_within(tmp_path):
    """A folder whose second epoch is the best one, with a checkpoint after 120 steps of the fifth; bias by epoch."""
    model, folder = small_model(), tmp_path / "within"
    manager = CheckpointManager(folder_at(str(folder)), keep_best="loss")
    losses = [5.0, 1.0, 4.0, 2.0]
    for epochs, step in ((1, 0), (2, 0), (3, 0), (4, 0), (4, 120)):
        build_variables(model, None)
        model.layers[0].bias.assign(np.full(2, epochs + step / 1000))
        manager.save(state_of(model, epochs, step, losses[:epochs]))
    small_model().save(tmp_path / "layers.keras")
    return folder


def exported_bias(folder, tmp_path, *arguments):
    saved, layers = str(tmp_path / "model.keras"), str(tmp_path / "layers.keras")
    code = main(["checkpoints", str(folder), "--export", saved, "--model", layers, *arguments])
    return keras.saving.load_model(saved).layers[0].bias.numpy()[0] if code == 0 else code


def test_checkpoints_when_one_lies_within_an_epoch_then_says_so_and_epochs_means_their_ends(
    kept_within, tmp_path, capsys
):
    assert main(["checkpoints", str(kept_within)]) == 0
    assert [line.split("whole")[0].strip() for line in capsys.readouterr().out.splitlines()[1:]] == [
        "2",
        "4",
        "4 + 120 steps",
    ]
    assert main(["checkpoints", str(kept_within), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["epochs"], row["step"]) for row in rows] == [(2, 0), (4, 0), (4, 120)]
    assert exported_bias(kept_within, tmp_path) == pytest.approx(4.12)
    assert "after 4 epochs and 120 steps" in capsys.readouterr().out
    assert exported_bias(kept_within, tmp_path, "--epochs", "4") == 4.0
    assert exported_bias(kept_within, tmp_path, "--epochs", "3") == 1
    assert "one after 3 epochs. Received: a folder with 2, 4, 4 + 120 steps" in capsys.readouterr().err


def test_checkpoints_when_the_best_is_asked_for_then_saves_that_epoch_s_own_model(kept_within, tmp_path, capsys):
    assert exported_bias(kept_within, tmp_path, "--best", "loss") == 2.0
    # What the fit returned in the end is another model than the one whose metrics these are.
    manager = CheckpointManager(folder_at(str(kept_within)))
    state = manager.latest(suits=lambda manifest: not manifest.step).state
    manager.finish([np.zeros_like(value) for value in state.variables], trained=False)
    assert exported_bias(kept_within, tmp_path, "--best", "loss:max") == 4.0
    assert exported_bias(kept_within, tmp_path, "--epochs", "4") == 0.0
    capsys.readouterr()
    assert exported_bias(kept_within, tmp_path, "--best", "val_loss") == 2
    assert "--best: expected a metric of the fit: loss. Received: 'val_loss'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        exported_bias(kept_within, tmp_path, "--best", "gain")
    assert "--best: expected the name of a metric, such as 'val_loss', and ':max'" in capsys.readouterr().err


def test_checkpoints_when_the_model_is_another_then_says_so(kept, tmp_path, capsys):
    folder, _ = kept
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
    other.save(tmp_path / "other.keras")
    given = ["checkpoints", str(folder), "--export", str(tmp_path / "model.keras")]
    assert main([*given, "--model", str(tmp_path / "other.keras")]) == 2
    assert "dense/kernel of shape (3, 2), not (3, 5)" in capsys.readouterr().err
    assert not (tmp_path / "model.keras").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--export", "model.keras"], 2, "--export FILE.keras and --model together"),
        (["--model", "m:build"], 2, "--export FILE.keras and --model together"),
        (["--epochs", "2"], 2, "--epochs: expected --export with it"),
        (["--best", "loss"], 2, "--best: expected --export with it"),
        (
            ["--export", "model.keras", "--model", "m:build", "--epochs", "2", "--best", "loss"],
            2,
            "--best: expected no --epochs with it",
        ),
        (["--export", "model.h5", "--model", "m:build"], 2, "a name that ends in .keras"),
        (["--export", "model.keras", "--model", "m:build"], 1, "a folder with none"),
        ([], 1, ""),
    ],
)
def test_checkpoints_when_there_are_none_or_arguments_do_not_fit_then_says_so(arguments, code, text, tmp_path, capsys):
    assert main(["checkpoints", str(tmp_path), *arguments]) == code
    assert text in capsys.readouterr().err
