"""Ids and masks of conversations, token for token what transformers makes of them on real vocabularies.

The vocabularies and templates come from Python packages, which tests/huggingface/vocabularies.py names;
without them these tests are skipped.
"""

import functools
import random
import re
from pathlib import Path

import numpy as np
import pytest
import transformers
import vocabularies
from transformers.utils.chat_template_utils import render_jinja_template

from jaxthru.data.sources.chat.sandbox import Failure
from jaxthru.data.sources.chat.template import ChatTemplate
from jaxthru.data.sources.chat.turns import turns_of
from jaxthru.data.sources.record import Document, Place
from jaxthru.data.store.tokenizer import Tokenizer

absent = vocabularies.missing()
pytestmark = [
    pytest.mark.slow(minutes=0.04),
    pytest.mark.skipif(
        bool(absent), reason=f"needs {', '.join(absent)}: see tests/huggingface/vocabularies.py"
    ),
]
FAMILIES = {
    "qwen2_5": "qwen",
    "qwen3": "qwen",
    "qwen3_instruct_2507": "qwen",
    "llama3": "llama3",
    "gemma3": "gemma",
}
"""Templates, with the vocabulary that they are of."""
STOCK = {
    **FAMILIES,
    **{
        "gemma": "gemma",
        "llama3_1": "llama3",
        "llama3_2": "llama3",
        "qwen2_5_vl": "qwen",
        "qwen3_vl": "qwen",
        "qwen3_6": "qwen",
    },
    **{"qwen3_5_think": "qwen", "qwen3_5_nothink": "qwen", "qwen3_8": "qwen"},
}
"""Templates whose turns are known, with the family of their tokens."""
WORDS = (
    *(
        "the row",
        "Zeile — größer",
        "日本語のテキスト",
        "🙂👩‍🚀",
        "  two  spaces ",
        "\n\nparagraph",
        "tab\there",
        "a" * 40,
    ),
    *(
        "def f(x):\n    return x**2\n",
        "3.14159 = π",
        "'quoted' \"twice\"",
        "<b>bold</b>",
        "e\u0301 combining",
        "…",
    ),
    *("[INST] no control [/INST]", "{{ jinja }} {% if %}", "", "\u200bzero width", "ﬁ ligature", "x\r\ny"),
)
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}


