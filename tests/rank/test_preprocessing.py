"""The user's functions on batches: what they are given, what they may return, and when they run."""

import keras
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit
from keras_reference import fit_one_process, global_batches, largest_difference, split
from rank_pool import RankError
from tables import every_case
from tiers import in_tiers

from elephant.config import FitConfig
from elephant.data.ragged import RaggedArray
from elephant.data.schema import DENSE, RAGGED, SCALAR, SPARSE, TEXT, DataSchema, Field
from elephant.errors import DataError, SchemaError, UnsupportedError
from elephant.modeling.model_spec import model_source
from elephant.rank.input.preprocessing import AUGMENT, PREPARE, Preprocessing, augmentation, generator, model_rows
from elephant.rank.job import BatchFunctions, TrainingJob

TOLERANCE = 1e-5


def text_of(words):
    encoded = [word if isinstance(word, bytes) else word.encode() for word in words]
    offsets = np.concatenate([[0], np.cumsum([len(word) for word in encoded])])
    return RaggedArray(offsets, (np.frombuffer(b"".join(encoded), np.uint8),))


RAW = DataSchema(
    inputs=(
        Field("features", ("price",), "float64", SCALAR),
        Field("features_2", ("name",), "string", TEXT),
        Field("features_3", ("content",), "bytes", TEXT),
        Field("features_4", ("image.height",), "int32", SCALAR),
        Field("features_5", ("tokens",), "int64", RAGGED),
    ),
    labels=(Field("label", ("kind",), "string", TEXT),),
    x={"price": 0, "name": 1, "content": 2, "image": {"height": 3}, "tokens": 4},
)
RAW_SHAPES = {"features_2": (), "features_3": (), "features_5": (), "label": ()}
RAW_VALUES = (
    np.array([1.5, 2.5, 4.0]),
    text_of(["a", "ü", ""]),
    text_of([b"\x00\xff", b"", b"x"]),
    np.array([7, 8, 9], "int32"),
    RaggedArray(np.array([0, 2, 2, 3]), (np.array([5, 6, 7]),)),
    text_of(["cat", "dog", "cat"]),
)
TARGET = DataSchema(
    inputs=(
        Field("features", ("price",), "float32", DENSE, (1,)),
        Field("features_2", ("words",), "string", TEXT, (1,)),
        Field("features_3", ("tokens",), "int32", RAGGED, (None,)),
    ),
    labels=(Field("label", ("kind",), "float32", DENSE, None),),
    x={"numbers": 0, "words": 1, "steps": 2},
)
NAMES = ["numbers", "words", "steps"]


def made_by(function, raw=RAW, target=TARGET, names=NAMES, shapes=RAW_SHAPES):
    return Preprocessing(function, raw, target, names, shapes)


def test_preprocessing_when_columns_are_of_all_kinds_then_gets_them_by_name_and_passes_on_what_it_leaves():
    seen = {}

    def function(batch):
        seen.update(batch)
        return {"words": batch["name"], "kind": (batch["kind"] == "dog").astype("int64")}

    made = made_by(function)
    numbers, words, steps, kind = made(RAW_VALUES, generator(PREPARE, 0))
    assert seen["price"].tolist() == [1.5, 2.5, 4.0]
    assert seen["name"].dtype == object and seen["name"].tolist() == ["a", "ü", ""]
    assert seen["content"].tolist() == [b"\x00\xff", b"", b"x"]
    assert seen["image"]["height"].tolist() == [7, 8, 9]
    assert [row.tolist() for row in seen["tokens"]] == [[5, 6], [], [7]]
    np.testing.assert_array_equal(numbers, np.array([[1.5], [2.5], [4.0]], "float32"))
    assert words.buffers[0].tobytes() == "aü".encode() and words.offsets.tolist() == [0, 1, 3, 3]
    assert steps.offsets.tolist() == [0, 2, 2, 3] and steps.buffers[0].dtype == np.int32
    assert kind.tolist() == [0, 1, 0]
    assert [field.dtype for field in made.schema.labels] == ["int64"]
    assert [field.shape for field in made.schema.batch_fields] == [(1,), (1,), (None,), ()]


