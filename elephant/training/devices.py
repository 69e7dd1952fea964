"""What of a rank's devices the framework that is to compute on them sees."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_MODULES = {"tensorflow": "tensorflow", "jax": "jax", "torch": "torch"}


def unseen_note(devices: Sequence[str], host: str) -> str:
    """Returns what to say where a framework sees none of the devices of a rank; nothing where all is well.

    A framework that is not imported in this process is not asked.

    Args:
        devices: The rank's, as ``CUDA_VISIBLE_DEVICES`` names them.
        host: Where it runs.
    """
    module = _MODULES.get(os.environ.get("KERAS_BACKEND", "tensorflow"), "")
    if not devices or module not in sys.modules or sees_gpu(module):
        return ""
    remedy = "pip install tensorflow[and-cuda]" if module == "tensorflow" else f"a build of {module} for CUDA"
    return (
        f"GPU {','.join(devices)} of {host} was given to a rank, and {module} sees none there: it computes on the CPU. "
        f"See that the executors' environment has the libraries of the GPU ({remedy}) and its driver."
    )


def computes_on_gpu(backend: str) -> bool:
    """Returns whether Keras computes on a GPU in this process, which has imported it.

    Args:
        backend: Keras'.
    """
    module = _MODULES.get(backend, "")
    return module in sys.modules and sees_gpu(module)


def sees_gpu(module: str) -> bool:
    """Returns whether a framework sees a GPU.

    Args:
        module: ``tensorflow``, ``jax`` or ``torch``, which is imported already.
    """
    framework = sys.modules[module]
    if module == "tensorflow":
        return bool(framework.config.list_physical_devices("GPU"))
    if module == "torch":
        return bool(framework.cuda.is_available())
    return any(device.platform == "gpu" for device in framework.devices())
