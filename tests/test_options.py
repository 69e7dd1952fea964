"""The table of options: what else declares an option for type checkers and users says the same."""

import functools
import inspect
import operator
import types
import typing
from dataclasses import MISSING, fields

import pytest

from elephant.config import AsynchronousOptions, FitConfig
from elephant.errors import ConfigurationError
from elephant.options import OPTION, OPTIONS, PAIRS, REMOVED, Scope, key_of, options_of, refuse_unknown, remedy_for

# Values of which the estimator takes more forms than the fit.
WIDER = ("checkpoint_path", "distribution", "num_workers", "pipeline_stages", "ports", "timeouts")


def test_estimator_when_its_signature_is_read_then_names_types_and_defaults_are_those_of_the_table():
    from elephant import KerasEstimator

    parameters = inspect.signature(KerasEstimator).parameters
    others = {"model", "customObjects", "unknown"}
    given = {name: parameter.default for name, parameter in parameters.items() if name not in others}
    assert given == {option.param: option.default for option in OPTIONS}
    hints = typing.get_type_hints(KerasEstimator.__init__)
    of_fit = [option for option in options_of(Scope.FIT, Scope.SERVERS) if option.name not in WIDER]
    kinds = {option.name: without_words(hints[option.param]) for option in of_fit}
    assert kinds == {option.name: option.type for option in of_fit}
    for option in OPTIONS:
        words = words_of(hints[option.param])
        assert all(option.value_of(word) for word in words)
        if option.kind.expected.startswith("one of ") and str not in typing.get_args(hints[option.param]):
            assert set(option.kind.expected.removeprefix("one of ").split(", ")) <= words


def words_of(hint):
    """Returns the words that a type names."""
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    return set().union(*map(words_of, typing.get_args(hint)))


def without_words(hint):
    """Returns a type with ``str`` in place of the words that it names."""
    if typing.get_origin(hint) is typing.Literal:
        return str
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else ()
    return functools.reduce(operator.or_, map(without_words, parts)) if parts else hint


@pytest.mark.parametrize(("config", "scope"), [(FitConfig, Scope.FIT), (AsynchronousOptions, Scope.SERVERS)])
def test_config_when_its_fields_are_read_then_they_are_those_of_the_table(config, scope):
    plain = {field.name: field.default for field in fields(config) if field.default is not MISSING}
    expected = {option.name: option.default for option in options_of(scope) if option.name != "timeouts"}
    if config is FitConfig:
        # The pair of num_workers, beside the number of now.
        assert plain.pop("elastic", 0) is None
    assert plain == expected
    assert {field.name: field.type for field in fields(config) if field.name in plain} == {
        name: OPTION[name].type for name in plain
    }
    assert inspect.signature(config).parameters.keys() >= expected.keys()


def test_params_when_declared_then_each_has_help_a_getter_a_setter_and_its_default():
    from elephant import KerasEstimator, KerasModel

    of_the_model = options_of(Scope.INPUT, Scope.LABEL)
    for stage, options in ((KerasEstimator, OPTIONS), (KerasModel, of_the_model)):
        for option in options:
            title = option.param[0].upper() + option.param[1:]
            assert getattr(stage, option.param).doc == option.help
            assert getattr(stage, f"get{title}").__doc__ == f"Returns {option.param}: {option.help}."
            assert getattr(stage, f"set{title}").__doc__.startswith(f"Sets {option.param}: ")
    assert not [option.param for option in OPTIONS if option not in of_the_model and hasattr(KerasModel, option.param)]


def test_table_when_read_then_each_name_is_there_once_and_defaults_may_be_had():
    assert len(OPTION) == len(OPTIONS) and {pair.name for pair in PAIRS} <= set(OPTION)
    for option in OPTIONS:
        if option.default != ():
            assert option.value_of(option.default) == option.default
        assert option.help and not option.help.endswith(".")


def test_option_when_a_value_is_refused_then_the_error_has_the_name_that_the_user_knows():
    with pytest.raises(ConfigurationError, match=r"^useGpu: expected True, False or 'auto'\. Received: 1\.$"):
        OPTION["use_gpu"].value_of(1, OPTION["use_gpu"].param)
    with pytest.raises(ConfigurationError, match=r"^verbose: expected 0, 1, 2 or 'auto'\. .*True"):
        OPTION["verbose"].value_of(True)


def test_arguments_when_unknown_then_the_error_has_the_nearest_or_says_what_became_of_it():
    with pytest.raises(TypeError, match=r"^fit has no argument 'epoch'\. Did you mean 'epochs'\?$"):
        refuse_unknown("fit", {"seed": 1, "epoch": 2}, ["epochs", "seed"])
    with pytest.raises(TypeError, match=r"^fit has no argument 'quux'\. Known: epochs, seed\.$"):
        refuse_unknown("fit", {"quux": 2}, ["epochs", "seed"])
    explained = {"elephas_optimizer": " The servers apply their own: leave it out."}
    with pytest.raises(TypeError, match=r"'elephas_optimizer'\. The servers apply .*: leave it out\.$"):
        refuse_unknown("fit", {"elephas_optimizer": 2}, ["epochs"], explained=explained)


# What one more says, users may better say by another one, or not at all.
MOST_PARAMS = 58


def test_estimator_when_its_params_are_counted_then_are_few():
    from elephant import KerasEstimator

    params = [name for name in dir(KerasEstimator) if type(getattr(KerasEstimator, name)).__name__ == "Param"]
    assert len(params) == len(OPTIONS) + 1 <= MOST_PARAMS


def test_options_when_there_are_none_of_the_name_any_more_then_each_error_says_what_to_do_instead():
    assert not set(REMOVED) & set(OPTION)
    for name in REMOVED:
        words = name.split("_")
        param = words[0] + "".join(word.title() for word in words[1:])
        remedies = {remedy_for(given) for given in (name, param, f"--{key_of(name)}", key_of(name))}
        assert all(remedy.endswith(".") and "{" not in remedy for remedy in remedies)
        for caller, given in (("SparkModel", name), ("KerasEstimator", param)):
            with pytest.raises(TypeError, match=f"{caller} has no argument '{given}'. .+\\.$"):
                refuse_unknown(caller, {given: 1}, ["epochs"])
    assert remedy_for("labelCols").startswith(" labelCol takes") and "features-col" in remedy_for("input-cols")


def test_estimator_when_given_what_is_no_option_any_more_then_says_what_to_do_instead():
    from elephant import KerasEstimator, KerasModel

    with pytest.raises(TypeError, match="no param 'labelCols'. labelCol takes the columns of several outputs"):
        KerasEstimator(model=None, labelCols=["a", "b"])
    with pytest.raises(AttributeError, match="no attribute 'setInputCols'. featuresCol takes the columns of several"):
        KerasModel.__new__(KerasModel).setInputCols(["a"])
    with pytest.raises(AttributeError, match="'tracePath'. The trace of a fit lies beside its events: set eventsPath"):
        KerasEstimator.__new__(KerasEstimator).tracePath  # noqa: B018
