"""Kinds: what Spark's params, configuration, job files and command lines take for a value, in the same way."""

import numpy as np
import pytest
from tables import every_case

from elephant.config import FitConfig, Timeouts
from elephant.errors import ConfigurationError
from elephant.kinds import INTEGER, NUMBER, SWITCH, TEXTS, named_metric, one_of, plain
from elephant.options import OPTION

GIVEN_TIMEOUTS = {name: value for name, value in vars(Timeouts()).items() if value is not None}
# An option, what is given, and what Python has of it.
TAKEN = [
    ("epochs", np.int64(3), 3),
    ("epochs", np.uint8(3), 3),
    ("epochs", np.array(3), 3),
    ("epochs", 3.0, 3),
    ("learning_rate", np.float32(0.5), 0.5),
    ("learning_rate", np.int32(1), 1.0),
    ("validation_fraction", 0, 0.0),
    ("shuffle", np.bool_(False), False),
    ("use_gpu", np.bool_(True), True),
    ("use_gpu", "auto", "auto"),
    ("frequency", np.int64(4), 4),
    ("frequency", np.str_("epoch"), "epoch"),
    ("verbose", np.int8(2), 2),
    ("mode", "async", "asynchronous"),
    ("mode", np.str_("sync"), "synchronous"),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("prediction_col", np.str_("p"), "p"),
    ("features_col", np.array(["a", "b"]), ["a", "b"]),
    ("features_col", ("a", np.str_("b")), ["a", "b"]),
    ("features_col", {"a": np.array(["x", "y"]), "b": "z"}, {"a": ["x", "y"], "b": "z"}),
    ("features_col", [["a"], ("b", "c")], [["a"], ["b", "c"]]),
    ("label_col", None, None),
    ("weight_col", {np.str_("out"): np.str_("w")}, {"out": "w"}),
    ("class_weight", {np.int64(0): np.float32(0.5), 1: 2}, {0: 0.5, 1: 2.0}),
    ("timeouts", {"slots_s": np.float64(5)}, {"slots_s": 5.0}),
    ("timeouts", Timeouts(slots_s=5), {**GIVEN_TIMEOUTS, "slots_s": 5.0}),
]


@every_case(("name", "given", "expected"), TAKEN)
def test_value_when_given_by_numpy_or_in_another_form_then_is_python_s_own(name, given, expected):
    value = OPTION[name].value_of(given)
    assert value == expected and type(value) is type(expected)
    if isinstance(expected, (list, dict)):
        assert [type(part) for part in value] == [type(part) for part in expected]


REFUSED = [
    ("epochs", True, "epochs: expected an integer of at least 1. Received: True."),
    ("epochs", 2.5, "epochs: expected an integer of at least 1. Received: 2.5."),
    ("epochs", "3", "epochs: expected an integer of at least 1. Received: '3'."),
    ("epochs", np.array([3]), "epochs: expected an integer .* Received: array"),
    ("epochs", np.int64(0), "epochs: expected an integer of at least 1. Received: "),
    ("seed", 2**63, "seed: expected an integer in"),
    ("learning_rate", float("inf"), "learning_rate: expected a positive number. Received: inf."),
    ("shuffle", 1, "shuffle: expected true or false. Received: 1."),
    ("frequency", True, "frequency: expected 'batch', 'epoch' or an integer of at least 1. Received: True."),
    ("features_col", [], "features_col: expected a column name"),
    ("features_col", {"a": []}, "features_col: expected a column name"),
    ("features_col", {"a": ["b", ["c"]]}, "features_col: expected a column name"),
    ("features_col", np.array([1, 2]), "features_col: expected a column name"),
    ("preprocessing", "mine:halved", "preprocessing: expected a function on a batch. Received: 'mine:halved'."),
    ("class_weight", {0: -1.0}, "class_weight: expected a dictionary of weights, finite and at least 0, by class"),
    ("class_weight", {0.5: 1.0}, "class_weight: expected a dictionary of weights"),
    ("keep_best", "", "keep_best: expected the name of a metric, such as 'val_loss', and ':max' or ':min' behind it"),
    ("keep_best", "val_gain", "keep_best: .* where the name does not say which way is better. Received: 'val_gain'."),
    ("timeouts", {"heartbeat": 5}, "timeouts: expected elephant.config.Timeouts, or seconds by the names connect_s"),
]


