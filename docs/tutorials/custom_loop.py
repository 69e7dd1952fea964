# %% [markdown]
# # A training loop of your own
#
# You have a training loop with `GradientTape`, and want it to run on several workers. Here is one that runs on one
# worker or on two, unchanged, and two workers reach the same weights as one process, to 1e-5.
#
# It takes one to two minutes on two cores. [What you need](index.md#what-you-need).
#
# Where `KerasEstimator` can do it, that is shorter: it also takes models with a `train_step` of their own. A loop is
# for what no `fit` does.
#
# ## Start Spark
#
# `local[2]` gives this session two task slots, so a fit may have two workers. Two partitions are enough for a small
# table. On a cluster, remove `.master("local[2]")`: [`spark-submit`](spark_submit.md) names the master.

# %%
import os
import sys

import elephant

# Spark's workers run the same Python as this one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import numpy as np
from matplotlib import pyplot as plt
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## The loop
#
# `@elephant.distributed(num_workers=2)` makes a run of every call: two processes call the function at the same time,
# each with a rank. The function travels to them, and imports what it needs there.
#
# Four lines make it distributed:
#
# 1. `broadcast_variables` gives all workers the weights of rank 0.
# 2. `np.array_split` takes this worker's part of the rows of a step. All workers draw the same order, because the seed
#    is the same.
# 3. `DistributedOptimizer` averages the gradients of all workers before it applies them. `num_rows` tells it how many
#    rows are behind this worker's gradient, so that parts of unequal size count by their rows.
# 4. `collective.allreduce` adds up what each worker has counted.
#
# `autograph=False` spares TensorFlow looking for the function's source, which has stayed here. A step without `if` and
# `for` over tensors needs no AutoGraph.


# %%
@elephant.distributed(num_workers=2, verbose=0)
def train(epochs):
    import keras
    import tensorflow as tf
    from sklearn.datasets import load_digits

    from elephant import collective

    digits = load_digits()
    features, labels = (digits.data / 16.0).astype("float32"), digits.target
    order = np.random.default_rng(7).permutation(len(labels))
    test, training = order[:360], order[360:]

    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rows = np.arange(0)
    optimizer = elephant.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), num_rows=lambda: len(rows))
    elephant.broadcast_variables(model.variables)
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True, autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = []
    for epoch in range(epochs):
        shuffled, total = np.random.default_rng(epoch).permutation(training), np.zeros(2)
        for start in range(0, len(shuffled), 128):
            rows = np.array_split(shuffled[start : start + 128], collective.world_size())[collective.rank()]
            total += len(rows) * float(step(features[rows], labels[rows])), len(rows)
        total = collective.allreduce(total)
        losses.append(total[0] / total[1])

    mine = np.array_split(test, collective.world_size())[collective.rank()]
    right = np.sum(np.argmax(model.predict(features[mine], verbose=0), axis=-1) == labels[mine])
    right, asked = collective.allreduce(np.array([right, len(mine)]))
    return float(right / asked), losses, model.get_weights()


# %% [markdown]
# ## Try it here first
#
# `train.__wrapped__` is the function itself. It runs in this process, in a world of one rank, so that errors come as
# they are and a debugger stops in it.

# %%
alone, losses, weights = train.__wrapped__(5)
print(f"one process: accuracy {alone:.3f}")

# %% [markdown]
# ## Run it on two workers
#
# The result is a list with what each rank has returned. Return little: results travel through Spark to the driver.

# %%
results = train(5)
for rank, (accuracy, _, _) in enumerate(results):
    print(f"rank {rank}: accuracy {accuracy:.3f}")

# %% [markdown]
# ## Compare
#
# Sums of fractions depend on their order in the last digits, so the two ways differ by a little. The two ranks are
# alike to the last bit, because they apply the same average.

# %%
(accuracy, of_two, first), (_, _, second) = results
difference = max(np.abs(a - b).max() for a, b in zip(weights, first, strict=True))
print(f"largest difference from one process: {difference:.1e}")

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(range(1, 6), losses, marker="o", markersize=8, linewidth=0, fillstyle="none", label="one process")
axes.plot(range(1, 6), of_two, marker="x", markersize=4, label="two workers")
axes.set_xlabel("epoch")
axes.set_ylabel("loss")
axes.grid(alpha=0.3)
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## What was promised

# %%
assert accuracy > 0.9, accuracy
assert difference < 1e-5, difference
assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))

# %% [markdown]
# ## Where to go next
#
# - [Loops of your own](../run.md): all of `elephant.run`, `elephant.collective` and `DistributedOptimizer`
# - [A whole file on every worker](../run.md#a-file-elephant-run): `elephant run train.py --num-workers 2`
# - [Exactness](../exactness.md): what equals one process