@every_case(
    "value",
    [
        np.array([[1, 2], [3, 4], [5, 6]]),
        [[1, 2], [3, 4], [5, 6]],
        keras.ops.convert_to_tensor([[1, 2], [3, 4], [5, 6]]),
        [np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([5.0, 6.0])],
        np.array([1, 2, 3, 4, 5, 6]).reshape(3, 1, 2),
    ],
    ids=["array", "lists", "tensor", "list of arrays", "a dimension of one"],
)
def test_preprocessing_when_it_returns_rows_in_any_form_then_they_are_one_array(value):
    target = DataSchema(inputs=(Field("features", ("price",), "float32", DENSE, (2,)),))
    made = made_by(lambda batch: value, target=target, names=["numbers"])
    (rows,) = made(RAW_VALUES, generator(PREPARE, 0))
    np.testing.assert_array_equal(rows, np.array([[1, 2], [3, 4], [5, 6]], "float32"))
    assert rows.dtype == np.float32


def test_preprocessing_when_the_model_takes_sparse_rows_then_elements_that_are_not_zero_are_kept():
    target = DataSchema(inputs=(Field("features", ("price",), "float32", SPARSE, (3,), sparse_tensor=True),))
    made = made_by(lambda batch: np.array([[0, 2, 0], [0, 0, 0], [1, 0, 3]]), target=target, names=["numbers"])
    (rows,) = made(RAW_VALUES, generator(PREPARE, 0))
    assert rows.offsets.tolist() == [0, 1, 1, 3]
    assert [buffer.tolist() for buffer in rows.buffers] == [[1, 0, 2], [2.0, 1.0, 3.0]]


ONE = DataSchema(inputs=(Field("features", ("price",), "float32", DENSE, (2, 2)),))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (np.zeros((2, 2, 2)), "preprocessing: numbers: expected 3 rows, .* Received: 2 rows"),
        (np.float64(1), "expected 3 rows.* Received: one value"),
        (
            np.zeros((3, 4, 2)),
            r"expected the model's input of shape \(2, 2\) .* Received: an array of shape \(3, 4, 2\)",
        ),
        ([np.zeros((2, 2)), np.zeros((3, 2)), np.zeros((2, 2))], r"rows of one shape.* Received: rows of the shapes"),
        (np.full((3, 2, 2), 1j), "Received: elements of type complex128"),
        (np.full((3, 2, 2), "a"), "Received: elements of type <U1"),
        (None, "expected a dictionary of arrays .* or one array. Received: None"),
        ((np.zeros((3, 2, 2)), 1), "Received: an object of type tuple"),
        ({"pixels": np.zeros((3, 2, 2))}, "Received: 'pixels' in it"),
    ],
    ids=lambda value: None,
)
def test_preprocessing_when_what_it_returns_does_not_fit_then_the_error_says_what_came(result, message):
    with pytest.raises(DataError, match=message):
        made_by(lambda batch: result, target=ONE, names=["numbers"])(RAW_VALUES, generator(PREPARE, 0))


SEQUENCES = DataSchema(
    inputs=(Field("features", ("tokens",), "float32", RAGGED, (None, 2)),),
    labels=(Field("label", ("tags",), "float32", RAGGED, (None,)),),
    weights=(Field("weight", ("price",), "float32", SCALAR),),
)


def sequences_by(lengths, weights=(1, 1, 1)):
    def function(batch):
        return {
            "tokens": [[[place, length] for place in range(length)] for length in lengths],
            "tags": [list(range(length)) for length in lengths],
            "price": np.array(weights),
        }

    return made_by(function, target=SEQUENCES, names=["tokens"])


