"""A fit of which one training process is killed: its loss over time beside that of the same fit left alone.

::

    python benchmarks/killed_fit.py

Four ranks on two executors of this machine learn the handwritten digits. In the first fit of each pair nothing happens;
in the second one, SIGKILL ends a training process in the middle. Prints a line of JSON: seconds from the kill until all
ranks had taken the next step, against the target, the losses with the seconds at which their epochs ended, and whether
the weights in the end were the same to the bit. Fails where they were not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from report import Measurement, report
from restarts import busiest
from session_processes import is_of, session_processes

_RANKS, _EXECUTORS, _BATCH = 4, 2, 32
_TARGET_S = 5.0


class Clock:
    """The ends of a fit's epochs on the driver, and a kill behind one of them.

    Args:
        kill_after: The epoch behind which a training process is killed, counted from one; None for none.

    Attributes:
        ends: Seconds from the end of the first epoch, before which there is the start of the fit, to that of each: to
            the last one of an epoch that a loss has had repeated.
        killed: When a process was killed, in the same seconds, and in seconds since 1970; None before.
    """

    def __init__(self, kill_after: int | None) -> None:
        self.ends: dict[int, float] = {}
        self.killed: tuple[float, float] | None = None
        self._kill_after = kill_after
        self._began = 0.0
        self._thread: threading.Thread | None = None

    def callback(self) -> Any:
        """Returns a callback of Keras that notes the epochs, and has the process killed."""
        import keras

        return keras.callbacks.LambdaCallback(on_epoch_end=self._note)

    def join(self) -> None:
        """Waits until the kill, if there is one, is over."""
        if self._thread is not None:
            self._thread.join()

    def _note(self, epoch: int, _: Any) -> None:
        self._began = self._began or time.time()
        self.ends[epoch] = time.time() - self._began
        if epoch + 1 == self._kill_after and self._thread is None:
            # Epochs end while it looks for those that train.
            self._thread = threading.Thread(target=self._kill, name="killer")
            self._thread.start()

    def _kill(self) -> None:
        training = busiest([one for one in session_processes() if is_of(one, "training")], _RANKS)
        training[1].kill()
        now = time.time()
        self.killed = (now - self._began, now)


def build() -> Any:
    """Returns a classifier of the digits whose fit has all that must come back: slots and random generators."""
    import keras

    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Input((64,)),
        keras.layers.Dense(512, "relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(512, "relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10, "softmax"),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy")
    return model


def fit(frame: Any, epochs: int, kill_after: int | None) -> tuple[Any, Clock]:
    """Trains; returns the fitted model, and when its epochs ended."""
    from elephant import KerasEstimator

    clock = Clock(kill_after)
    estimator = KerasEstimator(
        model=build(),
        numWorkers=_RANKS,
        epochs=epochs,
        batchSize=_BATCH,
        maxRestarts=1,
        driverCallbacks=[clock.callback()],
        verbose=0,
    )
    try:
        return estimator.fit(frame), clock
    finally:
        clock.join()


def measure(frame: Any, options: argparse.Namespace) -> bool:
    """Runs pairs of fits, and prints the last one's curves with the median; returns whether all weights were equal."""
    fit(frame, 2, None)
    seconds, equal = list[float](), True
    for _ in range(options.repetitions):
        alone, left = fit(frame, options.epochs, None)
        again, clock = fit(frame, options.epochs, options.epochs // 2)
        (recovery,) = again.training_statistics["recoveries"]
        at, since_1970 = clock.killed
        seconds.append(recovery["resumed_at"] - since_1970)
        equal &= all(map(np.array_equal, again.model.get_weights(), alone.model.get_weights()))
        equal &= again.history["loss"] == alone.history["loss"]
    report(
        Measurement(
            measure="killed_fit",
            case={"ranks": _RANKS, "epochs": options.epochs, "parameters": again.model.count_params()},
            ratio=statistics.median(seconds),
            target=_TARGET_S,
            at_least=False,
            medians={"least_s": min(seconds), "most_s": max(seconds), "weights_as_expected": float(equal)},
            repetitions=options.repetitions,
            series={
                "undisturbed_s": list(left.ends.values()),
                "undisturbed_loss": alone.history["loss"],
                "killed_s": list(clock.ends.values()),
                "killed_loss": again.history["loss"],
                # The kill, and the first step of all ranks behind it.
                "lost_s": [at, at + seconds[-1]],
            },
        )
    )
    return equal


def main() -> None:
    """Measures in one session."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60, help="of each fit (60)")
    parser.add_argument("--repetitions", type=int, default=5, help="pairs of fits (5)")
    options = parser.parse_args()
    from sklearn.datasets import load_digits

    from elephant.cluster.local import local_session

    # A task that is lost finds a slot at hand.
    session = local_session(_EXECUTORS, conf={"spark.master": f"local-cluster[{_EXECUTORS},4,1024]"})
    try:
        images, labels = load_digits(return_X_y=True)
        rows = [(pixels.tolist(), int(label)) for pixels, label in zip(images / 16, labels, strict=True)]
        frame = session.createDataFrame(rows, "features array<float>, label int").repartition(_RANKS).cache()
        if not measure(frame, options):
            raise SystemExit("weights or losses differ from those of an undisturbed fit")
    finally:
        session.stop()


if __name__ == "__main__":
    main()
