"""The contract of Spark ML's own stages: what generic code relies on, whichever estimator it is given.

Tests whose stages come from ``ESTIMATORS`` or ``MODELS`` hold for Spark's own stages too, which
shows whose rules they are.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import pytest
from pyspark import cloudpickle
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression, OneVsRest, OneVsRestModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.ml.param import Param, Params, shared
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.ml.util import DefaultParamsReader
from tiers import in_tiers

from elephant import KerasEstimator, KerasModel
from elephant.errors import ConfigurationError
from elephant.modeling.model_spec import model_source
from elephant.spark.params import TrainingParams

pytestmark = pytest.mark.usefixtures("spark")
WIDTH = 3


def binary_model(loss="binary_crossentropy", activation="sigmoid", seed=5):
    """Returns a model of two classes with one unit."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(1, activation)])
    model.compile("sgd", loss)
    return model


@pytest.fixture(scope="module")
def source():
    """A model that is known to travel, so that estimators are made of it in no time."""
    return model_source(binary_model())


@dataclass(frozen=True)
class Stage:
    """A kind of stage, and params of it by what they are like.

    Args:
        make: Makes one; gets the model of the tests, and params by name.
        count: A param that is an integer, and has a default; empty where there is none.
        share: A param that is a number, and has a default; empty where there is none.
        unset: A param without a default.
        required: Params that nobody can leave out.
    """

    make: Callable[..., Params]
    count: str = ""
    share: str = ""
    unset: str = "weightCol"
    required: tuple[str, ...] = ()


ESTIMATORS = {
    "KerasEstimator": Stage(KerasEstimator, "epochs", "validationFraction", required=("model",)),
    "LogisticRegression": Stage(lambda source, **given: LogisticRegression(**given), "maxIter", "regParam"),
}
MODELS = {"KerasModel": Stage(KerasModel)}
estimators = pytest.mark.parametrize("kind", ESTIMATORS.values(), ids=ESTIMATORS)
stages = pytest.mark.parametrize("kind", [*ESTIMATORS.values(), *MODELS.values()], ids=[*ESTIMATORS, *MODELS])


def title(name):
    return name[0].upper() + name[1:]


def values_of(stage):
    return {param.name: value for param, value in stage.extractParamMap().items()}


def state_of(stage):
    """Returns what a stage says of itself, and where each value comes from."""
    where = {param.name: (stage.isSet(param), stage.hasDefault(param)) for param in stage.params}
    return stage.uid, stage.explainParams(), repr(stage), where


@stages
def test_params_when_listed_then_are_the_instance_s_own_and_in_the_order_of_their_names(kind, source):
    stage = kind.make(source)
    names = [param.name for param in stage.params]
    assert names == sorted(names) and len(set(names)) == len(names)
    for param in stage.params:
        assert param.parent == stage.uid and param.doc
        assert stage.hasParam(param.name) and stage.getParam(param.name) == param == stage._resolveParam(param.name)
        of_class = getattr(type(stage), param.name)
        assert isinstance(of_class, Param) and of_class.parent == "undefined"
    assert not stage.hasParam("notAParam")
    with pytest.raises(AttributeError):
        stage.getParam("notAParam")


@stages
def test_param_when_nobody_has_set_it_then_is_not_set_and_its_default_may_change(kind, source):
    stage = kind.make(source)
    assert [param.name for param in stage.params if stage.isSet(param)] == list(kind.required)
    for param in stage.params:
        assert stage.isDefined(param) == (stage.hasDefault(param) or param.name in kind.required)
        assert ("current: " in stage.explainParam(param)) == (param.name in kind.required)
    stage._setDefault(predictionCol="guess")
    assert stage.getPredictionCol() == "guess" and "(default: guess)" in stage.explainParam("predictionCol")
    assert stage.explainParam(kind.unset).endswith("(undefined)")


