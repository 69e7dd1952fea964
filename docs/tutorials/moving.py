# %% [markdown]
# # Moving from Elephas, Horovod or TorchDistributor
#
# You have a program that trains on Spark with another library, and want to see what of it changes. Here the same
# classifier of handwritten digits moves three times: from Elephas, where two imports change; from HorovodRunner, where
# the function stays and three lines change; and from TorchDistributor, where a loop becomes a call of `fit`. What was
# there before is shown as text and not run. What comes in its place is run.
#
# It takes two minutes on two cores. [What you need](index.md#what-you-need).
#
# ## Start Spark
#
# `local[2]` gives this session two task slots, so a fit may have two workers. Two partitions are enough for a small
# table. On a cluster, remove `.master("local[2]")`: [`spark-submit`](spark_submit.md) names the master.

# %%
import os
import sys

import elephant  # first, and TensorFlow starts without lines of its own

# Spark's workers run the same Python as this one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import tempfile

import keras
import numpy as np
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## What stays
#
# 1,797 images of 64 grey values, of which the last 297 are for the test, and a Keras 3 model.

# %%
digits = load_digits()
x, y = digits.data.astype("float32") / 16, keras.utils.to_categorical(digits.target)
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]
folder = tempfile.mkdtemp(prefix="moving-")


