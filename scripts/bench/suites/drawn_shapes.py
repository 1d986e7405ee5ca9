"""Shapes of models that nobody has tuned for: drawn from a commit's hash, the same ones for the same hash.

    python scripts/bench/suites/drawn_shapes.py HASH

Six have 9 to 36 B parameters, one in each sixth of that range by logarithm; two have 55 to 110 B, which with
6 bytes a parameter are more than a GPU of 141 GB and a host of 128 GiB hold together.
"""

import dataclasses
import hashlib
import sys

DIGITS, DEPTHS = 12, range(16, 97)
WIDTHS = (4096, 5120, 6144, 7168, 8192)
# Parameters from, to, how many shapes, and widths. Of a wider model two layers on their way take 20 GB.
FITTING, TOO_LARGE = (9e9, 36e9, 6, WIDTHS), (55e9, 110e9, 2, (*WIDTHS, 10_240, 12_288))


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A model and its batch: what `--set` takes, and about how many parameters they give."""

    settings: str
    parameters: int


class Draws:
    """Numbers in [0, 1) of a text, the same in every version of Python."""

    def __init__(self, text: str):
        self._text, self._count = text, 0

    def __call__(self) -> float:
        self._count += 1
        digest = hashlib.sha256(f"{self._text} {self._count}".encode()).digest()
        return int.from_bytes(digest[:8]) / 2**64

    def of(self, values: tuple):
        """Returns one of some values."""
        return values[int(self() * len(values))]


def shape(draw: Draws, target: float, widths: tuple[int, ...]) -> Drawn:
    """Returns a shape of about so many parameters, and of a depth that models have."""
    kv_heads, vocabulary = draw.of((4, 8)), draw.of((32_000, 128_256, 151_936))
    tied, qk_norm = draw.of((False, True)), draw.of((False, True))
    ratio = 2.5 + 1.5 * draw()
    possible = []
    for embed in widths:
        heads, mlp = embed // 128, round(embed * ratio / 256) * 256
        layer = embed * 128 * 2 * (heads + kv_heads) + 3 * embed * mlp
        table = embed * vocabulary * (1 if tied else 2)
        layers = round((target - table) / layer)
        if layers in DEPTHS:
            possible.append((embed, heads, mlp, layers, layers * layer + table))
    embed, heads, mlp, layers, parameters = draw.of(tuple(possible))
    sequence, tokens = draw.of((2048, 4096, 8192)), draw.of((8192, 16_384, 32_768))
    rows = tokens // sequence
    # No more than 16,384 tokens in a micro-batch.
    microbatches = draw.of(tuple(n for n in (1, 2, 4) if rows % n == 0 and tokens // n <= 16_384))
    settings = {
        "model.layers": layers,
        "model.embed": embed,
        "model.heads": heads,
        "model.kv_heads": kv_heads,
        "model.head_dim": 128,
        "model.mlp": mlp,
        "model.vocabulary": vocabulary,
        "model.tied_embeddings": str(tied).lower(),
        "model.qk_norm": str(qk_norm).lower(),
        "data.sequence": sequence,
        "train.rows": rows,
        "train.microbatches": microbatches,
    }
    return Drawn(" ".join(f"{key}={value}" for key, value in settings.items()), parameters)


def shapes(commit: str) -> tuple[list[Drawn], list[Drawn]]:
    """Returns the shapes that are to fit, and those that are too large. commit: its hash, of which the first
    DIGITS digits count."""
    draw = Draws(commit[:DIGITS])

    def drawn(low: float, high: float, count: int, widths: tuple[int, ...]) -> list[Drawn]:
        steps = [(number + draw()) / count for number in range(count)]
        return [shape(draw, low * (high / low) ** step, widths) for step in steps]

    return drawn(*FITTING), drawn(*TOO_LARGE)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    for kind, drawn in zip(("fits", "too large"), shapes(sys.argv[1]), strict=True):
        for each in drawn:
            print(f"{kind}, {each.parameters / 1e9:.1f} B: {each.settings}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
