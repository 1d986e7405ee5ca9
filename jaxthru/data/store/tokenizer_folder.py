"""A folder of published weights, as far as text goes: its tokenizer's files, and what begins and ends a text.

The names of the files and of the keys in them are those of the Hugging Face libraries:
https://huggingface.co/docs/transformers/main_classes/tokenizer
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jaxthru.runtime.errors import InputError, require

TOKENIZER = "tokenizer.json"
FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
"""The files of a tokenizer, which belong together: whoever copies one copies all that are there."""
BORDERS = "documents.json"
"""The file that says what a run's documents began and ended with; of `RUN/tokenizer`, and of no other
folder. It counts before what the tokenizer's own files say, for a mix may have said otherwise."""


class Borders(NamedTuple):
    """What each document begins and ends with, as special tokens are spelled. bos: "" is nothing, None what
    the folder says, or else nothing. end: None is what the folder says, or else a usual name."""

    bos: str | None = None
    end: str | None = None


UNSAID = Borders()
"""What the tokenizer's files say, or the usual."""


def tokenizer_file(path: Path) -> Path:
    """Returns the tokenizer.json that a path stands for: itself, that of a folder, or that of a run.

    Raises InputError if there is none.
    """
    if path.is_file():
        return path
    require(path.is_dir(), f"tokenizer {path}: no such file or folder")
    for file in (path / TOKENIZER, path / "tokenizer" / TOKENIZER):
        if file.is_file():
            return file
    said = f"tokenizer {path}: the folder holds no {TOKENIZER}"
    if (path / "config.json").is_file() and (path / "metrics.jsonl").is_file():
        raise InputError(f"{said}: the run was started before runs kept their tokenizer; resume it once")
    if (path / "tokenizer.model").is_file() or (path / "vocab.json").is_file():
        said += "; transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    raise InputError(said)


def read_borders(folder: Path, tokenizer: tokenizers.Tokenizer) -> Borders:
    """Returns what documents begin and end with by the files of a folder; end: None if they do not say.

    A document begins with the BOS token where the tokenizer itself puts one there: as `add_bos_token` says,
    or else, as what the tokenizer makes of a text begins. Raises InputError for a damaged file.
    """
    if (folder / BORDERS).is_file():
        kept = read_object(folder / BORDERS)
        return Borders(_name(folder / BORDERS, kept, "bos") or "", _name(folder / BORDERS, kept, "end"))
    asked = read_object(folder / "tokenizer_config.json").get("add_bos_token")
    if asked is None:
        bos = _begins(tokenizer)
    else:
        bos = _special(folder, tokenizer, "bos") if asked else ""
        said = f"{folder / 'tokenizer_config.json'}: add_bos_token is true, but no file says bos_token"
        require(bos is not None, said)
    return Borders(bos, _special(folder, tokenizer, "end"))


def _begins(tokenizer: tokenizers.Tokenizer) -> str:
    """Returns the special token that the tokenizer's own template puts before a text; "" if it puts none."""
    try:
        # Of some text: of an empty one, a token before and a token behind look the same.
        found = tokenizer.encode("a")
    except Exception:  # the library raises no narrower class; some know few texts
        found = tokenizer.encode("")
    if found.ids and found.special_tokens_mask[0]:
        return tokenizer.id_to_token(found.ids[0])
    return ""


KEYS = {"bos": ("bos_token", "bos_token_id"), "end": ("eos_token", "eos_token_id")}


def _special(folder: Path, tokenizer: tokenizers.Tokenizer, which: str) -> str | None:
    """Returns a special token's text: by name, as the tokenizer's files say, or by the model's id of it."""
    by_name, by_id = KEYS[which]
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        name = _name(folder / file, read_object(folder / file), by_name)
        if name is not None:
            known = tokenizer.token_to_id(name) is not None
            require(known, f"{folder / file}: {by_name} = {name!r}: is no token of {TOKENIZER} beside it")
            return name
    for file in ("config.json", "generation_config.json"):
        tree = read_object(folder / file)
        value = tree.get(by_id, _within(tree).get(by_id))
        first = value[0] if isinstance(value, list) and value else value
        if first is not None and first != []:
            token = tokenizer.id_to_token(first) if type(first) is int and 0 <= first < 2**32 else None
            require(
                token is not None, f"{folder / file}: {by_id} = {value!r}: is no id of {TOKENIZER} beside it"
            )
            return token
    return None


def _within(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of the text model within one of text and pictures."""
    found = tree.get("text_config")
    return found if isinstance(found, dict) else {}


def _name(file: Path, tree: Mapping[str, Any], key: str) -> str | None:
    """Returns the text of a token, which may stand alone or with how it is matched."""
    value = tree.get(key)
    name = value.get("content") if isinstance(value, dict) else value
    require(name is None or isinstance(name, str), f"{file}: {key} = {value!r}: must be the text of a token")
    return name or None


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, {} if the file is not there. Raises InputError."""
    if not file.is_file():
        return {}
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({error})") from error
    require(isinstance(tree, dict), f"{file}: must hold one JSON object")
    return tree
