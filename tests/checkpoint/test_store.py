"""A checkpoint is whole or not there at all, whenever the process ends and whatever the disk does."""

import contextlib
import json
import os
import shutil
import subprocess
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_arrays import ODD_ARRAYS

from elephant.checkpoint.manager import CheckpointManager, read_arrays, write_arrays
from elephant.checkpoint.state import CheckpointManifest, FitState, StoredFile, named
from elephant.errors import CheckpointError
from elephant.storage.folder import DamagedError, LocalFolder, folder_at, sealed, unsealed


def state_of(epochs, size=40, *, step=0):
    rng = np.random.default_rng([epochs, step])
    arrays = named("model", [rng.normal(size=size).astype("float32"), np.int64(epochs) + np.zeros((), np.int64)])
    history = {"loss": [1.0 / (epochs or 1)] * epochs}
    return FitState(epochs=epochs, step=step, history=history, arrays=arrays, facts={"seed": epochs})


def require_equal(checkpoint, state):
    assert (checkpoint.state.epochs, checkpoint.state.step) == (state.epochs, state.step)
    assert checkpoint.state.history == state.history
    assert checkpoint.state.facts == state.facts
    assert sorted(checkpoint.state.arrays) == sorted(state.arrays)
    for name, array in state.arrays.items():
        np.testing.assert_array_equal(checkpoint.state.arrays[name], array)
        assert checkpoint.state.arrays[name].dtype == array.dtype


def saved(path, *epochs):
    store = CheckpointManager(folder_at(str(path)))
    for number in epochs:
        store.save(state_of(number))
    return store


def latest(path):
    return CheckpointManager(folder_at(str(path))).latest()


def is_whole(path):
    try:
        CheckpointManifest.from_bytes(path.read_bytes())
    except DamagedError:
        return False
    return True


def test_state_when_saved_then_is_read_back_and_the_last_two_are_kept(tmp_path):
    saved(tmp_path, 1, 2, 3)
    require_equal(latest(tmp_path), state_of(3))
    assert [manifest.epochs for manifest in CheckpointManager(folder_at(str(tmp_path))).manifests()] == [2, 3]
    assert len(os.listdir(tmp_path)) == 4


def test_arrays_of_all_dtypes_when_written_then_numpy_reads_them_without_pickle(tmp_path):
    arrays = {
        f"a/{kind}": np.arange(6).reshape(2, 3).astype(kind) for kind in ("f2", "f4", "f8", "i1", "u4", "i8", "?")
    }
    arrays |= {"empty": np.empty((0, 3)), "number": np.float32(2)}
    with open(tmp_path / "arrays.npz", "wb") as file:
        write_arrays(file, arrays)
    with np.load(tmp_path / "arrays.npz", allow_pickle=False) as read:
        assert sorted(read.files) == sorted(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(read[name], array)
            assert read[name].dtype == np.asarray(array).dtype


def test_objects_when_in_a_file_then_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "arrays.npz", model=np.array([print], dtype=object))
    with open(tmp_path / "arrays.npz", "rb") as file, pytest.raises(ValueError, match="allow_pickle"):
        read_arrays(file)


class Killed(BaseException):
    """The process has ended: nothing of it runs any more."""


class TornFile:
    """Takes so many bytes, and ends the process then."""

    def __init__(self, folder, file):
        self._folder, self._file = folder, file

    def write(self, data):
        view = memoryview(data).cast("B")
        self._file.write(view[: self._folder.left])
        self._folder.spend(len(view))
        return len(view)

    def flush(self):
        self._file.flush()


class TornFolder(LocalFolder):
    """A file system without atomic writes, under a process that is killed after so many bytes and removals."""

    def __init__(self, path, left):
        super().__init__(path)
        self.left = left

    def write(self, name, fill):
        self.spend(1)
        with open(self._path / name, "wb") as file:
            fill(TornFile(self, file))

    def remove(self, name):
        self.spend(1)
        super().remove(name)

    def spend(self, amount):
        self.left -= amount
        if self.left < 0:
            self.left = 0
            raise Killed


