"""The plots of a plan are SVG that every browser reads, whatever the sources are called."""

import xml.etree.ElementTree

import numpy as np

from jaxthru.training.plot import Panel, svg


def test_names_are_text():
    name = """<b>"'&</b>]]><script>"""
    line = np.arange(3.0), np.arange(3.0)
    root = xml.etree.ElementTree.fromstring(svg([Panel(f"title {name}", {f"source {name}": line})]))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {f"title {name}", f"source {name}"} < set(texts)


def test_a_logarithmic_axis_has_its_powers_of_ten():
    x = np.array([8.0, 64.0, 16384.0])
    root = xml.etree.ElementTree.fromstring(
        svg([Panel("share", {"all": (x, np.array([1.0, 0.5, 0.0]))}, "x")])
    )
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"8", "100", "1,000", "16,384", "0", "1"} <= set(texts) and "10" not in texts  # too near to 8
    (line,) = (element.get("points") for element in root.iter() if element.tag.endswith("polyline"))
    across = [float(point.split(",")[0]) for point in line.split()]
    assert np.isclose((across[1] - across[0]) / (across[2] - across[0]), 3 / 11, atol=1e-3)
