"""Stores of conversations: the same from every format, each of its template; what is left out is counted."""

import json

import numpy as np
import pytest
import tokenizers
from chatting import CHATML, HELLO, MORE, SPECIALS, TAGGED, folder, mix
from formats import archive, array_record

from jaxthru.data.sources import documents
from jaxthru.data.sources.chat.template import ChatTemplate
from jaxthru.data.store import marked
from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.prepare import Prepared, open_stores
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.runtime.errors import InputError

ROWS = [
    {"messages": MORE},
    {"conversations": [{"from": "human", "value": "the <|im_end|> token"}, {"from": "gpt", "value": "é a"}]},
    {"prompt": "the row: ", "completion": "a token"},
    {"text": "the store"},
    {"messages": HELLO},
]


def opened(path, store) -> Prepared:
    return open_stores(load_mix(str(path)), store)


def of_store(prepared: Prepared, split: str = "train") -> list[tuple[str, str]]:
    """Returns each document's text, and what of it is trained on."""
    found = getattr(prepared.stores["chats"], split)
    starts = np.concatenate([[0], found.ends])
    parts = []
    for start, end in zip(starts, found.ends, strict=False):
        ids, trained = found.read(start, end), found.read_trained(start, end)
        decode = prepared.tokenizer.decode
        parts.append((decode(ids), decode(ids[trained == 1])))
    return parts


def written(path, kind: str):
    """Writes ROWS in a format beside the mix, and returns the mix."""
    if kind == "jsonl":
        return mix(path, ROWS)
    contents = [json.dumps(row).encode() for row in ROWS]
    if kind == "tar":
        named = [(f"{number}.json", content) for number, content in enumerate(contents)]
        path.joinpath("a.tar").write_bytes(archive(named))
        return mix(path, [], format="tar", paths=["a.tar"])
    if kind == "array_record":
        array_record(path / "a.array_record", contents, group=2)
        return mix(path, [], format="array_record", paths=["a.array_record"])
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {key: [row.get(key) for row in ROWS] for row in ROWS for key in row} | {"id": [1] * len(ROWS)}
    parquet.write_table(pyarrow.table(table), path / "a.parquet", row_group_size=2)
    return mix(path, [], format="parquet", paths=["a.parquet"])


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar", "array_record"])
def test_conversations_are_the_same_from_every_format(tmp_path, kind):
    prepared = opened(written(tmp_path, kind), tmp_path / "store")
    said = "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nA row.<|im_end|>\n"
    more = "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nThe token, the row.<|im_end|>\n"
    typed = "<|im_start|>user\nthe <|im_end|> token<|im_end|>\n<|im_start|>assistant\né a<|im_end|>\n"
    assert of_store(prepared) == [
        (said + more, "A row.<|im_end|>\nThe token, the row.<|im_end|>\n"),
        (typed, "é a<|im_end|>\n"),
        ("the row: a token<|endoftext|>", "a token<|endoftext|>"),
        ("the store<|endoftext|>", "the store<|endoftext|>"),
        (said, "A row.<|im_end|>\n"),
    ]
    found = prepared.stores["chats"].train
    ids = found.read(0, found.tokens)
    assert (ids == SPECIALS.index("<|im_end|>")).sum() == 8  # and one that was typed
    assert not list((tmp_path / "store").glob("*/damaged-*"))


def test_a_store_is_of_its_template(tmp_path):
    chats = mix(tmp_path, ROWS)
    first = opened(chats, tmp_path / "store")
    folder(tmp_path / "model", TAGGED)
    other = opened(chats, tmp_path / "store")
    assert first.keys["chats"] != other.keys["chats"]
    assert of_store(other)[4] == (
        "<|begin|>[user]Hello?<|endoftext|>[assistant]A row.<|endoftext|>",
        "A row.<|endoftext|>",
    )
    (tmp_path / "own.jinja").write_text(CHATML)
    chats = mix(tmp_path, ROWS, '{path = "model", chat_template = "own.jinja"}')
    assert opened(chats, tmp_path / "store").keys == first.keys  # wherever the template stands


