"""Tokenizers of folders, files and runs: what documents begin and end with, and what travels with a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from chatting import byte_level

from jaxthru.build.choices import documents
from jaxthru.config import RunConfig
from jaxthru.data.loading.dataset import DataConfig, open_data, prepare_data
from jaxthru.data.sources.record import Document, Place
from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.prepare import open_stores
from jaxthru.data.store.tokenizer import Tokenizer, train
from jaxthru.data.store.tokenizer_folder import Borders
from jaxthru.runtime.errors import InputError

SPECIALS = ("<|begin|>", "<|end|>", "</s>")


def write(folder: Path, template: str | None = None, **files: dict) -> Path:
    """Writes a byte-level tokenizer with SPECIALS and these files beside it. template: what it puts around a
    text, as `<|begin|> $A`."""
    folder.mkdir(exist_ok=True)
    made = byte_level(SPECIALS, 280)
    if template:
        ids = [(name, made.token_to_id(name)) for name in SPECIALS]
        made.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=ids)
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("template", "files", "bos", "end"),
    [
        (None, {}, "", "</s>"),
        ("<|begin|> $A", {}, "<|begin|>", "</s>"),
        ("$A </s>", {}, "", "</s>"),
        ("<|end|> $A <|end|>", {"config": {"eos_token_id": 1}}, "<|end|>", "<|end|>"),
        ("$A <|end|>", {"tokenizer_config": {"bos_token": "<|end|>", "eos_token": "<|end|>"}}, "", "<|end|>"),
        ("<|begin|> $A", {"tokenizer_config": {"add_bos_token": False}}, "", "</s>"),
        (None, {"tokenizer_config": {"add_bos_token": True, "bos_token": "<|begin|>"}}, "<|begin|>", "</s>"),
        (
            None,
            {"tokenizer_config": {"add_bos_token": True}, "config": {"bos_token_id": 0}},
            "<|begin|>",
            "</s>",
        ),
        (None, {"tokenizer_config": {"add_bos_token": None, "bos_token": "<|begin|>"}}, "", "</s>"),
        (
            None,
            {"tokenizer_config": {"eos_token": {"content": "<|end|>"}}, "config": {"eos_token_id": 2}},
            "",
            "<|end|>",
        ),
        (None, {"special_tokens_map": {"eos_token": "<|end|>"}}, "", "<|end|>"),
        (None, {"config": {"eos_token_id": [1, 2]}}, "", "<|end|>"),
        (None, {"config": {"text_config": {"eos_token_id": 1}}}, "", "<|end|>"),
        (None, {"generation_config": {"eos_token_id": [1]}, "config": {}}, "", "<|end|>"),
    ],
)
def test_a_folder_says_what_documents_begin_and_end_with(tmp_path, template, files, bos, end):
    tokenizer = Tokenizer.of(write(tmp_path / "t", template, **files))
    assert tokenizer.borders == (bos, end)
    [ids] = tokenizer.encode(["the row"])
    alone = (
        tokenizers.Tokenizer.from_file(str(tokenizer.path)).encode("the row", add_special_tokens=False).ids
    )
    begin = [] if tokenizer.bos is None else [SPECIALS.index(bos)]
    assert ids.tolist() == [*begin, *alone, SPECIALS.index(end)]
    assert tokenizer.decode(ids) == bos + "the row" + end and tokenizer.decode(ids, True) == "the row"


def test_a_tokenizer_json_alone_is_what_it_was(tmp_path):
    folder = write(tmp_path / "t", "<|begin|> $A", tokenizer_config={"eos_token": "<|end|>"})
    alone, whole = Tokenizer.of(folder / "tokenizer.json"), Tokenizer.of(folder)
    assert alone.borders == ("", "</s>") and alone.identity == alone.hash == whole.hash
    assert whole.identity == f"{whole.hash} bos=0 end=1"
    assert list(alone.files) == ["tokenizer.json"]
    assert whole.files == {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("borders", [Borders(), Borders("", "</s>"), Borders("<|end|>", "<|begin|>")])
def test_a_run_keeps_its_tokenizer(tmp_path, borders):
    folder = write(tmp_path / "t", "<|begin|> $A", config={"eos_token_id": 1})
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")
    first = Tokenizer.of(folder, borders)
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    for name, content in first.kept.items():
        (tmp_path / "run" / "tokenizer" / name).write_bytes(content)
    for place in ("run", "run/tokenizer"):
        again = Tokenizer.of(tmp_path / place)
        assert (again.identity, again.borders, again.files) == (first.identity, first.borders, first.files)
    assert list(first.files) == ["tokenizer.json", "chat_template.jinja"]


def test_special_tokens_are_text_in_documents_and_tokens_in_prompts(tmp_path):
    tokenizer = Tokenizer.of(write(tmp_path / "t", "<|begin|> $A"))
    [ids] = tokenizer.encode(["<|begin|>a</s>"])
    assert (ids == 0).sum() == 1 and (ids == 2).sum() == 1
    prompt = tokenizer.encode_prompt("a<|end|>b")
    assert prompt.dtype == np.int32 and prompt[0] == 0 and (prompt == 1).sum() == 1 and prompt[-1] != 2
    assert tokenizer.encode_prompt("<|begin|>a").tolist() == tokenizer.encode_prompt("a").tolist()  # not two
    assert tokenizer.encode_prompt("").tolist() == [0]
    assert tokenizer.encode(["<|begin|>a</s>"])[0].tolist() == ids.tolist()


def document(text: str, trained=None, literal=(), rendered=False) -> Document:
    """The spans are given as the words that they cover."""

    def spans(words):
        return tuple((text.index(word), text.index(word) + len(word)) for word in words)

    marked = {"trained": None if trained is None else spans(trained), "literal": spans(literal)}
    return Document.of(text, Place("", ""))._replace(**marked, rendered=rendered)


def shown(tokenizer: Tokenizer, encoded) -> list[str]:
    """What is trained on, as text, a stretch at a time."""
    starts = np.flatnonzero(np.diff(encoded.trained, prepend=False) & encoded.trained)
    ends = np.flatnonzero(~np.append(encoded.trained, False))
    return [tokenizer.decode(encoded.ids[start : ends[ends > start][0]]) for start in starts]


def test_plain_documents_are_encoded_as_texts_are(tmp_path):
    tokenizer = Tokenizer.of(write(tmp_path / "t", "<|begin|> $A"))
    texts = ["the row</s>", "", "the token"]
    encoded = tokenizer.encode_documents([document(text) for text in texts])
    assert [each.ids.tolist() for each in encoded] == [ids.tolist() for ids in tokenizer.encode(texts)]
    assert [each.trained for each in encoded] == [None] * 3


def test_documents_say_what_they_are_trained_on(tmp_path):
    tokenizer = Tokenizer.of(write(tmp_path / "t", "<|begin|> $A"))
    documents = [
        document("the row</s> is a token", ["row</s>", " token"]),
        document("the row the store", ["the row"]),
        document("no", []),
        document("plain"),
    ]
    encoded = tokenizer.encode_documents(documents)
    texts = [each.text for each in documents]
    assert [each.ids.tolist() for each in encoded] == [ids.tolist() for ids in tokenizer.encode(texts)]
    assert shown(tokenizer, encoded[0]) == [" row</s>", " token</s>"]  # typed, and its own end
    assert shown(tokenizer, encoded[1]) == ["the row"] and encoded[1].trained.tolist()[:2] == [False, True]
    assert not encoded[2].trained.any() and encoded[3].trained is None


def test_a_templates_control_tokens_are_tokens_and_typed_ones_text(tmp_path):
    """Exactly as the whole is tokenised: tokens that reach over the border of what was typed are the same."""
    tokenizer = Tokenizer.of(write(tmp_path / "t", "<|begin|> $A"))
    text = "<|begin|>the row<|end|><|begin|>ä the <|end|> token<|end|>\n"
    plain = document(text, ["ä the <|end|> token<|end|>"], rendered=True)
    typed = plain._replace(literal=((text.index(" <|end|> ") + 1, text.index(" token<")),))
    first, second = tokenizer.encode_documents([plain, typed])
    assert (first.ids < 3).sum() == 5 and (second.ids < 3).sum() == 4
    assert first.ids.dtype == second.ids.dtype == tokenizer.dtype
    assert tokenizer.decode(first.ids) == tokenizer.decode(second.ids) == text
    assert shown(tokenizer, first) == shown(tokenizer, second) == ["ä the <|end|> token<|end|>"]
    assert second.ids.tolist() == tokenizer.encode_documents([typed])[0].ids.tolist()
    middle = tokenizer.encode(["ä the <|end|> token"])[0][1:-1].tolist()
    assert str(middle)[1:-1] in str(second.ids.tolist())
    assert (
        tokenizer.encode_documents([plain._replace(trained=None), typed._replace(trained=None)])[1][1] is None
    )


def test_typed_tokens_move_no_other_tokens_ids(tmp_path):
    """Control tokens may be in the model's own vocabulary, and ordinary ones be added behind it."""
    folder = write(tmp_path / "t")
    tree = json.loads((folder / "tokenizer.json").read_text())
    assert tree["model"]["vocab"]["</s>"] == 2
    last = max(tree["model"]["vocab"].values())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tree["added_tokens"] += [{"id": last + 1 + at, "content": f"<{at}>"} | flags for at in range(3)]
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    tokenizer = Tokenizer.of(folder)
    text = "<|begin|><0>the</s><2> row <1><|end|>"
    plain = document(text, rendered=True)
    typed = plain._replace(literal=((text.index("</s>"), text.index("</s>") + 4),))
    (first, _), (second, _) = tokenizer.encode_documents([plain, typed])
    special = lambda ids: [id for id in ids.tolist() if id < 3 or id > last]  # noqa: E731
    assert special(first) == [0, last + 1, 2, last + 3, last + 2, 1]
    assert special(second) == [0, last + 1, last + 3, last + 2, 1] and tokenizer.decode(second) == text


