"""A folder of published weights, as far as text goes: its tokenizer's files, and what begins and ends a text.

The names of the files and of the keys in them are those of the Hugging Face libraries:
https://huggingface.co/docs/transformers/main_classes/tokenizer
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jaxthru.runtime.errors import InputError, did_you_mean, require

TOKENIZER = "tokenizer.json"
FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
"""The files of a tokenizer, which belong together: whoever copies one copies all that are there."""
TEMPLATE = "chat_template.jinja"
BORDERS = "documents.json"
"""The file that says what a run's documents began and ended with; of `RUN/tokenizer`, and of no other
folder. It counts before what the tokenizer's own files say, for a mix may have said otherwise."""
TURN_END = "turn_end"
"""The key there of the token that ended the assistant's turns, if there were conversations."""


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


SHIPPED = {"chatml": Path(__file__).parent.parent / "sources" / "chat" / "chatml.jinja"}
"""Chat templates for models that come without one, by the names that a mix may give."""
OWN, CONTROL = "chatml", ("<|im_start|>", "<|im_end|>")
"""The template of a tokenizer that is trained for conversations, and its control tokens."""


def read_template(folder: Path | None, wanted: str | None) -> tuple[str, str]:
    """Returns the text of a chat template, and where it was found.

    folder: of the tokenizer, None for a tokenizer.json alone. wanted: the path of a file, its name ending in
    .jinja; the name of one of several that tokenizer_config.json holds; or of one of SHIPPED. None is that of
    chat_template.jinja, or else the default of tokenizer_config.json. Raises InputError if there is none.
    """
    if wanted and wanted.endswith(".jinja"):
        return _text(Path(wanted)), wanted
    settings = folder / "tokenizer_config.json" if folder else None
    found = read_object(settings).get("chat_template") if settings else None
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        named = {each.get("name"): each.get("template") for each in found}
    else:
        named = {"default": found}
    named = {name: text for name, text in named.items() if isinstance(text, str)}
    if wanted:
        if wanted in named:
            return named[wanted], f"{wanted!r} of {settings}"
        known = (*named, *SHIPPED)
        require(wanted in SHIPPED, lambda: f"chat_template = {wanted!r}{did_you_mean(wanted, known)}")
        return _text(SHIPPED[wanted]), wanted
    if folder and (folder / TEMPLATE).is_file():
        return _text(folder / TEMPLATE), str(folder / TEMPLATE)
    if "default" in named:
        return named["default"], str(settings)
    where = f"{folder}: holds no chat template" if folder else "a tokenizer.json alone has no chat template"
    names = f"; it holds {', '.join(map(repr, named))}" if named else ""
    own = f'[tokenizer] chat_template = "FILE.jinja", or one of {", ".join(map(repr, SHIPPED))}'
    raise InputError(f"{where}{names}; name one in the mix: {own}")


def template_variables(folder: Path | None, borders: Borders) -> dict[str, str]:
    """Returns what a chat template may write beside the conversation: `bos_token`, `eos_token` and such.
    borders: for those that the tokenizer's files do not name."""
    found = {"bos_token": borders.bos, "eos_token": borders.end}
    for file in ("special_tokens_map.json", "tokenizer_config.json") if folder else ():
        tree = read_object(folder / file)
        names = [
            key for key, value in tree.items() if key.endswith("_token") and isinstance(value, str | dict)
        ]
        found |= {key: _name(folder / file, tree, key) for key in names}
    return {key: text for key, text in found.items() if text}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"chat template {file}: cannot be read as text ({error})") from error


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
