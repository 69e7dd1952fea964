"""Fits and predictions through preprocessing functions, on executors: image files, columns of any type, and errors."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from spark_frames import partitioned_frame

import elephant
from elephant import KerasEstimator, KerasModel
from elephant.errors import SchemaError, WorkerFailure

SIDE, IMAGES = 8, 30


def picture(number):
    """Returns an image, brighter on its left when its class is 1."""
    pixels = np.random.default_rng(number).integers(0, 120, (SIDE, SIDE, 3)).astype(np.uint8)
    pixels[:, : SIDE // 2] += np.uint8(100 * (number % 2))
    return pixels


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    """PNG files, every third in twice the size; and what they are when each pixel of these counts once."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(IMAGES):
        pixels = picture(number)
        if number % 3 == 0:
            pixels = pixels.repeat(2, axis=0).repeat(2, axis=1)
        (folder / f"{number}_{'right' if number % 2 else 'wrong'}.png").write_bytes(tf.io.encode_png(pixels).numpy())
    return folder


def image_model(seed=0):
    keras.utils.set_random_seed(seed)
    image = keras.Input((SIDE, SIDE, 3), name="image")
    hidden = keras.layers.Rescaling(1 / 255)(image)
    hidden = keras.layers.Flatten()(keras.layers.Conv2D(4, 3, activation="relu")(hidden))
    model = keras.Model(image, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(keras.optimizers.SGD(0.05), "binary_crossentropy", metrics=["accuracy"])
    return model


def largest_difference(model, other):
    return max(np.abs(a - b).max() for a, b in zip(model.get_weights(), other.get_weights(), strict=True))


def decoded_files(batch):
    """What the user writes: files to pixels, and, where there is one, the path to the class."""
    images = elephant.decode_images(batch["content"], size=(8, 8), paths=batch["path"])
    if "kind" not in batch:
        return images
    return {"image": images, "kind": np.array([path.endswith("right.png") for path in batch["kind"]])}


def decoded(batch):
    return elephant.decode_images(batch["image"], size=(8, 8))


def brighter(batch, rng):
    return {"image": batch["image"] * rng.uniform(0.5, 1.0)}


@pytest.mark.slow("a fit, and predictions of what was saved")
def test_fit_when_images_are_files_then_equals_one_process_on_their_pixels_and_transforms_and_is_saved(
    spark, by_value, image_folder, tmp_path
):
    files = spark.read.format("binaryFile").load(f"{image_folder}/*.png")
    frame = files.selectExpr("content", "path", "path AS kind")
    estimator = KerasEstimator(
        model=image_model(),
        featuresCol=["content", "path"],
        labelCol="kind",
        preprocessing=decoded_files,
        numWorkers=2,
        epochs=2,
        batchSize=IMAGES,
        verbose=0,
    )
    frame.repartition(2).write.parquet(str(tmp_path / "rows"))
    fitted = estimator.fit(str(tmp_path / "rows"))
    pixels = np.stack([picture(number) for number in range(IMAGES)]).astype("float32")
    classes = np.arange(IMAGES) % 2
    expected = image_model()
    history = expected.fit(pixels, classes, batch_size=IMAGES, epochs=2, shuffle=False, verbose=0)
    assert largest_difference(fitted.model, expected) <= 1e-5
    np.testing.assert_allclose(fitted.history["loss"], history.history["loss"], rtol=1e-5)

    fitted.write().save(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"), trusted=True)
    rows = loaded.transform(frame).select("kind", "probability").collect()
    found = {int(row["kind"].rsplit("/", 1)[1].split("_")[0]): row["probability"][1] for row in rows}
    np.testing.assert_allclose(
        [found[number] for number in range(IMAGES)], expected.predict(pixels, verbose=0)[:, 0], atol=1e-5
    )
    evaluated = expected.evaluate(pixels, classes, verbose=0, return_dict=True)
    assert loaded.evaluate(frame) == pytest.approx(evaluated, rel=1e-5)
    estimator.write().save(str(tmp_path / "estimator"))
    again = KerasEstimator.load(str(tmp_path / "estimator"), trusted=True)
    assert again.getPreprocessing()(
        {"content": [(image_folder / "1_right.png").read_bytes()], "path": ["1_right.png"]}
    ).shape == (1, 8, 8, 3)


def test_fit_when_images_come_from_the_image_source_and_are_augmented_then_equals_one_process_on_the_same_draws(
    spark, by_value, image_folder
):
    from elephant.rank.input.preprocessing import AUGMENT, generator

    frame = spark.read.format("image").load(f"{image_folder}/*.png")
    frame = frame.selectExpr("image", "CAST(image.origin LIKE '%right%' AS INT) AS label")
    fitted = KerasEstimator(
        model=image_model(),
        featuresCol={"image": "image"},
        preprocessing=decoded,
        augmentation=brighter,
        epochs=3,
        batchSize=IMAGES,
        seed=4,
        verbose=0,
    ).fit(frame)
    pixels = np.stack([picture(number) for number in range(IMAGES)]).astype("float32")
    expected = image_model()
    for epoch in range(3):
        factor = generator(AUGMENT, 4, 0, epoch, 0).uniform(0.5, 1.0)
        expected.train_on_batch((pixels * factor).astype("float32"), np.arange(IMAGES) % 2)
    assert largest_difference(fitted.model, expected) <= 1e-5


def mixed(batch):
    days = batch["bought"].astype("float64") - 19000
    features = [batch["price"], batch["flag"], days / 10, [len(name) for name in batch["name"]]]
    sums = [float(np.sum(row)) for row in batch["steps"]]
    features += [sums, batch["vector"][:, 1], batch["place"]["x"]]
    return {"features": np.stack([np.asarray(part, "float32") for part in features], axis=1)}


@pytest.mark.slow("a fit; tests/rank/test_preprocessing.py holds what the function is given")
def test_asynchronous_fit_when_columns_are_of_all_types_then_the_function_gets_them_as_they_are(
    spark, by_value, tmp_path
):
    import datetime
    import decimal

    from pyspark.ml.linalg import Vectors

    def row(number):
        return (
            decimal.Decimal(number) / 4,
            number % 2 == 0,
            datetime.date(2022, 1, 8) + datetime.timedelta(days=number),
            "n" * number,
            [float(step) for step in range(number)],
            Vectors.dense(0, number / 8),
            (number / 2,),
            float(number % 3),
        )

    names = "price decimal(10,2), flag boolean, bought date, name string, steps array<double>"
    rows = [row(number) for number in range(12)]
    without = [(*one[:5], *one[6:]) for one in rows]
    frame = partitioned_frame(spark, [without[:5], without[5:]], f"{names}, place struct<x: double>, label double")
    vectors = spark.createDataFrame([(one[3], one[5]) for one in rows], ["name", "vector"])
    frame = frame.join(vectors, "name")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((7,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.001), "mse")
    columns = ["price", "flag", "bought", "name", "steps", "vector", "place"]
    # The driver of such a mode knows rows by the model, and not by the first one.
    options = {"mode": "asynchronous", "epochs": 2, "batchSize": 12, "verbose": 0}
    fitted = KerasEstimator(model=model, featuresCol=columns, preprocessing=mixed_of(mixed), **options).fit(frame)
    numbers = np.arange(12)
    features = [numbers / 4, numbers % 2 == 0, numbers / 10, numbers, numbers * (numbers - 1) / 2, numbers / 8]
    x = np.stack([*features, numbers / 2], axis=1).astype("float32")
    expected = keras.models.clone_model(model)
    expected.set_weights(model.get_weights())
    expected.compile(keras.optimizers.SGD(0.001), "mse")
    expected.fit(x, (numbers % 3).astype("float32"), batch_size=12, epochs=2, shuffle=False, verbose=0)
    assert largest_difference(fitted.model, expected) <= 1e-5


def mixed_of(function):
    """Returns a function whose result is an array: the model has one input."""
    return lambda batch: function(batch)["features"]


def broken(batch):
    raise KeyError("no such breed")


@pytest.mark.slow("a fit that starts; tests/rank/test_preprocessing.py holds what is said")
def test_fit_when_a_function_cannot_be_used_then_the_error_says_why(spark, by_value):
    frame = spark.createDataFrame([("a", 1.0), ("b", 2.0)], "name string, label double")
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def fit(function, **options):
        options = {"featuresCol": "name", "model": model, "verbose": 0, **options}
        KerasEstimator(preprocessing=function, **options).fit(frame)

    with pytest.raises(WorkerFailure, match="KeyError: 'no such breed'") as caught:
        fit(broken)
    assert "in broken" in caught.value.traceback
    with pytest.raises(SchemaError, match="featuresCol: expected one of the columns name, label. Received: 'text'"):
        fit(broken, featuresCol="text")
