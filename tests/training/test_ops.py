"""Operations on tensors of all ranks: gradients and weights against one process with the rows of all."""

import keras
import numpy as np
import pytest
from gradients_over_ranks import VALUE, assert_equal_to_one_process, rank_gradients, rows_of
from keras import ops
from keras_reference import classifier_data, fit_one_process, global_batches, job_for, largest_difference, split
from rank_pool import WORLD

from elephant.errors import ConfigurationError
from elephant.training import ops as of_ranks


def test_gradients_when_ranks_compute_losses_together_then_equal_one_process(rank_pool):
    found = rank_pool.run(rank_gradients, [(*rows_of(rank), VALUE) for rank in range(WORLD)])
    assert_equal_to_one_process(found)


def row_losses(truth, outputs):
    """Returns each row's contrastive loss; the negatives are the rows of all ranks."""
    images, texts = outputs[:, :3], outputs[:, 3:]
    of_all = ops.matmul(images, ops.transpose(of_ranks.allgather(texts)))
    return ops.logsumexp(of_all, axis=1) - ops.sum(images * texts, axis=1)


def two_towers():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    towers = [keras.layers.Dense(3, "tanh")(inputs) for _ in range(2)]
    model = keras.Model(inputs, keras.layers.Concatenate()(towers))
    model.compile(keras.optimizers.SGD(0.1), row_losses)
    return model


@pytest.mark.skipif(keras.config.backend() == "jax", reason="ranks of different rows, which JAX has no shapes for")
@pytest.mark.usefixtures("by_value")
def test_fit_when_its_loss_has_the_rows_of_all_ranks_then_equals_one_process(rank_pool):
    sizes = (14, 9, 0)
    parts = split(classifier_data(sum(sizes)), sizes)
    job = job_for(two_towers(), epochs=2, batch_size=4, shuffle=False, allow_batch_coupled_loss=True)
    recordings = rank_pool.fit(job, parts)
    with keras.utils.custom_object_scope({"row_losses": row_losses}):
        expected, _ = fit_one_process(two_towers(), list(global_batches(parts, 4, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-5


def test_operations_when_in_a_world_of_one_then_return_what_they_get():
    tensor = ops.convert_to_tensor(np.arange(6.0, dtype="float32").reshape(3, 2))
    for operation in (of_ranks.allreduce, of_ranks.allgather, of_ranks.reduce_scatter, of_ranks.alltoall):
        np.testing.assert_array_equal(ops.convert_to_numpy(operation(tensor)), ops.convert_to_numpy(tensor))
    with pytest.raises(ConfigurationError, match="op: expected sum or mean. Received: 'max'"):
        of_ranks.allreduce(tensor, "max")
