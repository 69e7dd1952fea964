"""One process that trains a model of 100 MB, or a stage of it, in memory that is limited; a process that a test starts.

    python limited_rank.py ARCHIVE OUT MULTIPLE STEPS

Reads its rank, or null for the whole model, and the addresses of all, as lines of JSON. From then on it may take
MULTIPLE times the bytes of the weights more address space than it has then; any if MULTIPLE is 0. Rank 0, or the only
process, writes the trained weights to OUT. In the end it prints the bytes of its address space, and the most that it
had in memory.
"""

import contextlib
import json
import re
import resource
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

from elephant.collective import form_collective
from elephant.modeling.model_spec import KerasSettings, ModelSpec
from elephant.net import Listener
from elephant.training.pipeline import ModelPipeline
from elephant.training.stage_values import load_stage

WIDTH, DEPTH, STAGES = 1024, 24, 4
WEIGHTS_BYTES = 4 * DEPTH * (WIDTH + 1) * WIDTH


def model_of(width, depth):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, "tanh", name=f"dense{place}") for place in range(depth)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    return model


def batches(steps, width=WIDTH):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(2, 16, width)).astype("float32") for _ in range(steps)]


def address_space():
    """Returns the bytes of address space that this process has, and the most that it has had in memory."""
    status = Path("/proc/self/status").read_text()
    return [1024 * int(re.search(rf"{name}:\s*(\d+) kB", status)[1]) for name in ("VmSize", "VmHWM")]


def limit(multiple):
    if multiple:
        most = address_space()[0] + int(multiple * WEIGHTS_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def train_whole(steps):
    """Trains as lean as one process can: nothing is loaded, and gradients are those of one batch."""
    model = model_of(WIDTH, DEPTH)
    for x, y in batches(steps):
        model.train_on_batch(x, y)
    return [keras.ops.convert_to_numpy(one) for one in model.weights]


def train_stage(spec, communicator, steps):
    model = spec.build_structure()
    pipeline = ModelPipeline(
        model,
        stages=STAGES,
        micro_batches=2,
        communicator=communicator,
        load=lambda stage, optimizer: load_stage(spec, model, stage, optimizer),
    )
    for x, y in batches(steps):
        pipeline.train_on_batch(*((x, y) if pipeline.place.is_first else ()))
    return list(pipeline.weights())


def source(archive):
    return ModelSpec(None, KerasSettings.current(), archive=archive)


def main(archive, out, multiple, steps):
    rank = json.loads(sys.stdin.readline())
    with contextlib.ExitStack() as stack:
        communicator = None
        if rank is not None:
            listener = stack.enter_context(Listener.bind("127.0.0.1"))
            print(json.dumps(listener.address), flush=True)
            addresses = [tuple(one) for one in json.loads(sys.stdin.readline())]
            token = b"0123456789abcdef"
            communicator = stack.enter_context(
                form_collective(rank, addresses, listener, token, "run", 60.0, operation_timeout_s=90.0)
            )
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            spec = source(Path(archive).read_bytes()).with_weights_on_disk(folder)
        # What the framework makes for its first step, threads above all, is not the model's.
        model_of(8, 2).train_on_batch(*batches(1, 8)[0])
        limit(multiple)
        weights = train_whole(steps) if rank is None else train_stage(spec, communicator, steps)
        if weights:
            np.savez(out, *weights)
        print(json.dumps(address_space()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
