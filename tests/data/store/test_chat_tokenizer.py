"""A mix of conversations without a tokenizer trains one that has ChatML's control tokens."""

import json

import pytest
from chatting import HELLO, MORE, lines

from jaxthru.data.loading.dataset import DataConfig, open_data
from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.runtime.errors import InputError

ROWS = [
    {"messages": [*MORE, {"role": "user", "content": f"number {number} <|im_end|>"}]} for number in range(30)
]


def mix(path, tokenizer: str = ""):
    lines(path / "chats.jsonl", [*ROWS, {"messages": HELLO}])
    (path / "a.txt").write_text("a text of no conversation")
    file = path / "chats.toml"
    chats = '[sources.chats]\nrecipe = "local_chat"\npaths = ["chats.jsonl"]\nweight = 1\n'
    text = '[sources.text]\nrecipe = "local_text"\npaths = ["a.txt"]\nweight = 1\n'
    file.write_text(f"held_out = 0\n[tokenizer]\nvocabulary = 300\n{tokenizer}\n{chats}{text}")
    return file


def test_it_knows_who_speaks_and_was_trained_on_words_alone(tmp_path):
    config = DataConfig(str(mix(tmp_path)), sequence=256, store=str(tmp_path / "store"))
    with open_data(config) as data:
        split = data.train[0][0]
        ids = split.read(0, split.tokens)
        said = [data.tokenizer.decode(ids[split.read_trained(0, split.tokens) == 1])]
        assert said[0].count("A row.<|im_end|>") == 31 and "Hello" not in said[0]
        assert (ids == 2).sum() == 30 * 5 + 2 and (ids == 1).sum() == 30 * 5 + 2  # but for what was typed
        assert data.tokenizer.decode([0, 1, 2]) == "<|endoftext|><|im_start|><|im_end|>"
        assert data.tokenizer.end_of_text == 0 and data.tokenizer.vocabulary == 300
        merged = json.loads(data.tokenizer.files["tokenizer.json"])["model"]["merges"]
        assert merged and not any(mark in pair for pair in map("".join, merged) for mark in ('"', "{", "us"))
        assert data.counted["text"] is None
    (tmp_path / "chats.jsonl").unlink()
    with open_data(config, begun=data.keys) as again:  # the text is gone, the tokenizer is found
        assert again.keys == data.keys and again.tokenizer.identity == data.tokenizer.identity


def test_a_run_keeps_its_template(tmp_path):
    config = DataConfig(str(mix(tmp_path)), sequence=256, store=str(tmp_path / "store"))
    with open_data(config) as data:
        kept = data.tokenizer.kept
    (tmp_path / "kept").mkdir()
    for name, content in kept.items():
        (tmp_path / "kept" / name).write_bytes(content)
    found = Tokenizer.of(tmp_path / "kept")
    assert found.identity == data.tokenizer.identity
    assert found.chat_template.digest == data.tokenizer.chat_template.digest


def test_another_template_needs_a_tokenizer_that_knows_it(tmp_path):
    with pytest.raises(InputError) as caught:
        load_mix(str(mix(tmp_path, 'chat_template = "llama"')))
    why = "needs tokenizer.path, a tokenizer that has its control tokens"
    said = f"{tmp_path}/chats.toml: tokenizer.chat_template = 'llama': {why}"
    assert str(caught.value) == f"{said}; one to be trained has those of 'chatml'"
    assert load_mix(str(mix(tmp_path, 'chat_template = "chatml"'))).tokenizer.template == "chatml"
