"""Where the docs say more of a part of the step: a link in a checkout, words elsewhere."""

import re
from html import escape
from pathlib import Path

LEDGER = Path(__file__).parents[3] / "docs" / "ledger.md"
"""A report lies in a run's directory, anywhere: only a whole address leads from there to a checkout."""


def more(title: str) -> str:
    """Returns, as HTML, where docs/ledger.md has a part's heading; without a checkout its name alone."""
    place = f"docs/ledger.md, {title}"
    if not LEDGER.is_file():
        return f'<span class="more">{escape(place)}</span>'
    address = f"{LEDGER.as_uri()}#{anchor(title)}"
    return f'<a class="more" href="{escape(address)}" title="{escape(place)}">more</a>'


def anchor(title: str) -> str:
    """Returns the anchor of a heading, as viewers of Markdown make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