def test_checkpoint_when_the_process_is_killed_at_any_byte_then_the_last_whole_one_is_read(tmp_path, monkeypatch):
    # Thousands of files that no loss of power threatens.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    left, finished, seen = 0, False, set()
    saved(tmp_path / "before", 1, 2)
    while not finished:
        path = tmp_path / str(left)
        shutil.copytree(tmp_path / "before", path)
        with contextlib.suppress(Killed):
            CheckpointManager(TornFolder(path, left)).save(state_of(3))
            finished = True
        read = latest(path)
        require_equal(read, state_of(read.state.epochs))
        seen.add(read.state.epochs)
        # Who comes next goes on, and removes the arrays that were left unfinished. Half a manifest stays, and what it
        # may tell of: nobody knows that it was never whole.
        torn = {name for name in os.listdir(path) if name.endswith(".json") and not is_whole(path / name)}
        saved(path, 4)
        require_equal(latest(path), state_of(4))
        writings = {name.split(".")[1] for name in torn}
        others = [name for name in os.listdir(path) if name.split(".")[1] not in writings]
        assert len(others) == 4 and torn <= {*os.listdir(path)}
        left += 1
    assert seen == {2, 3} and left > 900


def test_checkpoint_when_any_byte_of_its_files_is_changed_then_the_one_before_is_read(tmp_path):
    saved(tmp_path, 1, 2)
    for name in sorted(os.listdir(tmp_path))[-2:]:
        content = (tmp_path / name).read_bytes()
        for place in range(0, len(content), 7):
            damaged = bytearray(content)
            damaged[place] ^= 0x20
            (tmp_path / name).write_bytes(damaged)
            notes = []
            read = CheckpointManager(folder_at(str(tmp_path))).latest(notes.append)
            # In the manifest, a letter may become one that means the same.
            require_equal(read, state_of(read.state.epochs))
            assert read.state.epochs == 1 or name.endswith(".json"), place
            assert read.state.epochs == 2 or name.endswith(".json") or "epoch 2" in notes[0]
        (tmp_path / name).write_bytes(content)
    require_equal(latest(tmp_path), state_of(2))


def test_store_when_a_process_was_killed_in_the_middle_of_a_file_then_the_next_one_removes_it(tmp_path):
    saved(tmp_path, 1)
    (name,) = (path.name for path in tmp_path.glob("*.npz"))
    (tmp_path / f".{name}.0123.unfinished").write_bytes(b"half")
    saved(tmp_path, 2)
    assert len(os.listdir(tmp_path)) == 4


def test_store_when_all_checkpoints_are_damaged_then_raises(tmp_path):
    saved(tmp_path, 1)
    (path,) = tmp_path.glob("*.npz")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"expected a checkpoint that is whole. Received: 1 that are damaged"):
        latest(tmp_path)


def written_again(path, **changes):
    """Writes a manifest whose checksum holds, with other content."""
    body = {**json.loads(json.loads(path.read_bytes())["body"]), **changes}
    text = json.dumps(body)
    path.write_text(json.dumps({"crc": zlib.crc32(text.encode()), "body": text}))


