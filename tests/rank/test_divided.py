"""Batches of ranks among which a model is divided: each has the rows of all."""

import numpy as np
import pytest
from rank_threads import run_threads

from elephant.data.epoch_plan import EpochPlan
from elephant.rank.divided import GlobalBatches

ROWS = (5, 0, 3)


class Feed:
    """Batches of two rows, of sequences as long as a batch's number and the rank say, of labels, and stand-ins."""

    def __init__(self, rank, rows):
        self.rank, self.rows = rank, rows

    def batches(self, steps):
        for step in range(steps):
            count = min(max(self.rows - 2 * step, 0), 2)
            numbers = 100 * self.rank + 2 * step + np.arange(count)
            yield self.batch(numbers, 1 + step + self.rank) if count else self.stand_in()

    def batch(self, numbers, length):
        return {"ids": np.tile(numbers.astype("int32")[:, None], length)}, (numbers / 2).astype("float32")

    def stand_in(self):
        return self.batch(np.array([-1]), 1)

    def training_batches(self, first_epoch):
        assert first_epoch == 0
        yield from self.batches(3)

    def validation_batches(self):
        yield from self.batches(-(-self.rows // 2))


@pytest.mark.parametrize("is_validation", [False, True])
def test_batches_when_rows_are_uneven_then_each_rank_has_those_of_all_filled_up_alike(is_validation):
    plan = EpochPlan(training_rows=ROWS, validation_rows=ROWS, batch_size=2)

    def batches(communicator):
        given = GlobalBatches(Feed(communicator.rank, ROWS[communicator.rank]), plan, communicator)
        return list(given.validation() if is_validation else given.training(first_epoch=0))

    expected = [([0, 1, 200, 201], (1, 1, 3, 3)), ([2, 3, 202], (2, 2, 4)), ([4], (3,))]
    for found in run_threads(3, batches):
        for (inputs, labels), (numbers, lengths) in zip(found, expected, strict=True):
            wanted = np.zeros((len(numbers), max(lengths)), "int32")
            for row, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
                wanted[row, :length] = number
            np.testing.assert_array_equal(inputs["ids"], wanted)
            np.testing.assert_array_equal(labels, np.array(numbers) / 2)
            assert (inputs["ids"].dtype, labels.dtype) == ("int32", "float32")
