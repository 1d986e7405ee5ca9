"""A toy tokenizer with a chat template, and mixes of conversations: `from chatting import folder, mix`."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The stock template of ChatML, which does not say what the assistant's part is."""
TAGGED = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""One that says it, but leaves the end of the turn outside."""
SPECIALS = ("<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
HELLO = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "A row."}]
MORE = [*HELLO, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "The token, the row."}]


def byte_level(specials: Sequence[str], vocabulary: int) -> tokenizers.Tokenizer:
    """Returns a byte-level tokenizer that knows the words of one sentence, and these special tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=list(specials),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        vocab_size=vocabulary,
        show_progress=False,
    )
    made.train_from_iterator(["the store the row the token\n"] * 9, trainer)
    return made


def folder(path: Path, template: str | None = CHATML, bos: bool = False) -> Path:
    """Writes a byte-level tokenizer, its settings and a chat template as a folder of published weights has
    them. bos: whether documents begin with <|begin|>."""
    path.mkdir(parents=True, exist_ok=True)
    made = byte_level(SPECIALS, 300)
    made.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>", "add_bos_token": bos}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def lines(path: Path, records: list) -> Path:
    """Writes records as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def mix(path: Path, rows: list, tokenizer: str = '"model"', **keys) -> Path:
    """Writes a folder's model, records and a mix of them, and returns the mix's path. keys: of the source."""
    lines(path / "chats.jsonl", rows)
    if not (path / "model").exists():
        folder(path / "model")
    recipe = {"recipe": "local_chat", "paths": ["chats.jsonl"], "weight": 1} | keys
    source = "".join(f"{key} = {json.dumps(value)}\n" for key, value in recipe.items())
    file = path / "chats.toml"
    file.write_text(f"held_out = 0\ntokenizer = {tokenizer}\n[sources.chats]\n{source}")
    return file
