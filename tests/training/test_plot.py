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
