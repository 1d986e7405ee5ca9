"""What is gained where the LM head is computed on trained positions alone, by how many there are."""

from suites.measured import Measured, Over, Ratio

SHARES = ("1", "0.5", "0.2")
GAINED = {share: Ratio(f"trained@{share}", f"all@{share}") for share in SHARES}


def row(about: str, config: str, settings: str, at_0_2: float) -> Measured:
    """Returns the row of a shape. at_0_2: what a fifth of the tokens has to gain."""
    return Measured(
        about,
        config=config,
        settings=settings,
        bars=(
            Over(GAINED["1"].name, 0.99, "{:.3g} × of all tokens, if all are trained on"),
            Over(GAINED["0.2"].name, at_0_2, "{:.3g} ×, if a fifth is"),
        ),
        contenders={"in turns": "trained_share.py {config} {seconds}"},
        within="contenders",
        ratios=tuple(GAINED.values()),
        rounds=2,
        seconds=250.0,
        timed=(15.0, 12.0),
        columns={
            "tokens/s": ("tokens_per_second", ",.0f"),
            "trained": ("trained_share", ".0%"),
            "MHz": ("sm_clock_mhz", ".0f"),
        },
        tiny="--turn-seconds 0.1",
    )


# fmt: off
ROWS = {
    "llama_1b": row("Llama 3.2 1B, head 21% of the step", "llama3_2_1b",
                    "data.sequence=4096 train.rows=8", 1.10),
    "8layer": row("8 layers of Llama 3 8B, head 23%", "llama3_8b_8layer",
                  "remat.policy=projections model.loop=unroll", 1.12),
}
# fmt: on
NOTES = """\
Random tokens, of which a share is trained on; both heads take the same batches in turns in one process, on
one state. Data without masks runs the program of `all`.
"""
