# %% [markdown]
# # Going on after a failure
#
# Your fit takes hours, and you want to lose none of them when a worker dies or somebody stops the driver. Here the
# worker of one fit is killed, and another fit is stopped and called again. Both end with the same weights as one that
# nothing disturbed, to 1e-6.
#
# It takes one to two minutes on two cores. [What you need](index.md#what-you-need).
#
# ## Start Spark
#
# `local[2]` gives this session two task slots, so a fit may have two workers. Two partitions are enough for a small
# table. On a cluster, remove `.master("local[2]")`: [`spark-submit`](spark_submit.md) names the master.

# %%
import os
import sys

from elephant import KerasEstimator  # first, and TensorFlow starts without lines of its own

# Spark's workers run the same Python as this one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import signal
import tempfile
from pathlib import Path

import keras
import numpy as np
from matplotlib import pyplot as plt
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## Rows and a model
#
# `Dropout` draws random numbers, and Adam remembers past gradients. Both have to go on where they were, or the weights
# would be others in the end.

# %%
rng = np.random.default_rng(7)
points = rng.normal(size=(600, 8))
label = (points[:, :2].sum(axis=1) > 0).astype(int)
train = spark.createDataFrame(
    list(zip(points.tolist(), label.tolist(), strict=True)), "features array<double>, label int"
)
train = train.repartition(2).cache()


def build():
    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(16, "relu"), layers.Dropout(0.2), layers.Dense(1, "sigmoid")]
    )
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
    return model


# %% [markdown]
# ## A fit that nothing disturbs
#
# `checkpointPath` is a folder for the checkpoints of one fit. Here it is on this machine's disk. On a cluster it is
# `hdfs:///...` or `s3a://...`: the driver writes, and a driver on another host can go on.
#
# Two checkpoints are kept, each of arrays and a manifest. An epoch that is faster than the disk may have none.

# %%
folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))


def estimator(name, **options):
    return KerasEstimator(
        model=build(), numWorkers=2, epochs=6, checkpointPath=str(folder / name), verbose=0, **options
    )


undisturbed = estimator("undisturbed").fit(train)
for path in sorted((folder / "undisturbed").iterdir()):
    print(path.name)

# %% [markdown]
# ## A worker is killed
#
# `Killed` ends the process of rank 1 at the beginning of the fourth epoch, as the kernel does when memory runs out.
# It does so once, and then leaves the file `marker`. It has to run on the workers, and a callback with a batch method
# does: so it has an empty `on_train_batch_begin`.
#
# `maxRestarts=1` allows one new start of what was lost, from the last state of the fit.


# %%
class Killed(keras.callbacks.Callback):
    def __init__(self, marker):
        super().__init__()
        self.marker = Path(marker)

    def on_epoch_begin(self, epoch, logs=None):
        from elephant import collective

        if epoch == 3 and collective.rank() == 1 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_begin(self, batch, logs=None):
        pass


killed = estimator("killed", maxRestarts=1, callbacks=[Killed(folder / "marker")]).fit(train)
print(f"{killed.training_statistics['restarts']} restart, {len(killed.history['loss'])} epochs in the history")

# %% [markdown]
# ## The driver stops
#
# `Stopped` raises in the third epoch, as Ctrl-C or an error in your script would. The fit ends, and its checkpoints
# stay.


# %%
class Stopped(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError("somebody has stopped this")


try:
    estimator("stopped", callbacks=[Stopped()]).fit(train)
except InterruptedError as error:
    print(error)

# %% [markdown]
# The same call again, with `resume=True`, goes on after the last epoch that has a checkpoint. A script that is run
# again until it is done has `resume=True` from the first time on: where there is no checkpoint yet, the fit begins.

# %%
resumed = estimator("stopped", resume=True).fit(train)
print(f"{len(resumed.history['loss'])} epochs in the history")

# %% [markdown]
# ## Compare


# %%
def difference(fitted):
    pairs = zip(fitted.model.get_weights(), undisturbed.model.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


print(f"killed: {difference(killed):.1e}, stopped: {difference(resumed):.1e}")

figure, axes = plt.subplots(figsize=(6, 3))
for name, fitted, marker in (("undisturbed", undisturbed, "o"), ("killed", killed, "x"), ("stopped", resumed, "+")):
    axes.plot(range(1, 7), fitted.history["loss"], marker=marker, linewidth=0.5, label=name)
axes.set_xlabel("epoch")
axes.set_ylabel("loss")
axes.grid(alpha=0.3)
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## What was promised

# %%
assert killed.training_statistics["restarts"] == 1
assert difference(killed) < 1e-6, difference(killed)
assert difference(resumed) < 1e-6, difference(resumed)

# %% [markdown]
# ## Where to go next
#
# - [Checkpoints](../checkpoints.md): what is kept, what it costs, callbacks that remember
# - [Failures](../failures.md): which event does what in which mode
# - [Asynchronous training](../asynchronous.md): there Spark replaces a lost worker while the others go on
