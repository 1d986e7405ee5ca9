"""generation_config.json: how a model is meant to be sampled, and which tokens end a text."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from jaxthru.data.store.tokenizer_folder import read_object
from jaxthru.runtime.errors import require

log = logging.getLogger(__name__)
FILE = "generation_config.json"
NEUTRAL = {
    **dict.fromkeys(("repetition_penalty", "typical_p", "num_beams", "length_penalty"), (1,)),
    **dict.fromkeys(("min_p", "no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "min_length"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "min_new_tokens"), ()),
}
"""Keys that change which token is taken and are not built -> the values that change nothing."""


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """temperature: 0 is greedy. top_k, top_p: 0 and 1 take all. stop: ids of tokens that end a text."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[int, ...] = ()


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Returns what a folder's generation_config.json says, and its config.json of stop tokens where that does
    not. Absent keys mean what they do in Hugging Face's `GenerationConfig`. Raises InputError."""
    keys, config = read_object(folder / FILE), read_object(folder / "config.json")
    stop = _ids(folder / FILE, keys) or _ids(folder / "config.json", config)
    left = [name for name, neutral in NEUTRAL.items() if keys.get(name) not in (None, *neutral)]
    if left:
        log.warning("%s: %s: not applied, as it is not built", folder / FILE, ", ".join(left))
    if not keys.get("do_sample", False):
        return GenerationDefaults(stop=stop)
    found = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    for name, default in found.items():
        value = keys.get(name)
        value = default if value is None else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**31
        require(is_number, f"{folder / FILE}: {name} = {value!r}: must be a number from 0 to 2**31 - 1")
        found[name] = type(default)(value)
    return GenerationDefaults(**found, stop=stop)


def _ids(path: Path, keys: dict[str, Any]) -> tuple[int, ...]:
    """Returns the ids of `eos_token_id`, which is one or a list."""
    found = keys.get("eos_token_id")
    if found is None:
        return ()
    ids = tuple(found) if isinstance(found, list) else (found,)
    are_ids = all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**31 for each in ids)
    require(are_ids, f"{path}: eos_token_id = {found!r}: must be an id, or a list of ids")
    return ids