def build():
    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = keras.Sequential([keras.Input((64,)), layers.Dense(128, "relu"), layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.Adam(0.003), "categorical_crossentropy", metrics=["accuracy"])
    return model


# %% [markdown]
# ## From Elephas
#
# Before, with Elephas 7:
#
# ```python
# from elephas.spark_model import SparkModel, load_spark_model
# from elephas.utils.rdd_utils import to_simple_rdd
#
# rdd = to_simple_rdd(spark.sparkContext, x_train, y_train)
# spark_model = SparkModel(build(), num_workers=2)
# spark_model.fit(rdd, epochs=10, batch_size=32, verbose=0, validation_split=0.1)
#
# loss, of_elephas = spark_model.evaluate(x_test, y_test, verbose=0)
# predicted = np.argmax(spark_model.predict(x_test), axis=1)
# print(f"accuracy {of_elephas:.3f}, right in {np.mean(predicted == np.argmax(y_test, axis=1)):.1%} of the rows")
#
# spark_model.save(f"{folder}/digits.h5", overwrite=True)
# again = load_spark_model(f"{folder}/digits.h5")
# ```
#
# After, two imports are others:

# %%
from elephant import SparkModel, load_spark_model
from elephant.spark.conversions import to_simple_rdd

rdd = to_simple_rdd(spark.sparkContext, x_train, y_train)
spark_model = SparkModel(build(), num_workers=2)
spark_model.fit(rdd, epochs=10, batch_size=32, verbose=0, validation_split=0.1)

loss, of_elephas = spark_model.evaluate(x_test, y_test, verbose=0)
predicted = np.argmax(spark_model.predict(x_test), axis=1)
print(f"accuracy {of_elephas:.3f}, right in {np.mean(predicted == np.argmax(y_test, axis=1)):.1%} of the rows")

spark_model.save(f"{folder}/digits.h5", overwrite=True)
again = load_spark_model(f"{folder}/digits.h5")

# %% [markdown]
# The words are the same, and what happens is not: workers average their gradients at every step, as one process with
# larger batches would, where Elephas 7 averages the weights after every epoch and drops the optimizer's state. If you
# want what it did, `SparkModel(..., frequency="epoch")` is the nearest. [From Elephas](../from_elephas.md) has every
# name.
#
# ## From HorovodRunner
#
# Before, with Horovod 0.28 on Databricks:
#
# ```python
# import horovod.tensorflow.keras as hvd
# from sparkdl import HorovodRunner
#
#
# def train(learning_rate):
#     hvd.init()
#     rank, size = hvd.rank(), hvd.size()
#     model = build()
#     optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate))
#     model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"])
#     starts_alike = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
#     x, y = x_train[rank::size], y_train[rank::size]
#     model.fit(x, y, batch_size=32, epochs=10, callbacks=[starts_alike], verbose=0)
#     return model.evaluate(x_test, y_test, verbose=0)[1]
#
#
# of_horovod = HorovodRunner(np=2).run(train, learning_rate=0.003)
# ```
#
# After, the function has another optimizer around Keras' own, and asks once for equal weights. Workers are connected
# before it begins. `elephant.run` returns what each rank has returned, where HorovodRunner returns that of rank 0.


# %%
def train(learning_rate):
    rank, size = elephant.collective.rank(), elephant.collective.world_size()
    model = build()
    optimizer = elephant.DistributedOptimizer(keras.optimizers.Adam(learning_rate))
    # On a GPU, Keras would hand the step to XLA, which cannot contain the exchange.
    model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    elephant.broadcast_variables(model.variables)
    x, y = x_train[rank::size], y_train[rank::size]
    model.fit(x, y, batch_size=32, epochs=10, verbose=0)
    return model.evaluate(x_test, y_test, verbose=0)[1]


of_horovod = elephant.run(train, kwargs={"learning_rate": 0.003}, num_workers=2, verbose=0)
print(f"accuracy of the ranks: {[round(accuracy, 3) for accuracy in of_horovod]}")

# %% [markdown]
# All ranks must take the same number of steps, so each gets as many rows, as before. If the rows are a Spark table,
# you need no function at all: see the next section, which is also where `horovod.spark.keras.KerasEstimator` leads.
# [From Horovod](../from_horovod.md) has every name.
#
# ## From TorchDistributor
#
# Spark's TorchDistributor starts processes and leaves the rest to them. So the rows are written to files that all of
# them see, and the program divides them, wraps the model, and has a loop:
#
# ```python
# from pyspark.ml.torch.distributor import TorchDistributor
#
#
# def train(path, epochs):
#     import torch
#     import torch.distributed as dist
#     from torch.nn.parallel import DistributedDataParallel
#     from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
#
#     dist.init_process_group("gloo")
#     arrays = np.load(path)
#     rows = TensorDataset(torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["labels"]))
#     sampler = DistributedSampler(rows)
#     network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
#     model = DistributedDataParallel(network)
#     optimizer, loss_of = torch.optim.Adam(model.parameters(), 0.003), torch.nn.CrossEntropyLoss()
#     for epoch in range(epochs):
#         sampler.set_epoch(epoch)
#         for features, labels in DataLoader(rows, batch_size=32, sampler=sampler):
#             optimizer.zero_grad()
#             loss_of(model(features), labels).backward()
#             optimizer.step()
#     dist.destroy_process_group()
#     return network.state_dict()
#
#
# weights = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(train, f"{folder}/digits.npz", 10)
# ```
#
# After, the DataFrame goes into `fit`, and the fitted model scores another one. The loop, the sampler and the files are
# gone, and every row counts once in an epoch, also where workers have parts of different sizes: a `DistributedSampler`
# repeats rows to make the parts equal.

# %%
table = spark.createDataFrame(
    [(row.tolist(), int(label)) for row, label in zip(x, digits.target, strict=True)],
    "features array<float>, label int",
)
train_rows, test_rows = table.randomSplit([0.8, 0.2], seed=7)
model = build()
model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])
fitted = elephant.KerasEstimator(model, numWorkers=2, batchSize=32, epochs=10, validationFraction=0.1).fit(train_rows)
of_torch = fitted.evaluate(test_rows)["accuracy"]
print(f"accuracy {of_torch:.3f}")

# %%
panels = fitted.plot()

# %% [markdown]
# The model has to be a Keras model. Keras computes with PyTorch as well, if `KERAS_BACKEND=torch` is set
# ([backends](../backends.md)), and the weights of a trained network move along: a `Linear` layer's weight is the
# transpose of a `Dense` layer's kernel.
#
# ```python
# dense.set_weights([linear.weight.detach().numpy().T, linear.bias.detach().numpy()])
# ```
#
# A program that has to stay a `torch.nn.Module` with a loop of its own stays with TorchDistributor: elephant trains no
# modules outside of Keras.
#
# ## What was promised

# %%
assert min(of_elephas, of_torch, *of_horovod) > 0.85, (of_elephas, of_torch, of_horovod)
assert again.evaluate(x_test, y_test, verbose=0)[1] == of_elephas

# %% [markdown]
# ## Where to go next
#
# - [Moving to elephant](../migrating.md): what changes wherever you come from, and TensorFlowOnSpark, dist-keras
# - [From tf.distribute](../from_tf_distribute.md)
# - [A loop of your own](custom_loop.ipynb): `GradientTape`, where no `fit` does
