"""An application that fits on executors with invented GPUs: ``python gpu_fits.py SETTINGS CASE ...``.

SETTINGS is a JSON object: those of a local cluster. The last line that it prints is a JSON object: what each case gave.
"""

import json
import os
import sys
import warnings

import keras
import numpy as np
from keras_reference import classifier_data, regression_model

import elephant
from elephant.cluster.local import local_session

ROWS = 48


def frame(spark):
    data = classifier_data(ROWS)
    rows = [(x.tolist(), float(y)) for x, y in zip(data["features"], data["label"], strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label float")


def fitted(spark, **options):
    """Trains on all rows at each step: what comes of it does not depend on who has which."""
    options = {
        "numWorkers": 2,
        "batchSize": ROWS,
        "epochs": 4,
        "shuffle": False,
        "verbose": int(os.environ.get("V", "0")),
        **options,
    }
    model = regression_model(keras.optimizers.SGD(0.05, momentum=0.9))
    estimator = elephant.KerasEstimator(model=model, **options)
    return estimator.fit(frame(spark))


def told(model):
    return {"plan": model.plan, "weights": [value.tolist() for value in model.model.get_weights()]}


def frame_case(spark):
    return told(fitted(spark))


def single_case(spark):
    return told(fitted(spark, numWorkers=1, useGpu=True))


def several_case(spark):
    return told(fitted(spark, numWorkers=1, gpusPerWorker=2))


def asynchronous_case(spark):
    model = fitted(spark, mode="asynchronous", numWorkers=1, gpusPerWorker=2, batchSize=8)
    return {"plan": model.plan, "history": model.history}


def rdd_case(spark):
    data = classifier_data(ROWS)
    rdd = spark.sparkContext.parallelize(list(zip(data["features"], data["label"], strict=True)), 1)
    model = regression_model(keras.optimizers.SGD(0.05, momentum=0.9))
    trainer = elephant.SparkModel(model, num_workers=1, gpus_per_worker=2, shuffle=False)
    trainer.fit(rdd, epochs=2, batch_size=8, verbose=0)
    return {"plan": trainer.plan, "weights": [value.tolist() for value in trainer.model.get_weights()]}


def environment_of_rank():
    names = ("CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH", "OMP_NUM_THREADS")
    return {"rank": elephant.collective.rank(), **{name: os.environ.get(name) for name in names}}


def run_case(spark):
    return elephant.run(environment_of_rank, num_workers=2, spark=spark, verbose=0)


def unseen_case(spark):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fitted(spark)
    path = f"file://{os.environ['ELEPHANT_TEST_FOLDER']}/model"
    model.write().overwrite().save(path)
    loaded = elephant.KerasModel.load(path).plan
    return {**told(model), "loaded": loaded, "warnings": [str(warning.message) for warning in caught]}


def device_seen(batch):
    """Makes of each row the number of the GPU that its process sees; -1 where that is none."""
    return {"features": np.full((len(batch["features"]), 1), float(os.environ["CUDA_VISIBLE_DEVICES"]), np.float32)}


def scored_case(spark):
    """Scores in tasks that ask for GPUs, and in tasks that do not; labels say how far from -1 a device is."""
    inputs = keras.Input((1,), name="features")
    model = keras.Model(inputs, keras.layers.Rescaling(1.0)(inputs))
    model.compile(loss="mae")
    rows = spark.createDataFrame([([0.0], -1.0)] * 8, "features array<float>, label float").repartition(2)
    path = f"{os.environ['ELEPHANT_TEST_FOLDER']}/rows"
    rows.write.parquet(f"file://{path}")
    stage = elephant.KerasModel(model).setPreprocessing(device_seen).setLabelCol("label")
    results = {}
    for uses in (False, True):
        stage = stage.copy().setInferenceUseGpu(uses)
        results[str(uses)] = {
            "frame": [row.prediction for row in stage.transform(rows).collect()],
            "label": [row.label for row in stage.transform(rows).collect()],
            "files": [row.prediction for row in stage.transform(path).collect()],
            "predict": stage.predict(rows).ravel().tolist(),
            "evaluate": stage.evaluate(rows)["loss"],
        }
    return results


def main():
    settings, cases = json.loads(sys.argv[1]), sys.argv[2:]
    spark = local_session(1, conf=settings)
    try:
        results = {case: globals()[f"{case}_case"](spark) for case in cases}
    finally:
        spark.stop()
    print(json.dumps(results))


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