def test_typed_tokens_are_text_to_a_unigram_model_too(tmp_path):
    """Which has control tokens among its pieces, and makes any piece of text."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -3.0) for letter in "a</s>")]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    made.add_special_tokens(["<unk>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.of(tmp_path)
    typed = document("a</s>a</s>", ["a</s>"], rendered=True)._replace(literal=((1, 5),))
    ids, trained = tokenizer.encode_documents([typed])[0]
    assert ids.tolist() == [2, 3, 4, 5, 6, 2, 1] and trained.tolist() == [True] * 5 + [False] * 2


def test_a_stream_is_whole_characters_and_all_of_the_text(tmp_path):
    tokenizer = Tokenizer.of(write(tmp_path / "t"))
    text = "the é名🙂 row\ufffd the"
    ids = tokenizer.encode([text])[0]
    pieces = list(tokenizer.stream(ids))
    assert "".join(pieces) == text + "</s>" and "é" in pieces and "🙂" in pieces
    cut = tokenizer.encode(["a🙂"])[0][:3]
    assert "".join(tokenizer.stream(cut)) == tokenizer.decode(cut) == "a\ufffd"
    assert tokenizer.decode([5, 10_000]) == tokenizer.decode(np.array([5]))  # of a model's padded rows
    assert list(tokenizer.stream([])) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"eos_token": "<eos>"}}, "eos_token = '<eos>': is no token of tokenizer.json"),
        ({"tokenizer_config": {"eos_token": 5}}, "eos_token = 5: must be the text of a token"),
        ({"tokenizer_config": {"add_bos_token": True}}, "add_bos_token is true, but no file says bos_token"),
        ({"tokenizer_config": []}, "must hold one JSON object"),
        ({"config": {"eos_token_id": 9999}}, "eos_token_id = 9999: is no id of tokenizer.json"),
        ({"config": {"eos_token_id": "x"}}, "eos_token_id = 'x': is no id of tokenizer.json"),
    ],
)
def test_a_folder_that_contradicts_itself_is_one_line(tmp_path, files, message):
    with pytest.raises(InputError, match=message):
        Tokenizer.of(write(tmp_path / "t", **files))


def test_no_tokenizer_is_one_line(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        Tokenizer.of(tmp_path / "none")
    with pytest.raises(InputError, match=r"holds no tokenizer\.json$"):
        Tokenizer.of(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(InputError, match=r"holds no tokenizer\.json; transformers writes one"):
        Tokenizer.of(tmp_path)
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match="started before runs kept their tokenizer"):
        Tokenizer.of(tmp_path)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ('{path = "t", bos = "<s>"}', "bos = '<s>': is no token of it; did you mean '</s>'"),
        ('{path = "t", end = ""}', "end = '': is no token of it"),
        ('{path = "none"}', "tokenizer = 'none': no such file or folder"),
        ('{path = "t", vocabulary = 300}', "tokenizer.vocabulary is of a tokenizer to be trained"),
        ('{bos = "</s>"}', "tokenizer.bos needs tokenizer.path"),
        ('{path = "t", eos = "</s>"}', "unknown key tokenizer.eos"),
        ("{path = 5}", "tokenizer.path = 5"),
    ],
)
def test_what_a_mix_says_wrong_is_one_line(mix, tmp_path, tokenizer, message):
    write(tmp_path / "t")
    _name(mix, tokenizer)
    with pytest.raises(InputError, match=message):
        open_stores(load_mix(str(mix)), tmp_path / "store")


def _name(mix: Path, tokenizer: str) -> None:
    text = mix.read_text().replace("[tokenizer]\nvocabulary = 300\n", "")
    mix.write_text(f"tokenizer = {tokenizer}\n{text}")


def _rows(config: DataConfig, **more) -> list[dict]:
    with open_data(config, **more) as data:
        schedule = ((0, data.mixture),)
        with data.train_batches(schedule, seed=0, rows=8, steps=4) as batches:
            return list(batches)


@pytest.mark.parametrize("online", [False, True])
def test_documents_of_rows_have_both_borders(mix, tmp_path, online, monkeypatch):
    monkeypatch.setattr("jaxthru.data.store.chunks.CHUNK_BYTES", 64)  # many documents of several chunks
    folder = write(tmp_path / "t", "<|begin|> $A")
    if online:
        mix.write_text(mix.read_text().replace("weight", "online = true\nweight"))
    config = DataConfig(str(mix), 64, store=str(tmp_path / "store"), tokenizer=str(folder), loaders=1)
    begun = 0
    for batch in _rows(config):
        starts = batch["tokens"] == 0
        assert (batch["positions"][starts] == 0).all()
        begun += starts.sum()
        ends = batch["loss_mask"] == 0
        assert (batch["tokens"][ends] == 2).all() and (batch["targets"][starts] != 0).all()
    assert begun >= 3
    if online:
        plain = mix.with_name("plain.toml")
        plain.write_text(mix.read_text().replace("online = true\n", ""))
        again = DataConfig(str(plain), 64, store=str(tmp_path / "store"), tokenizer=str(folder))
        for one, other in zip(_rows(config), _rows(again), strict=True):
            assert all((one[name] == other[name]).all() for name in one)


def test_keys_are_of_what_documents_become(mix, tmp_path):
    """A tokenizer.json alone keeps the keys it had; another path to the same tokenizer changes none."""
    store, folder = tmp_path / "store", write(tmp_path / "t", "<|begin|> $A")

    def keys(tokenizer: str | None, said: str = "") -> dict[str, str]:
        named = mix.with_name("named.toml")
        named.write_text(mix.read_text())
        if said:
            _name(named, said)
        return prepare_data(DataConfig(str(named), store=str(store), tokenizer=tokenizer))

    alone = keys(str(folder / "tokenizer.json"))
    assert alone == keys(None, '"t/tokenizer.json"') == keys(None, '{path = "t", bos = ""}')
    begun = keys(str(folder))
    assert begun == keys(None, '"t"') == keys(None, '{path = "t/tokenizer.json", bos = "<|begin|>"}')
    assert not set(begun.values()) & set(alone.values())
    assert keys(None, '{path = "t", end = "<|end|>"}') != begun


def test_a_mailed_run_goes_on_with_the_tokenizer_it_kept(mix, tmp_path):
    folder, kept = write(tmp_path / "t", "<|begin|> $A"), tmp_path / "run" / "tokenizer"
    kept.mkdir(parents=True)
    config = DataConfig(str(mix), 64, store=str(tmp_path / "store"), tokenizer=str(folder))
    keys = prepare_data(config, kept=kept)  # which is empty yet
    with open_data(config, prepare=False, begun=keys, kept=kept) as data:
        for name, content in data.tokenizer.kept.items():
            (kept / name).write_bytes(content)
    folder.rename(tmp_path / "moved")
    with pytest.raises(InputError, match=f"data.tokenizer = '{folder}': no such file or folder"):
        prepare_data(config, keys)
    for store in (config.store, str(tmp_path / "other")):  # its stores may have stayed behind
        there = DataConfig(str(mix), 64, store=store, tokenizer=str(folder))
        assert prepare_data(there, keys, kept) == keys
        with open_data(there, prepare=False, begun=keys, kept=kept) as data:
            assert data.tokenizer.path == kept / "tokenizer.json" and data.tokenizer.bos == 0
            found = documents(RunConfig(data=there), keys, kept)  # by which a run's settings are chosen
            assert found.segments == data.segments and not found.notes
    # Another path to the same tokenizer is as good, another tokenizer is not.
    moved = DataConfig(str(mix), 64, store=config.store, tokenizer=str(tmp_path / "moved"))
    assert prepare_data(moved, keys, kept) == keys
    other = write(tmp_path / "other tokenizer")
    with pytest.raises(InputError, match="other tokenizer: is not the one that the run was started with"):
        changed = DataConfig(str(mix), 64, store=config.store, tokenizer=str(other))
        prepare_data(changed, keys)


def test_a_trained_tokenizer_that_is_gone_is_taken_from_the_run(mix, tmp_path):
    store, kept = tmp_path / "store", tmp_path / "tokenizer"
    config = DataConfig(str(mix), 64, store=str(store))
    with open_data(config) as data:
        keys = data.keys
        kept.mkdir()
        for name, content in data.tokenizer.kept.items():
            (kept / name).write_bytes(content)
        data.tokenizer.path.unlink()
    (tmp_path / "text" / "new.txt").write_text("another document\n")
    assert prepare_data(config, keys, kept) == keys


def test_a_trained_tokenizer_has_no_bos(tmp_path):
    train(iter(["the row " * 20]), 300, tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.of(tmp_path)
    assert tokenizer.bos is None and tokenizer.borders.end == "<|endoftext|>"
    assert tokenizer.identity == tokenizer.hash
