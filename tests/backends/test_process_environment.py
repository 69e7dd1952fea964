"""Environment of processes: the backend that Keras will take, and what its framework reads."""

import pytest

from elephant.backends import DEFAULT, asked_for
from elephant.backends.process_environment import process_environment


@pytest.mark.parametrize(
    ("named", "settings", "expected"),
    [
        ("torch", '{"backend": "jax"}', "torch"),
        ("", '{"backend": "jax"}', "jax"),
        (None, '{"backend": "jax"}', "jax"),
        (None, '{"floatx": "float32"}', DEFAULT),
        (None, "no JSON", DEFAULT),
        (None, "[]", DEFAULT),
        (None, None, DEFAULT),
    ],
)
@pytest.mark.parametrize("variable", ["KERAS_HOME", "HOME"])
def test_backend_when_asked_for_in_variables_or_settings_then_is_the_one_that_keras_takes(
    tmp_path, variable, named, settings, expected
):
    folder = tmp_path if variable == "KERAS_HOME" else tmp_path / ".keras"
    folder.mkdir(exist_ok=True)
    if settings is not None:
        (folder / "keras.json").write_text(settings)
    environment = {variable: str(tmp_path)} | ({} if named is None else {"KERAS_BACKEND": named})
    assert asked_for(environment) == expected


def test_environment_when_no_backend_is_given_then_is_that_of_the_user_s_settings(tmp_path, monkeypatch):
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    made = process_environment(threads=3, devices=(), backend=None)
    assert made["NPROC"] == "3" and "TF_NUM_INTRAOP_THREADS" not in made and "KERAS_BACKEND" not in made
    assert process_environment(threads=3, devices=(), backend="tensorflow")["TF_NUM_INTRAOP_THREADS"] == "3"


def test_environment_when_the_user_sets_a_level_of_logs_then_it_stays(monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    assert process_environment(threads=1, devices=(), backend="torch")["TF_CPP_MIN_LOG_LEVEL"] == "2"
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    assert process_environment(threads=1, devices=(), backend="torch")["TF_CPP_MIN_LOG_LEVEL"] == "0"