@stages
def test_getter_when_called_then_gives_what_the_param_has_or_raises_key_error(kind, source):
    stage = kind.make(source)
    for param in stage.params:
        get = getattr(stage, f"get{title(param.name)}")
        if stage.isDefined(param) and param.name not in ("threshold", "thresholds"):
            assert get() == stage.getOrDefault(param) == stage.getOrDefault(param.name)
    with pytest.raises(KeyError):
        getattr(stage, f"get{title(kind.unset)}")()


@estimators
def test_param_when_it_is_given_its_default_then_is_set(kind, source):
    default = kind.make(source).getOrDefault(kind.count)
    assert kind.make(source, **{kind.count: default}).isSet(kind.count)
    stage = kind.make(source)
    assert getattr(stage, f"set{title(kind.count)}")(default) is stage and stage.isSet(kind.count)


@estimators
def test_set_params_when_called_then_takes_the_constructor_s_keywords_and_leaves_others_alone(kind, source):
    stage = kind.make(source, predictionCol="guess")
    assert stage.setParams(**{kind.count: 7}) is stage
    assert (stage.getOrDefault(kind.count), stage.getPredictionCol()) == (7, "guess")
    assert {param.name for param in stage.params if stage.isSet(param)} == {kind.count, "predictionCol", *kind.required}
    keywords = inspect.signature(type(stage)).parameters.values()
    for keyword in keywords:
        if keyword.kind is keyword.KEYWORD_ONLY:
            kind.make(source).setParams(**{keyword.name: keyword.default})
    with pytest.raises(TypeError, match="setParams.*notAParam"):
        stage.setParams(notAParam=3)
    with pytest.raises(TypeError):
        stage.setParams(7)


@estimators
def test_stage_when_generic_code_looks_for_its_params_then_finds_them_by_the_shared_classes(kind, source):
    stage = kind.make(source)
    mixins = ("FeaturesCol", "LabelCol", "PredictionCol", "ProbabilityCol", "RawPredictionCol", "WeightCol")
    for name in mixins:
        assert isinstance(stage, getattr(shared, f"Has{name}"))
    assert (
        values_of(stage).items()
        >= {
            "featuresCol": "features",
            "labelCol": "label",
            "predictionCol": "prediction",
            "probabilityCol": "probability",
            "rawPredictionCol": "rawPrediction",
        }.items()
    )
    for name in (*mixins, "ValidationIndicatorCol", "Seed", "BatchSize", "LearningRate"):
        assert issubclass(KerasEstimator, getattr(shared, f"Has{name}"))
        assert issubclass(KerasModel, getattr(shared, f"Has{name}")) == (name in mixins)


@stages
def test_copy_when_given_extra_values_then_they_hold_in_the_copy_alone(kind, source):
    stage = kind.make(source)
    copied = stage.copy({stage.predictionCol: "guess"})
    assert type(copied) is type(stage) and copied.uid == stage.uid and copied.params == stage.params
    assert copied.getPredictionCol() == "guess" and not stage.isSet("predictionCol")
    assert copied._defaultParamMap == stage._defaultParamMap
    assert state_of(stage.copy()) == state_of(stage)
    with pytest.raises(TypeError, match="instance of Param"):
        stage.copy({"predictionCol": "guess"})
    with pytest.raises(TypeError, match="Expecting a dict"):
        stage.copy(["predictionCol"])


@stages
def test_param_map_when_extracted_then_extra_values_go_before_those_set_and_these_before_defaults(kind, source):
    stage = kind.make(source).setFeaturesCol("x").setPredictionCol("guess")
    extracted = stage.extractParamMap({stage.featuresCol: "y"})
    names = ("featuresCol", "predictionCol", "probabilityCol")
    assert [extracted[stage.getParam(name)] for name in names] == ["y", "guess", "probability"]
    assert stage.getParam(kind.unset) not in extracted


