"""A model that does not fit the memory of one process trains in three, to the same weights."""

import ctypes
import re
import resource
import sys
import tempfile
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
from rank_pool import RankError, RankPool

from elephant.modeling.keras_archive import save_archive

pytestmark = pytest.mark.usefixtures("by_value")

WIDTH, DEPTH, STAGES, STEPS = 1024, 12, 3, 2
WEIGHTS_BYTES = 4 * DEPTH * (WIDTH + 1) * WIDTH
# So many times its weights a process may take: with Adam, weights and gradients, a whole model needs four times them.
MULTIPLE = 3.5
# Of glibc's mallopt. Each arena reserves address space, of which little is memory; and large arrays are given back.
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8


def model_of(width, depth):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, "tanh", name=f"dense{place}") for place in range(depth)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    return model


def batches(steps, width=WIDTH):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(2, 16, width)).astype("float32") for _ in range(steps)]


def limit():
    """From now on this process may take `MULTIPLE` times the weights more address space than it has."""
    for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 1 << 20)):
        ctypes.CDLL(None).mallopt(option, value)
    # So does the stack of each thread that sends: 8 MB.
    threading.stack_size(1 << 20)
    # What the framework makes for its first step, threads above all, is not the model's.
    model_of(8, 2).train_on_batch(*batches(1, 8)[0])
    size = 1024 * int(re.search(r"VmSize:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
    resource.setrlimit(resource.RLIMIT_AS, (size + int(MULTIPLE * WEIGHTS_BYTES),) * 2)


def train_whole(limited):
    """Trains as lean as one process can: nothing is loaded, and gradients are those of one batch."""
    if limited:
        limit()
    model = model_of(WIDTH, DEPTH)
    for x, y in batches(STEPS):
        model.train_on_batch(x, y)
    return [keras.ops.convert_to_numpy(one) for one in model.weights]


def train_stage(archive):
    """Trains a rank's stage; returns the weights on rank 0."""
    from elephant.collective.api import current_collective
    from elephant.modeling.model_spec import KerasSettings, ModelSpec
    from elephant.training.pipeline import ModelPipeline
    from elephant.training.stage_values import load_stage

    with tempfile.TemporaryDirectory() as folder:
        spec = ModelSpec(None, KerasSettings.current(), archive=Path(archive).read_bytes())
        spec = spec.with_weights_on_disk(Path(folder))
        limit()
        model = spec.build_structure()
        pipeline = ModelPipeline(
            model,
            stages=STAGES,
            micro_batches=2,
            communicator=current_collective(),
            load=lambda stage, optimizer: load_stage(spec, model, stage, optimizer),
        )
        for x, y in batches(STEPS):
            pipeline.train_on_batch(*((x, y) if pipeline.place.is_first else ()))
        return list(pipeline.weights())


@pytest.fixture
def fresh_pool():
    """Processes that have trained nothing before, and that nobody has after this test: their memory is limited."""
    # On some processors oneDNN has a second copy of the weights, in an order of its own.
    pool = RankPool(environment={"TF_ENABLE_ONEDNN_OPTS": "0"})
    yield pool
    pool.close()


@pytest.mark.slow(
    "trains 50 MB in five processes; tests/training/test_stage_values.py holds that a stage reads its own"
)
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space, and reads Linux' figures of a process")
@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="XLA reserves address space as it likes")
def test_stages_when_the_model_does_not_fit_the_limit_of_one_process_then_train_as_one_without_a_limit(
    fresh_pool, tmp_path
):
    with pytest.raises(RankError) as failed:
        fresh_pool.run(train_whole, [(True,)])
    ((kind, text, _),) = failed.value.outcomes
    assert kind == "MemoryError" or "OOM when allocating" in text or "bad_alloc" in text, failed.value
    fresh_pool.kill(0)
    (expected,) = fresh_pool.run(train_whole, [(False,)])
    fresh_pool.kill(0)
    archive = tmp_path / "model.keras"
    archive.write_bytes(save_archive(model_of(WIDTH, DEPTH)))
    found, *_ = fresh_pool.run(train_stage, [(str(archive),)] * STAGES)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