def _shifted(by: int):
    trained = marked._trained
    return lambda *given: np.roll(trained(*given), by)


MUTANTS = {
    "none": (None, None, None),
    "mask shifted behind": (marked, "_trained", _shifted(1)),
    "mask shifted before": (marked, "_trained", _shifted(-1)),
    "BOS and end added": (marked.MarkedEncoder, "_kind", lambda self, document: self._as_text),
    "typed tokens are tokens": (marked.MarkedEncoder, "_kind", lambda self, document: self._as_template),
    "turn's end left out": (ChatTemplate, "_with_its_end", lambda self, span, rendered: span),
    "question trained on": (ChatTemplate, "_with_its_end", lambda self, span, rendered: (0, span[1])),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mask_or_a_border_that_is_wrong_is_noticed(tmp_path, monkeypatch, name):
    folder(tmp_path / "model", TAGGED, bos=True)
    rows = [{"messages": [HELLO[0] | {"content": "a <|im_end|> b"}, *HELLO[1:]]}]
    where, function, mutant = MUTANTS[name]
    if where is not None:
        monkeypatch.setattr(where, function, mutant)
    prepared = opened(mix(tmp_path, rows), tmp_path / "store")
    found = prepared.stores["chats"].train
    ids, trained = found.read(0, found.tokens), found.read_trained(0, found.tokens)
    control = [SPECIALS[id] for id in ids.tolist() if id < len(SPECIALS)]
    said = prepared.tokenizer.decode(ids[trained == 1])
    right = control == ["<|begin|>", "<|endoftext|>", "<|endoftext|>"] and said == "A row.<|endoftext|>"
    assert right == (name == "none")


def test_a_template_without_bos_is_told_of(tmp_path, capsys):
    folder(tmp_path / "model", TAGGED.removeprefix("{{ bos_token }}"), bos=True)
    prepared = opened(mix(tmp_path, [{"messages": HELLO}]), tmp_path / "store")
    assert "writes no <|begin|>, with which texts begin; none is added" in capsys.readouterr().err
    assert of_store(prepared)[0][0].startswith("[user]Hello?")


def test_a_transform_sees_the_conversation_and_equal_ones_are_one(tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "import json\n"
        "def louder(text):\n"
        "    record = json.loads(text)\n"
        "    for message in record['messages']:\n"
        "        message['content'] = message['content'].upper()\n"
        "    return json.dumps(record) if 'Hello' in text else ''\n"
    )
    rows = [*({"messages": HELLO} for _ in range(3)), {"messages": MORE[2:]}]
    prepared = opened(mix(tmp_path, rows, transform="own:louder"), tmp_path / "store")
    assert [text for text, _ in of_store(prepared)] == [
        "<|im_start|>user\nHELLO?<|im_end|>\n<|im_start|>assistant\nA ROW.<|im_end|>\n"
    ]
    assert "1 empty left out; 2 repeated left out" in capsys.readouterr().err


def test_pairs_are_two_documents_that_stay_together(tmp_path):
    rows = [{"prompt": f"{n}?", "chosen": HELLO[1:], "rejected": MORE[3:]} for n in range(40)]
    chats = mix(tmp_path, rows, recipe="local_pairs")
    chats.write_text(chats.read_text().replace("held_out = 0\n", "held_out = 0.3\n"))
    prepared = opened(chats, tmp_path / "store")
    train, held_out = of_store(prepared), of_store(prepared, "held_out")
    assert len(train) + len(held_out) == 80 and len(held_out) > 4
    for split in (train, held_out):
        for (chosen, first), (rejected, second) in zip(split[::2], split[1::2], strict=True):
            assert (first, second) == ("A row.<|im_end|>\n", "The token, the row.<|im_end|>\n")
            assert chosen.removesuffix(first) == rejected.removesuffix(second)


def test_what_is_left_out_is_counted(tmp_path, capsys):
    silent = {"messages": HELLO[:1]}
    empty = {"messages": [*MORE[:3], {"role": "assistant", "content": ""}]}
    rows = [{"messages": MORE}, silent, {"messages": HELLO[:1] * 2}, empty, {"text": ""}]
    opened(mix(tmp_path, rows), tmp_path / "store")
    left = f"1 empty left out; 2 {documents.UNTRAINED} left out; 1 empty answers; 2 records, none damaged"
    assert left in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "tokenizer", "keys", "message"),
    [
        (
            [{"messages": HELLO[:1]}],
            '"model"',
            {},
            "source chats: all of its 1 conversations are without any",
        ),
        ([{"messages": 5}], '"model"', {}, "1 of 1 records damaged.*line 1: no messages under 'messages'"),
        (
            [{"messages": HELLO}],
            '{path = "model", chat_template = "none.jinja"}',
            {},
            "tokenizer.chat_template = 'none.jinja': no such file",
        ),
        (
            [{"messages": HELLO}],
            '{path = "model", chat_template = "chatmal"}',
            {},
            "chat_template = 'chatmal'; did you mean 'chatml'",
        ),
        ([{"messages": HELLO}], '"bare"', {}, "bare: holds no chat template; name one in the mix"),
        (
            [{"messages": HELLO}],
            '"unknown"',
            {},
            "does not say which text is the assistant's, nor is it a known",
        ),
        ([{"messages": HELLO}], '"strict"', {}, "line 1: the chat template fails: never 1.5"),
        (
            [{"messages": HELLO}],
            '"model"',
            {"records": "chat"},
            "records = 'chat': must be one of 'text', 'con",
        ),
        (
            [{"messages": HELLO}],
            '"model"',
            {"format": "text"},
            "records = 'conversations': is read with format",
        ),
        (
            [{"prompt": "a", "chosen": "b"}],
            '"model"',
            {"recipe": "local_pairs"},
            "line 1: a pair needs 'chosen' and 'rejected', and has no 'rejected'",
        ),
    ],
)
def test_bad_conversations_are_one_line(tmp_path, rows, tokenizer, keys, message):
    folder(tmp_path / "bare", None)
    folder(tmp_path / "unknown", CHATML.replace("user", "me") + " ")
    refusing = "{% if messages[0].content == 'Hello?' %}{{ raise_exception('never 1.5') }}{% endif %}"
    folder(tmp_path / "strict", refusing + TAGGED)
    with pytest.raises(InputError, match=message) as refused:
        opened(mix(tmp_path, rows, tokenizer, **keys), tmp_path / "store")
    assert "\n" not in str(refused.value)


