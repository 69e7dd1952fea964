"""A picture of a history: loss and metrics by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def save_curves(history: Mapping[str, Sequence[float]], path: str | Path) -> Path:
    """Draws one panel per metric, training and validation together, into a PNG file.

    Args:
        history: What `KerasModel.history` holds: one number per epoch by metric.
        path: The file to write.

    Returns:
        The absolute path of the file.

    Raises:
        ImportError: matplotlib is not installed (``pip install 'elephant-spark[local]'``).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("save_curves needs matplotlib: pip install 'elephant-spark[local]'") from error

    names = [name for name in history if not name.startswith("val_") and name != "learning_rate"]
    figure = Figure(figsize=(5.2 * len(names), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for position, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), position + 1)
        for label, key in (("training", name), ("validation", f"val_{name}")):
            if key in history:
                values = history[key]
                axes.plot(range(1, len(values) + 1), values, marker="o", markersize=3, label=label)
        axes.set_title(name)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    target = Path(path).absolute()
    figure.savefig(target, dpi=120)
    return target
