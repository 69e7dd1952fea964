"""HTML and curves of a fit, as an XML parser reads them."""

import math
from xml.etree import ElementTree

from elephant.monitor.report import curve_svg, legend, table_html

SVG = "{http://www.w3.org/2000/svg}"


def lines_of(svg):
    """Returns the points (x, y) of each line of a drawing."""
    lines = ElementTree.fromstring(svg).findall(f"{SVG}polyline")
    return [[tuple(map(float, point.split(","))) for point in line.get("points").split()] for line in lines]


def test_curve_when_there_is_validation_then_both_lines_share_the_drawing_from_edge_to_edge():
    history = {"loss": [4.0, 2.0, 1.0], "val_loss": [3.0, 2.0, 3.0], "accuracy": [0.1, 0.2, 0.9]}
    training, validation = lines_of(curve_svg("loss", history, width=108, height=68))
    assert training == [(4.0, 4.0), (54.0, 44.0), (104.0, 64.0)]
    assert validation == [(4.0, 24.0), (54.0, 44.0), (104.0, 24.0)]


def test_curve_when_numbers_are_missing_then_is_drawn_of_the_others():
    (line,) = lines_of(curve_svg("loss", {"loss": [math.nan, 2.0, math.inf, 1.0]}))
    assert len(line) == 2
    assert len(lines_of(curve_svg("loss", {"loss": [0.5]}))[0]) == 1
    assert curve_svg("loss", {"loss": [math.nan]}) == curve_svg("loss", {}) == ""


def test_html_when_names_hold_markup_then_is_text():
    svg = curve_svg("<b>", {"<b>": [1.0]})
    assert ElementTree.fromstring(svg).find(f"{SVG}title").text.startswith("<b>: ")
    table = ElementTree.fromstring(table_html(["<i>"], [["<script>", 3]]))
    assert [cell.text for cell in table.iter() if cell.text] == ["<i>", "<script>", "3"]
    assert "".join(ElementTree.fromstring(legend({"<script>": "red"})).itertext()) == "<script>"
