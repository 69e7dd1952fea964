"""Models that are trained and saved on one backend, and loaded on another one in a process of its own."""

import importlib.util
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

INSTALLED = [name for name in ("tensorflow", "jax", "torch") if importlib.util.find_spec(name)]
ROWS, WEIGHTS = 48, 4
# A session and a fit, on a machine that may be busy.
DEADLINE_S = 400

SCRIPT = """
import sys
import warnings
from pathlib import Path
import keras
import numpy as np
from elephant import KerasEstimator, KerasModel
from elephant.cluster.local import local_session

def train(folder, name, rows, session):
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    rows_of_frame = [(x.tolist(), float(y)) for x, y in zip(rows["x"], rows["y"])]
    frame = session.createDataFrame(rows_of_frame, "features array<float>, label float")
    fitted = KerasEstimator(model=model, numWorkers=1, epochs=2, batchSize=8, verbose=0).fit(frame)
    fitted.save(str(folder / name))
    fitted.save(folder / f"{name}.h5")
    fitted.model.save(folder / f"{name}.keras")
    plain = keras.saving.load_model(folder / f"{name}.keras")
    saved = [keras.ops.convert_to_numpy(variable) for variable in (*plain.weights, *plain.optimizer.variables)]
    plain.train_on_batch(rows["x"], rows["y"])
    np.savez(folder / f"{name}.saved.npz", *saved)
    np.savez(folder / f"{name}.after.npz", *plain.get_weights())

def load(folder, name, rows, saved_on):
    forms = {
        "folder": lambda: KerasModel.load(str(folder / saved_on)).model,
        "keras": lambda: path_of_estimator(folder / f"{saved_on}.keras"),
        "h5": lambda: path_of_estimator(folder / f"{saved_on}.h5"),
    }
    for form, read in forms.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = read()
        found = {
            "jit_compile": model.jit_compile,
            "told": any("jit_compile=False" in str(one.message) for one in told),
            "predicted": model.predict(rows["x"], verbose=0),
        }
        for index, variable in enumerate((*model.weights, *model.optimizer.variables)):
            found[f"saved_{index}"] = keras.ops.convert_to_numpy(variable)
        model.train_on_batch(rows["x"], rows["y"])
        found |= {f"after_{index}": weight for index, weight in enumerate(model.get_weights())}
        np.savez(folder / f"{saved_on}.{name}.{form}.npz", **found)

def path_of_estimator(path):
    estimator = KerasEstimator(model=str(path))
    return estimator.getModel().model

def main(folder, saved_on, trains):
    name, rows = keras.config.backend(), np.load(folder / "rows.npz")
    session = local_session(1)
    try:
        if saved_on:
            load(folder, name, rows, saved_on)
        if trains:
            train(folder, name, rows, session)
    finally:
        session.stop()

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "trains")
"""


def run_on(backend, *arguments):
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]


def arrays_of(path):
    with np.load(path) as archive:
        return [archive[f"arr_{index}"] for index in range(len(archive.files))]


@pytest.mark.spark
# A process for each place in the ring, with a session of its own.
@pytest.mark.timeout(4 * DEADLINE_S + 30)
@pytest.mark.slow("fits and sessions; tests/modeling/test_keras_archive.py holds what is changed in one")
def test_model_when_trained_on_another_backend_then_predicts_and_goes_on_as_there(tmp_path):
    x = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
    np.savez(tmp_path / "rows.npz", x=x, y=np.sin(x.sum(axis=1)))
    # Each trains for the next one, and the last one for the first.
    ring = [*INSTALLED, INSTALLED[0]]
    for place, backend in enumerate(ring):
        run_on(backend, tmp_path, ring[place - 1] if place else "", "trains" if place + 1 < len(ring) else "")
    for saved_on, backend in itertools.pairwise(ring):
        require_as_there(tmp_path, saved_on, backend, x)


def require_as_there(folder, saved_on, backend, x):
    saved, after = (arrays_of(folder / f"{saved_on}.{name}.npz") for name in ("saved", "after"))
    kernel, bias, last_kernel, last_bias = saved[:WEIGHTS]
    expected = np.tanh(x @ kernel + bias) @ last_kernel + last_bias
    for form in ("folder", "keras", "h5"):
        with np.load(folder / f"{saved_on}.{backend}.{form}.npz") as found:
            np.testing.assert_allclose(found["predicted"], expected, atol=1e-5)
            # With the state of the optimizer.
            for index, value in enumerate(saved):
                np.testing.assert_array_equal(found[f"saved_{index}"], value)
            for index, value in enumerate(after):
                np.testing.assert_allclose(found[f"after_{index}"], value, atol=1e-5)
            # A file does not tell TensorFlow from JAX.
            untold = backend == "jax" and saved_on == "tensorflow" and form != "folder"
            assert found["told"] == untold
            if backend != "tensorflow":
                assert found["jit_compile"] == (backend == "jax" and not untold)