@stages
def test_param_when_cleared_then_has_its_default_again(kind, source):
    stage = kind.make(source).setPredictionCol("guess")
    stage.clear(stage.predictionCol)
    stage.clear(stage.featuresCol)
    assert not stage.isSet("predictionCol") and stage.getPredictionCol() == "prediction"


@stages
def test_param_when_it_is_another_instance_s_then_is_refused_and_a_copy_passes_it_over(kind, source):
    stage, other = kind.make(source), kind.make(source)
    for use in (stage.isSet, stage.hasDefault, stage.getOrDefault, stage.clear, stage.explainParam):
        with pytest.raises(ValueError, match="does not belong to"):
            use(other.predictionCol)
    with pytest.raises(ValueError, match="does not belong to"):
        stage.set(other.predictionCol, "guess")
    # A pipeline hands each of its stages the params of all.
    assert stage.copy({other.predictionCol: "guess"}).getPredictionCol() == "prediction"
    both = Pipeline(stages=[stage, other]).copy({other.predictionCol: "guess"}).getStages()
    assert [each.getPredictionCol() for each in both] == ["prediction", "guess"]


def test_fit_when_params_are_another_instance_s_then_says_whose_they_are_and_what_to_do(source, spark):
    # Spark passes them over here too, so that a grid of the wrong estimator tunes nothing and says nothing.
    stage, other = KerasEstimator(source), KerasEstimator(source)
    theirs = f"params: expected params of {stage.uid}. Received: batchSize of {other.uid}, which would change nothing."
    for params in ({other.batchSize: 3}, [{stage.epochs: 2}, {other.batchSize: 3}]):
        with pytest.raises(ConfigurationError, match=rf"^{theirs} Take it from the estimator that is fitted, or name"):
            stage.fit("rows", params)
    model = KerasModel(source)
    with pytest.raises(ConfigurationError, match="Received: predictionCol of KerasEstimator_.*Take it from the model"):
        model.transform(spark.range(1), {other.predictionCol: "guess"})


@estimators
def test_fit_when_given_maps_of_params_then_each_model_has_its_own(kind, source, spark, monkeypatch):
    stage = kind.make(source, predictionCol="guess")
    monkeypatch.setattr(type(stage), "_fit", lambda self, dataset: self.copy())
    rows, maps = spark.range(1), [{stage.getParam(kind.count): count} for count in (2, 3, 4)]
    found = dict(stage.fitMultiple(rows, maps))
    assert {place: model.getOrDefault(kind.count) for place, model in found.items()} == {0: 2, 1: 3, 2: 4}
    for given in (maps, tuple(maps)):
        assert [model.getOrDefault(kind.count) for model in stage.fit(rows, given)] == [2, 3, 4]
    fitted = stage.fit(rows, maps[0])
    assert (fitted.getOrDefault(kind.count), fitted.getPredictionCol(), fitted.uid) == (2, "guess", stage.uid)
    assert stage.fit(rows, {}).uid == stage.uid and not stage.isSet(kind.count)
    with pytest.raises(TypeError, match="Params must be either a param map or a list/tuple of param maps"):
        stage.fit(rows, 3)
    with pytest.raises(TypeError, match="Expecting a valid instance of Param"):
        stage.fit(rows, {kind.count: 3})


def test_set_params_when_custom_objects_come_without_a_model_then_says_what_to_do(source):
    with pytest.raises(ConfigurationError, match="customObjects: expected beside a model, .* Pass both"):
        KerasEstimator(source).setParams(customObjects={"Own": keras.layers.Dense})


def test_param_when_none_is_given_then_has_its_default_but_for_labels_which_there_are_none_of(source):
    given = KerasEstimator(source, epochs=None, learningRate=None, labelCol=None)
    assert {param.name for param in given.params if given.isSet(param)} == {"model", "labelCol"}
    assert (given.getEpochs(), given.getLabelCol()) == (1, None)
    given.setParams(learningRate=0.5, epochs=3).setParams(learningRate=None).setEpochs(None)
    assert (given.isSet("learningRate"), given.isSet("epochs")) == (False, False)
    given.clear(given.labelCol)
    assert given.getLabelCol() == "label"
    assert KerasModel(source).getLabelCol() is None
    rates = ParamGridBuilder().addGrid(given.learningRate, [None, 0.5]).build()
    assert [given.copy(one).getLearningRate() for one in rates] == [None, 0.5]


