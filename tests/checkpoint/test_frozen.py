"""Frozen weights lie in one file of a folder, which all checkpoints name whose weights it has."""

import dataclasses
import json

import numpy as np
import pytest

from elephant.checkpoint.manager import CheckpointManager, read_arrays
from elephant.checkpoint.state import CheckpointManifest, FitState
from elephant.errors import CheckpointError
from elephant.storage.folder import folder_at, sealed, unsealed

BASE, COUNT, FACTOR = "model/base/kernel", "model/base/count", "model/base/factor"
SIZE = 5_000


def state_of(epochs, *, base=0.0, frozen=(BASE, COUNT)):
    arrays = {
        BASE: np.random.default_rng(1).normal(size=SIZE).astype("float32") + np.float32(base),
        COUNT: np.int64(3) + np.zeros((), np.int64),
        FACTOR: np.full(4, epochs, "float32"),
    }
    return FitState(epochs=epochs, arrays=arrays, facts={"variables": [BASE, COUNT, FACTOR], "frozen": [*frozen]})


def manager_of(path):
    return CheckpointManager(folder_at(str(path)))


def require_equal(found, state):
    assert found.facts == state.facts and found.arrays.keys() == state.arrays.keys()
    for name, array in state.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


def files_of(path, kind):
    return sorted(path.glob(f"*.{kind}"))


def test_checkpoints_when_weights_are_frozen_then_these_are_written_once_and_stay_as_long_as_they_are_named(tmp_path):
    manager = manager_of(tmp_path)
    for epochs in range(1, 5):
        manager.save(state_of(epochs))
        require_equal(manager_of(tmp_path).latest().state, state_of(epochs))
    (frozen,) = files_of(tmp_path, "frozen.npz")
    assert frozen.name.startswith("epoch-00000001.") and frozen.stat().st_size > 4 * SIZE
    assert [place.name[:14] for place in files_of(tmp_path, "state.npz")] == ["epoch-00000003", "epoch-00000004"]
    assert all(place.stat().st_size < 4 * SIZE / 10 for place in files_of(tmp_path, "state.npz"))
    assert [one.num_bytes > 4 * SIZE and one.error is None for one in manager.survey()] == [True, True]
    manager.remove()
    assert not list(tmp_path.iterdir())


def test_checkpoints_when_a_fit_goes_on_then_name_the_file_that_is_there(tmp_path):
    manager_of(tmp_path).save(state_of(1))
    frozen = files_of(tmp_path, "frozen.npz")
    again = manager_of(tmp_path)
    require_equal(again.latest().state, state_of(1))
    for epochs in (2, 3, 4):
        again.save(state_of(epochs))
    assert files_of(tmp_path, "frozen.npz") == frozen


def test_checkpoints_when_something_assigns_to_a_frozen_weight_then_it_is_in_their_states(tmp_path):
    manager = manager_of(tmp_path)
    manager.save(state_of(1))
    changed = state_of(2, base=1.0, frozen=[COUNT])
    manager.save(changed)
    require_equal(manager_of(tmp_path).latest().state, changed)
    assert len(files_of(tmp_path, "frozen.npz")) == 1
    # To another process the weight is as it was found.
    again = manager_of(tmp_path)
    again.latest()
    for epochs in (3, 4):
        again.save(state_of(epochs, base=1.0))
        require_equal(manager_of(tmp_path).latest().state, state_of(epochs, base=1.0))
    (frozen,) = files_of(tmp_path, "frozen.npz")
    assert frozen.name.startswith("epoch-00000003.")


def test_result_when_it_is_another_than_the_state_then_has_no_frozen_weight_but_one_that_was_assigned_to(tmp_path):
    manager, state = manager_of(tmp_path), state_of(2)
    manager.save(state)
    result = [*state.variables[:2], np.full(4, 9.0, "float32")]
    manager.finish(result)
    for found, expected in zip(manager_of(tmp_path).latest().result, result, strict=True):
        np.testing.assert_array_equal(found, expected)
    with files_of(tmp_path, "result.npz")[0].open("rb") as file:
        assert [*read_arrays(file)] == [FACTOR]
    result[0] = result[0] * 2
    manager.finish(result)
    np.testing.assert_array_equal(manager_of(tmp_path).latest().result[0], result[0])
    require_equal(manager_of(tmp_path).latest().state, state)


def test_checkpoints_when_the_file_of_frozen_weights_is_damaged_or_gone_then_none_of_them_is_whole(tmp_path):
    manager = manager_of(tmp_path)
    for epochs in (1, 2):
        manager.save(state_of(epochs))
    (frozen,) = files_of(tmp_path, "frozen.npz")
    content = bytearray(frozen.read_bytes())
    content[len(content) // 2] ^= 1
    frozen.write_bytes(content)
    assert [f"{frozen.name} is not what was written" in one.error for one in manager_of(tmp_path).survey()] == [
        True
    ] * 2
    with pytest.raises(CheckpointError, match="expected a checkpoint that is whole"):
        manager_of(tmp_path).latest()
    frozen.unlink()
    with pytest.raises(CheckpointError, match=f"the file {frozen.name} is missing"):
        manager_of(tmp_path).latest()


def test_manifest_when_no_weight_is_frozen_then_is_that_of_versions_before(tmp_path):
    state = state_of(1, frozen=())
    manager_of(tmp_path).save(dataclasses.replace(state, facts={"variables": state.facts["variables"]}))
    assert not files_of(tmp_path, "frozen.npz")
    content = unsealed(files_of(tmp_path, "json")[0].read_bytes())
    assert "frozen" not in content and CheckpointManifest.from_bytes(sealed(content)).frozen is None
    assert "frozen" not in json.dumps(content["facts"])