STATE = {"name": "epoch-00000001.0123456789abcdef.state.npz", "num_bytes": 1, "crc": 2}
DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "flipped": lambda path: path.write_bytes(path.read_bytes().replace(b"seed", b"sead")),
    "empty": lambda path: path.write_bytes(b""),
    "a later format": lambda path: written_again(path, format=3),
    "epochs of another type": lambda path: written_again(path, epochs="x"),
    "steps of another type": lambda path: written_again(path, step=-1),
    "facts of another type": lambda path: written_again(path, facts=[]),
    "history of another type": lambda path: written_again(path, history={"loss": 3}),
    "arrays that lie elsewhere": lambda path: written_again(path, state={**STATE, "name": "../../etc/passwd"}),
    "arrays of another type": lambda path: written_again(path, state="epoch"),
    "a length of another type": lambda path: written_again(path, state={**STATE, "num_bytes": None}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_store_when_no_manifest_can_be_read_then_names_one_and_removes_nothing(tmp_path, damage):
    saved(tmp_path, 1, 2)
    manifests = sorted(tmp_path.glob("*.json"))
    for path in manifests:
        DAMAGES[damage](path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for read in (CheckpointManager.latest, CheckpointManager.manifests):
        with pytest.raises(CheckpointError, match=f"expected a checkpoint that is whole.*{manifests[0].name}"):
            read(CheckpointManager(folder_at(str(tmp_path))))
    saved(tmp_path, 3, 4, 5)
    assert before.items() <= {path.name: path.read_bytes() for path in tmp_path.iterdir()}.items()


def test_store_when_the_newest_manifest_cannot_be_read_then_takes_the_one_before_and_says_so(tmp_path):
    saved(tmp_path, 1, 2)
    damaged = max(tmp_path.glob("*.json"))
    DAMAGES["cut"](damaged)
    notes = []
    require_equal(CheckpointManager(folder_at(str(tmp_path))).latest(notes.append), state_of(1))
    assert len(notes) == 1 and damaged.name in notes[0]


def test_store_when_a_folder_lies_in_the_place_of_arrays_then_takes_the_checkpoint_before(tmp_path):
    saved(tmp_path, 1, 2)
    arrays = max(tmp_path.glob("*.npz"))
    arrays.unlink()
    arrays.mkdir()
    require_equal(latest(tmp_path), state_of(1))


def not_finite(epochs):
    state = state_of(epochs)
    state.arrays["model/0"][3] = np.nan
    return state


def test_store_when_the_model_is_not_finite_then_keeps_the_last_one_that_is_and_goes_on_from_it(tmp_path):
    store = saved(tmp_path, 1, 2)
    for epochs in (3, 4, 5):
        store.save(not_finite(epochs))
    reader, notes = CheckpointManager(folder_at(str(tmp_path))), []
    assert [manifest.epochs for manifest in reader.manifests()] == [2, 4, 5]
    require_equal(reader.latest(notes.append), state_of(2))
    assert len(notes) == 1 and "epoch 5" in notes[0] and "that of epoch 2 is taken" in notes[0]
    # A fit that has ended with it has nothing to go on with.
    store.finish([np.zeros(3), np.int64(1)])
    assert latest(tmp_path).finished and latest(tmp_path).state.epochs == 5
    # Of which more is asked for now has.
    more = CheckpointManager(folder_at(str(tmp_path))).latest(epochs=10)
    require_equal(more, state_of(2))
    assert not more.finished


def test_store_when_arrays_are_damaged_then_the_one_before_is_kept_beside_those_to_come(tmp_path):
    saved(tmp_path, 1, 2)
    damaged = max(tmp_path.glob("*.npz"))
    damaged.write_bytes(b"cut")
    store = CheckpointManager(folder_at(str(tmp_path)))
    require_equal(store.latest(), state_of(1))
    store.save(state_of(2))
    assert sorted(one.epochs for one in CheckpointManager(folder_at(str(tmp_path))).manifests()) == [1, 2, 2]
    store.save(state_of(3))
    assert sorted(one.epochs for one in CheckpointManager(folder_at(str(tmp_path))).manifests()) == [2, 2, 3]
    assert damaged.read_bytes() == b"cut"


def test_store_when_it_goes_on_from_a_finite_model_and_that_fails_again_then_its_checkpoints_are_kept(tmp_path):
    store = saved(tmp_path, 1, 2)
    for epochs in (3, 4, 5):
        store.save(not_finite(epochs))
    again = CheckpointManager(folder_at(str(tmp_path)))
    require_equal(again.latest(), state_of(2))
    again.save(not_finite(3))
    again.save(not_finite(4))
    require_equal(latest(tmp_path), state_of(2))
    again.save(state_of(5))
    require_equal(latest(tmp_path), state_of(5))


def test_store_when_its_files_are_gone_then_stops_and_makes_no_new_folder(tmp_path):
    store = saved(tmp_path / "kept", 1)
    shutil.rmtree(tmp_path / "kept")
    with pytest.raises(CheckpointError, match="expected the checkpoint that was there.*epoch-00000001.*resume=True"):
        store.save(state_of(2))
    assert not (tmp_path / "kept").exists()


def test_store_when_its_mount_is_gone_then_writes_nothing_in_its_place(small_disk, tmp_path):
    # Before the first checkpoint, when no file of it can be missed.
    store = CheckpointManager(folder_at(str(small_disk / "kept")))
    subprocess.run(["umount", str(small_disk)], check=True)
    try:
        with pytest.raises(CheckpointError, match="expected the file system that was mounted here"):
            store.save(state_of(1))
        assert not any(small_disk.iterdir())
    finally:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small_disk)], check=True)
    # The same place, under another number of the kernel's, as of a network's file system that was mounted anew.
    store.save(state_of(1))
    require_equal(latest(small_disk / "kept"), state_of(1))


