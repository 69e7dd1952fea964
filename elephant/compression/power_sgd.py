"""Matrices as products of two thin ones: PowerSGD, with warm start and error feedback."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from elephant.compression.codec import (
    BLOCK_VALUES,
    Compression,
    Exchange,
    GradientReducer,
    Slices,
    blocks,
    register_reducer,
)

DEFAULT_RANK = 4
_SEED = 0
# A column that has lost this much to those before it is rounding noise.
_INDEPENDENT = 1e-6


@dataclass
class _Matrix:
    """One array of the flat one, seen as a matrix, and the factor that its next step begins with.

    Attributes:
        span: Its part of the flat array.
        shape: Rows and columns: the last dimension has the columns.
        first: Drawn from the seed, float32 of shape (rank, columns).
        start: That of the last step, of the same shape.
    """

    span: slice
    shape: tuple[int, int]
    first: np.ndarray
    start: np.ndarray

    def of(self, flat: np.ndarray) -> np.ndarray:
        """Returns the matrix in ``flat``, as a view."""
        return flat[self.span].reshape(self.shape)


class PowerSGD(GradientReducer):
    """Sums approximations of low rank of the gradients that are matrices, and keeps what they lack.

    One step of subspace iteration, from where the last step ended (Vogels, Karimireddy &
    Jaggi 2019, algorithms 1 and 2). Arrays of more dimensions are matrices whose columns are
    the last one, as in the kernels of Keras. Vectors, and matrices that two factors would not
    make smaller, travel as they are.

    All ranks get the same bits from the same sums: what is not local is computed with additions and
    multiplications in a fixed order, and not with matrix products, whose order depends on
    the processor.

    A step whose sums are not finite gives NaN in every matrix, and clears what was kept.
    """

    def __init__(self, slices: Slices, *, rank: int = DEFAULT_RANK) -> None:
        super().__init__(slices)
        generator = np.random.default_rng(_SEED)
        self._matrices: list[_Matrix] = []
        self._plain: list[slice] = []
        for start, shape in slices:
            span = slice(start, start + math.prod(shape))
            rows, columns = math.prod(shape[:-1]), (shape[-1] if shape else 1)
            kept = min(rank, rows, columns)
            if (rows + columns) * kept < rows * columns:
                first = generator.standard_normal((kept, columns), np.float32)
                self._matrices.append(_Matrix(span, (rows, columns), first, first.copy()))
            else:
                self._plain.append(span)
        self._memory = np.zeros(self._count, np.float32)

    def _reduce(self, flat: np.ndarray, exchange: Exchange) -> None:
        left = self._reduce_left(flat, exchange)
        if not self._matrices:
            return
        right = self._reduce_right(left, exchange) if _finite(left) else left
        if not _finite(right):
            self._give_up(flat)
            return
        for matrix, rows, columns in zip(self._matrices, left, right, strict=True):
            add_outer_products(rows, columns, matrix.of(flat))
            matrix.start[:] = _next_start(columns, matrix.first)

    @property
    def memory(self) -> list[np.ndarray]:
        return [self._memory, *(matrix.start for matrix in self._matrices)]

    def _reduce_left(self, flat: np.ndarray, exchange: Exchange) -> list[np.ndarray]:
        """Sums the left factors, of shape (rank, rows), in one operation with all that travels as it is.

        The factors come back orthonormal, or as they are where they are not finite.
        """
        factors = [self._add_and_project(matrix, flat) for matrix in self._matrices]
        plain = [flat[span] for span in (*self._plain, slice(self._count, flat.size))]
        *factors, vectors = _allreduce([*factors, np.concatenate(plain)], exchange)
        borders = np.cumsum([len(part) for part in plain])[:-1]
        for part, reduced in zip(plain, np.split(vectors, borders), strict=True):
            part[:] = reduced
        return [orthonormal(factor) for factor in factors] if _finite(factors) else factors

    def _reduce_right(self, left: list[np.ndarray], exchange: Exchange) -> list[np.ndarray]:
        """Sums the right factors, of shape (rank, columns), and takes what this rank gave out of its memory."""
        own = [rows @ matrix.of(self._memory) for rows, matrix in zip(left, self._matrices, strict=True)]
        for matrix, rows, columns in zip(self._matrices, left, own, strict=True):
            _subtract_product(rows, columns, matrix.of(self._memory))
        return _allreduce(own, exchange)

    def _add_and_project(self, matrix: _Matrix, flat: np.ndarray) -> np.ndarray:
        """Adds the gradient to the memory and returns this rank's left factor, in one pass over both."""
        wanted, gradient = matrix.of(self._memory), matrix.of(flat)
        factor = np.empty((len(matrix.start), len(wanted)), np.float32)
        for block in blocks(len(wanted), _rows_of_block(wanted)):
            np.add(wanted[block], gradient[block], out=wanted[block])
            factor[:, block] = matrix.start @ wanted[block].T
        return factor

    def _give_up(self, flat: np.ndarray) -> None:
        self._memory.fill(0)
        for matrix in self._matrices:
            matrix.of(flat).fill(np.nan)
            matrix.start[:] = matrix.first


