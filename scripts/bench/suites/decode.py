"""How fast text comes, of a Llama 3 of 8B's shape with random weights, beside Hugging Face's generation."""

import dataclasses

import harness
from suites.measured import Measured, Ratio


@dataclasses.dataclass(frozen=True)
class Text(Measured):
    """A row of text. batch: rows at once."""

    batch: int = 1
    rounds: int = 2
    seconds: float = 120.0

    def given(self, setup):
        words = [
            *(harness.TINY if setup.tiny else harness.Shape(layers=32)).flags(),
            "--batch",
            str(self.batch),
        ]
        words += ["--prompt", "8", "--generate", "16"] if setup.tiny else []
        small = ["--compute", "float32", "--gib", "0.015625"] if setup.tiny else []
        return super().given(setup) | {"text": words, "small": small}


def text(batch: int) -> Text:
    """Returns the row of a batch."""
    return Text(
        f"greedy text, {batch} rows, prompts of 128 tokens, 256 tokens a call",
        contenders={
            "jaxthru": "decode.py {text} {seconds} {small}",
            "hf": "peers.hugging_face_decode {text} {seconds}",
        },
        ratios=(Ratio("jaxthru", "hf"),),
        columns={
            "prefill s": ("prefill_seconds", ".4f"),
            "tokens/s": ("tokens_per_second", ",.0f"),
            "of the roofline": ("share_of_roofline", ".0%"),
            "MHz": ("sm_clock_mhz", ".0f"),
        },
        tiny="",
        batch=batch,
    )


ROWS = {"one": text(1), "eight": text(8)}
NOTES = """\
The roofline is what a token must read (each weight once, and the keys and values before it) at the bandwidth
of a sum that the same process measures. hf is transformers with a static cache and torch.compile.
"""