def test_store_when_there_is_nothing_or_half_of_one_then_there_is_none(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    saved(tmp_path, 1)
    (path,) = tmp_path.glob("*.json")
    path.unlink()
    (tmp_path / "notes.json").write_text("{}")
    assert latest(tmp_path) is None


class FailingFolder(LocalFolder):
    """A folder whose n-th write fails half way, as one on a full disk does."""

    def __init__(self, path, failing):
        super().__init__(path)
        self.left = failing

    def write(self, name, fill):
        self.left -= 1
        if self.left:
            return super().write(name, fill)

        def half(file):
            file.write(b"half")
            raise OSError(28, "No space left on device")

        return super().write(name, half)


@pytest.mark.parametrize("failing", [1, 2])
def test_store_when_a_write_fails_then_says_what_is_left_and_leaves_it(tmp_path, failing):
    saved(tmp_path, 1, 2)
    before = sorted(os.listdir(tmp_path))
    store = CheckpointManager(FailingFolder(tmp_path, failing))
    with pytest.raises(
        CheckpointError, match=r"epoch 3. Received: OSError: .*No space left.* That of epoch 2 is still"
    ):
        store.save(state_of(3))
    assert sorted(os.listdir(tmp_path)) == before
    store.save(state_of(3))
    require_equal(latest(tmp_path), state_of(3))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte, where this process may make one."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_store_when_the_disk_is_full_then_the_last_checkpoint_is_still_there(small_disk):
    store = CheckpointManager(folder_at(str(small_disk / "kept")))
    store.save(state_of(1, size=1000))
    with pytest.raises(CheckpointError, match="No space left on device.*That of epoch 1 is still there"):
        store.save(state_of(2, size=300_000))
    require_equal(latest(small_disk / "kept"), state_of(1, size=1000))
    assert len(os.listdir(small_disk / "kept")) == 2


def test_store_when_the_folder_is_none_then_says_so(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="expected a folder that can be read. Received: NotADirectoryError"):
        CheckpointManager(folder_at(str(tmp_path / "file")))
    store = CheckpointManager(folder_at(str(tmp_path / "file2" / "kept")))
    (tmp_path / "file2").write_text("no folder")
    with pytest.raises(CheckpointError):
        store.save(state_of(1))


def test_store_when_asked_whether_it_can_write_then_leaves_nothing_or_says_what_to_do(tmp_path):
    # A fit asks before it trains.
    store = CheckpointManager(folder_at(str(tmp_path / "new" / "kept")))
    store.require_writable()
    assert os.listdir(tmp_path / "new" / "kept") == []
    store = CheckpointManager(folder_at("/proc/nope/kept"))
    with pytest.raises(CheckpointError, match=r"^checkpointPath=/proc/nope/kept: .* written to\. Received: .*Pass ano"):
        store.require_writable()


def test_stores_when_two_fits_write_at_once_then_the_second_one_fails(tmp_path):
    first, second = (CheckpointManager(folder_at(str(tmp_path))) for _ in range(2))
    first.save(state_of(1))
    with pytest.raises(CheckpointError, match="Received: files of another one that runs at the same time"):
        second.save(state_of(1))
    first.save(state_of(2))
    require_equal(latest(tmp_path), state_of(2))


def test_finished_when_the_result_is_the_state_then_shares_its_file_and_otherwise_has_one(tmp_path):
    store = saved(tmp_path, 1, 2)
    same, other = state_of(2).variables, state_of(9).variables
    store.finish(same)
    read = latest(tmp_path)
    assert read.finished and len(list(tmp_path.glob("*.npz"))) == 2
    np.testing.assert_array_equal(read.result[0], same[0])
    store.finish(other)
    read = latest(tmp_path)
    require_equal(read, state_of(2))
    np.testing.assert_array_equal(read.result[0], other[0])
    assert sorted(path.name.split(".", 2)[2] for path in tmp_path.glob("epoch-00000002*")) == [
        "json",
        "result.npz",
        "state.npz",
    ]


def test_store_when_it_goes_on_then_an_epoch_that_is_repeated_takes_the_place_of_the_old_one(tmp_path):
    saved(tmp_path, 1, 2)
    again = FitState(epochs=2, arrays=named("model", [np.full(3, 7.0)]))
    CheckpointManager(folder_at(str(tmp_path))).save(again)
    np.testing.assert_array_equal(latest(tmp_path).state.variables[0], np.full(3, 7.0))


def test_store_when_states_lie_within_an_epoch_then_the_furthest_is_read_and_the_end_before_is_kept(tmp_path):
    store = CheckpointManager(folder_at(str(tmp_path)))
    for epochs, step in ((0, 7), (1, 0), (1, 9), (1, 10), (1, 100)):
        store.save(state_of(epochs, step=step))
    reader = CheckpointManager(folder_at(str(tmp_path)))
    assert [manifest.place for manifest in reader.manifests()] == [(1, 0), (1, 10), (1, 100)]
    assert [(one.epochs, one.step, one.error) for one in reader.survey()] == [
        (1, 0, None),
        (1, 10, None),
        (1, 100, None),
    ]
    require_equal(reader.latest(), state_of(1, step=100))
    # Names of others, or of none that was ever written, are nobody's to remove.
    foreign = {"notes.json", "epoch-00000001.step-9.0123456789abcdef.json", "epoch-00000001.json"}
    for name in foreign:
        (tmp_path / name).write_text("{}")
    reader.remove()
    assert {*os.listdir(tmp_path)} == foreign


def test_store_when_a_write_within_an_epoch_fails_then_leaves_nothing_of_it_and_says_what_is_left(tmp_path):
    store = CheckpointManager(FailingFolder(tmp_path, 6))
    store.save(state_of(1))
    store.save(state_of(1, step=5))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(
        CheckpointError, match="checkpoint of epoch 1 and 6 steps. Received: .* of epoch 1 and 5 steps is"
    ):
        store.save(state_of(1, step=6))
    assert sorted(os.listdir(tmp_path)) == before


def test_store_when_a_fit_cannot_go_on_from_some_then_takes_the_newest_of_those_that_suit(tmp_path):
    store = saved(tmp_path, 1, 2)
    store.save(state_of(2, step=5))
    at_an_end = {"suits": lambda manifest: not manifest.step}
    reader = CheckpointManager(folder_at(str(tmp_path)))
    require_equal(reader.latest(**at_an_end), state_of(2))
    assert reader.latest(suits=lambda manifest: False) is None
    # With fewer epochs than before, the third is not asked for: the end of the second one is what there is to return.
    require_equal(reader.latest(epochs=2), state_of(2))
    require_equal(reader.latest(epochs=3), state_of(2, step=5))


def test_store_when_a_fit_went_back_within_an_epoch_then_goes_on_from_what_it_has_left_since(tmp_path):
    store = saved(tmp_path, 1)
    store.save(state_of(1, step=240))
    again = CheckpointManager(folder_at(str(tmp_path)))
    # With other workers, say: what is further is of rows that these do not have.
    require_equal(again.latest(suits=lambda manifest: not manifest.step), state_of(1))
    again.save(state_of(1, step=60))
    require_equal(latest(tmp_path), state_of(1, step=60))


def test_store_when_the_best_one_has_lost_its_arrays_then_keeps_the_best_of_the_others(tmp_path):
    store = CheckpointManager(folder_at(str(tmp_path)), keep_best="loss:max")
    for epochs in (1, 2):
        store.save(state_of(epochs))
    (lost,) = tmp_path.glob("epoch-00000001.*.npz")
    lost.unlink()
    for epochs in (3, 4, 5):
        store.save(state_of(epochs))
    # A manifest whose arrays are gone is as one that cannot be read: it stays.
    assert sorted({path.name[:14] for path in tmp_path.glob("*.npz")}) == [f"epoch-0000000{one}" for one in (2, 4, 5)]
    assert list(tmp_path.glob("epoch-00000001.*.json"))


def test_store_when_a_fit_goes_on_then_the_best_one_of_before_is_still_the_best(tmp_path):
    first = CheckpointManager(folder_at(str(tmp_path)), keep_best="loss:max")
    for epochs in (1, 2, 3):
        first.save(state_of(epochs))
    again = CheckpointManager(folder_at(str(tmp_path)), keep_best="loss:max")
    require_equal(again.latest(), state_of(3))
    again.save(state_of(4))
    again.save(state_of(5))
    again.finish(state_of(5).variables)
    kept = CheckpointManager(folder_at(str(tmp_path))).manifests()
    assert [(manifest.epochs, manifest.finished) for manifest in kept] == [(1, False), (4, False), (5, True)]


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_store_when_on_other_file_systems_then_works_alike(tmp_path, scheme):
    url = f"memory://kept-{os.getpid()}/fit" if scheme == "memory" else f"file://{tmp_path}/kept"
    pytest.importorskip("fsspec")
    assert latest(url) is None
    saved(url, 1, 2, 3)
    require_equal(latest(url), state_of(3))
    assert len(folder_at(url).names()) == 4


def test_manifest_when_of_another_format_then_is_refused():
    manifest = CheckpointManifest(epochs=1, number=1, state=StoredFile(**STATE))
    for version, expected in ((3, "format 3, of a later version of elephant"), (0, "format 0; this one reads 1 and 2")):
        with pytest.raises(DamagedError, match=expected):
            CheckpointManifest.from_bytes(sealed({**unsealed(manifest.to_bytes()), "format": version}))
    for content in (b"", b"{}", b"[]", b"null", manifest.to_bytes()[:-1]):
        with pytest.raises(DamagedError):
            CheckpointManifest.from_bytes(content)


def test_checkpoint_when_of_the_first_format_then_its_variables_are_read_by_place(tmp_path):
    saved(tmp_path, 1)
    (manifest,) = tmp_path.glob("*.json")
    written_again(manifest, format=1)
    require_equal(latest(tmp_path), state_of(1))
    for value, expected in zip(latest(tmp_path).state.variables, state_of(1).arrays.values(), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_manifest_when_written_before_there_were_steps_then_is_that_of_an_epoch_s_end(tmp_path):
    saved(tmp_path, 1)
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(sealed({name: value for name, value in unsealed(path.read_bytes()).items() if name != "step"}))
    require_equal(latest(tmp_path), state_of(1))


def test_result_when_variables_have_paths_then_is_kept_by_them_in_their_order(tmp_path):
    arrays, names = {"model/b": np.zeros(2), "model/a": np.ones(3)}, ["model/a", "model/b"]
    store = CheckpointManager(folder_at(str(tmp_path)))
    store.save(FitState(epochs=1, arrays=arrays, facts={"variables": names}))
    store.finish([np.full(3, 5.0), np.full(2, 4.0)])
    result = latest(tmp_path).result
    assert [value.tolist() for value in result] == [[5.0] * 3, [4.0] * 2]
    (file,) = tmp_path.glob("*.result.npz")
    with np.load(file, allow_pickle=False) as read:
        assert sorted(read.files) == sorted(names)


def test_checkpoint_when_a_named_variable_is_not_in_its_arrays_then_is_damaged(tmp_path):
    state = FitState(epochs=1, arrays={"model/a": np.ones(3)}, facts={"variables": ["model/a"]})
    CheckpointManager(folder_at(str(tmp_path))).save(state)
    (manifest,) = tmp_path.glob("*.json")
    written_again(manifest, facts={"variables": ["model/a", "model/b"]})
    with pytest.raises(CheckpointError, match="is without model/b"):
        latest(tmp_path)


def test_arrays_when_some_are_asked_for_then_the_bytes_of_others_are_left_alone(tmp_path):
    path = tmp_path / "a.npz"
    with open(path, "wb") as file:
        write_arrays(file, {"model/a": np.full(40, 3.0), "model/b": np.full(40, 5.0)})
    path.write_bytes(path.read_bytes().replace(np.full(40, 3.0).tobytes(), np.full(40, 9.0).tobytes()))
    with open(path, "rb") as file:
        assert {name: array.tolist() for name, array in read_arrays(file, ["model/b"]).items()} == {
            "model/b": [5.0] * 40
        }
    with open(path, "rb") as file, pytest.raises(zipfile.BadZipFile):
        read_arrays(file)


def test_array_file_when_cut_short_then_is_refused(tmp_path):
    with open(tmp_path / "a.npz", "wb") as file:
        write_arrays(file, {"model/0": np.ones(4)})
    content = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(content[:-5])
    with open(tmp_path / "a.npz", "rb") as file, pytest.raises((ValueError, zipfile.BadZipFile)):
        read_arrays(file)


NOT_READ = [case for case in ODD_ARRAYS if case not in ("another name", "texts", "more than there is memory")]


@pytest.mark.parametrize("case", NOT_READ)
def test_checkpoint_when_its_arrays_are_none_behind_a_right_checksum_then_is_damaged(tmp_path, case):
    content, name = ODD_ARRAYS[case], "epoch-00000001.0123456789abcdef.state.npz"
    stored = StoredFile(name=name, num_bytes=len(content), crc=zlib.crc32(content))
    (tmp_path / name).write_bytes(content)
    manifest = CheckpointManifest(epochs=1, number=1, state=stored)
    (tmp_path / name.replace("state.npz", "json")).write_bytes(manifest.to_bytes())
    with pytest.raises(CheckpointError, match="expected a checkpoint that is whole.*damaged"):
        latest(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["format", "epochs", "step", "number", "state", "result", "finished", "history", "facts", "finite", "more"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), JSON)
def test_manifest_when_its_fields_are_anything_then_is_read_or_damaged(fields, whole):
    stored = StoredFile(name="epoch-00000001.0123456789abcdef.state.npz", num_bytes=3, crc=5)
    body = json.loads(json.loads(CheckpointManifest(epochs=1, number=4, state=stored).to_bytes())["body"])
    for content in (sealed({**body, **fields}), sealed(whole), json.dumps(whole).encode()):
        with contextlib.suppress(DamagedError):
            assert isinstance(CheckpointManifest.from_bytes(content), CheckpointManifest)
