# %% [markdown]
# # A pretrained text classifier, with LoRA
#
# You have a pretrained transformer and want it to learn a task of your own, without training all of its weights, and
# without sending them all between workers at every step. Here a BERT of KerasHub learns to tell praise from complaint.
# Its base stays frozen. Small adapters beside its attention are trained, and their gradients alone travel.
#
# It takes two minutes on two cores. [What you need](index.md#what-you-need), and `pip install keras-hub`.
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

import math
import random
import tempfile

import keras
import keras_hub
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
spark = builder.getOrCreate()

# %% [markdown]
# ## A preset
#
# A preset is a folder with a backbone, its tokenizer and their settings. In your own work it has a name that KerasHub
# knows, such as `preset = "bert_tiny_en_uncased"`, and this cell is that line. So that nothing has to be downloaded,
# the cell makes a tiny one instead: a BERT of two layers that knows the words below, and has learned nothing yet.

# %%
THINGS = ["room", "breakfast", "staff", "view", "pool", "bed", "bar", "lift"]
PRAISE = ["good", "clean", "friendly", "lovely", "great", "quiet"]
BLAME = ["bad", "dirty", "rude", "awful", "noisy", "cold"]
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "was", "not", ".", *THINGS, *PRAISE, *BLAME]

keras.utils.set_random_seed(7)
backbone = keras_hub.models.BertBackbone(
    vocabulary_size=len(words),
    num_layers=2,
    num_heads=2,
    hidden_dim=64,
    intermediate_dim=128,
    max_sequence_length=16,
    dropout=0.0,
)
tokenizer = keras_hub.models.BertTokenizer(words, lowercase=True)
preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=12)
preset = f"{tempfile.mkdtemp(prefix='lora-')}/tiny"
keras_hub.models.BertTextClassifier(backbone, 2, preprocessor, dropout=0.0).save_to_preset(preset)

# %% [markdown]
# ## Sentences
#
# Half of them have a "not", which turns their meaning round. So single words do not tell, and attention has something
# to learn.

# %%
pick = random.Random(7)


def sentence():
    praises, is_negated = pick.random() < 0.5, pick.random() < 0.5
    word = pick.choice(PRAISE if praises else BLAME)
    return f"The {pick.choice(THINGS)} was {'not ' if is_negated else ''}{word}.", int(praises != is_negated)


reviews = spark.createDataFrame([sentence() for _ in range(1600)], "review string, label int")
train, test = reviews.randomSplit([0.8, 0.2], seed=7)

# %% [markdown]
# ## The model, as a function
#
# `enable_lora(4)` freezes the backbone and gives its attention adapters of rank 4. They and the classifier on top are
# what is trained. Keras does not save adapters within attention, so the estimator gets a function that makes the
# model in each training process, and not the model. On several hosts, a preset that is a folder lies where all of
# them see it.


# %%
def adapted():
    model = keras_hub.models.TextClassifier.from_preset(preset, num_classes=2, preprocessor=None)
    model.backbone.enable_lora(4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


# %% [markdown]
# ## From sentences to tokens
#
# `preprocessing` gets a batch of the DataFrame's columns and returns what the model takes. It runs on the workers, once
# for each row. The preset's own preprocessor is read there when the first batch comes, and kept for the next ones.

# %%
kept = []


def tokens(batch):
    if not kept:
        kept.append(keras_hub.models.TextClassifierPreprocessor.from_preset(preset))
    return kept[0](batch["review"].tolist())


# %% [markdown]
# ## Train

# %%
estimator = KerasEstimator(
    model=adapted,
    featuresCol=["review"],
    labelCol="label",
    preprocessing=tokens,
    numWorkers=2,
    epochs=12,
    validationFraction=0.1,
)
fitted = estimator.fit(train)

# %%
fitted  # its layers, its curves, and where the time of its fit went

# %% [markdown]
# ## Evaluate
#
# The fitted model keeps `tokens`, so that `transform` takes sentences as they are.

# %%
predictions = fitted.transform(test)
accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predictions)
predictions.select("review", "label", "prediction").show(4, truncate=False)
print(f"accuracy {accuracy:.3f} on sentences that the training has not seen")

# %% [markdown]
# ## What it costs
#
# A few of a hundred weights are trained. At every step, workers exchange the gradients of these, four bytes each.
# With a real BERT the share is smaller still, because adapters grow with the width of a layer, and its weights with
# the square of it.

# %%
trained = sum(math.prod(variable.shape) for variable in fitted.model.trainable_variables)
whole = fitted.model.count_params()
print(f"{trained:,} of {whole:,} weights are trained")
print(f"gradients of a step: {4 * trained / 1000:.0f} kB in place of {4 * whole / 1000:.0f} kB")

# %% [markdown]
# ## What was promised

# %%
assert accuracy > 0.95, accuracy
assert trained < whole / 20, (trained, whole)

# %% [markdown]
# ## Where to go next
#
# - [A frozen base and LoRA](../models.md#a-frozen-base-and-lora): what a frozen base saves in checkpoints and messages
# - [Preprocessing](../preprocessing.md): what such functions get, and what they may return
# - [Models in stages](../parallelism.md): a model that is too large for one GPU
