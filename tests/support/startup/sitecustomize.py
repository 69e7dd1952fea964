"""Start of Python in processes of tests: what Keras imports for functions that nobody calls stays out.

Where they are installed, as in the tests' environment, Keras imports Matplotlib, scikit-learn, JAX and IPython, and
TensorFlow JAX and SciPy: plots, wrappers and converters may need them. That takes a third of the processor time of an
import of Keras, in hundreds of processes. To these modules, and to no others, the packages are not installed.
"""

import sys

# Package: how the names of modules begin that do not find it.
UNUSED = {
    "IPython": "keras.src.saving.",
    "jax": ("keras.src.callbacks.", "tensorflow.lite."),
    "matplotlib": "keras.src.visualization.",
    "scipy": "tensorflow.python.keras.",
    "sklearn": "keras.src.wrappers.",
}


class UnusedPackages:
    """Finder of Python's that finds nothing, and refuses what is unused."""

    def find_spec(self, name, path=None, target=None):
        if name in UNUSED and _importer().startswith(UNUSED[name]):
            raise ModuleNotFoundError(f"{name} stays out of processes of tests: tests/support/startup", name=name)


def _importer():
    """Returns the name of the module that imports."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame is not None else ""


sys.meta_path.insert(0, UnusedPackages())
