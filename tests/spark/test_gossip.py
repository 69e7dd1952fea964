"""A fit in gossip mode on executors in processes of their own."""

import keras
import numpy as np
from counting_model import counted, counting_data, counting_model, weights_of
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator

SCHEMA = "features array<double>, label double"


def awaiting(folder):
    """Returns a callback with which a worker awaits the other one after its first step."""

    class Awaiting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            import os
            import time

            with open(os.path.join(folder, str(os.getpid())), "w"):
                pass
            for _ in range(600):
                if len(os.listdir(folder)) >= 2:
                    break
                time.sleep(0.1)
            time.sleep(0.02)

    return Awaiting()


def test_fit_when_workers_gossip_then_the_model_is_their_average_and_each_batch_is_in_it_once(spark, tmp_path, capsys):
    columns = counting_data(96)
    frame = partitioned_frame(spark, split_rows(columns, (48, 48)), SCHEMA)
    callbacks = [awaiting(str(tmp_path))]
    estimator = KerasEstimator(
        model=counting_model(), mode="gossip", numWorkers=2, batchSize=8, epochs=3, callbacks=callbacks, verbose=2
    )
    fitted = estimator.fit(frame)
    np.testing.assert_allclose(weights_of(fitted), counted(columns, batch_size=8, epochs=3) / 2, rtol=1e-5)
    assert len(fitted.history["loss"]) == 3
    statistics = fitted.training_statistics
    assert statistics["exchanges"] > 0 and (statistics["refused"], statistics["worker_retries"]) == (0, 0)
    assert "exchanges, " in capsys.readouterr().out
