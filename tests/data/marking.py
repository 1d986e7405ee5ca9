"""Sources that say what is trained on, of plain text: `from marking import mark, trained_of`."""

import re
from collections.abc import Iterator

import pytest

from jaxthru.data.sources import corpus
from jaxthru.data.sources.record import Document

ANSWER = re.compile(r"(?<=row )[^.]*\.")
"""What is trained on: behind each "row " up to the end of the sentence."""


def spans(text: str) -> tuple[tuple[int, int], ...]:
    return tuple(found.span() for found in ANSWER.finditer(text))


def mark(patch: pytest.MonkeyPatch, fmt: str = "jsonl", **marks) -> None:
    """Has the documents of sources of this format say what of them is trained on. marks: further fields."""
    read = corpus.read

    def marked(files, recipe, *more) -> Iterator:
        for item in read(files, recipe, *more):
            if isinstance(item, Document) and recipe.format == fmt:
                item = item._replace(trained=spans(item.text), **marks)
            yield item

    patch.setattr(corpus, "read", marked)
