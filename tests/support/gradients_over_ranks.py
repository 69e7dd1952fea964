"""Gradients of losses that ranks compute together, on whichever backend Keras has; ranks run it, and one process."""

import numpy as np


def gradient_of(loss_of, value):
    """Returns the gradient of a loss at a matrix, as an array."""
    import keras

    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        @tf.function
        def compute(matrix):
            with tf.GradientTape() as tape:
                tape.watch(matrix)
                loss = loss_of(matrix)
            return tape.gradient(loss, matrix)

        return compute(tf.constant(value)).numpy()
    if keras.config.backend() == "jax":
        import jax

        return np.asarray(jax.jit(jax.grad(loss_of))(value))
    import torch

    matrix = torch.tensor(value, requires_grad=True)
    loss_of(matrix).backward()
    return matrix.grad.numpy()


def contrastive(images, texts, gather):
    """Returns the mean over rows of a loss whose negatives are all rows that are gathered."""
    from keras import ops

    of_all = ops.matmul(images, ops.transpose(gather(texts)))
    return ops.mean(ops.logsumexp(of_all, axis=1) - ops.sum(images * texts, axis=1))


def rank_gradients(images, texts, value):
    """Returns the gradients that one rank has of a loss through each of the operations."""
    from keras import ops

    from elephant.training import ops as of_ranks

    images, texts = ops.convert_to_tensor(images), ops.convert_to_tensor(texts)

    def through_sum(matrix):
        # Each rank's loss depends on the sum over all ranks, by a weight of its own.
        total = of_ranks.allreduce(ops.matmul(images, matrix))
        return ops.sum(ops.square(total) * texts[:, :2])

    def through_mean(matrix):
        return ops.sum(ops.square(of_ranks.allreduce(ops.matmul(images, matrix), "mean")) * texts[:, :2])

    def through_parts(matrix):
        part = of_ranks.reduce_scatter(ops.matmul(images, matrix))
        return ops.sum(ops.square(part) * texts[: part.shape[0] or len(texts) // 3, :2])

    def through_exchange(matrix):
        return ops.sum(ops.square(of_ranks.alltoall(ops.matmul(images, matrix))) * texts[:, :2])

    def through_rows(matrix):
        return contrastive(ops.matmul(images, matrix), ops.matmul(texts, matrix), of_ranks.allgather)

    losses = (through_sum, through_mean, through_parts, through_exchange, through_rows)
    return [gradient_of(loss, value) for loss in losses]


def rows_of(rank):
    """Returns a rank's images and texts, float32 of shape (6, 4)."""
    generator = np.random.default_rng(rank)
    return [generator.normal(size=(6, 4)).astype("float32") for _ in range(2)]


VALUE = np.random.default_rng(9).normal(size=(4, 2)).astype("float32")


def expected_gradients(world_size):
    """Returns what one process makes of all ranks' rows: the gradients of the sums of the ranks' losses."""
    from keras import ops

    rows = [[ops.convert_to_tensor(values) for values in rows_of(rank)] for rank in range(world_size)]
    texts = [own[1][:, :2] for own in rows]

    def outputs(matrix):
        return [ops.matmul(images, matrix) for images, _ in rows]

    def through_sum(matrix):
        total = sum(outputs(matrix))
        return sum(ops.sum(ops.square(total) * weights) for weights in texts)

    def through_mean(matrix):
        return through_sum(matrix) / world_size**2

    def through_parts(matrix):
        total, count = sum(outputs(matrix)), 6 // world_size
        return sum(
            ops.sum(ops.square(total[rank * count : (rank + 1) * count]) * weights[:count])
            for rank, weights in enumerate(texts)
        )

    def through_exchange(matrix):
        found, count = outputs(matrix), 6 // world_size
        received = [
            ops.concatenate([one[rank * count : (rank + 1) * count] for one in found]) for rank in range(world_size)
        ]
        return sum(ops.sum(ops.square(one) * weights) for one, weights in zip(received, texts, strict=True))

    def through_rows(matrix):
        images = ops.matmul(ops.concatenate([own[0] for own in rows]), matrix)
        return world_size * contrastive(
            images, ops.matmul(ops.concatenate([own[1] for own in rows]), matrix), lambda x: x
        )

    losses = (through_sum, through_mean, through_parts, through_exchange, through_rows)
    return [gradient_of(loss, VALUE) for loss in losses]


def assert_equal_to_one_process(found):
    """Checks the gradients that all ranks have returned."""
    for name, total, expected in zip(
        ("allreduce", "mean", "reduce_scatter", "alltoall", "allgather"),
        [sum(parts) for parts in zip(*found, strict=True)],
        expected_gradients(len(found)),
        strict=True,
    ):
        np.testing.assert_allclose(total, expected, rtol=2e-5, atol=1e-4, err_msg=name)
