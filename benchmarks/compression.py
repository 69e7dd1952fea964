"""What each compression costs on one core, and what it saves.

::

    python benchmarks/compression.py
    python benchmarks/compression.py --values 1000000 --repetitions 21

Codecs encode and decode pieces of 512 KiB, as the ring hands them over. Reductions that are no codecs
(top-k, PowerSGD) take whole arrays, and a collective of two ranks that costs nothing but a copy stands in
for the network. In turns with each repetition the same float32 bytes are copied; fields that end in ``to_copy``
compare with that. Times are processor time, because other work may share the machine. Prints one line of
JSON per codec, and per reduction and size.
"""

from __future__ import annotations

import os

# Before numpy is imported: matrix products on one core, as the other passes are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from elephant.compression import BFloat16, Codec, ErrorFeedback, Float16, Int8, reduction_for

PIECE_VALUES = 1 << 17
SIZES = (1_000_000, 10_000_000)
REDUCTIONS = ("topk", "topk:0.001", "powersgd", "powersgd:1")


class TwoRanks:
    """Both ranks have the same gradients; bytes are counted and go nowhere."""

    world_size, crosses_hosts = 2, True

    def __init__(self) -> None:
        self.sent_bytes = 0

    def allreduce_(self, array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> None:
        """Adds the array to itself; between two ranks each sends as much as it has."""
        self.sent_bytes += array.nbytes
        np.add(array, array, out=array)

    def allgather(self, array: np.ndarray) -> list[np.ndarray]:
        """Returns the array twice."""
        self.sent_bytes += array.nbytes
        return [array.copy(), array.copy()]


def codecs() -> dict[str, Codec]:
    """Returns what is measured piece by piece, by name."""
    return {
        "bfloat16": BFloat16(),
        "float16": Float16(),
        "int8 without feedback": Int8(),
        "int8": ErrorFeedback(Int8(), PIECE_VALUES),
        "numpy's float16": NumpyFloat16(),
    }


class NumpyFloat16(Codec):
    """What ``Float16`` is compared with: numpy's own casts."""

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: np.ndarray, out: np.ndarray, *, offset: int) -> None:
        np.copyto(out.view(np.float16), values, casting="unsafe")

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, data.view(np.float16))


def in_turns(actions: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Returns the median of each action in milliseconds; they take turns, and the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repetitions + 1):
        for name, action in actions.items():
            began = time.process_time()
            action()
            times[name].append((time.process_time() - began) * 1000)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def measure_codec(name: str, codec: Codec, repetitions: int) -> dict[str, object]:
    """Measures one codec on a piece of gradients, of which many are small."""
    values = np.random.default_rng(0).normal(size=PIECE_VALUES).astype(np.float32) * np.float32(1e-3)
    data, result = np.empty(codec.encoded_bytes(PIECE_VALUES), np.uint8), np.empty_like(values)
    medians = in_turns(
        {
            "encode": lambda: codec.encode(values, data, offset=0),
            "decode": lambda: codec.decode(data, result),
            "copy": lambda: np.copyto(result, values),
        },
        repetitions,
    )
    megabytes = values.nbytes / 1e6
    return {
        "name": name,
        "values": PIECE_VALUES,
        "ratio": round(values.nbytes / data.nbytes, 2),
        "encode_ms_per_mb": round(medians["encode"] / megabytes, 3),
        "decode_ms_per_mb": round(medians["decode"] / megabytes, 3),
        "encode_to_copy": round(medians["encode"] / medians["copy"], 1),
        "decode_to_copy": round(medians["decode"] / medians["copy"], 1),
    }


def measure_reduction(name: str, count: int, repetitions: int) -> dict[str, object]:
    """Measures one reduction of a square matrix of about ``count`` gradients."""
    side = round(count**0.5)
    gradients = np.random.default_rng(0).standard_normal(side * side, np.float32)
    flat, ranks = np.empty_like(gradients), TwoRanks()
    reduction = reduction_for(name, [(0, (side, side))])
    medians = in_turns(
        {
            "copy": lambda: np.copyto(flat, gradients),
            "reduce": lambda: reduction.reduce_(flat, ranks),
        },
        repetitions,
    )
    return {
        "name": name,
        "values": flat.size,
        "ratio": round(flat.nbytes * (repetitions + 1) / ranks.sent_bytes, 1),
        "reduce_ms": round(medians["reduce"], 2),
        "reduce_ms_per_mb": round(medians["reduce"] / (flat.nbytes / 1e6), 3),
        "reduce_to_copy": round(medians["reduce"] / medians["copy"], 1),
    }


def main() -> None:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, action="append", help="length of the arrays that are reduced; repeatable")
    parser.add_argument("--repetitions", type=int, default=11)
    options = parser.parse_args()
    for name, codec in codecs().items():
        print(json.dumps(measure_codec(name, codec, 10 * options.repetitions)), flush=True)
    for count in options.values or SIZES:
        for name in REDUCTIONS:
            print(json.dumps(measure_reduction(name, count, options.repetitions)), flush=True)


if __name__ == "__main__":
    main()