@estimators
def test_value_when_it_is_of_another_type_of_numbers_then_becomes_python_s(kind, source):
    stage = kind.make(source)
    for name, value, wanted in (
        (kind.count, 5.0, 5),
        (kind.count, np.int64(5), 5),
        (kind.share, np.float64(0.25), 0.25),
        (kind.share, 0, 0.0),
        ("predictionCol", np.str_("guess"), "guess"),
    ):
        stage.setParams(**{name: value})
        found = stage.getOrDefault(name)
        assert isinstance(found, type(wanted)) and found == wanted
    for name, value in ((kind.count, "many"), (kind.count, 5.1), (kind.share, "most"), ("featuresCol", 2.3)):
        with pytest.raises((TypeError, ValueError)):
            stage.setParams(**{name: value})
    counts = ParamGridBuilder().addGrid(stage.getParam(kind.count), np.array([2, 3])).build()
    assert [type(value) for one in counts for value in one.values()] == [int, int]


def test_value_when_numpy_has_made_it_then_is_taken_by_any_param_and_becomes_python_s(source):
    given = {
        "featuresCol": np.array(["a", "b"]),
        "weightCol": np.str_("w"),
        "classWeight": {np.int32(0): np.float32(0.5)},
        "epochs": np.int32(3),
        "validationFraction": np.float32(0.25),
        "learningRate": np.array(0.5),
        "shuffle": np.bool_(False),
        "useGpu": np.bool_(False),
        "frequency": np.int16(4),
        "verbose": np.uint8(2),
        "mode": np.str_("sync"),
    }
    stage = KerasEstimator(source, **{name: value for name, value in given.items() if name != "weightCol"})
    stage.clear(stage.classWeight)
    stage.setWeightCol(given["weightCol"])
    found = {name: stage.getOrDefault(name) for name in given if stage.isSet(name)}
    assert found == {
        "featuresCol": ["a", "b"],
        "weightCol": "w",
        "epochs": 3,
        "validationFraction": 0.25,
        "learningRate": 0.5,
        "shuffle": False,
        "useGpu": False,
        "frequency": 4,
        "verbose": 2,
        "mode": "synchronous",
    }
    plain = (str, int, float, bool, list)
    assert {type(value) for value in (*found.values(), *found["featuresCol"])} <= set(plain)


def same_state(stages, others):
    for stage, other in zip(stages, others, strict=True):
        assert state_of(stage) == state_of(other)


def test_stage_when_saved_and_loaded_alone_and_in_a_pipeline_then_prints_as_before(source, tmp_path):
    # Set to its default, and set to another value.
    stage = KerasEstimator(source, epochs=1, validationFraction=0.25)
    stage.save(str(tmp_path / "stage"))
    pipeline = Pipeline(stages=[stage])
    pipeline.save(str(tmp_path / "pipeline"))
    loaded = type(stage).load(str(tmp_path / "stage"))
    piped = Pipeline.load(str(tmp_path / "pipeline"))
    same_state([stage, stage], [loaded, *piped.getStages()])
    assert (piped.uid, repr(piped)) == (pipeline.uid, repr(pipeline))
    assert DefaultParamsReader.loadParamsInstance(str(tmp_path / "stage"), None).uid == stage.uid


def test_fitted_model_when_it_gets_the_estimator_s_params_then_builds_no_keras_model(source, monkeypatch):
    def refuse(spec):
        raise AssertionError("expected no Keras model to be built")

    monkeypatch.setattr(type(source), "build", refuse)
    fitted = KerasEstimator(source, featuresCol="pixels")._copyValues(KerasModel(source))
    assert fitted.getFeaturesCol() == "pixels" and not fitted.hasParam("model")


