"""The tutorials as notebooks: ``python tests/support/notebooks.py [NAME ...]`` runs them and keeps what they show.

Each script of docs/tutorials is the source of the notebook of its name beside it. Without names, those are run whose
cells are no longer those of their script. Each runs in a kernel of its own, in a new folder. What would differ on the
next machine is taken out of the outputs: paths, names of hosts, and what Spark and its Java write to standard error.
"""

import base64
import io
import os
import re
import socket
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image
from python_start import python_path

from elephant.cluster.local import ensure_java

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
SCRIPTS = sorted(TUTORIALS.glob("*.py"))
_CELL_TIMEOUT_S = 600
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_COLORS = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


def from_script(script):
    """Returns the notebook that a script is the source of: its cells in their order, without outputs."""
    notebook = jupytext.read(script, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(_METADATA)
    for number, cell in enumerate(notebook.cells):
        # Names drawn at random would be others each time.
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
    return notebook


def sources_of(notebook):
    """Returns kind and text of each cell."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def is_current(script):
    """Returns whether there is a notebook of this script whose cells are the script's."""
    path = script.with_suffix(".ipynb")
    return path.exists() and sources_of(nbformat.read(path, 4)) == sources_of(from_script(script))


def texts_of(output):
    """Returns the texts that an output of a cell shows."""
    data = output.get("data", {})
    return [output[name] for name in ("text", "traceback") if name in output] + [
        text for kind, text in data.items() if kind.startswith("text/")
    ]


def executed(script):
    """Returns the notebook of a script with the outputs of a run."""
    notebook = from_script(script)
    with tempfile.TemporaryDirectory(prefix="run-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = folder
        client = NotebookClient(
            notebook,
            timeout=_CELL_TIMEOUT_S,
            kernel_name="python3",
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute()
        finally:
            del os.environ["TMPDIR"]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [_general(output, folder) for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = nbformat.from_dict(_METADATA)
    return notebook


def _general(output, folder):
    """Returns an output without what is of this machine and run alone."""
    places = {folder: "/tmp", str(ROOT): ".", sys.prefix: ".venv", socket.gethostname(): "localhost"}

    def general(text):
        for place, word in places.items():
            text = text.replace(place, word)
        text = _COLORS.sub("", text)
        return "\n".join(line.rstrip() for line in text.split("\n"))

    if "text" in output:
        output.text = general(output.text)
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/"):
            output.data[kind] = general(value)
        elif kind == "image/png":
            output.data[kind] = _with_few_colors(value)
    return output


def _with_few_colors(encoded):
    """Returns a picture in a third of its bytes: plots have few colors."""
    small = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB").quantize(64).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main(names):
    """Runs the scripts of these names, or those that have no current notebook; returns the exit code."""
    unknown = set(names) - {script.stem for script in SCRIPTS}
    if unknown:
        print(f"expected names of scripts in {TUTORIALS}. Received: {', '.join(sorted(unknown))}.", file=sys.stderr)
        return 2
    ensure_java()
    # Of the machine, plans show the loopback alone.
    os.environ.update(PYTHONPATH=python_path(ROOT), SPARK_LOCAL_IP="127.0.0.1")
    for script in SCRIPTS:
        if script.stem in names or not (names or is_current(script)):
            print(script.stem, flush=True)
            nbformat.write(executed(script), script.with_suffix(".ipynb"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
