"""Headless Chromium, where there is one: pictures of pages, and what people would see of their texts and drawings.

The pictures stay in ``build/pictures`` of the checkout, or in the folder that ``ELEPHANT_PICTURES`` names, so that
somebody can look at them. A page is shown in frames side by side: light and dark, wide and narrow.
"""

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
# Nothing is asked of other hosts.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--allow-file-access-from-files", "--enable-logging=stderr", "--hide-scrollbars", "--virtual-time-budget=10000",
)  # fmt: skip
_SHEET = """<!DOCTYPE html><html><head><meta charset="utf-8"><style>
body { margin: 0; display: flex; background: #fff } iframe { border: 0; flex: none }
</style></head><body>FRAMES<script>SCRIPT</script></body></html>"""
# Of a frame: its width and what its content needs, widths of drawings, pixels of the smallest letters in one, and of
# elephant's own parts the lowest contrast of a text, by WCAG 2, and what is cut off.
_SCRIPT = r"""
const numbers = (color) => {
  const parts = color.match(/-?[\d.]+(?:e-?\d+)?/g).map(Number);
  const rgb = parts.slice(0, 3).map((part) => color.startsWith("color(") ? part : part / 255);
  return [...rgb, parts.length > 3 ? parts[3] : 1];
};
const over = (front, back) => [0, 1, 2].map((at) => front[at] * front[3] + back[at] * (1 - front[3])).concat(1);
const lightness = (color) => {
  const [red, green, blue] = color.map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05;
};
const ancestors = (part) => part ? [part, ...ancestors(part.parentElement)] : [];
const contrast = (part, style) => {
  const layers = ancestors(part).map((one) => numbers(style(one).backgroundColor)).reverse();
  const back = layers.reduce((below, layer) => over(layer, below), [1, 1, 1, 1]);
  const drawn = part.ownerSVGElement;
  const front = numbers(drawn ? style(part).fill : style(part).color);
  const opacity = ancestors(part).reduce((all, one) => all * style(one).opacity, drawn ? style(part).fillOpacity : 1);
  front[3] *= opacity;
  const pair = [lightness(over(front, back)), lightness(back)];
  return Math.max(...pair) / Math.min(...pair);
};
const measure = (frame) => {
  const page = frame.contentDocument, root = page.documentElement;
  const style = (part) => frame.contentWindow.getComputedStyle(part);
  const box = (part) => part.getBoundingClientRect();
  const scale = (svg) => box(svg).width / svg.viewBox.baseVal.width;
  const own = [...page.querySelectorAll(".elephant-fit, .elephant-fit *")].filter((part) => box(part).width > 0);
  const texts = own.filter((part) => [...part.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  const contrasts = texts.map((part) => contrast(part, style));
  const letters = texts.filter((part) => part.matches("svg text"));
  const scrolls = (part) => ancestors(part.parentElement).some((one) => style(one).overflowX === "auto");
  const leaves = (part, edge) => box(part).left < box(edge).left - 1 || box(part).right > box(edge).right + 1;
  return {
    width: root.clientWidth,
    needed: root.scrollWidth,
    height: root.scrollHeight,
    texts: page.body.innerText.length,
    drawings: own.filter((part) => part.matches("svg")).map((svg) => box(svg).width),
    smallest: Math.min(...letters.map((text) => Number(text.getAttribute("font-size")) * scale(text.ownerSVGElement))),
    contrast: Math.min(...contrasts),
    dimmest: texts[contrasts.indexOf(Math.min(...contrasts))]?.outerHTML.slice(0, 100),
    cut: [
      ...letters.filter((text) => leaves(text, text.ownerSVGElement)),
      ...own.filter((part) => !part.ownerSVGElement && !scrolls(part) && leaves(part, root)),
    ].map((part) => part.outerHTML.slice(0, 100)),
  };
};
addEventListener("load", () => {
  const found = document.createElement("pre");
  found.hidden = true;
  found.textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(measure));
  document.body.append(found);
});
"""


def browser():
    return next(filter(None, map(shutil.which, _NAMES)), None)


needs_browser = pytest.mark.skipif(
    browser() is None, reason="there is no Chromium: none of its names is a program on the PATH"
)


@dataclass(frozen=True)
class Frame:
    """A page in the size of a window.

    Args:
        page: HTML, or the path of a file.
        theme: What the browser says that its user prefers: ``"light"`` or ``"dark"``.
    """

    page: str | Path
    theme: str = "light"
    width: int = 1000
    height: int = 900

    @property
    def tag(self):
        page = f'src="{self.page.as_uri()}"' if isinstance(self.page, Path) else f'srcdoc="{html.escape(self.page)}"'
        style = f"width:{self.width}px;height:{self.height}px;color-scheme:{self.theme}"
        return f'<iframe style="{style}" {page}></iframe>'


@dataclass(frozen=True)
class Seen:
    """What was seen in a frame.

    Args:
        measures: By name; see the script.
        pixels: Levels of gray (height, width), from 0 to 1.
    """

    measures: dict
    pixels: object

    @property
    def background(self):
        """The level of most pixels."""
        import numpy as np

        levels, counts = np.unique(np.round(self.pixels, 2), return_counts=True)
        return float(levels[counts.argmax()])

    @property
    def drawn(self):
        """The part of the pixels that are not the background's."""
        return float((abs(self.pixels - self.background) > 0.1).mean())


def look_at(name, *frames, heard=None):
    """Returns what is seen in each frame, and keeps a picture of them all under a name.

    Args:
        heard: A pattern of what the pages may say on their console, where they may say something.
    """
    from matplotlib.image import imread

    folder = Path(os.environ.get("ELEPHANT_PICTURES") or ROOT / "build" / "pictures")
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{name}.png"
    picture.unlink(missing_ok=True)
    width, height = sum(frame.width for frame in frames), max(frame.height for frame in frames)
    with tempfile.TemporaryDirectory(prefix="elephant-browser-", ignore_cleanup_errors=True) as scratch:
        sheet = Path(scratch) / "sheet.html"
        text = _SHEET.replace("SCRIPT", _SCRIPT).replace("FRAMES", "".join(frame.tag for frame in frames))
        sheet.write_text(text, encoding="utf-8")
        flags = [
            *_FLAGS, f"--user-data-dir={scratch}/profile", f"--window-size={width},{height}",
            f"--screenshot={picture}", "--dump-dom",
        ]  # fmt: skip
        done = subprocess.run([browser(), *flags, sheet.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.findall('<pre hidden="">(.*)</pre></body>', done.stdout)
    assert done.returncode == 0 and len(found) == 1 and picture.exists(), done.stderr
    # Errors are said there.
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line and not (heard and re.search(heard, line))]
    assert said == [], "\n".join(said)
    pixels = imread(picture)[..., :3].mean(axis=-1)
    assert pixels.shape == (height, width)
    seen, left = [], 0
    for frame, measures in zip(frames, json.loads(html.unescape(found[0])), strict=True):
        seen.append(Seen(measures, pixels[: frame.height, left : left + frame.width]))
        left += frame.width
    return seen
