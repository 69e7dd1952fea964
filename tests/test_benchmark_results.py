"""Files that `make bench` writes: medians and spans of given lines, the newest file of each theme in the chart."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "results.py"
SVG = "{http://www.w3.org/2000/svg}"


def line(measure, ratio, **case):
    rates = {"ours_rows_per_s": 12345.0, "ours_ms_per_step": 3.0}
    own = {"measure": measure, "case": case, "ratio": ratio, "medians": rates}
    return json.dumps({**own, "target": None, "at_least": True, "repetitions": 3, "load_before": 0.1, "reached": None})


def written(folder, theme, lines):
    """Has the script make its files of lines; returns the theme's file and the chart."""
    (folder / "lines.jsonl").write_text("\n".join(["chatter", *lines]))
    words = ["--only", theme, "--from", folder / "lines.jsonl", "--folder", folder, "--pictures", folder]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=60, check=True)
    return Path(done.stdout.strip()), (folder / "parity.svg").read_text()


def test_results_when_made_of_lines_then_have_medians_and_spans_by_case_and_theme(tmp_path):
    ddp = [line("ranks_against_compiled_ddp", ratio, workload="mlp", ranks=2) for ratio in (1.2, 0.9, 1.1)]
    alone = line("rank_against_tuned_model_fit", 1.5, workload="mlp", ranks=1)
    file, _ = written(
        tmp_path, "training", [*ddp, line("ranks_against_compiled_ddp", 6.0, workload="mlp", ranks=4), alone]
    )
    assert re.fullmatch(r"training_[\w.-]+-cores_\d{4}-\d\d-\d\d\.md", file.name)
    text = file.read_text()
    rows = [row.split(" | ")[1:5] for row in text.splitlines() if row.startswith("| ") and "Least" not in row]
    assert rows == [
        ["workload mlp, ranks 1", "150 %", "150 % to 150 %", "1"],
        ["workload mlp, ranks 2", "110 %", "90 % to 120 %", "3"],
        ["workload mlp, ranks 4", "600 %", "600 % to 600 %", "1"],
    ]
    assert "ours_rows_per_s 12,345" in text and "ms_per_step" not in text.split("```")[0]
    assert all(f"- {name}: " in text for name in ("date", "processor", "commit", "command"))
    # An older file of the same theme is not drawn, and the other theme's is.
    (tmp_path / "training_x-cores_1999-01-01.md").write_text(line("rank_against_tuned_model_fit", 9.0, workload="old"))
    _, chart = written(tmp_path, "inference", [line("predict_udf_against_predict_batch_udf", 1.4, rows=5)])
    drawn = ElementTree.fromstring(chart)
    texts = [text.text for text in drawn.iter(f"{SVG}text")][1:]
    assert texts == [
        *("mlp, one core against model.fit, tuned", "150 %", "mlp, 2 ranks against PyTorch DDP, compiled", "110 %"),
        *("mlp, 4 ranks against PyTorch DDP, compiled", "600 %", "predict_udf against predict_batch_udf", "140 %"),
    ]
    widths = [float(bar.get("width")) for bar in drawn.iter(f"{SVG}rect")]
    # 450 % are 400 pixels, and no bar is longer.
    assert widths == pytest.approx([400 / 4.5 * ratio for ratio in (1.5, 1.1, 4.5, 1.4)], abs=0.1)
