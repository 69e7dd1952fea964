"""A fit of a model in stages, whose ranks are threads, against one process of plain Keras."""

import dataclasses
import functools
import pickle

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, global_batches, job_for, largest_difference, split
from pyspark import cloudpickle
from rank_pool import Recording, places_of
from rank_threads import run_threads

from elephant.data.shard import Shard
from elephant.rank.job import epoch_plan
from elephant.rank.staged import train_staged

pytestmark = pytest.mark.usefixtures("by_value")


def deep_model(optimizer=None, **compiled):
    """Returns a model of four layers, of which one is regularized, whose first weights are always the same."""
    layers = [keras.layers.Dense(8, "tanh", name=f"hidden{number}") for number in range(2)]
    layers += [keras.layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.01), name="regular")]
    model = keras.Sequential([keras.layers.Input((6,)), *layers, keras.layers.Dense(1, name="head")])
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=weight.shape, scale=0.4) for weight in model.get_weights()])
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", **{"metrics": ["mae"], **compiled})
    return model


def staged_job(model, *, num_ranks, **options):
    shared = {"epochs": 2, "batch_size": 8, "shuffle": False, "pipeline_stages": 2, "micro_batches": 3}
    return job_for(model, num_workers=num_ranks, **{**shared, **options})


def fit_in_stages(job, parts, folder):
    """Trains ranks in threads; returns their recordings.

    Args:
        parts: Columns of each rank.
    """
    places = places_of(job, parts, folder)
    block = cloudpickle.dumps(job)

    def live(world):
        own, place, recording = pickle.loads(block), places[world.rank], Recording()
        shard = Shard(None if place["shard"] is None else folder / str(world.rank), own.schema, place["row_shapes"])
        plan = epoch_plan(own, place["num_rows"], place["num_marked"])
        train_staged(own, shard, plan, world, recording)
        return recording

    return run_threads(len(parts), live)


def of_replicas(parts, num_replicas):
    """Returns the rows of each replica: those of its ranks, by rank."""
    return [
        {name: np.concatenate([part[name] for part in parts[replica::num_replicas]]) for name in parts[0]}
        for replica in range(num_replicas)
    ]


def test_fit_when_a_model_is_in_stages_then_equals_one_process(tmp_path):
    sizes = (9, 0, 14, 20)
    total = sum(sizes)
    rng = np.random.default_rng(3)
    marked = rng.permutation(np.arange(total) < 7)
    columns = {**classifier_data(total), "validation": marked, "weight": rng.uniform(0, 2, total).astype("float32")}
    parts = split(columns, sizes)
    job = staged_job(deep_model(), num_ranks=4, indicated=True, weighted=True)
    recordings = fit_in_stages(job, parts, tmp_path)
    trained = [{name: part[name][~part["validation"]] for name in part} for part in of_replicas(parts, 2)]
    expected, history = fit_one_process(deep_model(), list(global_batches(trained, 8, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-5
    for metric, values in history.items():
        np.testing.assert_allclose([logs[metric] for logs in recordings[0].epochs], values, rtol=1e-5)
    model = deep_model()
    model.set_weights(expected)
    x, y, weight = (columns[name][marked] for name in ("features", "label", "weight"))
    found = model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True)
    for metric, value in found.items():
        np.testing.assert_allclose(recordings[0].epochs[-1][f"val_{metric}"], value, rtol=1e-4)
