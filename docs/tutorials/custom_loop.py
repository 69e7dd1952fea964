# %% [markdown]
# # A training loop of your own
#
# At the end you have a loop with `GradientTape` that runs on one worker or on two, unchanged. Two workers reach the
# same weights as one process, to 1e-5.
#
# It takes one to two minutes on two cores. [What you need](index.md#what-you-need).
#
# When `KerasEstimator` can do it, it is shorter: it also takes models with a `train_step` of their own. A loop is for
# what no `fit` does.
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

    for epoch in range(epochs):
        shuffled = np.random.default_rng(epoch).permutation(training)
        for start in range(0, len(shuffled), 128):
            rows = np.array_split(shuffled[start : start + 128], collective.world_size())[collective.rank()]
            step(features[rows], labels[rows])

    mine = np.array_split(test, collective.world_size())[collective.rank()]
    right = np.sum(np.argmax(model.predict(features[mine], verbose=0), axis=-1) == labels[mine])
    right, asked = collective.allreduce(np.array([right, len(mine)]))
    return float(right / asked), model.get_weights()


# %% [markdown]
# ## Try it here first
#
# `train.__wrapped__` is the function itself. It runs in this process, in a world of one rank. Errors come as they are,
# and a debugger stops in it.

# %%
alone, weights = train.__wrapped__(5)
print(f"one process: accuracy {alone:.3f}")

# %% [markdown]
# ## Run it on two workers
#
# The result is a list with what each rank has returned. Return little: results travel through Spark to the driver.

# %%
results = train(5)
for rank, (accuracy, _) in enumerate(results):
    print(f"rank {rank}: accuracy {accuracy:.3f}")
# rank 0: accuracy 0.933
# rank 1: accuracy 0.933

# %% [markdown]
# ## Compare
#
# Sums of fractions depend on their order in the last digits, so the two ways differ by a little. Both ranks are alike
# to the last bit.

# %%
(accuracy, first), (_, second) = results
difference = max(np.abs(a - b).max() for a, b in zip(weights, first, strict=True))
print(f"largest difference from one process: {difference:.1e}")
# largest difference from one process: 3.0e-07

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
