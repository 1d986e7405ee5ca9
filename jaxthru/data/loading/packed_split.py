"""How a source is packed: text as `data.packing` says, conversations whole; and what had to be left out.

A packing is made once and kept beside the store, as `<split>.<how>-<sequence>.columns`; see `packed_rows.py`
for what is in it.
"""

from typing import NamedTuple

from jaxthru.data.loading.packed_rows import PackedRows, write_rows
from jaxthru.data.mixture.packing import pack, split_rows
from jaxthru.data.mixture.packing_whole import OverLong, Packed, pack_whole
from jaxthru.data.store.column_file import ENDING, ColumnFile, Writer, keep
from jaxthru.data.store.token_store import Split
from jaxthru.runtime.errors import require

VERSION = 1
"""Of what a packing of the same documents holds."""


class PackedSplit(NamedTuple):
    """counted: what became of conversations, None of text, which is packed in full. trained: their tokens
    that are trained on. kept: whether the packing lies beside the store."""

    split: Split
    rows: PackedRows
    counted: Packed | None = None
    trained: int = 0
    kept: bool = True


def pack_split(split: Split, sequence: int, packing: str, over_long: OverLong, unit: int) -> PackedSplit:
    """Returns a split packed. The arguments are keys of `data`, but for unit: 2 of a source of pairs. Raises
    InputError."""
    if split.targets is not None:
        said = "data.over_long = cut: a pair is not cut over rows; set data.over_long to drop or truncate"
        require(unit == 1 or over_long != "cut", said)
        packing = f"whole-{over_long}"
    of = f"packing {VERSION} {packing} {sequence} {unit} {split.identity}"
    path = f"{split.folder}/{split.split}.{packing}-{sequence}{ENDING}"

    def make(writer: Writer) -> dict:
        split.keep_index()  # now that all of it is read: a later start may not be able to write
        if packing == "split":
            parts, rows = split_rows(split.ends_by_shard(), sequence), -(-split.tokens // sequence)
            return write_rows(writer, parts, sequence, rows, split.documents + rows, in_order=True)
        more = {}
        if split.targets is None:
            packed = pack(split.ends, sequence, packing)
        else:
            packed, counted = pack_whole(split.ends, split.targets.first, sequence, over_long, unit)
            more = {"counted": counted, "trained": split.targets.count}
        given = [packed], sequence, packed.rows, len(packed.length)
        return write_rows(writer, *given, in_order=False) | more

    columns = keep(path, of, make)
    return _opened(split, columns, sequence, in_order=packing == "split")


def _opened(split: Split, columns: ColumnFile, sequence: int, *, in_order: bool) -> PackedSplit:
    rows, counted = PackedRows(columns, sequence, in_order=in_order), columns.facts.get("counted")
    trained = columns.facts.get("trained", 0)
    return PackedSplit(split, rows, counted and Packed(*counted), trained, columns.path is not None)


def describe(name: str, packed: PackedSplit, unit: int) -> str:
    """Returns in one line what became of a source's conversations. Raises InputError if none is left."""
    rows, counted, sequence = packed.rows.rows, packed.counted, packed.rows.sequence
    what = "documents" if unit == 1 else "pairs"
    long = f"{counted.too_long:,} longer than data.sequence = {sequence}"
    lost = f"left out: {long}, {counted.untrained:,} without a token to train on"
    require(
        rows > 0,
        f"source {name}: nothing to train on is left of its {counted.documents:,} {what}; {lost}; give a "
        "longer data.sequence, data.over_long = truncate, or another template",
    )
    fill = packed.rows.tokens / (rows * sequence)
    trained = packed.trained / packed.split.tokens
    fits = f"{counted.kept:,} of {counted.documents:,} {what} in {rows:,} rows, {fill:.1%} full"
    return (
        f"source {name}: {fits}, {trained:.1%} of all tokens trained on; {lost}; truncated: "
        f"{counted.truncated:,}"
    )
