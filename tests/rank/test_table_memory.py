"""A table of three times the memory that a worker may take trains on four workers."""

import ctypes
import re
import resource
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
from keras_reference import global_batches, job_for, split
from rank_pool import RankError, RankPool

from elephant.modeling.layers.sharded_embedding import ShardedEmbedding
from elephant.tables.stored import StoredTable

MEMORY_BYTES, WORKERS = 400_000_000, 4
WIDTH, STRIDE, KNOWN = 16, 100_000, 30
ROWS = 3 * MEMORY_BYTES // (4 * WIDTH)
BATCH, EPOCHS = 4, 2
# Of glibc's mallopt. Each arena reserves address space, of which little is memory; and large arrays are given back.
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
RANDOM = np.random.default_rng(0)
PLACES = RANDOM.integers(0, KNOWN, (32, 2))
LABELS = RANDOM.normal(size=32).astype("float32")


def model_of(embedding):
    keras.utils.set_random_seed(5)
    ids = keras.Input((2,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(embedding(ids))))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def large(path):
    return ShardedEmbedding(ROWS, WIDTH, optimizer="sgd", learning_rate=0.1, seed=3, name="user", path=path)


def limit():
    """From now on this process may take so much more address space than it has."""
    for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 1 << 20)):
        ctypes.CDLL(None).mallopt(option, value)
    # So does the stack of each thread.
    threading.stack_size(1 << 20)
    # What the framework makes for its first step, threads above all, is not the table's.
    model_of(keras.layers.Embedding(KNOWN, WIDTH)).fit(PLACES, LABELS, verbose=0)
    size = 1024 * int(re.search(r"VmSize:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)


@pytest.fixture
def limited_pool():
    """Processes whose memory is limited, and that nobody has after this test."""
    pool = RankPool(size=WORKERS)
    pool.run(limit, [()] * WORKERS)
    yield pool
    pool.close()


@pytest.mark.slow("writes 1.2 GB; test_divided_tables.py has small tables")
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space, and reads Linux' figures of a process")
@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="XLA reserves address space as it likes")
def test_fit_when_a_table_takes_three_times_a_worker_s_memory_then_equals_keras(limited_pool, tmp_path):
    columns = {"features": (PLACES * STRIDE).astype("int64"), "label": LABELS}
    parts = split(columns, (8,) * WORKERS)
    job = job_for(model_of(large(str(tmp_path))), epochs=EPOCHS, batch_size=BATCH, shuffle=False)
    recording, *_ = limited_pool.fit(job, parts)
    (reference,) = [one for one in map(StoredTable.from_array, recording.variables) if one is not None]
    plain = keras.layers.Embedding(KNOWN, WIDTH)
    plain.build((None, 2))
    plain.embeddings.assign(large(None).table_spec.initial_rows(0, STRIDE)[:KNOWN])
    model, batches = (
        model_of(plain),
        list(global_batches(split({**columns, "features": PLACES}, (8,) * WORKERS), BATCH, EPOCHS)),
    )
    pairs = ((batch["features"], batch["label"]) for batch in batches)
    model.fit(pairs, epochs=EPOCHS, steps_per_epoch=len(batches) // EPOCHS, shuffle=False, verbose=0)
    found = reference.opened().take(np.arange(KNOWN) * STRIDE)
    np.testing.assert_allclose(found, keras.ops.convert_to_numpy(plain.embeddings), atol=1e-5)
    # One process under the limit does not hold it.
    with pytest.raises(RankError, match="MemoryError"):
        limited_pool.fit(job, split(columns, (32,)))