@pytest.mark.parametrize("lengths", [(2, 2, 2), (2, 1, 3), (0, 2, 1)], ids=["equal", "different", "first empty"])
def test_preprocessing_when_it_returns_sequences_then_their_types_do_not_depend_on_their_lengths(lengths):
    made = sequences_by(lengths)
    tokens, tags, _ = made(RAW_VALUES, generator(PREPARE, 0))
    assert np.diff(tokens.offsets).tolist() == list(lengths)
    assert tokens.buffers[0].tolist() == [[place, length] for length in lengths for place in range(length)]
    assert tags.buffers[0].tolist() == [place for length in lengths for place in range(length)]
    assert [(field.shape, field.dtype) for field in made.schema.batch_fields[:2]] == [
        ((None, 2), "float32"),
        ((None,), "int64"),
    ]


def test_preprocessing_when_it_returns_a_list_of_bytes_then_zeros_at_their_ends_stay():
    target = DataSchema(inputs=(Field("features", ("name",), "string", TEXT, ()),))
    made = made_by(lambda batch: [b"a\x00", "b", b"\x00"], target=target, names=["words"])
    (words,) = made(RAW_VALUES, generator(PREPARE, 0))
    assert (words.offsets.tolist(), words.buffers[0].tobytes()) == ([0, 2, 3, 4], b"a\x00b\x00")


def test_preprocessing_when_a_weight_is_negative_then_the_error_names_the_row_of_the_batch():
    made = sequences_by((1, 1, 1), weights=(1, 2, -3))
    with pytest.raises(
        DataError, match=r"preprocessing: price: expected weights .* Received: -3.0 in row 2 of the batch"
    ):
        made(RAW_VALUES, generator(PREPARE, 0))
    several = sequences_by((1, 1, 1), weights=np.diag([1.0, 2.0, -3.0]))
    with pytest.raises(DataError, match=r"expected weights .* Received: -3.0 in row 2 of the batch"):
        several(RAW_VALUES, generator(PREPARE, 0))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)], ids=str)
def test_preprocessing_when_it_makes_weights_then_a_row_has_one_or_several(shape):
    made = sequences_by((1, 1, 1), weights=np.ones((3, *shape)))
    assert made(RAW_VALUES, generator(PREPARE, 0))[-1].shape == (3, *(() if shape == (1,) else shape))


def test_preprocessing_when_integers_outgrow_the_models_type_then_is_refused():
    target = DataSchema(inputs=(Field("features", ("price",), "uint8", DENSE, (1,)),))
    with pytest.raises(DataError, match="expected integers from 0 to 255, .* Received: 7 to 300"):
        made_by(lambda batch: np.array([7, 8, 300]), target=target, names=["n"])(RAW_VALUES, generator(PREPARE, 0))
    with pytest.raises(DataError, match="Received: elements of type float64. .*astype"):
        made_by(lambda batch: np.array([7.5, 8, 9]), target=target, names=["n"])(RAW_VALUES, generator(PREPARE, 0))


def test_preprocessing_when_an_input_or_a_later_batch_is_missing_or_different_then_says_which():
    with pytest.raises(SchemaError, match="expected it to return 'words'. Received: 'price'"):
        made_by(lambda batch: {"price": batch["price"]})(RAW_VALUES, generator(PREPARE, 0))
    shapes = iter([(3, 4), (3, 5)])
    target = DataSchema(inputs=(Field("features", ("price",), "float32", DENSE, (None,)),))
    made = made_by(lambda batch: np.zeros(next(shapes)), target=target, names=["n"])
    made(RAW_VALUES, generator(PREPARE, 0))
    with pytest.raises(DataError, match=r"shape \(4,\) .* Received: an array of shape \(3, 5\)"):
        made(RAW_VALUES, generator(PREPARE, 0))


def test_rows_of_the_model_when_it_has_no_inputs_then_asynchronous_modes_say_what_to_do():
    assert model_rows(TARGET).tensors[2].shape == (None,)
    with pytest.raises(UnsupportedError, match="Give it keras.Input"):
        model_rows(DataSchema(inputs=(Field("features", ("price",), "float32"),)))