def test_fitted_model_when_saved_and_loaded_then_prints_as_before(source, tmp_path):
    stage = KerasEstimator(source, labelCol=None, learningRate=0.5, classWeight={0: 1.0})
    fitted = KerasModel(source, history={"loss": [0.5]})
    fitted._seconds = 12.3
    fitted = stage._copyValues(fitted)
    pipeline = PipelineModel([fitted])
    pipeline.save(str(tmp_path / "pipeline"))
    loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    same_state([fitted], loaded.stages)
    assert "12.3 s, loss=0.5" in repr(loaded.stages[0]) and (loaded.uid, repr(loaded)) == (pipeline.uid, repr(pipeline))
    stage.save(str(tmp_path / "stage"))
    same_state([stage], [KerasEstimator.load(str(tmp_path / "stage"))])


def test_stage_when_pickled_or_copied_deeply_then_is_the_same_and_on_its_own(source):
    # Spark's pipeline is of Python alone too; its other stages hold objects of the JVM.
    keras_stage = KerasEstimator(source, epochs=3, callbacks=keras.callbacks.TerminateOnNaN())
    for stage in (keras_stage, KerasModel(source).setFeaturesCol("x"), Pipeline(stages=[KerasModel(source)])):
        for made in (copy.deepcopy(stage), cloudpickle.loads(cloudpickle.dumps(stage))):
            assert (made.uid, made.params) == (stage.uid, stage.params)
            assert [made.isSet(param) for param in made.params] == [stage.isSet(param) for param in stage.params]
    made = copy.deepcopy(keras_stage)
    assert made.setEpochs(5).getEpochs() == 5 and keras_stage.getEpochs() == 3


def models_of(grid):
    return [value for one in grid for value in one.values()]


@pytest.mark.slow("six models; the test of stages saves one alone and in a pipeline")
def test_tuning_when_its_grid_is_over_models_then_is_saved_and_loaded_with_them(source, tmp_path):
    stage = KerasEstimator(source)
    fitted = KerasModel(model_source(binary_model(seed=6)), history={"loss": [0.5]})
    binary_model(seed=7).save(tmp_path / "model.keras")
    values = [binary_model(seed=5), fitted, str(tmp_path / "model.keras")]
    grid = ParamGridBuilder().addGrid(stage.model, values).build()
    tuning = CrossValidator(estimator=stage, estimatorParamMaps=grid, evaluator=BinaryClassificationEvaluator())
    tuning.save(str(tmp_path / "tuning"))
    loaded = CrossValidator.load(str(tmp_path / "tuning"))
    assert (loaded.uid, loaded.getEstimator().uid) == (tuning.uid, stage.uid)
    assert [each.uid for each in models_of(loaded.getEstimatorParamMaps())] == [each.uid for each in models_of(grid)]
    for one, seed in zip(loaded.getEstimatorParamMaps(), (5, 6, 7), strict=True):
        found = loaded.getEstimator().copy(one).getModel()
        for value, wanted in zip(found.model.get_weights(), binary_model(seed=seed).get_weights(), strict=True):
            np.testing.assert_array_equal(value, wanted)
        assert found.history == {}


def points(rows=40):
    rng = np.random.default_rng(3)
    labels = np.arange(rows) % 3
    return rng.normal(size=(rows, WIDTH)) + labels[:, None], labels


def frame_of(spark, x, labels):
    rows = [(Vectors.dense(row), float(label), 1.0 + label) for row, label in zip(x, labels.tolist(), strict=True)]
    return spark.createDataFrame(rows, ["features", "label", "weight"]).coalesce(1).cache()


def area_under_roc(scores, labels):
    """Returns the share of pairs of a positive and a negative row that the scores have in the right order."""
    positive, negative = scores[labels == 1][:, None], scores[labels == 0][None]
    return np.mean((positive > negative) + 0.5 * (positive == negative))


