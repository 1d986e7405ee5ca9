"""Rows as they are trained on, decoded: where documents stand, what of them is trained on, padding."""

import itertools
from collections.abc import Iterator

import numpy as np
import rich.console
import rich.text

from jaxthru.data.loading.dataset import Data
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.runtime.errors import require, shown

TRAINED = "bold green"
SHOWN = 1000
"""Characters of a row that a run shows at its start."""
OPEN, CLOSE = "⟦", "⟧"
"""Around what is trained on, where no colour can say it."""


def preview(data: Data, source: str | None = None, *, rows: int = 1) -> rich.text.Text:
    """Returns rows of a source as they are trained on, for a notebook: what is trained on is in colour, and
    between OPEN and CLOSE, so that `print` tells it apart, too.

    source: its name in the mix; None is the first. rows: spread evenly over it. Raises InputError for a
    source that the mix does not have, and for a damaged store.
    """
    name = data.names[0] if source is None else source
    require(name in data.names, f"source {name!r}: the mix has {', '.join(data.names)}")
    batch = sample(data, data.names.index(name), rows)
    parts = [
        rich.text.Text(f"{counts(batch, row)}\n").append_text(marked(decoded(data, batch, row)))
        for row in range(len(batch["tokens"]))
    ]
    return rich.text.Text("\n").join(parts)


def sample(data: Data, number: int, rows: int) -> dict[str, np.ndarray]:
    """Returns a batch of so many rows of a source, or of all that it has, spread evenly over it.

    number: of the source, as `batch["source"]` numbers them. Raises InputError for a damaged store.
    """
    have = data.rows[data.names[number]]
    chosen = np.arange(min(rows, have)) * have // max(min(rows, have), 1)
    return data.builder.build(np.full(len(chosen), number), chosen)


def decoded(data: Data, batch: dict[str, np.ndarray], row: int) -> rich.text.Text:
    """Returns the text of one row, each document under a line that says where it stands.

    Of a row in which not everything is trained on, what is stands in TRAINED.
    """
    segments, tokens = batch["segment_ids"][row], batch["tokens"][row]
    trained, text = trained_tokens(batch)[row], rich.text.Text()
    marked = _is_marked(batch, row)
    for segment in range(1, int(segments.max()) + 1):
        where = np.flatnonzero(segments == segment)
        untold = batch["targets"][row, where[-1]] == 0 and batch["loss_mask"][row, where[-1]] == 0
        count = f", {int(trained[where].sum())} of them trained on" if marked else ""
        ends = "the document ends" if where[-1] + 1 < len(segments) or untold else "it goes on"
        _line(text, f"document {segment}: tokens {where[0]} to {where[-1]}{count}, {ends}")
        for piece, is_trained in _pieces(data.tokenizer, tokens[where], trained[where]):
            text.append(shown(piece), TRAINED if marked and is_trained else "")
        if not text.plain.endswith("\n"):
            text.append("\n")
    padding = int((segments == 0).sum())
    if padding:
        _line(text, f"padding: {padding} tokens")
    text.right_crop(text.plain.endswith("\n"))
    return text


def opening(data: Data) -> list[str]:
    """Returns what a run of conversations says at its start: of each such source how its first row begins,
    with OPEN and CLOSE around what is trained on. Raises InputError for a damaged store."""
    lines = []
    for number, name in enumerate(data.names):
        if data.counted[name]:
            text = plain(decoded(data, sample(data, number, 1), 0))
            cut = f"{text[:SHOWN]} ..." if len(text) > SHOWN else text
            lines.append(f"source {name}, its first row; what is trained on stands in {OPEN}{CLOSE}:\n{cut}")
    return lines


def trained_tokens(batch: dict[str, np.ndarray]) -> np.ndarray:
    """Returns bool [rows, sequence], whether each token is trained on: as the target of the one before it."""
    trained = np.zeros(batch["loss_mask"].shape, bool)
    trained[:, 1:] = batch["loss_mask"][:, :-1] > 0
    return trained & (batch["positions"] > 0)


def counts(batch: dict[str, np.ndarray], row: int) -> str:
    """Returns in one line what a row holds."""
    segments = batch["segment_ids"][row]
    used, trained = int((segments > 0).sum()), int(batch["loss_mask"][row].sum())
    documents = int(segments.max(initial=0))
    of_used = f"{trained:,} of {used:,} tokens trained on, {1 - trained / max(used, 1):.1%} masked"
    return f"{documents:,} document{'s' * (documents != 1)}, {of_used}, {used / len(segments):.1%} full"


def print_row(console: rich.console.Console, text: rich.text.Text) -> None:
    """Prints a decoded row; in a terminal without colours with OPEN and CLOSE around what is trained on."""
    if console.color_system is None or console.no_color:
        text = rich.text.Text(plain(text))
    console.print(text, highlight=False, soft_wrap=True)


def plain(text: rich.text.Text) -> str:
    """Returns a decoded row with OPEN and CLOSE around what is trained on."""
    return marked(text).plain


def marked(text: rich.text.Text) -> rich.text.Text:
    """Returns a decoded row with OPEN and CLOSE around what is trained on, all three in its colour."""
    found, at = rich.text.Text(), 0
    for span in text.spans:
        found.append(text.plain[at : span.start])
        found.append(f"{OPEN}{text.plain[span.start : span.end]}{CLOSE}", span.style)
        at = span.end
    return found.append(text.plain[at:])


def _is_marked(batch: dict[str, np.ndarray], row: int) -> bool:
    """Says whether a token of a row is not trained on that has one of its document before it."""
    follows = (batch["segment_ids"][row] > 0) & (batch["positions"][row] > 0)
    return bool((follows & ~trained_tokens(batch)[row]).any())


def _pieces(tokenizer: Tokenizer, ids: np.ndarray, trained: np.ndarray) -> Iterator[tuple[str, bool]]:
    """Yields the text of each stretch of tokens that are all trained on or all not, and whether they are.

    Each is what it adds to the text before it, on which it may depend.
    """
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    before = ""
    for begin, end in itertools.pairwise(edges):
        text = tokenizer.decode(ids[:end])
        yield text[len(before) :], bool(trained[begin])
        before = text


def _line(text: rich.text.Text, said: str) -> None:
    text.append(f"──── {said} ────\n")