def test_augmentation_when_called_then_its_numbers_depend_on_seed_rank_epoch_and_step_alone():
    schema = DataSchema(
        inputs=(Field("features", ("x",), "float32", DENSE, (2,)),), labels=(Field("label", ("y",), "float32", SCALAR),)
    )
    made = augmentation(
        lambda batch, rng: {"x": batch["x"] + rng.normal(size=batch["x"].shape)}, schema, {"features": (2,)}, ["input"]
    )
    values = (np.ones((3, 2), "float32"), np.arange(3, dtype="float32"))

    def noise(*place):
        return made(values, generator(AUGMENT, *place))

    first, label = noise(1, 0, 0, 0)
    assert first.dtype == np.float32 and label.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(first, noise(1, 0, 0, 0)[0])
    for place in ((2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1)):
        assert np.abs(first - noise(*place)[0]).min() > 0
    with pytest.raises(DataError, match=r"augmentation: input: expected .*\(2,\).* Received: .*\(3, 3\)"):
        augmentation(lambda batch: np.ones((3, 3)), schema, {"features": (2,)}, ["input"])(values, None)


@every_case("name", ["content", "image"])
def test_augmentation_when_the_model_has_one_input_then_knows_it_by_its_column_and_by_its_own_name(name):
    schema = DataSchema(inputs=(Field("features", ("content",), "float32", DENSE, (2,)),))
    for shaken in (lambda batch: {name: -batch[name]}, lambda batch, rng: {**batch, name: rng * batch[name]}):
        made = augmentation(shaken, schema, {"features": (2,)}, ["image"])
        assert made([np.ones((3, 2), "float32")], -1)[0].tolist() == [[-1, -1]] * 3
    with pytest.raises(KeyError, match="other"):
        augmentation(lambda batch: batch["other"], schema, {"features": (2,)}, ["image"])([np.ones((3, 2))], None)


# Fits of ranks and workers: raw rows are pairs of numbers as text and a number, which become six features.


def raw_columns(rows):
    rng = np.random.default_rng(4)
    return {"features": rng.normal(size=rows), "label": rng.integers(0, 5, rows)}


def powers(batch):
    return {"x": np.stack([batch["x"] ** power for power in range(1, 7)], axis=1), "y": batch["y"] / 2}


def processed(columns):
    made = powers({"x": columns["features"], "y": columns["label"]})
    return {"features": made["x"].astype("float32"), "label": made["y"].astype("float32")}


def regression_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def job_of(model=None, *, preprocess=powers, augment=None, validated=False, **options):
    source = model_source(model or regression_model())
    validation = Field("validation", ("v",), "bool", SCALAR) if validated else None
    raw = DataSchema(
        inputs=(Field("features", ("x",), "float64", SCALAR),),
        labels=(Field("label", ("y",), "int64", SCALAR),),
        validation=validation,
        x={"x": 0},
    )
    target = DataSchema(
        inputs=(Field("features", ("x",), "float32", DENSE, (6,)),),
        labels=(Field("label", ("y",), "float32", DENSE, (1,)),),
        validation=validation,
    )
    functions = BatchFunctions(preprocess=preprocess, augment=augment, target_schema=target)
    return TrainingJob(source, (), FitConfig(**options), raw, preprocessing=functions)