def sigmoid(scores):
    return 1 / (1 + np.exp(-scores))


# Loss and activation, and what makes probabilities of the scores.
CLASSIFIERS = {
    "probabilities": ("binary_crossentropy", "sigmoid", np.array),
    "logits": (keras.losses.BinaryCrossentropy(from_logits=True), None, sigmoid),
}


@pytest.mark.parametrize("case", in_tiers(CLASSIFIERS, fast=["logits"], slow="the same columns of another output"))
def test_classifier_when_it_transforms_then_spark_s_evaluators_work_as_they_stand(case, spark):
    loss, activation, probabilities_of = case
    x, labels = points()
    labels = np.minimum(labels, 1)
    frame = frame_of(spark, x, labels)
    model = KerasModel(binary_model(loss, activation)).setLabelCol("label")
    predicted = model.transform(frame).cache()
    assert predicted.columns == [*frame.columns, "rawPrediction", "probability", "prediction"]
    rows = predicted.collect()
    raw, probability = (np.array([row[name] for row in rows]) for name in ("rawPrediction", "probability"))
    prediction = np.array([row.prediction for row in rows])
    assert isinstance(rows[0].rawPrediction, DenseVector) and raw.shape == probability.shape == (len(x), 2)
    np.testing.assert_allclose(raw[:, 1], model.model.predict(x, verbose=0)[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(prediction, raw.argmax(axis=1))
    np.testing.assert_allclose(probability, probabilities_of(raw), rtol=1e-5)
    area = BinaryClassificationEvaluator().evaluate(predicted)
    np.testing.assert_allclose(area, area_under_roc(probability[:, 1], labels), atol=1e-6)
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predicted)
    np.testing.assert_allclose(accuracy, np.mean(prediction == labels))
    left_out = model.copy({model.rawPredictionCol: "", model.probabilityCol: ""}).transform(frame)
    assert left_out.columns == [*frame.columns, "prediction"]
    assert [row.prediction for row in left_out.collect()] == prediction.tolist()


@pytest.mark.slow("three models that predict; the test of evaluators holds the columns that OneVsRest reads")
def test_one_vs_rest_when_it_has_a_weight_column_then_each_classifier_gets_it(source, spark, tmp_path, monkeypatch):
    x, labels = points()
    frame = frame_of(spark, x, labels)
    given = []

    def fit_none(self, dataset):
        given.append((self.getWeightCol(), self.getFeaturesCol(), dataset.columns[-1] == self.getLabelCol()))
        return self._copyValues(KerasModel(binary_model(seed=len(given))))

    monkeypatch.setattr(KerasEstimator, "_fit", fit_none)
    fitted = OneVsRest(classifier=KerasEstimator(source, verbose=0), weightCol="weight").fit(frame)
    assert given == [("weight", "features", True)] * 3
    predicted = fitted.transform(frame)
    assert predicted.columns == [*frame.columns, "rawPrediction", "prediction"]
    rows = predicted.collect()
    raw = np.array([row.rawPrediction for row in rows])
    assert [row.prediction for row in rows] == raw.argmax(axis=1).tolist()
    expected = np.hstack([model.model.predict(x, verbose=0) for model in fitted.models])
    np.testing.assert_allclose(raw, expected, rtol=1e-5)
    fitted.save(str(tmp_path / "fitted"))
    loaded = OneVsRestModel.load(str(tmp_path / "fitted"))
    assert loaded.getWeightCol() == "weight"
    for one, other in zip(loaded.models, fitted.models, strict=True):
        same_state([one], [other])
        for value, wanted in zip(one.model.get_weights(), other.model.get_weights(), strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_defaults_when_spark_s_own_classes_draw_them_from_a_class_s_name_then_are_those_of_the_table():
    seeds = {type(name, (TrainingParams,), {})().getOrDefault("seed") for name in "abcdefghijklmnopqrst"}
    assert seeds == {0}
