"""How a source is packed: text as `data.packing` says, conversations whole; and what had to be left out."""

from typing import NamedTuple

import numpy as np

from jaxthru.data.loading.online import OnlineSplit
from jaxthru.data.mixture.packing import Packing, pack
from jaxthru.data.mixture.packing_whole import OverLong, Packed, pack_whole
from jaxthru.data.store.token_store import Split
from jaxthru.runtime.errors import require


class PackedSplit(NamedTuple):
    """counted: what became of conversations, None of text, which is packed in full."""

    split: Split | OnlineSplit
    packing: Packing
    counted: Packed | None = None

    @property
    def documents(self) -> int:
        """Documents that lie in rows."""
        return int(np.count_nonzero(self.packing.last))


def pack_split(
    split: Split | OnlineSplit, sequence: int, packing: str, over_long: OverLong, unit: int
) -> PackedSplit:
    """Returns a split packed. The arguments are keys of `data`, but for unit: 2 of a source of pairs. Raises
    InputError."""
    if split.targets is None:
        return PackedSplit(split, pack(split.ends, sequence, packing))
    said = "data.over_long = cut: a pair is not cut over rows; set data.over_long to drop or truncate"
    require(unit == 1 or over_long != "cut", said)
    return PackedSplit(split, *pack_whole(split.ends, split.targets.first, sequence, over_long, unit))


def describe(name: str, packed: PackedSplit, unit: int, sequence: int) -> str:
    """Returns in one line what became of a source's conversations. Raises InputError if none is left."""
    rows, counted = packed.packing.rows, packed.counted
    what = "documents" if unit == 1 else "pairs"
    long = f"{counted.too_long:,} longer than data.sequence = {sequence}"
    lost = f"left out: {long}, {counted.untrained:,} without a token to train on"
    require(
        rows > 0,
        f"source {name}: nothing to train on is left of its {counted.documents:,} {what}; {lost}; give a "
        "longer data.sequence, data.over_long = truncate, or another template",
    )
    fill = packed.packing.length.sum() / (rows * sequence)
    trained = packed.split.targets.count / packed.split.tokens
    fits = f"{counted.kept:,} of {counted.documents:,} {what} in {rows:,} rows, {fill:.1%} full"
    return (
        f"source {name}: {fits}, {trained:.1%} of all tokens trained on; {lost}; truncated: "
        f"{counted.truncated:,}"
    )
