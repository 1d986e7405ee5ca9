"""Where the stock chat templates write what the assistant says, by the templates' hashes.

A template can say it itself, with `{% generation %}` around it. Few of those that models come with do: for
them this table says which words stand before the assistant's, and which end its turn.
"""

import hashlib
import re
from typing import NamedTuple

from jaxthru.data.store.marked import OPEN


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


CHATML = Turns(r"<\|im_start\|>assistant\n", r"<\|im_end\|>\n?", ("<|im_start|>", "<|im_end|>"))
QWEN2_5 = CHATML._replace(begin=r"<\|im_start\|>assistant")
"""Its turns of tool calls alone begin with an empty line, so the first line end is the assistant's."""
LLAMA3 = Turns(
    r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",
    r"<\|eot_id\|>|<\|eom_id\|>",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
)
GEMMA = Turns(r"<start_of_turn>model\n", r"<end_of_turn>\n?", ("<start_of_turn>", "<end_of_turn>"))
MISTRAL = Turns(
    r"\[/INST\]|\[/TOOL_RESULTS\]", r"</s>", ("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>")
)

STOCK: dict[str, Turns] = {}
"""The first digits of a template's SHA-256, see `digest` -> its turns."""


def digest(template: str) -> str:
    """Returns the SHA-256, in hex, of a template without the line end that files have and JSON has not."""
    return hashlib.sha256(template.removesuffix("\n").encode()).hexdigest()


def turns_of(template: str) -> Turns | None:
    """Returns the turns of a stock template; None for one that is not known."""
    return STOCK.get(digest(template)[:12])