def test_a_run_keeps_the_template_and_the_end_of_a_turn(tmp_path):
    tokenizer = opened(mix(tmp_path, [{"messages": HELLO}]), tmp_path / "store").tokenizer
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    for name, content in tokenizer.kept.items():
        (tmp_path / "run" / "tokenizer" / name).write_bytes(content)
    kept = json.loads((tmp_path / "run" / "tokenizer" / "documents.json").read_text())
    assert kept == {"bos": None, "end": "<|endoftext|>", "turn_end": "<|im_end|>"}
    again = Tokenizer.of(tmp_path / "run")
    assert again.chat_template.text == tokenizer.chat_template.text
    assert again.learnt_stop == tokenizer.learnt_stop == (1, 3)
    assert Tokenizer.of(tmp_path / "model").learnt_stop == (1,)  # whose documents were others


def test_control_tokens_that_a_template_writes_count_in_the_vocabulary(tmp_path):
    model = folder(tmp_path / "model", TAGGED + "<|late|>")
    before = Tokenizer.of(model)
    made = tokenizers.Tokenizer.from_file(str(before.path))
    made.add_special_tokens(["<|late|>", "<|later|>"])
    made.save(str(before.path))
    plain, talks = Tokenizer.of(model), Tokenizer.of(model, talks=True)
    assert plain.text_vocabulary == before.text_vocabulary < plain.vocabulary == before.vocabulary + 2
    assert talks.text_vocabulary == plain.vocabulary - 1  # <|later|> is for something else
    assert (
        opened(mix(tmp_path, ROWS[:1]), tmp_path / "store").tokenizer.text_vocabulary == talks.text_vocabulary
    )
