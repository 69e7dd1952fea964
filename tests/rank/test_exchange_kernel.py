"""Averages of TensorFlow's kernel have the bits of those that a callback makes; nobody waits for the dead."""

import functools
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, job_for, regression_model, split

from elephant.backends import tensorflow_exchange
from elephant.backends.gradient_averager import GradientAverager
from elephant.backends.lookups import BY_BATCH
from elephant.backends.tensorflow_exchange import EXCHANGE_VARIABLE, library_path
from elephant.collective import LocalCommunicator
from elephant.data.epoch_plan import EpochPlan
from elephant.rank.rank_progress import RankWeight

pytestmark = pytest.mark.usefixtures("by_value")

tf = pytest.importorskip("tensorflow", reason="a kernel of TensorFlow's, which is not installed")

ROOT = Path(__file__).resolve().parents[2]
built = pytest.mark.skipif(library_path() is None, reason="the kernel was not built: there was no C compiler")
# Of three ranks in each step: uneven, with one or two that bring no rows, and with none that does.
WEIGHTS = [(0.5, 0.25, 0.25), (1 / 3, 2 / 3, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0), (0.1, 0.2, 0.7)]


class Share:
    """A rank's weights, one after the other, as `elephant.rank.rank_progress.RankWeight` has them."""

    def __init__(self, weights):
        self.cell = np.zeros(1)
        self._weights = weights

    def begin(self, step):
        self.cell[0] = self._weights[step]

    def __call__(self):
        return float(self.cell[0])


class Pair:
    """A step that averages by the kernel, and one that does so by a callback.

    Args:
        widths: Of slices, for each looked-up gradient; the step takes its indices and its values behind the others.
    """

    def __init__(self, collective, weights, shapes, widths=(), *, ahead=False):
        import tensorflow as tf

        from elephant.backends.gradient_averager import GradientAverager, StopSignal
        from elephant.backends.lookups import BY_BATCH
        from elephant.backends.tensorflow_exchange import Callbacks, kernel_of
        from elephant.collective import LocalCommunicator

        self.share, self.stop = Share(weights), StopSignal()
        self.averager = GradientAverager(LocalCommunicator() if ahead else collective, self.share, stop=self.stop)
        self.averager.kernel = kernel = kernel_of(self.averager)
        group = self.averager.group("test", [(shape, "float32") for shape in shapes])
        other = GradientAverager(collective, self.share)
        callbacks = Callbacks(other, other.group("test", [(shape, "float32") for shape in shapes]), lambda: None)
        signature = [tf.TensorSpec(shape) for shape in shapes]
        for width in widths:
            signature += [tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None, width))]

        def by(exchange):
            @tf.function(input_signature=signature)
            def step(*given):
                dense, sparse = [array * 1.0 for array in given[: len(shapes)]], given[len(shapes) :]
                slices = [
                    (indices, values, (BY_BATCH,), tf.shape(indices))
                    for indices, values in zip(sparse[0::2], sparse[1::2], strict=True)
                ]
                averages, gathered = exchange(dense, slices)
                return [*averages, *(part for pair in gathered for part in pair)]

            return step

        self.by_kernel = by(lambda dense, slices: kernel.in_graph(group, dense, slices))
        self.by_callback = by(callbacks.in_graph)
        if ahead:
            self.by_kernel.get_concrete_function()
            self.averager.bind(collective, self.share, self.stop)
        else:
            self.averager.agree_on_kernel()

    def close(self):
        self.averager.close()


def gradients_of(rank, step, shapes, *, special=True):
    """Returns gradients with numbers of all sizes, those that are none, and denormal ones among them."""
    rng = np.random.default_rng((rank, step))
    arrays = [np.asarray(rng.normal(size=shape) * 10.0 ** rng.integers(-44, 30, shape), "float32") for shape in shapes]
    if special:
        first = arrays[0].reshape(-1)
        first[: 8 * 3] = np.tile(np.float32([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38, 2e-38, 0.0]), 3)
    return arrays


def slices_of(rank, step, widths):
    """Returns indices and values of rows that a batch looks up: none, a few, and more than a round has room for."""
    rng = np.random.default_rng((rank, step, 7))
    counts = [(rank + step) % 3 * 5, (3, 0, 4001)[(rank + step) % 3]][: len(widths)]
    return [
        part
        for count, width in zip(counts, widths, strict=True)
        for part in (rng.integers(0, 50, count), rng.normal(size=(count, width)).astype("float32"))
    ]


