"""Files that workers write to relative paths: what is taken of them, where it comes to, and fits that leave some."""

import functools
import os
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, regression_model

from elephant import collective, testing
from elephant.driver import local_ranks
from elephant.errors import WorkerFailure
from elephant.storage.user_files import make_folder, put_down, taken_files


def content_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_taken_files_when_a_process_has_read_and_written_then_has_what_it_wrote_within_the_limit(tmp_path, monkeypatch):
    here, folder = tmp_path / "executor", tmp_path / "files"
    here.mkdir()
    (here / "shipped.txt").write_text("words")
    monkeypatch.chdir(here)
    make_folder(folder)
    assert (folder / "shipped.txt").read_text() == "words"
    (folder / "logs").mkdir()
    (folder / "logs" / "empty").touch()
    (folder / "small").write_bytes(b"1234")
    (folder / "large").write_bytes(bytes(2_000_000))
    (folder / "stranger").symlink_to("/etc/hostname")
    os.mkfifo(folder / "pipe")
    files, left_out = taken_files(folder, 1000)
    assert (files, left_out) == ({"logs/empty": b"", "small": b"1234"}, ["large (2.0 MB)"])


def test_put_down_when_names_meet_then_each_content_is_there_once_and_none_is_lost(tmp_path):
    (tmp_path / "log").write_bytes(b"earlier")
    (tmp_path / "same").write_bytes(b"0")
    files = {0: {"log": b"0", "same": b"0"}, 2: {"log": b"2", "same": b"0", "only/2": b"2"}, 3: {"only/2": b"3"}}
    line, failed = put_down(files, tmp_path)
    assert content_of(tmp_path) == {
        "log": b"0", "log~": b"earlier", "same": b"0", "only/2": b"2", "rank-2/log": b"2", "rank-3/only/2": b"3",
    }  # fmt: skip
    assert not failed and line.endswith("log, same, rank-2/log, only/2, rank-3/only/2; what was there before is log~")


def test_put_down_when_a_path_leads_out_of_the_folder_then_is_refused_and_the_others_come(tmp_path):
    folder, outside = tmp_path / "driver", tmp_path / "outside"
    for one in (folder / "taken", outside):
        one.mkdir(parents=True)
    (folder / "way").symlink_to(outside)
    names = ["../up", str(outside / "root"), "way/out", "taken", "."]
    line, failed = put_down({0: {**dict.fromkeys(names, b"x"), "good": b"y"}}, folder)
    assert [text.partition(" (")[0] for text in failed] == sorted(names)
    assert content_of(folder) == {"good": b"y"} and not content_of(outside) and line.endswith("driver: good")


@pytest.mark.parametrize(
    "name", ["sitecustomize.py", "net/__init__.PYC", "random.so", "own.pth", ".env", ".git/config"]
)
def test_put_down_when_a_program_would_find_a_file_by_its_name_then_leaves_it_out(tmp_path, name):
    line, failed = put_down({0: {name: b"x", "a.log": b"y", "plots.py.txt": b"z"}, 1: {"a.log": b"w"}}, tmp_path)
    assert [text.partition(" (")[0] for text in failed] == [name]
    assert sorted(content_of(tmp_path)) == ["a.log", "plots.py.txt", "rank-1/a.log"] and name not in line


class Writer(keras.callbacks.Callback):
    """Writes to relative paths, as a user would who has one process, and fails on one rank where it is to."""

    def __init__(self, failing=None):
        super().__init__()
        self.failing = failing

    def on_train_batch_end(self, batch, logs=None):
        rank = collective.rank()
        with open("log.txt", "a") as log:
            log.write(f"{rank} {batch}\n")
        os.makedirs("arrays", exist_ok=True)
        np.save(f"arrays/{rank}.npy", np.arange(batch + 1))
        if rank == self.failing:
            raise ValueError("mine")


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("driver")


@pytest.fixture
def folder(own_folder, monkeypatch, warm_ranks):
    """The driver's folder; ranks have folders of their own, as they have on executors."""
    # One for all tests: a server forks for those alone that work where it does.
    monkeypatch.chdir(own_folder)
    monkeypatch.setattr(local_ranks, "TaskSpec", functools.partial(local_ranks.TaskSpec, brings_files=True))
    yield own_folder
    for path in own_folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def fit(callback, **options):
    data = classifier_data(40)
    return testing.fit_local(
        regression_model("sgd"), data["features"], data["label"], batch_size=10, callbacks=[callback], **options
    )


def test_fit_when_a_callback_writes_to_relative_paths_then_files_of_all_ranks_come_to_the_driver(folder, capsys):
    fit(Writer(), verbose=1)
    assert (folder / "log.txt").read_text() == "0 0\n0 1\n"
    assert (folder / "rank-1" / "log.txt").read_text() == "1 0\n1 1\n"
    for rank in (0, 1):
        np.testing.assert_array_equal(np.load(folder / "arrays" / f"{rank}.npy"), [0, 1])
    assert len(content_of(folder)) == 4
    assert f"are in {folder}: arrays/0.npy, log.txt, arrays/1.npy, rank-1/log.txt\n" in capsys.readouterr().out


def test_fit_when_a_rank_fails_then_what_all_have_written_comes(folder):
    with pytest.raises(WorkerFailure, match="rank 1 on .* failed.*: ValueError: mine"):
        fit(Writer(1))
    assert (folder / "log.txt").read_text().startswith("0 0\n")
    assert (folder / "rank-1" / "log.txt").read_text().startswith("1 0\n")


class TooLarge(keras.callbacks.Callback):
    """Writes more than a fit brings back."""

    def on_train_batch_end(self, batch, logs=None):
        Path("large").write_bytes(bytes(2**26 + 1))
        Path("small").write_bytes(b"1")


def test_fit_when_a_file_is_too_large_then_a_warning_says_so_and_the_small_one_comes(folder):
    with pytest.warns(UserWarning, match=r"files .* are lost: large \(67.1 MB\) of rank 0, large .* of rank 1\. A fit"):
        fit(TooLarge())
    assert content_of(folder) == {"small": b"1"}
