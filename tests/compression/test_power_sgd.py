import numpy as np
import pytest

from elephant.compression.power_sgd import PowerSGD, add_outer_products, orthonormal


def run_steps(run_ranks, gradients_of, *, slices, rank, steps, world_size=2):
    """Returns the sum of what rank 0 got over all steps, and the last result."""

    def work(ring):
        reduction = PowerSGD(slices, rank=rank)
        total = 0
        for step in range(steps):
            flat = gradients_of(ring.rank, step).astype(np.float32)
            reduction.reduce_(flat, ring)
            total = total + flat.astype(np.float64)
        return total, flat, ring.calls

    return run_ranks(world_size, work)[0]


def low_rank_matrix(seed, rows, columns, rank):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(rows, rank)) @ generator.normal(size=(rank, columns))


def test_powersgd_when_the_sum_has_the_rank_of_the_factors_then_one_step_is_exact(run_ranks):
    parts = [low_rank_matrix(seed, 60, 50, 2) for seed in range(2)]
    total, _, _ = run_steps(run_ranks, lambda rank, step: parts[rank].ravel(), slices=[(0, (60, 50))], rank=4, steps=1)
    np.testing.assert_allclose(total.reshape(60, 50), parts[0] + parts[1], atol=1e-4)


def test_powersgd_when_the_gradient_is_constant_then_warm_start_finds_its_largest_directions(run_ranks):
    generator = np.random.default_rng(0)
    left, right = (np.linalg.qr(generator.normal(size=(size, 20)))[0] for size in (60, 50))
    strengths = np.array([10.0, 8.0, *np.full(18, 0.1)])
    matrix = (left * strengths) @ right.T
    best = (left[:, :2] * strengths[:2]) @ right[:, :2].T

    def work(ring):
        results = []
        for steps in (1, 6):
            reduction = PowerSGD([(0, (60, 50))], rank=2)
            for _ in range(steps):
                reduction._memory.fill(0)
                flat = matrix.ravel().astype(np.float32)
                reduction.reduce_(flat, ring)
            results.append(np.linalg.norm(flat.reshape(60, 50) - best))
        return results

    ((cold, warm),) = run_ranks(1, work)
    assert warm < 1e-3 < cold


def test_powersgd_when_there_are_200_operations_then_the_running_sum_follows_the_true_one(run_ranks):
    constant = low_rank_matrix(0, 60, 50, 30)

    def gradients(rank, step):
        return (constant + np.random.default_rng((rank, step)).normal(size=(60, 50))).ravel()

    total, _, _ = run_steps(run_ranks, gradients, slices=[(0, (60, 50))], rank=4, steps=200)
    true = sum(gradients(rank, step) for rank in range(2) for step in range(200))
    # Without feedback what rank 4 cannot hold would be missing each time: 26 of 30 directions of the constant part.
    assert np.linalg.norm(total - true) < 0.1 * np.linalg.norm(true)


def test_powersgd_when_arrays_are_vectors_or_small_then_they_travel_as_they_are(run_ranks):
    slices = [(0, (100, 80)), (8000, (80,)), (8080, (3, 2)), (8086, (3, 3, 20, 30)), (13486, ())]
    gradient = np.random.default_rng(0).normal(size=13_487)
    total, _, calls = run_steps(run_ranks, lambda rank, step: gradient, slices=slices, rank=2, steps=1)
    plain = np.r_[8000:8086, 13486:13487]
    np.testing.assert_array_equal(total[plain], 2 * gradient[plain].astype(np.float32))
    rows = 2 * (100 + 180) + 80 + 6 + 1
    assert [call[:2] for call in calls] == [("allreduce", rows), ("allreduce", 2 * (80 + 30))]


def test_powersgd_when_a_gradient_is_zero_for_a_while_then_later_ones_are_as_good(run_ranks):
    matrix = low_rank_matrix(1, 60, 50, 3).ravel()

    def gradients(rank, step):
        return matrix if step >= 3 else np.zeros(3000)

    _, last, _ = run_steps(run_ranks, gradients, slices=[(0, (60, 50))], rank=3, steps=4)
    np.testing.assert_allclose(last, 2 * matrix, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12])
def test_powersgd_when_gradients_are_tiny_or_huge_then_it_works_as_for_others(run_ranks, scale):
    matrix = scale * low_rank_matrix(1, 60, 50, 2).ravel()
    _, last, _ = run_steps(run_ranks, lambda rank, step: matrix, slices=[(0, (60, 50))], rank=4, steps=4)
    np.testing.assert_allclose(last, 2 * matrix, atol=1e-3 * scale)


def test_orthonormal_when_vectors_depend_on_each_other_then_the_surplus_is_zero():
    vectors = np.array([[3, 0, 4], [6, 0, 8], [0, 2, 0], [0, 0, 0]], np.float32)
    expected = np.array([[0.6, 0, 0.8], [0, 0, 0], [0, 1, 0], [0, 0, 0]], np.float32)
    np.testing.assert_allclose(orthonormal(vectors), expected, atol=1e-7)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 100_000), (70_000, 2), (300, 500)])
def test_outer_products_when_added_then_are_the_matrix_product(rows, columns):
    generator = np.random.default_rng(0)
    one, other = (generator.normal(size=(3, size)).astype(np.float32) for size in (rows, columns))
    out = np.full((rows, columns), np.nan, np.float32)
    add_outer_products(one, other, out)
    np.testing.assert_allclose(out, one.T @ other, atol=1e-4)