def mapped():
    """Returns how many parts of shared memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:elephant")


def compare(rank, *, ahead=False, slices=False, more=()):
    """Returns for each step whether kernel and callback gave the same bits, and what the stop signals say."""
    from elephant.collective.api import current_collective

    shapes, widths = [(300, 41), (), (5000,), (0, 3), (7,), *more], (1, 100) if slices else ()
    before = mapped()
    pair = Pair(current_collective(), [weights[rank] for weights in WEIGHTS], shapes, widths, ahead=ahead)
    told = []
    for step in range(len(WEIGHTS)):
        pair.share.begin(step)
        pair.stop.requested = rank == 1 and step == 2
        given = [*gradients_of(rank, step, shapes), *slices_of(rank, step, widths)]
        kernel = [average.numpy() for average in pair.by_kernel(*given)]
        callback = [average.numpy() for average in pair.by_callback(*given)]
        same = [one.tobytes() == other.tobytes() for one, other in zip(kernel, callback, strict=True)]
        told.append((all(same), pair.stop.agreed, kernel))
    attached = pair.averager.kernel._memory is not None
    pair.close()
    return told, attached, mapped() - before


@built
@pytest.mark.parametrize(
    "ranks, slices, more, ahead",
    [(2, False, (), False), (3, True, ((), (700, 701), (262_144,)), False), (3, True, (), True)],
    ids=["2", "slices, several rounds", "slices, handed over"],
)
def test_averages_when_made_by_the_kernel_then_have_the_bits_of_the_callback(rank_pool, ranks, slices, more, ahead):
    job = functools.partial(compare, ahead=ahead, slices=slices, more=more)
    results = rank_pool.run(job, [(rank,) for rank in range(ranks)])
    for steps, attached, left in results:
        assert [same for same, _, _ in steps] == [True] * len(WEIGHTS)
        # The request of one rank has come to all with the step in which it was made.
        assert [agreed for _, agreed, _ in steps] == [False, False, True, True, True]
        assert attached is not ahead and left == 0
    for (_, _, first), *others in zip(*(steps for steps, _, _ in results), strict=True):
        for _, _, other in others:
            assert [array.tobytes() for array in other] == [array.tobytes() for array in first]
    # Nothing of a rank without rows counts, though it brings NaN: in the third step there is one rank alone.
    third = results[0][0][2][2]
    # Denormal numbers are zero to TensorFlow.
    assert np.allclose(third[2], gradients_of(1, 2, [(300, 41), (), (5000,)])[2], rtol=0, atol=1.2e-38)
    # In the fourth, nobody has rows: all averages are zero, and there are no slices.
    assert not any(array.any() for array in results[0][0][3][2])
    if slices:
        # Rank 1 is alone in the third step: its slices are all there are.
        for one, other in zip(third[-4:], slices_of(1, 2, (1, 100)), strict=True):
            assert one.tobytes() == other.tobytes()


def test_share_when_a_step_begins_then_is_in_memory_for_the_kernel():
    plan = EpochPlan(training_rows=(5, 2), validation_rows=(0, 0), batch_size=2)
    share = RankWeight(plan, 0)
    written = []
    for step in range(3):
        share.begin(step)
        written.append(float(share.cell[0]))
    assert written == [0.5, 1.0, 1.0]


@built
def test_kernel_when_gradients_are_of_other_types_or_named_by_the_step_then_leaves_them_to_the_callback():
    averager = GradientAverager(LocalCommunicator(), lambda: 1.0)
    kernel = tensorflow_exchange.kernel_of(averager)
    indices, values, sizes = tf.zeros((3,), "int32"), tf.zeros((3, 2)), tf.constant([3])
    of_batch = (indices, values, (BY_BATCH, BY_BATCH), sizes)
    for dtype, slices, taken in (
        ("float32", [], True),
        ("float64", [], False),
        ("float32", [of_batch], True),
        ("float32", [of_batch, (indices, values, (BY_BATCH, 0), sizes)], False),
        ("float32", [(indices, tf.cast(values, "float16"), (BY_BATCH,), sizes)], False),
        ("float32", [of_batch, (tf.cast(indices, "int64"), values, (BY_BATCH,), sizes)], False),
    ):
        group = averager.group("test", [((17 << 20,), dtype), ((10,), "float32")])
        assert kernel.takes(group, [tf.zeros((10,), dtype), tf.zeros((10,))], slices) is taken
    averager.close()


def one_lacks_it(rank):
    from elephant.backends.gradient_averager import GradientAverager
    from elephant.collective.api import current_collective

    averager = GradientAverager(current_collective(), lambda: 0.5)
    averager.kernel = None if rank else averager
    averager.agree_on_kernel()
    return averager.uses_kernel


def test_kernel_when_one_rank_lacks_it_then_none_uses_it(rank_pool):
    assert rank_pool.run(one_lacks_it, [(0,), (1,)]) == [False, False]


def stay_away(rank):
    """Takes some steps, and then is too late; returns in which step it failed, and of what."""
    from elephant.collective.api import current_collective

    collective = current_collective()
    pair = Pair(collective, [0.5] * 6, [(1000,)])
    pair.by_kernel.get_concrete_function()
    collective.barrier()
    collective.timeout_s = 2.0
    for step in range(6):
        pair.share.begin(step)
        if rank == 1 and step == 4:
            time.sleep(5)
        try:
            pair.by_kernel(*gradients_of(rank, step, [(1000,)]))
        except Exception as raised:
            error = pair.averager.error
            pair.close()
            return step, type(raised).__name__, type(error).__name__, str(error)


@built
def test_rank_when_it_stays_away_then_all_learn_at_the_deadline_who_did_not_come(rank_pool):
    told = rank_pool.run(stay_away, [(0,), (1,)])
    # The late one finds all gradients of its step, and nobody in the next.
    assert [step for step, *_ in told] == [4, 5]
    for _, raised, kind, text in told:
        assert (raised, kind) == ("AbortedError", "DeadlineExceededError")
        assert "exchange of gradients on rank 0 did not end within 2 s. Ranks that did not arrive: 1." in text


def closed_before(rank):
    from elephant.collective.api import current_collective

    pair = Pair(current_collective(), [0.5], [(8,)])
    pair.share.begin(0)
    pair.by_kernel(*gradients_of(rank, 0, [(8,)], special=False))
    pair.close()
    try:
        pair.by_kernel(*gradients_of(rank, 0, [(8,)], special=False))
    except Exception as error:
        return type(error).__name__, "The fit of this step has ended." in str(error)


@built
def test_step_when_run_after_its_fit_then_raises(rank_pool):
    assert rank_pool.run(closed_before, [(0,), (1,)]) == [("AbortedError", True)] * 2


class Way(keras.callbacks.Callback):
    """Tells, in a file of each process, which way the gradients of a fit take."""

    def __init__(self, folder, exchange):
        super().__init__()
        self.folder = folder
        self.exchange = exchange

    def on_train_batch_begin(self, batch, logs=None):
        """With it, each step is a call."""

    def on_train_end(self, logs=None):
        from elephant.backends.tensorflow import compiled_part
        from elephant.collective.api import current_collective

        graph = compiled_part(self.model.train_function)._list_all_concrete_functions()[0].graph
        names = {op.type for part in [graph, *graph._functions.values()] for op in operations(part)}
        way = "kernel" if "ElephantExchange" in names else "callback"
        Path(self.folder, f"{self.exchange}-{current_collective().rank}").write_text(way)


def operations(graph):
    return graph.get_operations() if hasattr(graph, "get_operations") else graph.graph.get_operations()


def choose(exchange):
    os.environ[EXCHANGE_VARIABLE] = exchange


def embedding_model(optimizer):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((6,)), keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse")
    return model


# A model with an embedding has dense gradients, too.
FITS = {
    "slices, a rank without rows": (embedding_model, (19, 8, 0), {}),
    "dense, several steps at once": (regression_model, (20, 20), {"steps_per_execution": 2}),
}


@built
@pytest.mark.parametrize("case", FITS.values(), ids=FITS)
def test_weights_when_a_fit_uses_the_kernel_then_have_the_bits_of_the_callback(rank_pool, tmp_path, case):
    network, sizes, options = case
    data = classifier_data(sum(sizes))
    # Numbers that can be looked up.
    parts = split({**data, "features": np.floor(np.abs(data["features"]) * 3) % 9}, sizes)
    found = {}
    for exchange in ("kernel", "callback"):
        rank_pool.run(choose, [(exchange,)] * len(sizes))
        try:
            model = network(keras.optimizers.Adam(0.01))
            if options:
                model.compile(keras.optimizers.Adam(0.01), "mse", **options)
            job = job_for(model, epochs=2, batch_size=5, callbacks=[Way(str(tmp_path), exchange)])
            found[exchange] = rank_pool.fit(job, parts)[0].variables
        finally:
            rank_pool.run(choose, [("kernel",)] * len(sizes))
        assert [(tmp_path / f"{exchange}-{rank}").read_text() for rank in range(len(sizes))] == [exchange] * len(sizes)
    assert [one.tobytes() for one in found["kernel"]] == [other.tobytes() for other in found["callback"]]


@pytest.mark.parametrize("kind", ["garbage", "foreign"])
def test_library_when_it_is_another_one_then_is_ignored_with_a_line(monkeypatch, tmp_path, caplog, kind):
    path = tmp_path / "exchange.abi3.so"
    if kind == "garbage":
        path.write_bytes(b"no library")
    else:
        (tmp_path / "other.c").write_text("int other(void) { return 1; }")
        built = subprocess.run(["cc", "-shared", "-o", str(path), str(tmp_path / "other.c")], timeout=60, check=False)
        if built.returncode:
            pytest.skip("there is no C compiler")
    monkeypatch.setattr(tensorflow_exchange, "library_path", lambda: path)
    with caplog.at_level(logging.WARNING):
        assert tensorflow_exchange.library() is None
    assert f"expected a library of TensorFlow's kernel in {path}. Received: " in caplog.text


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_package_when_nothing_compiles_then_is_built_without_the_kernel(tmp_path, compiler):
    command = ["setup.py", "-q", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"]
    environment = {**os.environ, "CC": compiler}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))
