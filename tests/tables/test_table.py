import numpy as np
import pytest

from elephant.errors import ConfigurationError
from elephant.tables.stack import Groups, Stack, StackPart
from elephant.tables.table import ROWS, RULES, TableSpec, initializer_of

RATE = 0.1


def spec_of(rule="sgd", rows=23, **options):
    return TableSpec(num_rows=rows, width=3, rule=rule, learning_rate=RATE, seed=4, **options)


def steps_of(count=5, rows=23):
    """Ids and gradients of some steps: an id may be there several times, and a step may have none."""
    random = np.random.default_rng(0)
    for step in range(count):
        ids = random.integers(0, rows, 0 if step == 2 else 17)
        yield ids, random.normal(size=(len(ids), 3)).astype(np.float32)


def updated_densely(rule, rows):
    """Returns rows after the steps, by the formulas of the papers on a whole table in float64."""
    rows, square, mean = rows.astype(np.float64), np.zeros_like(rows, np.float64), np.zeros_like(rows, np.float64)
    for step, (ids, gradients) in enumerate(steps_of(rows=len(rows)), 1):
        total = np.zeros_like(rows)
        np.add.at(total, ids, gradients)
        hit = np.unique(ids)
        if rule == "sgd":
            rows[hit] -= RATE * total[hit]
        elif rule == "lazy_adam":
            mean[hit] = 0.9 * mean[hit] + 0.1 * total[hit]
            square[hit] = 0.999 * square[hit] + 0.001 * total[hit] ** 2
            # Kingma and Ba's section 2 ends with this order of the computation.
            rate = RATE * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            rows[hit] -= rate * mean[hit] / (np.sqrt(square[hit]) + 1e-7)
        else:
            own = total**2 if rule == "adagrad" else np.mean(total**2, axis=1, keepdims=True)
            square += own
            rows[hit] -= RATE * total[hit] / np.sqrt(0.1 + square[hit] + 1e-7)
    return rows


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_when_updated_with_repeated_ids_then_equal_the_formulas_on_a_whole_table(rule, parts):
    spec = spec_of(rule)
    whole = spec.initial_rows()
    own = [StackPart(Stack((0,), (spec,), parts), part) for part in range(parts)]
    for ids, gradients in steps_of():
        for part in own:
            here = ids % parts == part.part
            part.update(ids[here], gradients[here], [0])
    found = np.empty_like(whole)
    for part in own:
        found[part.part :: parts] = part.parts[0].arrays[ROWS]
    np.testing.assert_allclose(found, updated_densely(rule, whole), atol=2e-5)
    untouched = np.setdiff1d(np.arange(len(whole)), np.concatenate([ids for ids, _ in steps_of()]))
    np.testing.assert_array_equal(found[untouched], whole[untouched])


def test_parts_when_made_of_a_whole_table_then_hold_its_rows_and_slots():
    spec = spec_of("lazy_adam", rows=10)
    arrays = {
        ROWS: np.arange(30, dtype=np.float32).reshape(10, 3),
        "velocity": np.ones((10, 3), np.float32),
        "updates": np.full((1, 1), 7, np.float32),
    }
    stack_part = StackPart(Stack((0,), (spec,), 3), 1, [arrays])
    (part,) = stack_part.parts
    np.testing.assert_array_equal(part.arrays[ROWS], arrays[ROWS][1::3])
    assert part.arrays["updates"][0, 0] == 7 and part.arrays["momentum"].shape == (3, 3)
    stack_part.update(np.array([4]), np.ones((1, 3), np.float32), [0])
    assert arrays[ROWS][4, 0] == 12


@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 9000])
def test_first_rows_when_drawn_by_any_number_of_parts_then_are_those_of_one(count):
    for draw, drawn in (("uniform", (-1.0, 1.0)), ("normal", (0.0, 2.0)), ("constant", (3.0,))):
        spec = spec_of(rows=count, draw=draw, drawn=drawn)
        whole = spec.initial_rows()
        for parts in (2, 7):
            for part in range(parts):
                np.testing.assert_array_equal(spec.initial_rows(part, parts), whole[part::parts])
    other = TableSpec(num_rows=count, width=3, seed=5).initial_rows()
    assert not np.array_equal(other, TableSpec(num_rows=count, width=3, seed=6).initial_rows())


def test_sums_when_ids_repeat_then_are_added_in_their_order():
    ids = np.array([5, 1, 5, 5, 0])
    gradients = np.array([[1e8], [2.0], [1.0], [-1e8], [3.0]], np.float32)
    groups = Groups.of(ids)
    sums = groups.sums(gradients)
    assert groups.numbers.tolist() == [0, 1, 5]
    # 1e8 + 1 is 1e8 in float32.
    assert sums.ravel().tolist() == [3.0, 2.0, 0.0]
    assert groups.spread(sums).ravel().tolist() == [0.0, 2.0, 0.0, 0.0, 3.0]
    empty = Groups.of(np.empty(0, np.int64))
    assert empty.numbers.shape == (0,) and empty.sums(np.empty((0, 2), np.float32)).shape == (0, 2)


def test_initializer_when_it_cannot_be_drawn_in_parts_then_says_which_can():
    with pytest.raises(ConfigurationError, match=r"embeddings_initializer: expected 'uniform'.*Received: 'orthogonal'"):
        initializer_of("orthogonal")
