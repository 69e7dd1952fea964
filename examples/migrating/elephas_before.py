"""Digits with Elephas 7, as it stands before the move. `elephas_after.py` is the same with elephant.

Written for Elephas 7.3; nothing here needs elephant::

    pip install elephas scikit-learn
    python examples/migrating/elephas_before.py
"""

import keras
import numpy as np
from elephas.spark_model import SparkModel, load_spark_model
from elephas.utils.rdd_utils import to_simple_rdd
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

spark = SparkSession.builder.master("local[2]").appName("digits").getOrCreate()

# 1,797 images of 64 grey values; the last 297 are for the test.
digits = load_digits()
x, y = digits.data.astype("float32") / 16, keras.utils.to_categorical(digits.target)
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]

keras.utils.set_random_seed(7)
layers = keras.layers
model = keras.Sequential([layers.Input((64,)), layers.Dense(128, "relu"), layers.Dense(10, "softmax")])
model.compile(keras.optimizers.Adam(0.003), "categorical_crossentropy", metrics=["accuracy"])

rdd = to_simple_rdd(spark.sparkContext, x_train, y_train)
spark_model = SparkModel(model, num_workers=2)
spark_model.fit(rdd, epochs=10, batch_size=32, verbose=0, validation_split=0.1)

loss, accuracy = spark_model.evaluate(x_test, y_test, verbose=0)
print(f"loss {loss:.4f}, accuracy {accuracy:.4f}")

predicted = np.argmax(spark_model.predict(x_test), axis=1)
print(f"right in {np.mean(predicted == np.argmax(y_test, axis=1)):.1%} of {len(predicted)} rows")

spark_model.save("digits.h5", overwrite=True)
again = load_spark_model("digits.h5")
print(f"the saved model: accuracy {again.evaluate(x_test, y_test, verbose=0)[1]:.4f}")

spark.stop()