def test_weights_when_ranks_preprocess_then_equal_one_process_on_what_it_makes(rank_pool):
    sizes = (13, 0, 6)
    columns = raw_columns(sum(sizes))
    columns["validation"] = np.arange(sum(sizes)) % 5 == 4
    job = job_of(validated=True, epochs=2, batch_size=4, shuffle=False)
    recordings = rank_pool.fit(job, split(columns, sizes))
    kept = {**processed(columns), "validation": columns["validation"]}
    parts = split(kept, sizes)
    training = [{name: part[name][~part["validation"]] for name in ("features", "label")} for part in parts]
    expected, _ = fit_one_process(regression_model(), list(global_batches(training, 4, 2)), epochs=2)
    trained = recordings[0].variables[: len(expected)]
    assert largest_difference(trained, expected) <= TOLERANCE
    model = regression_model()
    model.set_weights(trained)
    marked = columns["validation"]
    loss, mae = model.evaluate(kept["features"][marked], kept["label"][marked], verbose=0)
    assert recordings[0].epochs[-1]["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert recordings[0].epochs[-1]["val_mae"] == pytest.approx(mae, rel=1e-5)


def shaken(batch, rng):
    return {"x": batch["x"] * rng.uniform(0.5, 1.5, size=(len(batch["x"]), 1))}


def powers_shaken(batch, rng):
    return {**powers(batch), **shaken(powers(batch), rng)}


@pytest.mark.parametrize(
    ("functions", "purpose"),
    [({"augment": shaken}, AUGMENT), ({"preprocess": powers_shaken}, PREPARE)],
    ids=["augmentation", "preprocessing"],
)
def test_weights_when_ranks_draw_for_their_batches_then_equal_one_process_on_the_same_draws(
    rank_pool, functions, purpose
):
    sizes = (9, 5)
    parts = split(processed(raw_columns(sum(sizes))), sizes)

    def augmented(part, rank, epoch, step):
        rows = {name: values[step * 4 : (step + 1) * 4] for name, values in part.items()}
        rng = generator(purpose, 3, rank, epoch, step)
        factors = rng.uniform(0.5, 1.5, size=(len(rows["features"]), 1))
        return {**rows, "features": (rows["features"] * factors).astype("float32")}

    job = job_of(**functions, epochs=2, batch_size=4, shuffle=False, seed=3)
    recordings = rank_pool.fit(job, split(raw_columns(sum(sizes)), sizes))
    batches = []
    for epoch in range(2):
        for step in range(3):
            rows = [augmented(part, rank, epoch, step) for rank, part in enumerate(parts)]
            batches.append({name: np.concatenate([row[name] for row in rows]) for name in rows[0]})
    expected, _ = fit_one_process(regression_model(), batches, epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def noisy(batch, rng):
    return {"x": batch["x"][:, np.newaxis] * np.ones(6) + rng.normal(size=(len(batch["x"]), 1))}


def test_weights_when_an_asynchronous_worker_preprocesses_then_do_not_depend_on_the_order_of_delivery(rank_pool):
    columns = raw_columns(11)
    reordered = {name: values[::-1].copy() for name, values in columns.items()}
    trained = []
    for part in (columns, reordered):
        job = job_of(preprocess=noisy, mode="asynchronous", epochs=2, batch_size=4, seed=2)
        with AsynchronousFit(rank_pool, job, [part]) as fit:
            recording = fit.train(0)
            trained.append(fit.weights())
        assert [(part.rows, part.steps) for part in recording.parts] == [(11, 3), (11, 3)]
    assert largest_difference(trained[0], trained[1]) == 0
    assert largest_difference(trained[0], regression_model().get_weights()) > 0.01


def broken(batch):
    raise KeyError("no such breed")


WHEN = {
    "before the fit": {"preprocess": broken},
    "in every batch": {"augment": broken},
}


@pytest.mark.parametrize("functions", in_tiers(WHEN, fast=["in every batch"], slow="the function is called elsewhere"))
def test_fit_when_a_function_raises_then_its_own_error_is_what_comes(rank_pool, functions):
    with pytest.raises(RankError) as caught:
        rank_pool.fit(job_of(batch_size=4, **functions), split(raw_columns(12), (6, 6)))
    failures = [outcome for outcome in caught.value.outcomes if outcome[0] == "KeyError"]
    assert failures
    assert "no such breed" in failures[0][1] and "in broken" in failures[0][2]


def test_fit_when_ranks_make_different_rows_then_says_so(rank_pool):
    def depends(batch):
        return {"x": np.zeros((len(batch["x"]), 6)), "y": batch["y"] * (0.5 if batch["y"][0] else 1)}

    columns = {"features": np.zeros(4), "label": np.array([1, 1, 0, 0])}
    with pytest.raises(RankError, match="to become the same on all workers. Received: shape .* and type float32"):
        rank_pool.fit(job_of(preprocess=depends, batch_size=4), split(columns, (2, 2)))
