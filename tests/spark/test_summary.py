"""What a fitted model and its estimator show of themselves, without Spark."""

import traceback
from types import SimpleNamespace
from xml.etree import ElementTree

import keras
import numpy as np
import pytest
from keras_reference import regression_model

from elephant import FitListener, KerasEstimator, KerasModel
from elephant.errors import ConfigurationError, DataError
from elephant.modeling.model_info import LayerInfo
from elephant.modeling.model_spec import model_source
from elephant.monitor.summary import FitSummary
from elephant.spark import model as spark_model
from elephant.spark.saving import persistence

HISTORY = {"loss": [2.0, 0.51234], "mae": [1.0, 0.25], "val_loss": [2.5, 0.75], "learning_rate": [0.1, 0.05]}


@pytest.fixture
def fitted():
    return KerasModel(model_source(regression_model("sgd")), history=HISTORY)


def test_estimator_when_shown_then_tells_what_was_set_and_no_defaults():
    stop = keras.callbacks.EarlyStopping()
    estimator = KerasEstimator(
        model=regression_model("sgd"), numWorkers=3, epochs=1, verbose=0, callbacks=[stop], checkpointPath="/<a>&b"
    )
    shown = repr(estimator)
    assert shown.startswith("KerasEstimator(model=<Sequential '")
    assert shown.endswith(">, callbacks=[EarlyStopping], numWorkers=3, checkpointPath='/<a>&b', verbose=0)")
    page = estimator._repr_html_()
    cells = [[cell.text for cell in row] for row in ElementTree.fromstring(page).iter("tr")]
    assert ["numWorkers", "3"] in cells and ["checkpointPath", "'/<a>&b'"] in cells and "epochs" not in page
    first, second = (layer.name for layer in estimator.getModel().model.layers)
    assert cells[-3:] == [
        ["layer", "type", "output", "parameters"],
        [first, "Dense", "(None, 8)", "56"],
        [second, "Dense", "(None, 1)", "9"],
    ]


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, name="<dense>")

    def call(self, x):
        return self.dense(x)


def build_subclass():
    model = Subclass()
    model.compile("sgd", "mse")
    return model


def test_estimator_when_its_model_is_not_built_then_is_shown_with_what_is_known():
    for model, built in ((build_subclass(), ""), (build_subclass, ", made by build_subclass")):
        estimator = KerasEstimator(model=model, driverCallbacks=[FitListener()])
        page = ElementTree.fromstring(estimator._repr_html_())
        head = "".join(page[1].itertext())
        assert "Subclass 'subclass" in head and head.endswith(f", 1 layer, not built yet{built}")
        cells = [[cell.text for cell in row] for row in page.iter("tr")]
        assert ["driverCallbacks", "[FitListener]"] in cells
        assert ["<dense>", "Dense", None, None] in cells
        assert f"{built}>" in repr(estimator) and "driverCallbacks=[FitListener]" in repr(estimator)


def test_facts_when_a_model_has_many_layers_then_are_of_the_first_and_the_number_of_the_others():
    layer = LayerInfo(name="a", kind="Dense", shape="", params=1, trained=1)
    facts = spark_model.model_facts(SimpleNamespace(title="m", info=SimpleNamespace(layers=(layer,) * 3000)))
    assert (len(facts["layers"]), facts["more_layers"], facts["model"]) == (200, 2800, "m")


def test_fitted_model_when_shown_then_tells_epochs_and_last_numbers(fitted):
    assert repr(fitted).endswith("2 epochs, loss=0.5123, mae=0.25, val_loss=0.75, learning_rate=0.05)")
    page = ElementTree.fromstring(fitted._repr_html_())
    facts = [[part.text for part in fact] for fact in page.find("div[@class='tiles']")]
    assert facts[:2] == [["epochs", "2"], ["loss", "0.5123"]]
    assert len(list(page.iter("{http://www.w3.org/2000/svg}polyline"))) == 3
    # What was set since then is shown as well.
    assert "'pixels'" in fitted.copy().setFeaturesCol("pixels")._repr_html_().replace("&#x27;", "'")
    assert not fitted.hasSummary
    with pytest.raises(RuntimeError, match="summary: expected a model that fit has returned"):
        _ = fitted.summary
    summary = FitSummary(model="m", seconds=12.34, history=HISTORY)
    assert "2 epochs, 12.3 s, loss" in repr(KerasModel(fitted.source, history=HISTORY, summary=summary).copy())
    without = KerasModel(fitted.source)
    assert repr(without).endswith("0 epochs)") and "<svg" not in without._repr_html_()


def test_plot_when_drawn_then_has_a_panel_for_each_metric_with_training_and_validation(fitted, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    loss, mae = fitted.plot()
    assert [panel.get_title() for panel in (loss, mae)] == ["loss", "mae"]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in loss.get_lines()}
    assert drawn == {"training": [[1, 2.0], [2, 0.51234]], "validation": [[1, 2.5], [2, 0.75]]}
    np.testing.assert_array_equal(mae.get_lines()[0].get_ydata(), HISTORY["mae"])
    pyplot.close(loss.figure)
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"plot needs matplotlib: pip install 'elephant-spark\[local\]'"):
            fitted.plot()
    with pytest.raises(ConfigurationError, match="plot: expected a model of a fit"):
        KerasModel(fitted.source).plot()


CALLS = {
    "plot": ("plot_curves", lambda fitted: fitted.plot()),
    "predict": ("collected_predictions", lambda fitted: fitted.predict(None)),
    "export": ("export_model", lambda fitted: fitted.export("model")),
    "save": ("write_model", lambda fitted: fitted.save("model.keras")),
    "load": ("StageReader", lambda fitted: KerasModel.load("model")),
}


@pytest.mark.parametrize("name", CALLS)
def test_fitted_model_when_elephant_refuses_what_is_asked_then_shows_no_frame_of_elephant(fitted, name, monkeypatch):
    inside, call = CALLS[name]
    space = {"__name__": "elephant.spark.inside", "DataError": DataError}
    exec("def refuse(*args, **options):\n    raise DataError('no rows')", space)  # noqa: S102  (its module is all)
    monkeypatch.setattr(spark_model, "frame_of", lambda *args: None)
    # Reading is written once for all that is saved.
    module = persistence if name == "load" else spark_model
    monkeypatch.setattr(module, inside, space["refuse"])
    with pytest.raises(DataError, match="no rows") as refused:
        call(fitted)
    assert [entry.name for entry in traceback.extract_tb(refused.value.__traceback__)][1:] == ["<lambda>", "call"]