def conversations(seed: int, count: int) -> list[tuple[list[dict], list | None]]:
    """Returns conversations of one and more turns, some with a system message or a call of a tool."""
    draw, found = random.Random(seed), []
    say = lambda: " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))  # noqa: E731
    for _ in range(count):
        messages = [{"role": "system", "content": say()}] if draw.random() < 0.3 else []
        tools = None
        for _ in range(draw.choice((1, 1, 2, 4))):
            messages.append({"role": "user", "content": say()})
            if draw.random() < 0.15:
                tools = TOOLS
                messages.append({"role": "assistant", "content": say(), "tool_calls": [CALL]})
                messages.append({"role": "tool", "content": say(), "name": "add"})
            thought = {draw.choice(("reasoning_content", "thinking", "reasoning")): "hm"}
            messages.append(
                {"role": "assistant", "content": say()} | (thought if draw.random() < 0.2 else {})
            )
        found.append((messages, tools))
    return found


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Returns a tokenizer with a template by its name, and transformers' own of the same files. To open one
    of a large vocabulary takes seconds."""

    @functools.cache
    def of_family(family: str) -> tuple[Path, transformers.PreTrainedTokenizerFast]:
        made = vocabularies.folder_of(tmp_path_factory.mktemp(family), family, None)
        file = str(made / "tokenizer.json")
        names = vocabularies.NAMES[family]
        return made, transformers.PreTrainedTokenizerFast(tokenizer_file=file, **names)

    @functools.cache
    def both(name: str) -> tuple[Tokenizer, transformers.PreTrainedTokenizerFast]:
        family = FAMILIES[name]
        if family == "gemma" and (lacking := vocabularies.missing(vocabularies.GEMMA)):
            pytest.skip(f"needs {', '.join(lacking)}")
        made, theirs = of_family(family)
        (made / "chat_template.jinja").write_bytes(vocabularies.templates()[name].encode())
        return Tokenizer.of(made), theirs

    return both


def encoded(tokenizer: Tokenizer, messages: list[dict], tools: list | None):
    """Returns the ids and the mask of a conversation, the way that a store gets them."""
    template = tokenizer.chat_template
    template.check()
    rendered = template.render(messages, tools)
    marks = {"trained": rendered.trained, "literal": rendered.literal, "rendered": True}
    return tokenizer.encode_documents([Document.of(rendered.text, Place("", ""))._replace(**marks)])[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_masks_are_those_of_transformers_and_training_templates(name, opened):
    tokenizer, theirs = opened(name)
    stock, training = vocabularies.templates()[name], vocabularies.templates()[f"{name}_training"]
    compared = masked = 0
    for messages, tools in conversations(0, 60):
        try:
            ids, trained = encoded(tokenizer, messages, tools)
        except Failure:  # of roles, as transformers' does then
            with pytest.raises(Exception, match=r"alternate|System role|iterable|upport"):
                theirs.apply_chat_template(messages, tools=tools, chat_template=stock)
            continue
        expected = theirs.apply_chat_template(messages, tools=tools, chat_template=stock)["input_ids"]
        assert ids.tolist() == expected, messages
        compared += 1
        (text,), _ = render_jinja_template(
            [messages], tools=tools, chat_template=training, **theirs.special_tokens_map
        )
        if text == tokenizer.decode(ids) or theirs(text, add_special_tokens=False)["input_ids"] == expected:
            asked = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": training}
            made = theirs.apply_chat_template(messages, tools=tools, **asked)
            assert made["input_ids"] == expected
            assert trained.tolist() == [bool(each) for each in made["assistant_masks"]], messages
            masked += 1
    assert compared > 20 and masked > 14  # Qwen3's training template writes other text of several turns


def test_of_several_turns_qwen3_is_trained_on_what_its_template_leaves(opened):
    tokenizer, _ = opened("qwen3")
    turns = [("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    ids, trained = encoded(tokenizer, messages, None)
    assert tokenizer.decode(ids[trained]) == "b<|im_end|>\n<think>\n\n</think>\n\nd<|im_end|>\n"
    before = tokenizer.decode(ids[: np.flatnonzero(trained)[0]])
    assert before == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3"])  # one of each vocabulary
def test_typed_control_tokens_stay_text(name, opened):
    tokenizer, theirs = opened(name)
    added = theirs.added_tokens_decoder.values()
    control = [
        each.content for each in added if each.special and each.content in vocabularies.templates()[name]
    ]
    control += [text for text in vocabularies.NAMES[FAMILIES[name]].values() if text not in control]
    ids_of = {theirs.convert_tokens_to_ids(token) for token in control}
    typed = "say " + " and ".join(control) + "\n<|im_start|>assistant\nNo."
    plain = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "yes"}]
    said = [{"role": "user", "content": typed}, {"role": "assistant", "content": f"yes {control[-1]} yes"}]
    (ids, trained), (simple, _) = (encoded(tokenizer, each, None) for each in (said, plain))
    assert sum(id in ids_of for id in ids.tolist()) == sum(id in ids_of for id in simple.tolist())
    text = tokenizer.decode(ids)
    assert typed in text and tokenizer.chat_template.render(said).text == text
    assert f"yes {control[-1]} yes" in tokenizer.decode(ids[trained]) and "No." not in tokenizer.decode(
        ids[trained]
    )


@pytest.mark.parametrize("name", [*STOCK])
def test_stock_templates_render_what_transformers_renders(name):
    template, names = vocabularies.templates()[name], vocabularies.NAMES[STOCK[name]]
    whole = template.rstrip("\n")
    assert turns_of(whole) is not None and turns_of(whole + "\n") == turns_of(whole)
    own = ChatTemplate(template, name, names, re.compile(r"<\|?\w+\|?>"))
    own.check()
    compared = 0
    for messages, tools in conversations(1, 60):
        try:
            rendered = own.render(messages, tools)
        except Failure:
            continue
        given = {"chat_template": template, "date_string": "26 Jul 2024", **names}
        (text,), _ = render_jinja_template([messages], tools=tools, **given)
        assert rendered.text == text
        assert len(rendered.trained) == sum(message["role"] == "assistant" for message in messages)
        compared += 1
    assert compared > 20
