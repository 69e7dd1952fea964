# %% [markdown]
# # Images in a table
#
# You have images, as files in a folder or as bytes in a column of a table, and want to train a classifier on them
# without a preparation of your own. Here three kinds of shapes go from a folder into a table, and the model that learns
# them takes the bytes as they are: what decodes them is a part of the fitted model.
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

from elephant import KerasEstimator, decode_images  # first, and TensorFlow starts without lines of its own

# Spark's workers run the same Python as this one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import io
import tempfile
from pathlib import Path

import keras
import numpy as np
from matplotlib import pyplot as plt
from PIL import Image, ImageDraw
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StringIndexer
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## A folder of images
#
# 120 images of each shape are drawn here, 40 pixels wide, each at another place, in another size and color, and with
# noise. With images of your own, `folder` is where they are, such as `s3a://bucket/shapes`, and this cell goes.

# %%
folder = Path(tempfile.mkdtemp(prefix="shapes-"))
rng = np.random.default_rng(7)


def draw(shape):
    image = Image.new("RGB", (40, 40), tuple(rng.integers(0, 90, 3).tolist()))
    (left, top), size = rng.integers(2, 14, 2).tolist(), int(rng.integers(18, 25))
    right, bottom, color = left + size, top + size, tuple(rng.integers(150, 255, 3).tolist())
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=color)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=color)
    else:
        pen.polygon(((left, bottom), (right, bottom), ((left + right) // 2, top)), fill=color)
    noisy = np.asarray(image) + rng.normal(0, 10, (40, 40, 3))
    return Image.fromarray(np.clip(noisy, 0, 255).astype("uint8"))


for shape in ("circle", "square", "triangle"):
    (folder / shape).mkdir()
    for number in range(120):
        draw(shape).save(folder / shape / f"{number:03}.png")

# %% [markdown]
# ## Into a table
#
# Spark's source `binaryFile` makes a row of each file: its path, and its bytes in the column `content`. The class is
# the name of the subfolder. `StringIndexer` numbers the classes, because Keras compares numbers.
#
# A fit takes these rows as well. The table is worth its few lines because thousands of small files are slow to list and
# to open, each time anew. If your images are in a table already, begin here.

# %%
files = spark.read.format("binaryFile").option("recursiveFileLookup", True).load(f"{folder}/")
named = files.withColumn("shape", sql.regexp_extract("path", "([^/]+)/[^/]+$", 1))
indexer = StringIndexer(inputCol="shape", outputCol="label", stringOrderType="alphabetAsc").fit(named)
indexer.transform(named).select("path", "content", "shape", "label").write.parquet(f"{folder}-table")

images = spark.read.parquet(f"{folder}-table")
train, test = images.randomSplit([0.8, 0.2], seed=7)
images.groupBy("shape", "label").agg(sql.count("*"), sql.avg(sql.length("content"))).orderBy("label").show()

# %% [markdown]
# ## What the workers do with the bytes
#
# `decoded` turns a batch of encoded images into an array of pixels. Each worker calls it once for its rows, and keeps
# the result on its disk as `uint8`, a byte for each color of each pixel. `paths` lets an error name the image.
#
# `flipped` turns half of the images round, in every batch of every epoch anew. So the model sees more images than there
# are. It is called in training alone.


# %%
def decoded(batch):
    return {"image": decode_images(batch["content"], size=(32, 32), paths=batch["path"])}


def flipped(batch, rng):
    turned = rng.random(len(batch["image"])) < 0.5
    return {"image": np.where(turned[:, None, None, None], batch["image"][:, :, ::-1], batch["image"])}


# %% [markdown]
# ## The model
#
# Its input is named `image`, which is what `decoded` returns. `Rescaling` makes numbers from 0 to 1 of the bytes.

# %%
keras.utils.set_random_seed(7)
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((32, 32, 3), dtype="uint8", name="image"),
        layers.Rescaling(1 / 255),
        layers.Conv2D(16, 3, strides=2, activation="relu"),
        layers.Conv2D(32, 3, strides=2, activation="relu"),
        layers.Flatten(),
        layers.Dense(32, "relu"),
        layers.Dense(3, "softmax"),
    ]
)
model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])

# %% [markdown]
# ## Train and evaluate

# %%
estimator = KerasEstimator(
    model=model,
    featuresCol=["content", "path"],
    preprocessing=decoded,
    augmentation=flipped,
    numWorkers=2,
    batchSize=16,
    epochs=15,
    validationFraction=0.1,
)
fitted = estimator.fit(train)
predictions = fitted.transform(test)
accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predictions)
print(f"accuracy {accuracy:.3f} on images that the training has not seen")

# %%
fitted  # its layers, its curves, and where the time of its fit went

# %% [markdown]
# ## Look
#
# The fitted model keeps `decoded`, so `transform` took the bytes of the table. The rows have all of their columns
# still: here are some images with what the model says of them.

# %%
figure, panels = plt.subplots(1, 6, figsize=(8, 1.8))
for panel, row in zip(panels, predictions.orderBy(sql.rand(7)).limit(6).collect(), strict=True):
    panel.imshow(Image.open(io.BytesIO(row.content)))
    panel.set_title(f"{indexer.labels[int(row.prediction)]}\n{row.probability[int(row.prediction)]:.2f}", fontsize=9)
    panel.axis("off")
figure.tight_layout()

# %% [markdown]
# ## What was promised

# %%
assert accuracy > 0.9, accuracy

# %% [markdown]
# ## Where to go next
#
# - [Preprocessing](../preprocessing.md): what such functions get, and what they may return
# - [Data](../data.md): how rows that do not fit into memory are kept
# - [A million rows](batch_inference.ipynb): predictions for a whole table