def orthonormal(vectors: np.ndarray) -> np.ndarray:
    """Returns vectors of length one, each orthogonal to those before it, or zero where nothing is left of it.

    Args:
        vectors: Float32 of shape (rank, length), finite.

    Returns:
        Float32 of the same shape, by the modified method of Gram and Schmidt in float64.
    """
    result = vectors.astype(np.float64)
    for index, vector in enumerate(result):
        length = math.sqrt(np.add.reduce(vector * vector))
        for earlier in result[:index]:
            vector -= earlier * np.add.reduce(earlier * vector)
        left = math.sqrt(np.add.reduce(vector * vector))
        if left > _INDEPENDENT * length:
            vector /= left
        else:
            vector.fill(0)
    return result.astype(np.float32)


def add_outer_products(rows: np.ndarray, columns: np.ndarray, out: np.ndarray) -> None:
    """Writes the sum of the outer products of pairs of vectors, added in their order.

    Args:
        rows: Float32 of shape (rank, rows).
        columns: Float32 of shape (rank, columns).
        out: Float32 of shape (rows, columns).
    """
    height = _rows_of_block(out)
    scratch = np.empty((min(height, len(out)), out.shape[1]), np.float32)
    for block in blocks(len(out), height):
        part = out[block]
        np.multiply(rows[0, block, None], columns[0], out=part)
        for one, other in zip(rows[1:, block], columns[1:], strict=True):
            np.multiply(one[:, None], other, out=scratch[: len(part)])
            np.add(part, scratch[: len(part)], out=part)


def _subtract_product(rows: np.ndarray, columns: np.ndarray, out: np.ndarray) -> None:
    """Takes ``rows.T @ columns`` off, for what stays on this rank: a matrix product is faster."""
    height = _rows_of_block(out)
    scratch = np.empty((min(height, len(out)), out.shape[1]), np.float32)
    for block in blocks(len(out), height):
        part = scratch[: block.stop - block.start]
        np.matmul(rows[:, block].T, columns, out=part)
        np.subtract(out[block], part, out=out[block])


def _next_start(columns: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Returns the factor that the next step begins with; a column that has vanished begins anew.

    The length does not matter to the subspace; without the division small gradients would underflow.
    """
    largest = np.abs(columns).max(axis=1, keepdims=True)
    return np.where(largest > 0, columns / np.where(largest > 0, largest, 1), first)


def _allreduce(arrays: list[np.ndarray], exchange: Exchange) -> list[np.ndarray]:
    """Sums all arrays over the ranks in one operation."""
    packed = np.concatenate([array.ravel() for array in arrays])
    exchange.allreduce_(packed)
    borders = np.cumsum([array.size for array in arrays])[:-1]
    return [part.reshape(array.shape) for part, array in zip(np.split(packed, borders), arrays, strict=True)]


def _finite(arrays: list[np.ndarray]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)


def _rows_of_block(matrix: np.ndarray) -> int:
    return max(1, BLOCK_VALUES // matrix.shape[1])


def _described(name: str, option: str | None) -> Compression:
    rank = DEFAULT_RANK if option is None else int(option)
    if rank < 1:
        raise ValueError(rank)
    return Compression(name=name, ratio=None, reduction=functools.partial(PowerSGD, rank=rank))


register_reducer("powersgd", _described)
