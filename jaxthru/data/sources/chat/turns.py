"""Where the stock chat templates write what the assistant says, by the templates' hashes.

A template can say it itself, with `{% generation %}` around it. Few of those that models come with do: for
them this table says which words stand before the assistant's, and which end its turn.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from jaxthru.data.sources.chat.marks import CLOSE, OPEN


class Turns(NamedTuple):
    """begin: what stands before the assistant's words. end: what ends its turn, and is trained on with them,
    up to and with the line end behind it. Both are regular expressions. words: what occurs in these and
    somebody may type, who then means no turn."""

    begin: str
    end: str
    words: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern:
        """What to look for in a text in which what was typed stands behind OPEN: groups `begin`, `said`."""
        begin, end = (f"(?<!{OPEN})(?:{each})" for each in (self.begin, self.end))
        return re.compile(f"(?P<begin>{begin})(?P<said>.*?{end})", re.DOTALL)

    def typed(self, control: re.Pattern) -> re.Pattern:
        """Returns what is told apart where somebody typed it: `words`, and what spells a control token."""
        return re.compile("|".join([*map(re.escape, self.words), control.pattern]))


def _any_of(words: Sequence[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, words))})"


CHATML = Turns(r"<\|im_start\|>assistant\n", r"<\|im_end\|>\n?", ("<|im_start|>", "<|im_end|>"))
QWEN2_5 = CHATML._replace(begin=r"<\|im_start\|>assistant")
"""Its turns of tool calls alone begin with an empty line, so the first line end is the assistant's."""
LLAMA3 = Turns(
    r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",
    r"<\|eot_id\|>|<\|eom_id\|>",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
)
GEMMA = Turns(r"<start_of_turn>model\n", r"<end_of_turn>\n?", ("<start_of_turn>", "<end_of_turn>"))
MISTRAL_BEFORE = ("<s>", "[/SYSTEM_PROMPT]", "[/INST]", "[/TOOL_RESULTS]")
MISTRAL_OTHERS = ("[INST]", "[SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
MISTRAL = Turns(
    rf"(?:{_any_of(MISTRAL_BEFORE)}|(?<=</s>)(?!{CLOSE}))(?!\s*{_any_of(MISTRAL_OTHERS)})",
    r"</s>",
    (*MISTRAL_BEFORE, *MISTRAL_OTHERS, "</s>"),
)
"""Nothing says that a turn is the assistant's: it is what begins where another's has ended, and is none
of the others', of which several may follow one another."""

STOCK = {
    "153280e3ff55": CHATML,  # plain ChatML
    "fcf7a096fe99": CHATML,  # the same, its line ends written as escapes
    "55b2f4a26ac9": QWEN2_5,  # Qwen2.5
    "94c6035b4f0e": CHATML,  # QwQ
    "a0bc6f6fc7a2": CHATML,  # Qwen2.5-VL
    "87a2728cb8dc": CHATML,  # Qwen3, first release
    "a55ee1b16601": CHATML,  # Qwen3
    "64f85b198065": CHATML,  # Qwen3-Instruct-2507
    "eae48a330793": CHATML,  # Qwen3-Coder
    "9d879ef91075": CHATML,  # Qwen3-VL
    "273d8e0e683b": CHATML,  # Qwen3.5, without thinking
    "a4aee8afcf2e": CHATML,  # Qwen3.5
    "e84f32a23fdd": CHATML,  # Qwen3.6
    "c3cf9e34abf4": CHATML,  # Qwen3.8
    "cbc1d50f777e": CHATML,  # SmolLM3
    "b48c47f64438": LLAMA3,  # Llama 3, which always lets the assistant begin
    "ba03a121d097": LLAMA3,  # Llama 3
    "93c0e9aa3629": LLAMA3,  # Llama 3.1 and 3.3
    "d82792f95932": LLAMA3,  # Llama 3.2
    "3c050259279d": GEMMA,  # Gemma, without a BOS token
    "ecd6ae513fe1": GEMMA,  # Gemma and Gemma 2
    "8d9e3a3c114f": GEMMA,  # Gemma 3
    "7e995b379ec0": MISTRAL,  # Mistral 7B, with a space behind each answer
    "26a59556925c": MISTRAL,  # Mistral 7B, Mixtral
    "bbc58aad9945": MISTRAL,  # Mistral 7B, with a system prompt
    "cafb64e0e9e5": MISTRAL,  # Mistral Large 2407
    "e7deee034838": MISTRAL,  # Mistral Nemo
    "3c4ad5fa60dd": MISTRAL,  # Mistral Large 2411
    "d990bccdaaa2": MISTRAL,  # Mistral Small 3.2
    "039a4710e2aa": MISTRAL,  # Devstral
    "31b50c917746": MISTRAL,  # Ministral 3
}
"""The first digits of a template's SHA-256, see `digest` -> its turns."""


def digest(template: str) -> str:
    """Returns the SHA-256, in hex, of a template without the line end that files have and JSON has not."""
    return hashlib.sha256(template.removesuffix("\n").encode()).hexdigest()


def turns_of(template: str) -> Turns | None:
    """Returns the turns of a stock template; None for one that is not known."""
    return STOCK.get(digest(template)[:12])