@every_case(("name", "given", "message"), REFUSED)
def test_value_when_of_another_kind_then_the_error_says_what_is_expected(name, given, message):
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        OPTION[name].value_of(given)


def test_value_when_text_of_a_configuration_then_is_what_python_would_be_given():
    assert [INTEGER.read("3"), NUMBER.read("1e-3"), TEXTS.read("a"), SWITCH.read(False)] == [3, 1e-3, ["a"], False]
    assert OPTION["class_weight"].kind.read({"0": "1", "1": 2.5}) == {0: 1.0, 1: 2.5}
    assert OPTION["timeouts"].kind.read({"slots_s": "5"}) == {"slots_s": 5.0}
    assert [OPTION["use_gpu"].kind.read(text) for text in ("True", "false", "auto", False)] == [
        True,
        False,
        "auto",
        False,
    ]
    for kind, text in ((INTEGER, "three"), (SWITCH, "yes"), (one_of("a", "b"), "c"), (OPTION["use_gpu"].kind, "maybe")):
        with pytest.raises((TypeError, ValueError)):
            kind.read(text)


# Keras' own names among them; an output's name, which comes first, may look like that of a metric.
MORE_IS_BETTER = (
    "accuracy", "val_acc", "sparse_top_k_categorical_accuracy", "val_auc_1", "precision_at_recall", "f1_score",
    "fbeta_score", "r2_score", "mean_io_u", "binary_io_u", "cosine_similarity", "concordance_correlation",
    "true_positives", "specificity_at_sensitivity_2", "val_map50", "ndcg@10", "loss:max", "a:b:max",
)  # fmt: skip
LESS_IS_BETTER = (
    "loss", "val_loss", "layer2_loss", "precision_loss", "map_mae", "val_mape", "mean_absolute_percentage_error",
    "sparse_categorical_crossentropy", "kl_divergence", "squared_hinge", "poisson", "logcosh", "false_negatives_1",
    "val_accuracy:min", "val_cost:min",
)  # fmt: skip
DIRECTIONS = [*((text, True) for text in MORE_IS_BETTER), *((text, False) for text in LESS_IS_BETTER)]


@every_case(("text", "more_is_better"), DIRECTIONS)
def test_metric_when_its_name_or_a_suffix_says_which_way_is_better_then_is_so(text, more_is_better):
    assert named_metric(text) == (text.removesuffix(":max").removesuffix(":min"), more_is_better)


@every_case("text", ["val_gain", "previous", "species_count", "accuracy_gap", ":max", "val_loss:maximum", ""])
def test_metric_when_nothing_says_which_way_is_better_then_is_refused(text):
    # A guess would have a fit keep the worst epoch, and remove the best.
    with pytest.raises(ValueError):
        named_metric(text)


def test_plain_when_given_what_is_not_numpy_s_then_returns_it_as_it_is():
    given = object()
    assert plain(given) is given and plain((given, [np.int8(1)])) == (given, [1])


def test_config_when_given_numpy_s_scalars_then_holds_python_s():
    config = FitConfig(epochs=np.int64(3), learning_rate=np.float32(0.25), shuffle=np.bool_(False), mode="sync")
    assert (config.epochs, config.learning_rate, config.shuffle, config.mode) == (3, 0.25, False, "synchronous")
    assert [type(value) for value in (config.epochs, config.learning_rate, config.shuffle)] == [int, float, bool]
    assert config == FitConfig(epochs=3, learning_rate=0.25, shuffle=False)


def test_workers_when_read_from_a_configuration_then_are_a_number_or_the_fewest_and_the_most():
    workers = OPTION["num_workers"].kind
    assert [workers.read(given) for given in ("4", 4, "2,8", [2, 8], (2, 8))] == [4, 4, (2, 8), (2, 8), (2, 8)]
    for given in ("0", "8,2", "0,2", [1, 2, 3]):
        with pytest.raises(ValueError, match="expected an integer of at least 1, or the fewest and the most workers"):
            workers.read(given)
